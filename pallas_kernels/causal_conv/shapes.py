"""Sizes of the causal convolution in real models, and small ones that tests run."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one layer.

    Attributes:
      num_channels: C, of queries, keys and values together.
      window: W, past inputs that an output needs; the kernel has W + 1 taps.
    """

    num_channels: int
    window: int


MODELS: Mapping[str, Sizes] = {
    "qwen3_5_0_8b": Sizes(6144, 3),
    "qwen3_5_27b": Sizes(10240, 3),
    "qwen3_5_35b_a3b": Sizes(8192, 3),
    "qwen3_5_122b_a10b": Sizes(12288, 3),
    "qwen3_5_397b_a17b": Sizes(12288, 3),
    "qwen3_next_80b_a3b": Sizes(8192, 3),
}

TINY: Mapping[str, Sizes] = {"tiny": Sizes(10, 3)}
