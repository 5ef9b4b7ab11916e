"""The target's forward over K rows per slot: reads the state, commits nothing.

`verify_rows` runs K rows from the state's value and returns them uncommitted (plain
decoding is K = 1). `prefill_chunk` runs a chunk of prompt: attention rows come back
uncommitted, recurrent layers advanced. One loop over the layers serves both.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from metrale_jax import config as config_lib
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax.axes import Array, Float, Float32, Int32
from metrale_jax.model import attention, delta_net, norm, rope
from metrale_jax.model import linear as linear_lib
from metrale_jax.model import mlp as mlp_lib
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch


class ForwardOutput(NamedTuple):
    """What a forward over K rows gives.

    Attributes:
      hidden: [B, K, M] after the final norm: input of the output head and of drafters.
      taps: residual streams [B, K, M] after the layers asked for, before any norm.
      layers: per layer, what its mixer returned beside its output.
    """

    hidden: Array
    taps: tuple[Array, ...]
    layers: tuple


class ChunkState(NamedTuple):
    """A recurrent layer after a chunk: matrix f32[B, Hv, Dk, Dv], window [B, W, C]."""

    recurrent_state: Array
    conv_state: Array


def verify_rows(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    tokens: Int32[Array, "B K"],
    *,
    config: config_lib.ModelConfig,
    taps: tuple[int, ...] = (),
    implementation: dispatch.Implementation | None = None,
) -> ForwardOutput:
    """Runs K rows per slot from position `length` on; `layers` are `LayerRows`."""

    def recur(
        mixer: params_lib.DeltaNetParams, recurrent: state_lib.RecurrentState, x: Array
    ) -> tuple[Array, verdict_lib.LayerRows]:
        return delta_net.delta_net_rows(
            mixer,
            recurrent,
            state.num_pending,
            x,
            config=config,
            implementation=implementation,
        )

    return _forward(params, state, tokens, recur, config, taps, implementation)


def prefill_chunk(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    tokens: Int32[Array, "B T"],
    num_tokens: Int32[Array, " B"],
    *,
    config: config_lib.ModelConfig,
    taps: tuple[int, ...] = (),
    implementation: dispatch.Implementation | None = None,
) -> ForwardOutput:
    """Runs the first `num_tokens` of T tokens; `layers` are `KVRows` or `ChunkState`.

    The recurrent matrices of `state` must be folded (`num_pending` is not read).
    """

    def recur(
        mixer: params_lib.DeltaNetParams, recurrent: state_lib.RecurrentState, x: Array
    ) -> tuple[Array, ChunkState]:
        output, matrix, window = delta_net.delta_net_chunk(
            mixer,
            recurrent.recurrent_state,
            recurrent.conv_state,
            num_tokens,
            x,
            config=config,
            implementation=implementation,
        )
        return output, ChunkState(matrix, window)

    return _forward(params, state, tokens, recur, config, taps, implementation)


def project_logits(
    params: params_lib.ModelParams, hidden: Float[Array, "... M"]
) -> Float32[Array, "... V"]:
    """Logits of final hiddens, in float32."""
    with jax.named_scope("output_head"):
        return linear_lib.linear(hidden, params.output_head).astype(jnp.float32)


def _forward(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    tokens: Array,
    recur: Callable[
        [params_lib.DeltaNetParams, state_lib.RecurrentState, Array],
        tuple[Array, object],
    ],
    config: config_lib.ModelConfig,
    taps: tuple[int, ...],
    implementation: dispatch.Implementation | None,
) -> ForwardOutput:
    """Runs the layers; `recur` is how a recurrent layer takes its rows."""
    if not config.num_layers == len(params.layers) == len(state.layers):
        raise ValueError(
            f"`config` has {config.num_layers} layers, `params` {len(params.layers)} "
            f"and `state` {len(state.layers)}; make all three from one config."
        )
    for tap in taps:
        if not 0 <= tap < config.num_layers:
            raise ValueError(
                f"`taps` must name layers 0..{config.num_layers - 1}, got {tap}."
            )
    epsilon = config.rms_norm_eps
    positions = rope.row_positions(state.length, tokens.shape[1])
    rotation = rope.rotation(
        positions, config.attention.rotary_dim, config.attention.rope_theta
    )

    def mix(mixer: object, layer_state: state_lib.LayerState, x: Array) -> tuple:
        match mixer, layer_state:
            case params_lib.AttentionParams(), state_lib.KVCache():
                return attention.attention_rows(
                    mixer,
                    layer_state,
                    state.page_table,
                    state.length,
                    x,
                    rotation,
                    config=config,
                    implementation=implementation,
                )
            case params_lib.DeltaNetParams(), state_lib.RecurrentState():
                return recur(mixer, layer_state, x)
            case _:
                raise TypeError(
                    f"`params` has {type(mixer).__name__} where `state` has "
                    f"{type(layer_state).__name__}; were they made from one config?"
                )

    x = params.embedding[tokens]
    after_layer = []
    layer_values = []
    for index, (kind, layer) in enumerate(
        zip(config.layers, params.layers, strict=True)
    ):
        with jax.named_scope(f"layer_{index}_{kind}"):
            normed = norm.zero_centred_rms_norm(x, layer.input_norm, epsilon)
            mixed, values = mix(layer.mixer, state.layers[index], normed)
            x = x + mixed
        with jax.named_scope(f"layer_{index}_mlp"):
            normed = norm.zero_centred_rms_norm(x, layer.post_norm, epsilon)
            x = x + mlp_lib.mlp(
                layer.mlp, normed, config=config, implementation=implementation
            )
        layer_values.append(values)
        after_layer.append(x)
    return ForwardOutput(
        hidden=norm.zero_centred_rms_norm(x, params.final_norm, epsilon),
        taps=tuple(after_layer[tap] for tap in taps),
        layers=tuple(layer_values),
    )
