"""A drafter with a script: for tests of what no drafter may change."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from metrale_jax import proposal
from metrale_jax.axes import Array


@struct.dataclass
class ScriptedState:
    """Rounds that each slot has had, i32[B], and what the inner drafter keeps."""

    num_rounds: Array
    inner: Any


@struct.dataclass
class ScriptedDrafter:
    """Offers `offered` drafts per round and slot, of which `right` are right.

    The scripts are used round after round, and start again at their end. Another
    drafter may ride along: it sees every committed row, as if the drafts were its own.

    Attributes:
      texts: i32[B, S], the tokens that plain decoding gives each slot, by position.
      offered: i32[B, rounds].
      right: i32[B, rounds].
      inner: the drafter whose state is kept, or None.
      vocab_size: V; wrong drafts are right ones plus one, modulo V.
      num_drafts: J.
    """

    texts: Array
    offered: Array
    right: Array
    inner: Any
    vocab_size: int = struct.field(pytree_node=False)
    num_drafts: int = struct.field(pytree_node=False)

    @property
    def max_drafts(self) -> int:
        return self.num_drafts

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.inner is None else self.inner.taps

    def describe_state(self, config, decode, *, dtype) -> Any:
        inner = None
        if self.inner is not None:
            inner = self.inner.describe_state(config, decode, dtype=dtype)
        return ScriptedState(
            jax.ShapeDtypeStruct((decode.num_slots,), jnp.int32), inner
        )

    def describe_probs(self, config, decode) -> Any:
        return None, None

    def prefill(self, params, state, chunk, *, config, implementation) -> Any:
        return self._advance("prefill", params, state, chunk, config, implementation)

    def commit(self, params, state, rows, *, config, implementation) -> Any:
        kept = self._advance("commit", params, state, rows, config, implementation)
        return kept.replace(
            num_rounds=kept.num_rounds + (rows.count > 0).astype(jnp.int32)
        )

    def _advance(self, method, params, state, rows, config, implementation) -> Any:
        kept = state.drafter
        if self.inner is None:
            return kept
        inner = getattr(self.inner, method)(
            params,
            state.replace(drafter=kept.inner),
            rows,
            config=config,
            implementation=implementation,
        )
        return kept.replace(inner=inner)

    def propose(self, params, state, *, config, implementation) -> proposal.Proposal:
        round_index = (state.drafter.num_rounds % self.offered.shape[1])[:, None]
        offered = jnp.take_along_axis(self.offered, round_index, axis=1)
        right = jnp.take_along_axis(self.right, round_index, axis=1)
        column = jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :]
        position = jnp.minimum(
            state.length[:, None] + 1 + column, self.texts.shape[1] - 1
        )
        drafts = jnp.take_along_axis(self.texts, position, axis=1)
        wrong = (drafts + 1) % self.vocab_size
        return proposal.Proposal(
            drafts=jnp.where(column < right, drafts, wrong),
            num_drafts=offered[:, 0],
            log_probs=jnp.zeros(drafts.shape, jnp.float32),
        )
