"""Gated full attention over K rows per slot; reads the KV pages, writes nothing."""

import jax

from metrale_jax import config as config_lib
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax.axes import Array, Float, Float32, Int32
from metrale_jax.model import linear as linear_lib
from metrale_jax.model import norm, rope
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch, verify_attention


def attention_rows(
    params: params_lib.AttentionParams,
    cache: state_lib.KVCache,
    page_table: Int32[Array, "B pages"],
    length: Int32[Array, " B"],
    x: Float[Array, "B K M"],
    rotation: tuple[Float32[Array, "B K half"], Float32[Array, "B K half"]],
    *,
    config: config_lib.ModelConfig,
    implementation: dispatch.Implementation | None,
) -> tuple[Float[Array, "B K M"], verdict_lib.KVRows]:
    """Attends from K rows at positions length..length+K-1 to the cache and each other.

    Each head's output is multiplied by the sigmoid of its gate before the output
    projection. Returns the output and the rows' own keys and values.
    """
    queries, gates = queries_and_gates(params, x, rotation, config=config)
    rows = keys_and_values(params, x, rotation, config=config)
    outputs = verify_attention.verify_attention(
        queries,
        rows.keys,
        rows.values,
        cache.keys,
        cache.values,
        page_table,
        length,
        scale=config.attention.head_dim**-0.5,
        implementation=implementation,
    )
    return project_outputs(params, outputs, gates), rows


def queries_and_gates(
    params: params_lib.AttentionParams,
    x: Float[Array, "B K M"],
    rotation: tuple[Float32[Array, "B K half"], Float32[Array, "B K half"]],
    *,
    config: config_lib.ModelConfig,
) -> tuple[Float[Array, "B K H D"], Float[Array, "B K H D"]]:
    """Returns the rows' queries, normed and rotated, and the gates of their heads."""
    head_dim = config.attention.head_dim
    # Per head, D rows of query are followed by D rows of gate.
    both = linear_lib.linear(x, params.q_proj).reshape(
        *x.shape[:2], config.attention.num_heads, 2 * head_dim
    )
    queries, gates = both[..., :head_dim], both[..., head_dim:]
    queries = norm.zero_centred_rms_norm(queries, params.q_norm, config.rms_norm_eps)
    return rope.rotate(queries, *rotation), gates


def keys_and_values(
    params: params_lib.AttentionParams,
    x: Float[Array, "B K M"],
    rotation: tuple[Float32[Array, "B K half"], Float32[Array, "B K half"]],
    *,
    config: config_lib.ModelConfig,
) -> verdict_lib.KVRows:
    """Returns the rows' keys, normed and rotated, and their values."""
    attention = config.attention
    kv_heads = (*x.shape[:2], attention.num_kv_heads, attention.head_dim)
    keys = linear_lib.linear(x, params.k_proj).reshape(kv_heads)
    values = linear_lib.linear(x, params.v_proj).reshape(kv_heads)
    keys = norm.zero_centred_rms_norm(keys, params.k_norm, config.rms_norm_eps)
    return verdict_lib.KVRows(keys=rope.rotate(keys, *rotation), values=values)


def project_outputs(
    params: params_lib.AttentionParams,
    outputs: Float[Array, "B K H D"],
    gates: Float[Array, "B K H D"],
) -> Float[Array, "B K M"]:
    """Gates what the heads give, and projects it back to the model's width."""
    gated = (outputs * jax.nn.sigmoid(gates)).reshape(*outputs.shape[:2], -1)
    return linear_lib.linear(gated, params.o_proj)
