"""Gated delta rule in closed form over several rows.

With G_i = g_1 + ... + g_i and S the state before the rows (https://arxiv.org/abs/2406.06484):
  A_ij = beta_i exp(G_i - G_j) k_i.k_j  for j < i
  (I + A) u = beta (v - exp(G) S^T k)                     a unit lower triangular solve
  o_i = exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i.k_j) u_j
  S' = exp(G_n) S + sum_j exp(G_n - G_j) k_j u_j^T
Exponents are differences of a falling sequence, so no exponential exceeds 1.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta import records as records_lib

_HIGHEST = lax.Precision.HIGHEST


def fold(
    state: jax.Array, pending: records_lib.Records, num_pending: jax.Array
) -> jax.Array:
    """See `api.fold`: S' = exp(G_n) S + sum_j exp(G_n - G_j) k_j u_j^T."""
    keys, deltas, log_decays = pending
    live = jnp.arange(keys.shape[1])[None, :] < num_pending[:, None]  # [B, K]
    keys = jnp.where(live[..., None, None], keys, 0)
    deltas = jnp.where(live[..., None, None], deltas, 0)
    log_decays = jnp.where(live[..., None], log_decays, 0)
    # Decay from after row j to the end, summed from the end: no difference of sums.
    later = jnp.pad(log_decays[:, :0:-1], [(0, 0), (1, 0), (0, 0)])
    following = jnp.cumsum(later, axis=1)[:, ::-1]
    return _fold(state, keys, deltas, jnp.exp(following), jnp.sum(log_decays, axis=1))


def _fold(state, keys, deltas, weights, total):
    batch, num_rows, num_value_heads, value_dim = deltas.shape
    num_key_heads, key_dim = keys.shape[2:]
    weighted = (weights[..., None] * deltas).reshape(
        batch, num_rows, num_key_heads, -1, value_dim
    )
    update = jnp.einsum("bjhk,bjhgv->bhgkv", keys, weighted, precision=_HIGHEST)
    decayed = jnp.exp(total)[..., None, None] * state
    return decayed + update.reshape(state.shape)


def verify(
    state: jax.Array,
    pending: records_lib.Records,
    num_pending: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_decays: jax.Array,
    betas: jax.Array,
) -> records_lib.VerifyOutput:
    """See `api.verify`."""
    folded = fold(state, pending, num_pending)
    outputs, deltas = _run_rows(folded, queries, keys, values, log_decays, betas)
    records = records_lib.Records(keys, deltas, log_decays)
    return records_lib.VerifyOutput(outputs, folded, records)


def _run_rows(state, queries, keys, values, log_decays, betas):
    """Returns outputs and deltas, [B, K, Hv, Dv], of rows that start from `state`."""
    batch, num_rows, num_value_heads, value_dim = values.shape
    num_key_heads, key_dim = keys.shape[2:]
    group = num_value_heads // num_key_heads
    grouped = (batch, num_rows, num_key_heads, group)
    cumulative = jnp.cumsum(log_decays, axis=1)
    row = jnp.arange(num_rows)
    causal = (row[:, None] >= row[None, :])[None, :, :, None]
    gap = jnp.where(causal, cumulative[:, :, None] - cumulative[:, None, :], -jnp.inf)
    decay = jnp.exp(gap).reshape(batch, num_rows, *grouped[1:])  # [B, i, j, Hk, G]
    state = state.reshape(batch, num_key_heads, group, key_dim, value_dim)
    both = jnp.concatenate([keys, queries], axis=1)
    products = jnp.einsum("bihk,bhgkv->bihgv", both, state, precision=_HIGHEST)
    overlap = jnp.einsum("bihk,bjhk->bijh", both, keys, precision=_HIGHEST)[..., None]
    reach = jnp.exp(cumulative).reshape(*grouped, 1)
    residual = values.reshape(*grouped, value_dim) - reach * products[:, :num_rows]
    betas = betas.reshape(grouped)
    mixing = betas[:, :, None] * decay * overlap[:, :num_rows]
    deltas = []
    for i in range(num_rows):
        delta = betas[:, i, ..., None] * residual[:, i]
        for j, earlier in enumerate(deltas):
            delta = delta - mixing[:, i, j, ..., None] * earlier
        deltas.append(delta)
    deltas = jnp.stack(deltas, axis=1)
    attention = decay * overlap[:, num_rows:]
    outputs = reach * products[:, num_rows:] + jnp.einsum(
        "bijhg,bjhgv->bihgv", attention, deltas, precision=_HIGHEST
    )
    shape = (batch, num_rows, num_value_heads, value_dim)
    return outputs.reshape(shape), deltas.reshape(shape)


