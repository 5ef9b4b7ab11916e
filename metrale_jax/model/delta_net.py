"""Gated DeltaNet (https://arxiv.org/abs/2412.06464): K rows, or a chunk of a prompt.

Both forms share the projections, the convolution and the gated output norm; they differ
in the recurrence: `delta_net_rows` folds the pending rows and leaves its own
uncommitted, `delta_net_chunk` advances the matrix over a whole chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from metrale_jax import config as config_lib
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax.axes import Array, Float, Float32, Int32
from metrale_jax.model import linear as linear_lib
from metrale_jax.model import norm
from metrale_jax.model import params as params_lib
from pallas_kernels import causal_conv, dispatch, gated_delta

# Inside the square root of the query and key normalisation.
_L2_NORM_EPSILON = 1e-6


class _Recurrence(NamedTuple):
    """Inputs of the recurrence, float32, and the pre-conv inputs they came from."""

    queries: Array  # [B, K, Hk, Dk], normalised and scaled
    keys: Array  # [B, K, Hk, Dk], normalised
    values: Array  # [B, K, Hv, Dv]
    log_decays: Array  # [B, K, Hv], at most 0
    betas: Array  # [B, K, Hv], in 0..1
    conv_inputs: Array  # [B, K, C], in the model's dtype


def delta_net_rows(
    params: params_lib.DeltaNetParams,
    state: state_lib.RecurrentState,
    num_pending: Int32[Array, " B"],
    x: Float[Array, "B K M"],
    *,
    config: config_lib.ModelConfig,
    implementation: dispatch.Implementation | None,
) -> tuple[Float[Array, "B K M"], verdict_lib.RecurrentRows]:
    """Runs K rows from the state's value; commits none of them."""
    inputs = _project(params, state.conv_state, x, config, implementation)
    result = gated_delta.verify(
        state.recurrent_state,
        state.pending,
        num_pending,
        inputs.queries,
        inputs.keys,
        inputs.values,
        inputs.log_decays,
        inputs.betas,
        implementation=implementation,
    )
    rows = verdict_lib.RecurrentRows(
        recurrent_state=result.state,
        records=result.records,
        conv_inputs=inputs.conv_inputs,
    )
    return _gated_output(params, result.outputs, x, config), rows


def delta_net_chunk(
    params: params_lib.DeltaNetParams,
    recurrent_state: Float32[Array, "B Hv Dk Dv"],
    conv_state: Float[Array, "B W C"],
    num_tokens: Int32[Array, " B"],
    x: Float[Array, "B T M"],
    *,
    config: config_lib.ModelConfig,
    implementation: dispatch.Implementation | None,
) -> tuple[Float[Array, "B T M"], Float32[Array, "B Hv Dk Dv"], Float[Array, "B W C"]]:
    """Advances a folded matrix and a conv window over the first `num_tokens` rows.

    Returns the output (finite beyond `num_tokens`), the matrix and the window.
    """
    inputs = _project(params, conv_state, x, config, implementation)
    outputs, recurrent_state = gated_delta.prefill(
        recurrent_state,
        inputs.queries,
        inputs.keys,
        inputs.values,
        inputs.log_decays,
        inputs.betas,
        num_tokens,
        implementation=implementation,
    )
    conv_state = causal_conv.shift_window(conv_state, inputs.conv_inputs, num_tokens)
    return _gated_output(params, outputs, x, config), recurrent_state, conv_state


def _project(
    params: params_lib.DeltaNetParams,
    conv_state: Array,
    x: Array,
    config: config_lib.ModelConfig,
    implementation: dispatch.Implementation | None,
) -> _Recurrence:
    delta_net = config.delta_net
    batch_rows = x.shape[:2]
    conv_inputs = linear_lib.linear(x, params.in_proj_qkv)
    mixed = causal_conv.causal_conv(
        conv_inputs, conv_state, params.conv, implementation=implementation
    )
    key_dim = delta_net.key_dim
    key_heads = (*batch_rows, delta_net.num_key_heads, delta_net.key_head_dim)
    value_heads = (*batch_rows, delta_net.num_value_heads, delta_net.value_head_dim)
    queries = _l2_normalise(mixed[..., :key_dim].reshape(key_heads))
    keys = _l2_normalise(mixed[..., key_dim : 2 * key_dim].reshape(key_heads))
    values = mixed[..., 2 * key_dim :].reshape(value_heads).astype(jnp.float32)

    a = linear_lib.linear(x, params.in_proj_a).astype(jnp.float32)
    b = linear_lib.linear(x, params.in_proj_b).astype(jnp.float32)
    decay_rates = jnp.exp(params.a_log)[None, None, :]
    log_decays = -decay_rates * jax.nn.softplus(a + params.dt_bias[None, None, :])
    return _Recurrence(
        queries=queries * delta_net.key_head_dim**-0.5,
        keys=keys,
        values=values,
        log_decays=log_decays,
        betas=jax.nn.sigmoid(b),
        conv_inputs=conv_inputs,
    )


def _l2_normalise(x: Array) -> Float32[Array, "..."]:
    x = x.astype(jnp.float32)
    square_sum = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square_sum + _L2_NORM_EPSILON)


def _gated_output(
    params: params_lib.DeltaNetParams,
    outputs: Float32[Array, "B K Hv Dv"],
    x: Array,
    config: config_lib.ModelConfig,
) -> Array:
    """Norm, then weight, then gate (in float32), then the output projection."""
    z = linear_lib.linear(x, params.in_proj_z).reshape(outputs.shape)
    # The published models round to the model's dtype before and after the weight.
    normalised = norm.plain_rms_norm(
        outputs.astype(x.dtype), params.norm, config.rms_norm_eps
    )
    gate = _output_gate(z.astype(jnp.float32), config.delta_net.output_gate)
    gated = (normalised.astype(jnp.float32) * gate).astype(x.dtype)
    return linear_lib.linear(gated.reshape(*x.shape[:2], -1), params.out_proj)


def _output_gate(z: Array, kind: config_lib.OutputGate) -> Array:
    match kind:
        case "silu":
            return jax.nn.silu(z)
        case "sigmoid":
            return jax.nn.sigmoid(z)
        case _:
            raise NotImplementedError(f"`output_gate` {kind!r} is not known here.")
