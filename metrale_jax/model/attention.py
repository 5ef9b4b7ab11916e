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
    attention = config.attention
    head_dim = attention.head_dim
    batch_rows = x.shape[:2]
    # Per head, D rows of query are followed by D rows of gate.
    queries_and_gates = linear_lib.linear(x, params.q_proj).reshape(
        *batch_rows, attention.num_heads, 2 * head_dim
    )
    queries = queries_and_gates[..., :head_dim]
    gates = queries_and_gates[..., head_dim:]
    kv_heads = (*batch_rows, attention.num_kv_heads, head_dim)
    keys = linear_lib.linear(x, params.k_proj).reshape(kv_heads)
    values = linear_lib.linear(x, params.v_proj).reshape(kv_heads)

    queries = norm.zero_centred_rms_norm(queries, params.q_norm, config.rms_norm_eps)
    keys = norm.zero_centred_rms_norm(keys, params.k_norm, config.rms_norm_eps)
    queries = rope.rotate(queries, *rotation)
    keys = rope.rotate(keys, *rotation)

    outputs = verify_attention.verify_attention(
        queries,
        keys,
        values,
        cache.keys,
        cache.values,
        page_table,
        length,
        scale=head_dim**-0.5,
        implementation=implementation,
    )
    gated = (outputs * jax.nn.sigmoid(gates)).reshape(*batch_rows, -1)
    output = linear_lib.linear(gated, params.o_proj)
    return output, verdict_lib.KVRows(keys=keys, values=values)
