"""Prefill: runs chunks of prompts into slots, and picks the first token after them."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from metrale_jax import config as config_lib
from metrale_jax import fold, indices
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax import verify as verify_lib
from metrale_jax.axes import Array, Bool, Int32, UInt32
from metrale_jax.drafters import protocol
from metrale_jax.model import params as params_lib
from metrale_jax.model import transformer
from pallas_kernels import dispatch, gated_delta


class PrefillOutput(NamedTuple):
    """What one chunk gives beside the state.

    Attributes:
      emission: `Emission` of [R, 1]: the first token of each prompt that ended here.
      hidden: [R, T, M], final hidden of every token, after the last norm.
      taps: residual streams [R, T, M] after the layers asked for.
    """

    emission: verdict_lib.Emission
    hidden: Array
    taps: tuple[Array, ...]


def prefill(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    slots: Int32[Array, " R"],
    tokens: Int32[Array, "R T"],
    num_tokens: Int32[Array, " R"],
    is_last: Bool[Array, " R"],
    drafter: protocol.Drafter | None = None,
    *,
    config: config_lib.ModelConfig,
    row_masks: UInt32[Array, "R 1 words"] | None = None,
    num_log_probs: int | None = None,
    taps: tuple[int, ...] = (),
    implementation: dispatch.Implementation | None = None,
) -> tuple[state_lib.SequenceState, PrefillOutput]:
    """Appends a chunk to each named slot; a prompt's last chunk starts decoding.

    Donates `state` when called as a step. Any split of a prompt into chunks gives the
    same state, within the tolerance of the chunked recurrence.

    Args:
      params: of the target.
      state: B slots.
      slots: distinct slots; one outside of 0..B-1 is inert and pads the call.
      tokens: the chunks, padded to a common length.
      num_tokens: how many tokens of each chunk count; 0 leaves the slot as it is. A
        chunk that leaves no room for a token within the slot's `length_limit` is not
        run: the slot finishes with `FINISHED_ERROR`, and takes no further chunk.
      is_last: the chunk completes its prompt: a first token is picked, and the slot
        becomes active unless that token already ends it.
      drafter: the drafter that keeps state here; it sees the chunk too.
      config: of the target.
      row_masks: tokens allowed as the first one, see `verify.verify`.
      num_log_probs: see `verify.verify`; of the first token.
      taps: layers whose residual stream to return; the drafter's are read anyway.
      implementation: of the kernels.

    Raises:
      ValueError: the arguments don't describe the same R chunks, or the state has a
        drafter's and the drafter is missing.
    """
    _check_chunks(slots, tokens, num_tokens, is_last)
    protocol.check_state(drafter, state, config)
    is_slot = (slots >= 0) & (slots < state.num_slots)
    gathered = _gather_slots(state, slots, implementation)
    is_slot &= gathered.finish_reason != state_lib.FINISHED_ERROR
    num_tokens = jnp.where(is_slot, jnp.clip(num_tokens, 0, tokens.shape[1]), 0)
    # At least the first token must fit behind the prompt.
    overflows = gathered.length + num_tokens >= gathered.length_limit
    overflows &= num_tokens > 0
    num_tokens = jnp.where(overflows, 0, num_tokens)
    drafter_taps = () if drafter is None else drafter.taps
    output = transformer.prefill_chunk(
        params,
        gathered,
        tokens,
        num_tokens,
        config=config,
        taps=(*taps, *drafter_taps),
        implementation=implementation,
    )
    ran = num_tokens > 0
    starts = is_last & ran
    after = _advance(gathered, tokens, num_tokens, starts, output.hidden)
    emission = _first_token(
        params,
        after,
        starts,
        overflows,
        config=config,
        row_masks=row_masks,
        num_log_probs=num_log_probs,
    )
    kept = None
    if drafter is not None:
        chunk = protocol.CommittedChunk(
            start=gathered.length,
            tokens=tokens,
            num_tokens=num_tokens,
            is_last=starts,
            first_token=emission.tokens[:, 0],
            previous_hidden=gathered.hidden,
            hidden=output.hidden,
            taps=output.taps[len(taps) :],
        )
        kept = drafter.prefill(
            params, gathered, chunk, config=config, implementation=implementation
        )
    state = _write_back(
        state, slots, gathered, after, emission, num_tokens, starts, overflows
    )
    written_slots = indices.inert_unless(ran, slots, state.num_slots)
    state = dataclasses.replace(
        state,
        drafter=_put_drafter(state.drafter, kept, written_slots),
        layers=tuple(
            _commit_layer(layer, values, gathered, written_slots, num_tokens)
            for layer, values in zip(state.layers, output.layers, strict=True)
        ),
    )
    return state, PrefillOutput(emission, output.hidden, output.taps[: len(taps)])


def _write_back(
    state: state_lib.SequenceState,
    slots: Int32[Array, " R"],
    gathered: state_lib.SequenceState,
    after: state_lib.SequenceState,
    emission: verdict_lib.Emission,
    num_tokens: Int32[Array, " R"],
    starts: Bool[Array, " R"],
    overflows: Bool[Array, " R"],
) -> state_lib.SequenceState:
    """Writes the bookkeeping of the R slots; caches and the drafter's state apart."""
    ran = num_tokens > 0
    written_slots = indices.inert_unless(ran, slots, state.num_slots)
    started_slots = indices.inert_unless(starts, slots, state.num_slots)
    judged_slots = indices.inert_unless(starts | overflows, slots, state.num_slots)
    first_token = emission.tokens[:, 0]
    at_first = (started_slots, jnp.minimum(after.length, state.max_length - 1))
    return dataclasses.replace(
        state,
        length=_put(state.length, written_slots, after.length),
        tokens=indices.write_rows(
            _put(state.tokens, written_slots, after.tokens), at_first, first_token
        ),
        prompt_length=_put(state.prompt_length, started_slots, after.prompt_length),
        hidden=_put(state.hidden, written_slots, after.hidden),
        num_pending=_put(state.num_pending, written_slots, jnp.zeros_like(slots)),
        last_token=_put(state.last_token, started_slots, first_token),
        active=_put(state.active, started_slots, ~emission.finished),
        finish_reason=_put(state.finish_reason, judged_slots, emission.reason),
    )


