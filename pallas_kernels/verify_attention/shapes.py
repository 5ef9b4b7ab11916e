"""Sizes of verify attention in real models, and small ones that tests run."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Heads and dimension of one layer.

    Attributes:
      num_heads: H, of queries.
      num_kv_heads: Hkv, of keys and values; H is a multiple.
      head_dim: D.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads


MODELS: Mapping[str, Sizes] = {
    "qwen3_5_0_8b": Sizes(8, 2, 256),
    "qwen3_5_27b": Sizes(24, 4, 256),
    "qwen3_5_35b_a3b": Sizes(16, 2, 256),
    "qwen3_5_122b_a10b": Sizes(32, 2, 256),
    "qwen3_5_397b_a17b": Sizes(32, 2, 256),
    "qwen3_next_80b_a3b": Sizes(16, 2, 256),
}

TINY: Mapping[str, Sizes] = {
    "tiny_group_1": Sizes(2, 2, 64),
    "tiny_group_2": Sizes(4, 2, 96),
    "tiny_group_4": Sizes(4, 1, 128),
    "tiny_wide_head": Sizes(2, 1, 256),
}
