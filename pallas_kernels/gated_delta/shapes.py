"""Sizes of the gated delta rule in real models, and small ones that tests run."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Heads and dimensions of one layer.

    Attributes:
      num_key_heads: heads of queries and keys.
      num_value_heads: heads of values and of the state, a multiple of the former.
      key_dim: Dk, of queries and keys.
      value_dim: Dv.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def group_size(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's float32 state in this layer."""
        return 4 * self.num_value_heads * self.key_dim * self.value_dim


MODELS: Mapping[str, Sizes] = {
    "qwen3_5_0_8b": Sizes(16, 16, 128, 128),
    "qwen3_5_27b": Sizes(16, 48, 128, 128),
    "qwen3_5_35b_a3b": Sizes(16, 32, 128, 128),
    "qwen3_5_122b_a10b": Sizes(16, 64, 128, 128),
    "qwen3_5_397b_a17b": Sizes(16, 64, 128, 128),
    "qwen3_next_80b_a3b": Sizes(16, 32, 128, 128),
}

# Key and value dimensions differ, so that a transposed state cannot pass.
TINY: Mapping[str, Sizes] = {
    "tiny_group_1": Sizes(3, 3, 8, 12),
    "tiny_group_2": Sizes(2, 4, 8, 12),
    "tiny_group_3": Sizes(1, 3, 12, 8),
}
