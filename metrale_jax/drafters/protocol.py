"""The protocol of drafters, and what the target tells them.

A drafter is a frozen pytree: its parameters are leaves, its options static fields
(`pytree_node=False`), so it passes through `jax.jit` as an ordinary argument. What it
knows of the sequences is not in it but in `SequenceState.drafter`, which its methods
take and return; per-slot leaves have B in front, and caches in pages are `KVCache`
nodes that share the slots' page table.

A drafter writes on accept, like the target: `commit` and `prefill` take rows that are
committed; `propose` is a pure function of the state and stores nothing. So proposing
twice gives the same drafts, and nothing of a rejected draft survives.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.typing
from flax import struct

from metrale_jax import config as config_lib
from metrale_jax import proposal as proposal_lib
from metrale_jax import state as state_lib
from metrale_jax.axes import Array
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch

# J of every drafter: a verify has at most 16 rows.
MAX_NUM_DRAFTS = 15


def check_num_drafts(num_drafts: int) -> None:
    """Raises ValueError unless the number is one that drafters offer."""
    if not 1 <= num_drafts <= MAX_NUM_DRAFTS:
        raise ValueError(
            f"`num_drafts` must be in 1..{MAX_NUM_DRAFTS}, got {num_drafts}."
        )


def check_state(
    drafter: "Drafter | None",
    state: state_lib.SequenceState,
    config: config_lib.ModelConfig,
) -> None:
    """Raises ValueError unless the state was made for this drafter, or for none.

    A state that keeps another drafter's would be misread, or fall behind.
    """
    expected = None
    if drafter is not None:
        # The structure does not depend on sizes.
        expected = drafter.describe_state(
            config, config_lib.for_slots(1, 1), dtype=state.hidden.dtype
        )
    if jax.tree.structure(expected) != jax.tree.structure(state.drafter):
        given = "no `drafter` is given" if drafter is None else type(drafter).__name__
        raise ValueError(
            f"`state` holds {type(state.drafter).__name__} as the drafter's state, but "
            f"{given}; give `init_state` and every step the same `drafter`."
        )


@struct.dataclass
class CommittedRows:
    """Rows that a round has just committed: the first `count` of K per slot.

    Attributes:
      start: i32[B], position of row 0: the slot's length before the round.
      count: i32[B], 0 for a slot that was not served.
      next_tokens: i32[B, K], the token after each row's input, as emitted; the one at
        row count - 1 is the slot's `last_token`.
      hidden: [B, K, M], the target's final hidden of each row, after the last norm.
      taps: residual streams [B, K, M] after the layers that the drafter asked for.
      num_drafts: i32[B], drafts that the round judged.
      num_accepted: i32[B], and accepted.
    """

    start: Array
    count: Array
    next_tokens: Array
    hidden: Array
    taps: tuple[Array, ...]
    num_drafts: Array
    num_accepted: Array


@struct.dataclass
class CommittedChunk:
    """A chunk of R prompts that prefill has just run: the first `num_tokens` of T each.

    Attributes:
      start: i32[R], position of token 0 of the chunk.
      tokens: i32[R, T], the chunk itself.
      num_tokens: i32[R], 0 for an inert row.
      is_last: bool[R], the prompt is complete, and `first_token` is known.
      first_token: i32[R], picked after the prompt; 0 where the prompt goes on.
      previous_hidden: [R, M], final hidden of position start - 1; stale at start 0.
      hidden: [R, T, M], final hidden of every token.
      taps: residual streams [R, T, M] after the layers that the drafter asked for.
    """

    start: Array
    tokens: Array
    num_tokens: Array
    is_last: Array
    first_token: Array
    previous_hidden: Array
    hidden: Array
    taps: tuple[Array, ...]


@runtime_checkable
class Drafter(Protocol):
    """What every drafter offers; all methods are batched over slots and traceable."""

    @property
    def max_drafts(self) -> int:
        """Most drafts it proposes per round, at least 1."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose residual stream it reads; may be empty."""
        ...

    def describe_state(
        self,
        config: config_lib.ModelConfig,
        decode: config_lib.DecodeConfig,
        *,
        dtype: jax.typing.DTypeLike,
    ) -> Any:
        """Returns its state as a pytree of `jax.ShapeDtypeStruct`, or None.

        Neutral is 0 in every leaf: that is what a slot's new owner finds.
        """
        ...

    def describe_probs(
        self, config: config_lib.ModelConfig, decode: config_lib.DecodeConfig
    ) -> Any:
        """Returns `Proposal.probs` and `.candidates` as pairs of ShapeDtypeStructs."""
        ...

    def prefill(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        chunk: CommittedChunk,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> Any:
        """Returns its state after a chunk; `state` holds the R slots as before it."""
        ...

    def commit(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        rows: CommittedRows,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> Any:
        """Returns its state after a round.

        `state` is the one after the round, but for `state.drafter`, which is still as
        before. A slot whose count is 0 keeps its values.
        """
        ...

    def propose(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> proposal_lib.Proposal:
        """Proposes drafts [B, max_drafts] for the positions after `last_token`.

        What it says of slots that are not active is not used. `log_probs`, `probs` and
        `candidates` are as `describe_probs` says.
        """
        ...


class DrafterBase:
    """Answers all of `Drafter` but `propose`, for a drafter without state.

    Such a drafter proposes from what `SequenceState` holds. It has a field
    `num_drafts`. One that keeps state, reads taps or draws its drafts answers the
    methods concerned itself.
    """

    num_drafts: int

    @property
    def max_drafts(self) -> int:
        return self.num_drafts

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def describe_state(
        self,
        config: config_lib.ModelConfig,
        decode: config_lib.DecodeConfig,
        *,
        dtype: jax.typing.DTypeLike,
    ) -> None:
        return None

    def describe_probs(
        self, config: config_lib.ModelConfig, decode: config_lib.DecodeConfig
    ) -> tuple[Any, Any]:
        return None, None

    def prefill(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        chunk: CommittedChunk,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> None:
        return None

    def commit(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        rows: CommittedRows,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> None:
        return None
