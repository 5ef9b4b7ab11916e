"""The public steps: each a jitted pure function of (params, state, data).

Every step takes the static `config` of the target and, optionally, the name of a kernel
implementation (None: the backend's own). State that a step donates must not be used
after.
"""

import functools

import jax
import jax.numpy as jnp

from metrale_jax import chunk, fold
from metrale_jax import config as config_lib
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax import verify as verify_lib
from metrale_jax.axes import Array, Bool, Int32
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch

_STATIC = ("config", "taps", "implementation")

_K4_DRAFTS = 3


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("state",))
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
) -> tuple[state_lib.SequenceState, chunk.PrefillOutput]:
    """Appends a chunk of prompt to each named slot. Donates `state`.

    See `metrale_jax.chunk.prefill` for the arguments.
    """
    return chunk.prefill(
        params,
        state,
        slots,
        tokens,
        num_tokens,
        is_last,
        config=config,
        taps=taps,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=_STATIC)
def verify_batched(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    drafts: Int32[Array, "B J"],
    num_drafts: Int32[Array, " B"],
    *,
    config: config_lib.ModelConfig,
    taps: tuple[int, ...] = (),
    implementation: dispatch.Implementation | None = None,
) -> verdict_lib.Verdict:
    """Judges up to J drafts per slot in one forward of J + 1 rows. Donates nothing.

    Counts may differ per slot and be 0 (plain decoding); a slot that is not active is
    inert. The state is not changed; `apply_verdict` applies the result.
    """
    return verify_lib.verify(
        params,
        state,
        drafts,
        num_drafts,
        config=config,
        taps=taps,
        implementation=implementation,
    )


def verify_k4(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    drafts: Int32[Array, "B 3"],
    *,
    config: config_lib.ModelConfig,
    taps: tuple[int, ...] = (),
    implementation: dispatch.Implementation | None = None,
) -> verdict_lib.Verdict:
    """Judges three drafts per slot in one forward of four rows. Donates nothing.

    Raises:
      ValueError: `drafts` has not three columns.
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
        taps=taps,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def apply_verdict(
    state: state_lib.SequenceState,
    verdict: verdict_lib.Verdict,
    *,
    config: config_lib.ModelConfig,
) -> tuple[state_lib.SequenceState, verdict_lib.Emission]:
    """Commits a verdict's accepted rows and emits their tokens. Donates `state`."""
    return fold.apply_verdict(state, verdict, config=config)


@functools.partial(
    jax.jit,
    static_argnames=("config", "implementation"),
    donate_argnames=("state",),
)
def decode_round(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    *,
    config: config_lib.ModelConfig,
    implementation: dispatch.Implementation | None = None,
) -> tuple[state_lib.SequenceState, verdict_lib.Emission]:
    """Decodes one token per active slot: verify without drafts, then apply.

    Donates `state`.
    """
    return _decode_round(params, state, config, implementation)


@functools.partial(
    jax.jit,
    static_argnames=("num_rounds", "config", "implementation"),
    donate_argnames=("state",),
)
def decode_rounds(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    *,
    num_rounds: int,
    config: config_lib.ModelConfig,
    implementation: dispatch.Implementation | None = None,
) -> tuple[state_lib.SequenceState, verdict_lib.Emission]:
    """Runs up to `num_rounds` rounds on the device. Donates `state`.

    Stops early when no slot is active. The Emission holds each slot's tokens of all
    rounds, packed to the left: `tokens` i32[B, num_rounds].
    """
    num_slots = state.num_slots
    emission = verdict_lib.Emission(
        tokens=jnp.zeros((num_slots, num_rounds), jnp.int32),
        count=jnp.zeros(num_slots, jnp.int32),
        finished=jnp.zeros(num_slots, bool),
        reason=state.finish_reason,
    )

    def goes_on(carry: _RoundsCarry) -> Array:
        round_index, state, _ = carry
        return (round_index < num_rounds) & jnp.any(state.active)

    def body(carry: _RoundsCarry) -> _RoundsCarry:
        round_index, state, total = carry
        state, emission = _decode_round(params, state, config, implementation)
        return round_index + 1, state, _append(total, emission)

    _, state, emission = jax.lax.while_loop(
        goes_on, body, (jnp.int32(0), state, emission)
    )
    return state, emission


_RoundsCarry = tuple[Array, state_lib.SequenceState, verdict_lib.Emission]


def _decode_round(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    config: config_lib.ModelConfig,
    implementation: dispatch.Implementation | None,
) -> tuple[state_lib.SequenceState, verdict_lib.Emission]:
    no_drafts = jnp.zeros((state.num_slots, 0), jnp.int32)
    verdict = verify_lib.verify(
        params,
        state,
        no_drafts,
        jnp.zeros(state.num_slots, jnp.int32),
        config=config,
        implementation=implementation,
    )
    return fold.apply_verdict(state, verdict, config=config)


def _append(
    total: verdict_lib.Emission, emission: verdict_lib.Emission
) -> verdict_lib.Emission:
    """Adds one round's tokens behind those that each slot already has."""
    step = jnp.arange(emission.tokens.shape[1], dtype=jnp.int32)
    return verdict_lib.Emission(
        tokens=fold.write_tokens(
            total.tokens,
            total.count,
            emission.tokens,
            step[None, :] < emission.count[:, None],
        ),
        count=total.count + emission.count,
        finished=total.finished | emission.finished,
        reason=emission.reason,
    )


insert = jax.jit(state_lib.insert, donate_argnames=("state",))
release = jax.jit(state_lib.release, donate_argnames=("state",))