def _check_chunks(
    slots: Array, tokens: Array, num_tokens: Array, is_last: Array
) -> None:
    shapes = (slots.shape, tokens.shape[:1], num_tokens.shape, is_last.shape)
    if tokens.ndim != 2 or len(set(shapes)) > 1:
        raise ValueError(
            "`slots`, `tokens`, `num_tokens` and `is_last` must be [R], [R, T], [R] "
            f"and [R], got {slots.shape}, {tokens.shape}, {num_tokens.shape} and "
            f"{is_last.shape}."
        )
    if is_last.dtype != jnp.bool_ or any(
        array.dtype != jnp.int32 for array in (slots, tokens, num_tokens)
    ):
        raise ValueError(
            "`slots`, `tokens` and `num_tokens` must be int32 and `is_last` bool, got "
            f"{slots.dtype}, {tokens.dtype}, {num_tokens.dtype} and {is_last.dtype}."
        )


def _put(field: Array, slots: Array, values: Array) -> Array:
    return indices.write_rows(field, (slots,), values)


def _gather_slots(
    state: state_lib.SequenceState,
    slots: Int32[Array, " R"],
    implementation: dispatch.Implementation | None,
) -> state_lib.SequenceState:
    """The named slots as a state of their own, recurrent matrices folded.

    An inert slot reads another slot's values; none of its results is written.
    """

    def take(node: object) -> object:
        if isinstance(node, state_lib.KVCache):
            return node
        return jax.tree.map(lambda leaf: leaf[slots], node)

    gathered = jax.tree.map(
        take, state, is_leaf=lambda node: isinstance(node, state_lib.KVCache)
    )

    def fold_layer(layer: state_lib.LayerState) -> state_lib.LayerState:
        if not isinstance(layer, state_lib.RecurrentState):
            return layer
        return dataclasses.replace(
            layer,
            recurrent_state=gated_delta.fold(
                layer.recurrent_state,
                layer.pending,
                gathered.num_pending,
                implementation=implementation,
            ),
        )

    return dataclasses.replace(
        gathered, layers=tuple(fold_layer(la) for la in gathered.layers)
    )


