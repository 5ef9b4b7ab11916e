"""The target of a lossless test, and what it says of a sequence by prefill alone."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax import config as config_lib
from metrale_jax import state as state_lib
from metrale_jax import steps
from metrale_jax.axes import Array
from metrale_jax.model import params as params_lib
from metrale_jax.model import transformer

_SHORTEST_CHUNK = 16
_LONGEST_CHUNK = 512


class Target(NamedTuple):
    """A loaded target, and the dtype of its weights and caches."""

    params: params_lib.ModelParams
    config: config_lib.ModelConfig
    dtype: jnp.dtype


class Reference:
    """Logits after any sequence, by prefill into an empty slot: no round is involved.

    Args:
      target: whose logits.
      max_length: tokens of the longest sequence.
      prompt_length: of the longest prompt; sets the length of the chunks, of which
        there is one only, so that one program serves every sequence.
    """

    def __init__(self, target: Target, max_length: int, prompt_length: int) -> None:
        self._target = target
        self._chunk_length = chunk_length(prompt_length)
        # A sequence that fills the context has no logits after it.
        capacity = min(max_length + 1, target.config.max_position)
        self._decode = config_lib.for_slots(1, capacity)
        self._state = state_lib.init_state(
            target.config, self._decode, dtype=target.dtype
        )

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns f32[V], of the token after `tokens`."""
        target = self._target
        request = state_lib.make_request(target.config, self._decode, slot=0)
        self._state = steps.insert(self._state, jnp.int32(0), request)
        for chunk in split(tokens, self._chunk_length):
            self._state, output = steps.prefill(
                target.params,
                self._state,
                jnp.zeros(1, jnp.int32),
                jnp.array([chunk.padded], jnp.int32),
                jnp.array([chunk.num_tokens], jnp.int32),
                jnp.array([chunk.is_last]),
                config=target.config,
            )
        hidden = output.hidden[0, chunk.num_tokens - 1]
        return np.asarray(_project(target.params, hidden))


class Chunk(NamedTuple):
    """A chunk of a prompt, padded to the common length."""

    padded: list[int]
    num_tokens: int
    is_last: bool


def split(tokens: Sequence[int], length: int) -> list[Chunk]:
    """Splits a sequence of at least one token into chunks of one length."""
    chunks = []
    for begin in range(0, len(tokens), length):
        part = list(tokens[begin : begin + length])
        is_last = begin + len(part) == len(tokens)
        chunks.append(Chunk(part + [0] * (length - len(part)), len(part), is_last))
    return chunks


def chunk_length(prompt_length: int) -> int:
    """The power of two that holds the longest prompt, within bounds."""
    power = 1 << (prompt_length - 1).bit_length()
    return min(max(power, _SHORTEST_CHUNK), _LONGEST_CHUNK)


@jax.jit
def _project(params: params_lib.ModelParams, hidden: Array) -> Array:
    return transformer.project_logits(params, hidden)
