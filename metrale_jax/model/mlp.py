"""Feed-forward parts: SwiGLU, and a mixture of SwiGLU experts with a shared one."""

import jax
import jax.numpy as jnp

from metrale_jax import config as config_lib
from metrale_jax.axes import Array, Float, Float32, Int32
from metrale_jax.model import linear as linear_lib
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch, expert_matmul


def mlp(
    params: params_lib.DenseParams | params_lib.MoEParams,
    x: Float[Array, "B K M"],
    *,
    config: config_lib.ModelConfig,
    implementation: dispatch.Implementation | None,
) -> Float[Array, "B K M"]:
    match params:
        case params_lib.DenseParams():
            return _swiglu(params, x)
        case params_lib.MoEParams():
            assert config.moe is not None
            return _mixture(params, x, config.moe, implementation)
        case _:
            raise TypeError(f"`params` must be dense or a mixture, got {type(params)}.")


def _swiglu(params: params_lib.DenseParams, x: Array) -> Array:
    gate = jax.nn.silu(linear_lib.linear(x, params.gate_proj))
    return linear_lib.linear(
        gate * linear_lib.linear(x, params.up_proj), params.down_proj
    )


def _mixture(
    params: params_lib.MoEParams,
    x: Array,
    moe: config_lib.MoEConfig,
    implementation: dispatch.Implementation | None,
) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    expert_index, expert_weight = route(params.router, rows, moe)
    routed = expert_matmul.expert_ffn(
        rows,
        params.gate_up_proj,
        params.down_proj,
        expert_index,
        expert_weight,
        implementation=implementation,
    )
    shared_gate = jax.nn.sigmoid(linear_lib.linear(rows, params.shared_expert_gate))
    shared = shared_gate * _swiglu(params.shared_expert, rows)
    return (routed + shared).reshape(x.shape)


def route(
    router: Float[Array, "E M"], rows: Float[Array, "N M"], moe: config_lib.MoEConfig
) -> tuple[Int32[Array, "N A"], Float32[Array, "N A"]]:
    """Chooses A experts per row: softmax over all in float32, the A largest, lower
    index on ties, rescaled to sum 1 where the family does so.

    Weights are rounded to the rows' dtype, as the published models do.
    """
    logits = linear_lib.linear(rows, router)
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, expert_index = jax.lax.top_k(probs, moe.num_experts_per_token)
    if moe.normalize_top_k:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return expert_index.astype(jnp.int32), weights.astype(rows.dtype).astype(
        jnp.float32
    )
