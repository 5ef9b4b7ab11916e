"""Applying a verdict: the only place where committed state advances by decoding."""

import dataclasses

import jax.numpy as jnp

from metrale_jax import config as config_lib
from metrale_jax import indices
from metrale_jax import proposal as proposal_lib
from metrale_jax import state as state_lib
from metrale_jax import statistics as statistics_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax import verify as verify_lib
from metrale_jax.axes import Array, Bool, Int32
from metrale_jax.drafters import protocol
from metrale_jax.model import params as params_lib
from pallas_kernels import causal_conv, dispatch, gated_delta


def apply_verdict(
    state: state_lib.SequenceState,
    verdict: verdict_lib.Verdict,
    params: params_lib.ModelParams | None = None,
    drafter: protocol.Drafter | None = None,
    *,
    config: config_lib.ModelConfig,
    implementation: dispatch.Implementation | None = None,
) -> tuple[state_lib.SequenceState, verdict_lib.Emission]:
    """Emits the accepted drafts and the bonus token, and commits the rows they rest on.

    Donates `state` when called as a step. Pending drafts are used up.

    A slot that ends inside its accepted drafts ends as plain decoding would have ended:
    its caches hold all but its last emitted token. A slot whose logits were not finite,
    or to which a mask left no token, emits nothing, keeps its state, and finishes with
    `FINISHED_ERROR`.

    Args:
      state: the state that was verified.
      verdict: its verdict.
      params: of the target; needed with a drafter.
      drafter: the drafter that keeps state here; its caches take the same rows.
      config: of the target.
      implementation: of the drafter's kernels.

    Raises:
      ValueError: the verdict is of another batch or target, has more rows than the
        state has room for, or lacks what the drafter reads; or the state was made for
        another drafter.
    """
    judgement = verdict.judgement
    _check_verdict(state, verdict, drafter)
    num_drafts = judgement.drafts.shape[1]
    if num_drafts > state.max_drafts:
        raise ValueError(
            f"`verdict` has {num_drafts + 1} rows, but `state` has room for "
            f"{state.max_drafts + 1}; make it with `max_drafts` {num_drafts} or more."
        )
    emitted = verify_lib.emitted_tokens(
        judgement.drafts, judgement.num_accepted, judgement.bonus_token
    )
    count, reason = count_and_reason(
        emitted,
        judgement.num_accepted + 1,
        state.length_limit - (state.length + 1),
        judgement.is_valid,
        config,
    )
    count = jnp.where(state.active, count, 0)
    finished = state.active & (reason != state_lib.RUNNING)
    row_index = jnp.arange(emitted.shape[1], dtype=jnp.int32)
    is_emitted = row_index[None, :] < count[:, None]
    emitted = jnp.where(is_emitted, emitted, 0)
    advanced = _advance(state, verdict, emitted, count, finished, reason)
    rows = protocol.CommittedRows(
        start=state.length,
        count=count,
        next_tokens=emitted,
        hidden=verdict.hidden,
        taps=_taps_for(drafter, verdict),
        num_drafts=judgement.num_drafts,
        num_accepted=judgement.num_accepted,
    )
    advanced = _commit_drafter(advanced, rows, params, drafter, config, implementation)
    emission = verdict_lib.Emission(
        tokens=emitted,
        count=count,
        finished=finished,
        reason=advanced.finish_reason,
        log_probs=judgement.log_probs,
    )
    return advanced, emission


