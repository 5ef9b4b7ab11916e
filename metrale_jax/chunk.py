"""Prefill: runs chunks of prompts into slots, and picks the first token after them."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from metrale_jax import config as config_lib
from metrale_jax import fold, indices, picks
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax.axes import Array, Bool, Int32
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
    *,
    config: config_lib.ModelConfig,
    taps: tuple[int, ...] = (),
    implementation: dispatch.Implementation | None = None,
) -> tuple[state_lib.SequenceState, PrefillOutput]:
    """Appends a chunk to each named slot; a prompt's last chunk starts decoding.

    Donates `state` when called as a step. Any split of a prompt into chunks gives the
    same state, within the tolerance of the chunked recurrence.

    Args:
      slots: distinct slots; one outside of 0..B-1 is inert and pads the call.
      tokens: the chunks, padded to a common length.
      num_tokens: how many tokens of each chunk count; 0 leaves the slot as it is. A
        chunk that leaves no room for a token within the slot's `length_limit` is not
        run: the slot finishes with `FINISHED_ERROR`, and takes no further chunk.
      is_last: the chunk completes its prompt: a first token is picked, and the slot
        becomes active unless that token already ends it.

    Raises:
      ValueError: the arguments don't describe the same R chunks.
    """
    _check_chunks(slots, tokens, num_tokens, is_last)
    is_slot = (slots >= 0) & (slots < state.num_slots)
    gathered = _gather_slots(state, slots, implementation)
    is_slot &= gathered.finish_reason != state_lib.FINISHED_ERROR
    num_tokens = jnp.where(is_slot, jnp.clip(num_tokens, 0, tokens.shape[1]), 0)
    # At least the first token must fit behind the prompt.
    overflows = gathered.length + num_tokens >= gathered.length_limit
    overflows &= num_tokens > 0
    num_tokens = jnp.where(overflows, 0, num_tokens)
    output = transformer.prefill_chunk(
        params,
        gathered,
        tokens,
        num_tokens,
        config=config,
        taps=taps,
        implementation=implementation,
    )
    last_row = jnp.maximum(num_tokens - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden, last_row, axis=1)
    length = gathered.length + num_tokens
    emission, first_token = _first_token(
        params, gathered, hidden, length, num_tokens, is_last, overflows, config
    )

    ran = num_tokens > 0
    starts = is_last & ran
    written_slots = indices.inert_unless(ran, slots, state.num_slots)
    started_slots = indices.inert_unless(starts, slots, state.num_slots)
    judged_slots = indices.inert_unless(starts | overflows, slots, state.num_slots)
    state = dataclasses.replace(
        state,
        length=_put(state.length, written_slots, length),
        tokens=_write_prompt(
            state.tokens,
            slots,
            gathered.length,
            tokens,
            num_tokens,
            first_token,
            starts,
        ),
        hidden=_put(state.hidden, written_slots, hidden[:, 0]),
        num_pending=_put(state.num_pending, written_slots, jnp.zeros_like(slots)),
        last_token=_put(state.last_token, started_slots, first_token),
        active=_put(state.active, started_slots, ~emission.finished),
        finish_reason=_put(state.finish_reason, judged_slots, emission.reason),
        layers=tuple(
            _commit_layer(layer, values, gathered, written_slots, num_tokens)
            for layer, values in zip(state.layers, output.layers, strict=True)
        ),
    )
    return state, PrefillOutput(emission, output.hidden, output.taps)


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


def _first_token(
    params: params_lib.ModelParams,
    gathered: state_lib.SequenceState,
    hidden: Array,
    length: Int32[Array, " R"],
    num_tokens: Int32[Array, " R"],
    is_last: Bool[Array, " R"],
    overflows: Bool[Array, " R"],
    config: config_lib.ModelConfig,
) -> tuple[verdict_lib.Emission, Int32[Array, " R"]]:
    """Picks the token at position `length`, and says whether it ends the sequence."""
    logits = transformer.project_logits(params, hidden)
    token = picks.pick_tokens(logits, length[:, None], gathered.sampling)[:, 0]
    starts = is_last & (num_tokens > 0)
    is_finite = jnp.all(jnp.isfinite(logits), axis=(1, 2))
    reason = jnp.where(
        fold.is_end_token(token, config),
        state_lib.FINISHED_END_TOKEN,
        jnp.where(
            length + 1 >= gathered.length_limit,
            state_lib.FINISHED_LENGTH,
            state_lib.RUNNING,
        ),
    )
    reason = jnp.where(is_finite, reason, state_lib.FINISHED_ERROR)
    reason = jnp.where(starts, reason, state_lib.RUNNING)
    reason = jnp.where(overflows, state_lib.FINISHED_ERROR, reason)
    is_emitted = starts & is_finite
    token = jnp.where(is_emitted, token, 0)
    emission = verdict_lib.Emission(
        tokens=token[:, None],
        count=is_emitted.astype(jnp.int32),
        finished=reason != state_lib.RUNNING,
        reason=reason,
    )
    return emission, token


def _write_prompt(
    all_tokens: Int32[Array, "B S"],
    slots: Int32[Array, " R"],
    start: Int32[Array, " R"],
    tokens: Int32[Array, "R T"],
    num_tokens: Int32[Array, " R"],
    first_token: Int32[Array, " R"],
    starts: Bool[Array, " R"],
) -> Int32[Array, "B S"]:
    """Writes the chunk at positions start.., and the first token behind it."""
    step = jnp.arange(tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    is_first = starts[:, None] & (step == num_tokens[:, None])
    values = jnp.where(is_first, first_token[:, None], padded)
    is_written = (step < num_tokens[:, None]) | is_first
    positions = indices.inert_unless(
        is_written, start[:, None] + step, all_tokens.shape[1]
    )
    return indices.write_rows(all_tokens, (slots[:, None], positions), values)