def _commit_layer(
    layer: state_lib.LayerState,
    values: verdict_lib.KVRows | transformer.ChunkState,
    gathered: state_lib.SequenceState,
    slots: Int32[Array, " R"],
    num_tokens: Int32[Array, " R"],
) -> state_lib.LayerState:
    match layer, values:
        case state_lib.KVCache(), verdict_lib.KVRows():
            return fold.write_kv_rows(
                layer, values, gathered.page_table, gathered.length, num_tokens
            )
        case state_lib.RecurrentState(), transformer.ChunkState():
            return dataclasses.replace(
                layer,
                recurrent_state=_put(
                    layer.recurrent_state, slots, values.recurrent_state
                ),
                conv_state=_put(layer.conv_state, slots, values.conv_state),
            )
        case _:
            raise TypeError(
                f"A {type(layer).__name__} got {type(values).__name__} from prefill."
            )


def _put_drafter(current: Any, kept: Any, slots: Int32[Array, " R"]) -> Any:
    """Writes the R slots of a drafter's state; caches in pages are whole already."""

    def put(old: Any, new: Any) -> Any:
        if isinstance(old, state_lib.KVCache):
            return new
        return _put(old, slots, new)

    return jax.tree.map(
        put, current, kept, is_leaf=lambda node: isinstance(node, state_lib.KVCache)
    )


def _advance(
    gathered: state_lib.SequenceState,
    tokens: Int32[Array, "R T"],
    num_tokens: Int32[Array, " R"],
    starts: Bool[Array, " R"],
    hidden: Array,
) -> state_lib.SequenceState:
    """The bookkeeping of the R slots after their chunk, its first token apart."""
    step = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    length = gathered.length + num_tokens
    last_row = jnp.maximum(num_tokens - 1, 0)[:, None, None]
    is_resumed = gathered.prompt_length > 0
    return dataclasses.replace(
        gathered,
        length=length,
        tokens=fold.write_tokens(
            gathered.tokens, gathered.length, tokens, step < num_tokens[:, None]
        ),
        prompt_length=jnp.where(starts & ~is_resumed, length, gathered.prompt_length),
        hidden=jnp.take_along_axis(hidden, last_row, axis=1)[:, 0],
    )


def _first_token(
    params: params_lib.ModelParams,
    after: state_lib.SequenceState,
    starts: Bool[Array, " R"],
    overflows: Bool[Array, " R"],
    *,
    config: config_lib.ModelConfig,
    row_masks: UInt32[Array, "R 1 words"] | None,
    num_log_probs: int | None,
) -> verdict_lib.Emission:
    """Picks the token at position `length`, and says whether it ends the sequence."""
    logits = transformer.project_logits(params, after.hidden[:, None])
    # The row is that of the prompt's last token: what verify calls length is one less.
    at_last = dataclasses.replace(after, length=after.length - 1)
    num_slots = logits.shape[0]
    judgement = verify_lib.judge(
        at_last,
        logits,
        jnp.zeros((num_slots, 0), jnp.int32),
        jnp.zeros(num_slots, jnp.int32),
        config=config,
        row_masks=row_masks,
        num_log_probs=num_log_probs,
    )
    token = judgement.bonus_token
    count, reason = fold.count_and_reason(
        token[:, None],
        jnp.ones(num_slots, jnp.int32),
        after.length_limit - after.length,
        judgement.is_valid,
        config,
    )
    count = jnp.where(starts, count, 0)
    reason = jnp.where(starts, reason, state_lib.RUNNING)
    reason = jnp.where(overflows, state_lib.FINISHED_ERROR, reason)
    return verdict_lib.Emission(
        tokens=jnp.where(count > 0, token, 0)[:, None],
        count=count,
        finished=reason != state_lib.RUNNING,
        reason=reason,
        log_probs=judgement.log_probs,
    )
