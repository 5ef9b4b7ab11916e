"""Prompt lookup: copies on from the latest match, as far as copies have been right."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.typing
from flax import struct

from metrale_jax import config as config_lib
from metrale_jax import proposal as proposal_lib
from metrale_jax import state as state_lib
from metrale_jax.axes import Array
from metrale_jax.drafters import protocol, suffix
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch

_FIRST_WINDOW = 2
# Exponent of the longest pause, before `max_pause` cuts it: keeps the shift in range.
_MAX_DOUBLINGS = 16


@struct.dataclass
class LookupState:
    """What prompt lookup remembers of B slots.

    Attributes:
      window: i32[B], drafts of the next copy; 0 before the first round.
      num_misses: i32[B], searches in a row that found nothing.
      pause: i32[B], rounds for which the slot is not searched.
    """

    window: Array
    num_misses: Array
    pause: Array


@struct.dataclass
class PromptLookupDrafter(protocol.DrafterBase):
    """Copies the tokens after the latest match of the text's last tokens.

    A copy is `window` tokens long. The window starts at 2, doubles when a whole copy
    was accepted and halves when not. A slot whose search finds nothing pauses for 1, 2,
    4, ... rounds, until a copy is found again.

    Attributes:
      num_drafts: J, longest copy, 1..15.
      min_match: tokens that must match, at least 1.
      max_pause: longest pause in rounds; 0 searches in every round.
    """

    num_drafts: int = struct.field(pytree_node=False, default=7)
    min_match: int = struct.field(pytree_node=False, default=3)
    max_pause: int = struct.field(pytree_node=False, default=16)

    def __post_init__(self) -> None:
        protocol.check_num_drafts(self.num_drafts)
        if self.min_match < 1:
            raise ValueError(f"`min_match` must be positive, got {self.min_match}.")
        if self.max_pause < 0:
            raise ValueError(f"`max_pause` must not be negative, got {self.max_pause}.")

    def describe_state(
        self,
        config: config_lib.ModelConfig,
        decode: config_lib.DecodeConfig,
        *,
        dtype: jax.typing.DTypeLike,
    ) -> Any:
        counts: Any = jax.ShapeDtypeStruct((decode.num_slots,), jnp.int32)
        return LookupState(window=counts, num_misses=counts, pause=counts)

    def prefill(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        chunk: protocol.CommittedChunk,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> Any:
        return state.drafter

    def commit(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        rows: protocol.CommittedRows,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> Any:
        past: LookupState = state.drafter
        copied = rows.num_drafts > 0
        paused = past.pause > 0
        window = self._window(past)
        was_right = rows.num_accepted == rows.num_drafts
        grown = jnp.where(was_right, window * 2, window // 2)
        num_misses = jnp.where(copied, 0, past.num_misses + (~paused).astype(jnp.int32))
        doublings = jnp.clip(num_misses - 1, 0, _MAX_DOUBLINGS)
        pause = jnp.minimum(jnp.int32(1) << doublings, self.max_pause)
        pause = jnp.where(paused, past.pause - 1, pause)
        after = LookupState(
            window=jnp.where(copied, jnp.clip(grown, 1, self.num_drafts), window),
            num_misses=num_misses,
            pause=jnp.where(copied, 0, pause),
        )
        ran = rows.count > 0
        return jax.tree.map(lambda new, old: jnp.where(ran, new, old), after, past)

    def propose(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> proposal_lib.Proposal:
        past: LookupState = state.drafter
        num_tokens = state.length + 1
        match = suffix.match_lengths(state.tokens, num_tokens, self.min_match)
        is_match = match >= self.min_match
        # The latest match: the first one of the reversed text.
        from_end = jnp.argmax(is_match[:, ::-1], axis=1).astype(jnp.int32)
        match_end = state.max_length - 1 - from_end
        is_found = jnp.any(is_match, axis=1) & (past.pause == 0)
        drafts = suffix.continuation(
            state.tokens, num_tokens, match_end, self.num_drafts
        )
        return proposal_lib.Proposal(
            drafts=drafts,
            num_drafts=jnp.where(is_found, self._window(past), 0),
        )

    def _window(self, past: LookupState) -> Array:
        first = min(_FIRST_WINDOW, self.num_drafts)
        return jnp.where(past.window == 0, first, past.window)