def _advance(
    state: state_lib.SequenceState,
    verdict: verdict_lib.Verdict,
    emitted: Int32[Array, "B K"],
    count: Int32[Array, " B"],
    finished: Bool[Array, " B"],
    reason: Int32[Array, " B"],
) -> state_lib.SequenceState:
    """Commits the first `count` rows and tokens of each slot, the drafter's apart."""
    judgement = verdict.judgement
    ran = count > 0
    row_index = jnp.arange(emitted.shape[1], dtype=jnp.int32)
    is_emitted = row_index[None, :] < count[:, None]
    last_row = jnp.maximum(count - 1, 0)[:, None]
    last_token = jnp.take_along_axis(emitted, last_row, axis=1)[:, 0]
    hidden = jnp.take_along_axis(verdict.hidden, last_row[:, :, None], axis=1)[:, 0]
    return dataclasses.replace(
        state,
        length=state.length + count,
        last_token=jnp.where(ran, last_token, state.last_token),
        tokens=write_tokens(state.tokens, state.length + 1, emitted, is_emitted),
        active=state.active & ~finished,
        finish_reason=jnp.where(finished, reason, state.finish_reason),
        hidden=jnp.where(ran[:, None], hidden, state.hidden),
        num_pending=count,
        proposal=dataclasses.replace(
            state.proposal, num_drafts=jnp.zeros_like(state.proposal.num_drafts)
        ),
        stats=statistics_lib.add_round(
            state.stats,
            count,
            judgement.num_drafts,
            judgement.num_accepted,
            judgement.hits,
            finished,
            _candidate_rank(state.proposal, judgement),
        ),
        layers=tuple(
            _commit_layer(layer, rows, state, count)
            for layer, rows in zip(state.layers, verdict.layers, strict=True)
        ),
    )


def _check_verdict(
    state: state_lib.SequenceState,
    verdict: verdict_lib.Verdict,
    drafter: protocol.Drafter | None,
) -> None:
    num_slots = verdict.judgement.num_accepted.shape[0]
    if num_slots != state.num_slots or len(verdict.layers) != len(state.layers):
        raise ValueError(
            f"`verdict` is of {num_slots} slots and {len(verdict.layers)} layers, "
            f"`state` of {state.num_slots} and {len(state.layers)}; apply a verdict to "
            "the state that was verified."
        )
    missing = set(() if drafter is None else drafter.taps) - set(verdict.tap_layers)
    if missing:
        raise ValueError(
            f"`verdict` lacks the taps {sorted(missing)} that `drafter` reads; verify "
            "with `taps=drafter.taps`."
        )


def _taps_for(
    drafter: protocol.Drafter | None, verdict: verdict_lib.Verdict
) -> tuple[Array, ...]:
    wanted = () if drafter is None else drafter.taps
    return tuple(verdict.taps[verdict.tap_layers.index(layer)] for layer in wanted)