def prefill(
    state: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_decays: jax.Array,
    betas: jax.Array,
    lengths: jax.Array,
    *,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """See `api.prefill`."""
    batch, num_rows = keys.shape[:2]
    live = jnp.arange(num_rows)[None, :] < lengths[:, None]
    rows = [
        jnp.where(live.reshape(batch, num_rows, *(1,) * (x.ndim - 2)), x, 0)
        for x in (queries, keys, values, log_decays, betas)
    ]
    num_chunks = max(1, -(-num_rows // chunk_size))
    chunks = [_split(x, num_chunks, chunk_size) for x in rows]
    state, outputs = lax.scan(_run_chunk, state, tuple(chunks))
    outputs = jnp.moveaxis(outputs, 0, 1).reshape(batch, -1, *values.shape[2:])
    outputs = outputs[:, :num_rows]
    return jnp.where(live[..., None, None], outputs, 0), state


def _split(x: jax.Array, num_chunks: int, chunk_size: int) -> jax.Array:
    """[B, T, ...] -> [num_chunks, B, chunk_size, ...], padded with zeros."""
    padding = num_chunks * chunk_size - x.shape[1]
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], num_chunks, chunk_size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def _run_chunk(state, chunk):
    queries, keys, values, log_decays, betas = chunk
    batch, size, num_value_heads, value_dim = values.shape
    num_key_heads, key_dim = keys.shape[2:]
    group = num_value_heads // num_key_heads
    heads = (batch, num_key_heads, group, size)
    cumulative = jnp.moveaxis(jnp.cumsum(log_decays, axis=1), 1, 2).reshape(heads)
    betas = jnp.moveaxis(betas, 1, 2).reshape(heads)
    row = jnp.arange(size)
    causal = row[:, None] >= row[None, :]
    gap = cumulative[..., :, None] - cumulative[..., None, :]
    decay = jnp.exp(jnp.where(causal[None, None, None], gap, -jnp.inf))
    grouped = state.reshape(batch, num_key_heads, group, key_dim, value_dim)
    both = jnp.concatenate([keys, queries], axis=1)
    products = jnp.einsum("bihk,bhgkv->bhgiv", both, grouped, precision=_HIGHEST)
    overlap = jnp.einsum("bihk,bjhk->bhij", both, keys, precision=_HIGHEST)
    overlap = overlap[:, :, None]
    values = values.reshape(batch, size, num_key_heads, group, value_dim)
    values = jnp.transpose(values, (0, 2, 3, 1, 4))
    reach = jnp.exp(cumulative)[..., None]
    residual = betas[..., None] * (values - reach * products[..., :size, :])
    strict = (row[:, None] > row[None, :])[None, None, None]
    mixing = betas[..., None] * decay * overlap[..., :size, :]
    deltas = lax.linalg.triangular_solve(
        jnp.where(strict, mixing, 0),
        residual,
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    outputs = reach * products[..., size:, :] + jnp.einsum(
        "bhgij,bhgjv->bhgiv",
        decay * overlap[..., size:, :],
        deltas,
        precision=_HIGHEST,
    )
    outputs = jnp.transpose(outputs, (0, 3, 1, 2, 4)).reshape(
        batch, size, num_value_heads, value_dim
    )
    weighted = decay[..., -1, :, None] * deltas
    update = jnp.einsum("bjhk,bhgjv->bhgkv", keys, weighted, precision=_HIGHEST)
    decayed = reach[..., -1:, :] * grouped
    return (decayed + update).reshape(state.shape), outputs
