"""The public steps: each a jitted pure function of (params, state, data).

Every step takes the static `config` of the target and, optionally, the name of a kernel
implementation (None: the backend's own). State that a step donates must not be used
after.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from metrale_jax import chunk, fold
from metrale_jax import config as config_lib
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax import verify as verify_lib
from metrale_jax.axes import Array, Int32
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch

_STATIC = ("config", "taps", "implementation")

_K4_DRAFTS = 3


prefill = jax.jit(chunk.prefill, static_argnames=_STATIC, donate_argnames=("state",))
verify_batched = jax.jit(verify_lib.verify, static_argnames=_STATIC)
apply_verdict = jax.jit(
    fold.apply_verdict, static_argnames=("config",), donate_argnames=("state",)
)
insert = jax.jit(state_lib.insert, donate_argnames=("state",))
release = jax.jit(state_lib.release, donate_argnames=("state",))


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


class _Rounds(NamedTuple):
    """Carry of the loop over rounds."""

    index: Array  # i32[], rounds done
    state: state_lib.SequenceState
    emission: verdict_lib.Emission


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

    def goes_on(rounds: _Rounds) -> Array:
        return (rounds.index < num_rounds) & jnp.any(rounds.state.active)

    def body(rounds: _Rounds) -> _Rounds:
        state, emission = _decode_round(params, rounds.state, config, implementation)
        return _Rounds(rounds.index + 1, state, _append(rounds.emission, emission))

    rounds = jax.lax.while_loop(goes_on, body, _Rounds(jnp.int32(0), state, emission))
    return rounds.state, rounds.emission


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
