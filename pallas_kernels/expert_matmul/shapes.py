"""Sizes of mixtures of experts in real models, and small ones that tests run."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one layer's routed experts.

    Attributes:
      num_experts: E, without shared ones.
      num_choices: A, experts that a row is sent to.
      width: M, of inputs and outputs.
      ffn_size: F, of the hidden values of one expert.
    """

    num_experts: int
    num_choices: int
    width: int
    ffn_size: int


# The 0.8B and 27B models have no experts.
MODELS: Mapping[str, Sizes] = {
    "qwen3_5_35b_a3b": Sizes(256, 8, 2048, 512),
    "qwen3_5_122b_a10b": Sizes(256, 8, 3072, 1024),
    "qwen3_5_397b_a17b": Sizes(512, 10, 4096, 1024),
    "qwen3_next_80b_a3b": Sizes(512, 10, 2048, 512),
}

TINY: Mapping[str, Sizes] = {"tiny": Sizes(5, 2, 16, 12)}