def count_and_reason(
    emitted: Int32[Array, "B K"],
    num_available: Int32[Array, " B"],
    room: Int32[Array, " B"],
    is_valid: Bool[Array, " B"],
    config: config_lib.ModelConfig,
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """How many tokens each slot emits, and why it stops if it does.

    Args:
      emitted: the tokens at hand.
      num_available: how many of them count.
      room: tokens until the slot's limit.
      is_valid: the target could pick them; a slot that it could not fails.
      config: of the target, for its end tokens.
    """
    room = jnp.maximum(room, 0)
    available = jnp.minimum(num_available, room)
    row_index = jnp.arange(emitted.shape[1], dtype=jnp.int32)
    ends = verify_lib.is_end_token(emitted, config) & (
        row_index[None, :] < available[:, None]
    )
    has_end = jnp.any(ends, axis=1)
    end_row = jnp.argmax(ends, axis=1).astype(jnp.int32)
    count = jnp.where(has_end, end_row + 1, available)
    reason = jnp.where(
        has_end,
        state_lib.FINISHED_END_TOKEN,
        jnp.where(count == room, state_lib.FINISHED_LENGTH, state_lib.RUNNING),
    )
    count = jnp.where(is_valid, count, 0)
    return count, jnp.where(is_valid, reason, state_lib.FINISHED_ERROR)


def write_tokens(
    tokens: Int32[Array, "B S"],
    start: Int32[Array, " B"],
    values: Int32[Array, "B K"],
    is_valid: Bool[Array, "B K"],
) -> Int32[Array, "B S"]:
    """Writes values[b, j] at position start[b] + j of slot b where valid."""
    slots = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    steps = jnp.arange(values.shape[1], dtype=jnp.int32)
    positions = start[:, None] + steps[None, :]
    positions = indices.inert_unless(is_valid, positions, tokens.shape[1])
    return indices.write_rows(tokens, (slots, positions), values)


def write_kv_rows(
    cache: state_lib.KVCache,
    rows: verdict_lib.KVRows,
    page_table: Int32[Array, "B pages"],
    length: Int32[Array, " B"],
    num_rows: Int32[Array, " B"],
) -> state_lib.KVCache:
    """Writes the first `num_rows` rows of each slot from position `length` on."""
    num_pages, page_size = cache.keys.shape[:2]
    pages_per_slot = page_table.shape[1]
    row_index = jnp.arange(rows.keys.shape[1], dtype=jnp.int32)
    positions = length[:, None] + row_index[None, :]
    page_slot = positions // page_size
    is_written = row_index[None, :] < num_rows[:, None]
    is_inside = page_slot < pages_per_slot
    page = jnp.take_along_axis(
        page_table, jnp.minimum(page_slot, pages_per_slot - 1), axis=1
    )
    page = indices.inert_unless(is_written & is_inside, page, num_pages)
    at = (page, positions % page_size)
    return state_lib.KVCache(
        keys=indices.write_rows(cache.keys, at, rows.keys),
        values=indices.write_rows(cache.values, at, rows.values),
    )


def _commit_drafter(
    state: state_lib.SequenceState,
    rows: protocol.CommittedRows,
    params: params_lib.ModelParams | None,
    drafter: protocol.Drafter | None,
    config: config_lib.ModelConfig,
    implementation: dispatch.Implementation | None,
) -> state_lib.SequenceState:
    protocol.check_state(drafter, state, config)
    if drafter is None:
        return state
    if params is None:
        raise ValueError("`apply_verdict` needs `params` to advance a `drafter`.")
    kept = drafter.commit(
        params, state, rows, config=config, implementation=implementation
    )
    return dataclasses.replace(state, drafter=kept)


def _candidate_rank(
    proposal: proposal_lib.Proposal, judgement: verdict_lib.Judgement
) -> Int32[Array, " B"]:
    """Rank of the bonus token among the candidates of the draft that fell, or -1."""
    candidates = proposal.candidates
    num_accepted = judgement.num_accepted
    if candidates is None or not judgement.drafts.shape[1]:
        return jnp.full_like(num_accepted, -1)
    column = jnp.minimum(num_accepted, candidates.shape[1] - 1)[:, None, None]
    row = jnp.take_along_axis(candidates, column, axis=1)[:, 0]
    matches = row == judgement.bonus_token[:, None]
    rank = jnp.argmax(matches, axis=1).astype(jnp.int32)
    fell = num_accepted < judgement.num_drafts
    return jnp.where(fell & jnp.any(matches, axis=1), rank, -1)


def _commit_layer(
    layer: state_lib.LayerState,
    rows: verdict_lib.LayerRows,
    state: state_lib.SequenceState,
    count: Int32[Array, " B"],
) -> state_lib.LayerState:
    match layer, rows:
        case state_lib.KVCache(), verdict_lib.KVRows():
            return write_kv_rows(layer, rows, state.page_table, state.length, count)
        case state_lib.RecurrentState(), verdict_lib.RecurrentRows():
            return state_lib.RecurrentState(
                recurrent_state=rows.recurrent_state,
                pending=_fit_pending(layer.pending, rows.records),
                conv_state=causal_conv.shift_window(
                    layer.conv_state, rows.conv_inputs, count
                ),
            )
        case _:
            raise TypeError(
                f"`verdict.layers` holds {type(rows).__name__} for a "
                f"{type(layer).__name__}; was it made from another target?"
            )


def _fit_pending(
    pending: gated_delta.Records, records: gated_delta.Records
) -> gated_delta.Records:
    """Pads the records of K rows to the state's capacity."""
    capacity, num_rows = pending.keys.shape[1], records.keys.shape[1]

    def pad(array: Array) -> Array:
        widths = [(0, 0)] * array.ndim
        widths[1] = (0, capacity - num_rows)
        return jnp.pad(array, widths)

    return gated_delta.Records(*(pad(array) for array in records))
