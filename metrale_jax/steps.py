"""The public steps: each a jitted pure function of (params, state, data).

Every step takes the static `config` of the target and, optionally, the name of a kernel
implementation (None: the backend's own). State that a step donates must not be used
after.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from metrale_jax import chunk, drafting, fold, indices
from metrale_jax import config as config_lib
from metrale_jax import proposal as proposal_lib
from metrale_jax import snapshot as snapshot_lib
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax import verify as verify_lib
from metrale_jax.axes import Array, Int32, UInt32
from metrale_jax.drafters import confidence, protocol
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch

_K4_DRAFTS = 3

_VERIFY_STATIC = ("config", "accept_rule", "num_log_probs", "taps", "implementation")
_ROUND_STATIC = ("config", "accept_rule", "num_log_probs", "limits", "implementation")

prefill = jax.jit(
    chunk.prefill,
    static_argnames=("config", "num_log_probs", "taps", "implementation"),
    donate_argnames=("state",),
)
verify_batched = jax.jit(verify_lib.verify, static_argnames=_VERIFY_STATIC)
apply_verdict = jax.jit(
    fold.apply_verdict,
    static_argnames=("config", "implementation"),
    donate_argnames=("state",),
)
propose = jax.jit(
    drafting.propose,
    static_argnames=("config", "limits", "implementation"),
    donate_argnames=("state",),
)
insert = jax.jit(state_lib.insert, donate_argnames=("state",))
release = jax.jit(state_lib.release, donate_argnames=("state",))
take_snapshot = jax.jit(snapshot_lib.take_snapshot)
restore_snapshot = jax.jit(snapshot_lib.restore_snapshot, donate_argnames=("state",))


def verify_k4(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    drafts: Int32[Array, "B 3"],
    *,
    config: config_lib.ModelConfig,
    draft_probs: proposal_lib.DraftProbs = None,
    row_masks: UInt32[Array, "B 4 words"] | None = None,
    accept_rule: verify_lib.AcceptRule = "match",
    num_log_probs: int | None = None,
    taps: tuple[int, ...] = (),
    implementation: dispatch.Implementation | None = None,
) -> verdict_lib.Verdict:
    """Judges three drafts per slot in one forward of four rows. Donates nothing.

    Arguments as for `verify_batched`, with every draft offered.

    Raises:
      ValueError: `drafts` has not three columns, or as for `verify_batched`.
    """
    if drafts.shape[1:] != (_K4_DRAFTS,):
        raise ValueError(
            f"`drafts` must have {_K4_DRAFTS} columns for `verify_k4`, got shape "
            f"{drafts.shape}; `verify_batched` takes any number."
        )
    num_drafts = jnp.full(drafts.shape[:1], _K4_DRAFTS, jnp.int32)
    return verify_batched(
        params,
        state,
        drafts,
        num_drafts,
        config=config,
        draft_probs=draft_probs,
        row_masks=row_masks,
        accept_rule=accept_rule,
        num_log_probs=num_log_probs,
        taps=taps,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=_ROUND_STATIC, donate_argnames=("state",))
def decode_round(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    drafter: protocol.Drafter | None = None,
    *,
    config: config_lib.ModelConfig,
    accept_rule: verify_lib.AcceptRule = "match",
    num_log_probs: int | None = None,
    limits: confidence.DraftLimits = confidence.NO_LIMITS,
    implementation: dispatch.Implementation | None = None,
) -> tuple[state_lib.SequenceState, verdict_lib.Emission]:
    """Verifies the pending drafts, applies the verdict, proposes the next drafts.

    Donates `state`. Without a drafter it is plain decoding: one row per slot, pending
    drafts dropped. The first round of a sequence has drafts if `propose` ran before it.

    Args:
      params: of the target.
      state: B slots, made with this drafter.
      drafter: None decodes plainly.
      config: of the target.
      accept_rule: see `verify_batched`, as the next.
      num_log_probs: of each emitted token.
      limits: see `propose`.
      implementation: of the kernels.

    Raises:
      ValueError: see `verify_batched`, `apply_verdict` and `propose`.
    """
    options = _Options(config, accept_rule, num_log_probs, limits, implementation)
    return _decode_round(params, state, drafter, options)


@functools.partial(
    jax.jit,
    static_argnames=("num_rounds", *_ROUND_STATIC),
    donate_argnames=("state",),
)
def decode_rounds(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    drafter: protocol.Drafter | None = None,
    *,
    num_rounds: int,
    config: config_lib.ModelConfig,
    accept_rule: verify_lib.AcceptRule = "match",
    num_log_probs: int | None = None,
    limits: confidence.DraftLimits = confidence.NO_LIMITS,
    implementation: dispatch.Implementation | None = None,
) -> tuple[state_lib.SequenceState, verdict_lib.Emission]:
    """Runs up to `num_rounds` rounds on the device. Donates `state`.

    Stops early when no slot is active. The Emission holds each slot's tokens of all
    rounds, packed to the left: `tokens` i32[B, num_rounds * K]. Other arguments and
    errors as for `decode_round`.
    """
    if num_rounds < 1:
        raise ValueError(f"`num_rounds` must be at least 1, got {num_rounds}.")
    options = _Options(config, accept_rule, num_log_probs, limits, implementation)
    num_rows = 1 if drafter is None else state.max_drafts + 1
    emission = _empty_emission(state, num_rounds * num_rows, num_log_probs)

    def goes_on(rounds: _Rounds) -> Array:
        return (rounds.index < num_rounds) & jnp.any(rounds.state.active)

    def body(rounds: _Rounds) -> _Rounds:
        state, emission = _decode_round(params, rounds.state, drafter, options)
        return _Rounds(rounds.index + 1, state, _append(rounds.emission, emission))

    rounds = jax.lax.while_loop(goes_on, body, _Rounds(jnp.int32(0), state, emission))
    return rounds.state, rounds.emission


def separate_round(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    drafter: protocol.Drafter,
    max_num_drafts: Int32[Array, " B"] | None = None,
    *,
    config: config_lib.ModelConfig,
    accept_rule: verify_lib.AcceptRule = "match",
    num_log_probs: int | None = None,
    limits: confidence.DraftLimits = confidence.NO_LIMITS,
    implementation: dispatch.Implementation | None = None,
) -> tuple[state_lib.SequenceState, verdict_lib.Emission]:
    """`decode_round` as three programs that a host may look between. Donates `state`.

    This is the strict tier, by `implementation="reference"`: with `max_num_drafts` 0 it
    decodes plainly in the very program that verifies drafts, so that a row has the same
    bits however many drafts ride along. Other arguments and errors as for `propose`,
    `verify_batched` and `apply_verdict`.
    """
    pending = state.proposal
    verdict = verify_batched(
        params,
        state,
        pending.drafts,
        pending.num_drafts,
        config=config,
        draft_probs=pending.probs,
        accept_rule=accept_rule,
        num_log_probs=num_log_probs,
        taps=drafter.taps,
        implementation=implementation,
    )
    state, emission = apply_verdict(
        state, verdict, params, drafter, config=config, implementation=implementation
    )
    state = propose(
        params,
        state,
        drafter,
        max_num_drafts,
        config=config,
        limits=limits,
        implementation=implementation,
    )
    return state, emission


class _Options(NamedTuple):
    """Static arguments of a round."""

    config: config_lib.ModelConfig
    accept_rule: verify_lib.AcceptRule
    num_log_probs: int | None
    limits: confidence.DraftLimits
    implementation: dispatch.Implementation | None


class _Rounds(NamedTuple):
    """Carry of the loop over rounds."""

    index: Array  # i32[], rounds done
    state: state_lib.SequenceState
    emission: verdict_lib.Emission


def _decode_round(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    drafter: protocol.Drafter | None,
    options: _Options,
) -> tuple[state_lib.SequenceState, verdict_lib.Emission]:
    pending = state.proposal
    num_columns = 0 if drafter is None else state.max_drafts
    verdict = verify_lib.verify(
        params,
        state,
        pending.drafts[:, :num_columns],
        pending.num_drafts,
        config=options.config,
        draft_probs=None if drafter is None else pending.probs,
        accept_rule=options.accept_rule,
        num_log_probs=options.num_log_probs,
        taps=() if drafter is None else drafter.taps,
        implementation=options.implementation,
    )
    state, emission = fold.apply_verdict(
        state,
        verdict,
        params,
        drafter,
        config=options.config,
        implementation=options.implementation,
    )
    if drafter is None:
        return state, emission
    state = drafting.propose(
        params,
        state,
        drafter,
        config=options.config,
        limits=options.limits,
        implementation=options.implementation,
    )
    return state, emission


def _empty_emission(
    state: state_lib.SequenceState, max_tokens: int, num_log_probs: int | None
) -> verdict_lib.Emission:
    num_slots = state.num_slots
    log_probs = None
    if num_log_probs is not None:
        top = (num_slots, max_tokens, num_log_probs)
        log_probs = verdict_lib.LogProbs(
            emitted=jnp.zeros((num_slots, max_tokens), jnp.float32),
            top_ids=jnp.zeros(top, jnp.int32),
            top=jnp.zeros(top, jnp.float32),
        )
    return verdict_lib.Emission(
        tokens=jnp.zeros((num_slots, max_tokens), jnp.int32),
        count=jnp.zeros(num_slots, jnp.int32),
        finished=jnp.zeros(num_slots, bool),
        reason=state.finish_reason,
        log_probs=log_probs,
    )


def _append(
    total: verdict_lib.Emission, emission: verdict_lib.Emission
) -> verdict_lib.Emission:
    """Adds one round's tokens behind those that each slot already has."""
    step = jnp.arange(emission.tokens.shape[1], dtype=jnp.int32)[None, :]
    slot = jnp.arange(emission.tokens.shape[0], dtype=jnp.int32)[:, None]
    place = indices.inert_unless(
        step < emission.count[:, None],
        total.count[:, None] + step,
        total.tokens.shape[1],
    )

    def write(array: Any, values: Any) -> Array:
        return indices.write_rows(array, (slot, place), values)

    return verdict_lib.Emission(
        tokens=write(total.tokens, emission.tokens),
        count=total.count + emission.count,
        finished=total.finished | emission.finished,
        reason=emission.reason,
        log_probs=jax.tree.map(write, total.log_probs, emission.log_probs),
    )
