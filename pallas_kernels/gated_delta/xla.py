"""Gated delta rule in closed form over several rows.

With G_ij the sum of log decays after row j up to row i, G_i that from the start, and S
the state before the rows (https://arxiv.org/abs/2406.06484):
  A_ij = beta_i exp(G_ij) k_i.k_j  for j < i
  (I + A) u = beta (v - exp(G_i) S^T k)                  a unit lower triangular solve
  o_i = exp(G_i) S^T q_i + sum_{j <= i} exp(G_ij) (q_i.k_j) u_j
  S' = exp(G_n) S + sum_j exp(G_nj) k_j u_j^T
Every G_ij is summed on its own, and is at most 0: a difference of two sums from the
start would lose the digits of small decays behind a large one, a ratio overflow.

Arrays here are [B, heads, rows, dim]: products then have their batch axes in front.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gated_delta import records as records_lib

# Up to so many rows, a fold is a written-out sum, which XLA fuses into one pass over S.
_MAX_SUMMED_ROWS = 16
# Up to so many, a solve is written out; more would cost more to compile than to run.
_MAX_SUBSTITUTED_ROWS = 8


def fold(
    state: jax.Array, pending: records_lib.Records, num_pending: jax.Array
) -> jax.Array:
    """See `api.fold`."""
    live = jnp.arange(pending.keys.shape[1])[None, :] < num_pending[:, None]
    keys, deltas, log_decays = (_rows_to_heads(_select(live, x)) for x in pending)
    return _fold(state, keys, deltas, log_decays)


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
    state = fold(state, pending, num_pending)
    rows = (queries, keys, values, log_decays, betas)
    outputs, deltas = _run_rows(state, *map(_rows_to_heads, rows))
    records = records_lib.Records(keys, _rows_to_heads(deltas), log_decays)
    return records_lib.VerifyOutput(_rows_to_heads(outputs), state, records)


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
    num_rows = keys.shape[1]
    live = jnp.arange(num_rows)[None, :] < lengths[:, None]
    rows = (queries, keys, values, log_decays, betas)
    # A row of zeros leaves the state as it is.
    chunks = [_split(_rows_to_heads(_select(live, x)), chunk_size) for x in rows]

    def run_chunk(state, chunk):
        _, keys, _, log_decays, _ = chunk
        outputs, deltas = _run_rows(state, *chunk)
        return _fold(state, keys, deltas, log_decays), outputs

    state, outputs = lax.scan(run_chunk, state, chunks)
    outputs = _select(live, _rows_to_heads(_join(outputs, num_rows)))
    return outputs, state


def _run_rows(state, queries, keys, values, log_decays, betas):
    """Returns outputs and deltas, [B, Hv, K, Dv], of rows that start from `state`."""
    num_rows = keys.shape[2]
    group_size = values.shape[1] // keys.shape[1]
    from_start, between = _decays(log_decays)
    both = jnp.concatenate([keys, queries], axis=2)
    products = _matmul(jnp.repeat(both, group_size, axis=1), state)
    predicted = from_start[..., None] * products[:, :, :num_rows]
    residual = betas[..., None] * (values - predicted)
    # Every row's scalar products with the keys: [B, Hv, 2K, K].
    overlap = _matmul(both, jnp.swapaxes(keys, 2, 3))
    overlap = jnp.repeat(overlap, group_size, axis=1)
    mixing = betas[..., None] * between * overlap[:, :, :num_rows]
    deltas = _solve(mixing, residual)
    outputs = from_start[..., None] * products[:, :, num_rows:]
    outputs += _matmul(between * overlap[:, :, num_rows:], deltas)
    return outputs, deltas


def _fold(state, keys, deltas, log_decays):
    """S' = exp(G_n) S + sum_j exp(G_nj) k_j u_j^T; every row counts."""
    num_rows = keys.shape[2]
    group_size = deltas.shape[1] // keys.shape[1]
    # Log decay from the start and from each row to the end: [B, Hv, 1 + K].
    to_end = jnp.exp(_contract(log_decays, _after(num_rows)))
    state = to_end[..., :1, None] * state
    keys = jnp.repeat(keys, group_size, axis=1)
    if num_rows > _MAX_SUMMED_ROWS:
        weighted = to_end[..., 1:, None] * deltas
        return state + _matmul(jnp.swapaxes(keys, 2, 3), weighted)
    # As a product, the weighted deltas are computed once, not in every row of S.
    weights = jnp.where(jnp.eye(num_rows, dtype=bool), to_end[..., None, 1:], 0)
    weighted = _matmul(weights, deltas)
    for j in range(num_rows):
        state += keys[:, :, j, :, None] * weighted[:, :, j, None, :]
    return state


def _solve(mixing: jax.Array, residual: jax.Array) -> jax.Array:
    """Solves (I + strictly lower part of mixing) x = residual over the row axis."""
    num_rows = residual.shape[2]
    if num_rows > _MAX_SUBSTITUTED_ROWS:
        return lax.linalg.triangular_solve(
            mixing, residual, left_side=True, lower=True, unit_diagonal=True
        )
    solution = []
    for i in range(num_rows):
        row = residual[:, :, i]
        for j, earlier in enumerate(solution):
            row -= mixing[:, :, i, j, None] * earlier
        solution.append(row)
    return jnp.stack(solution, axis=2)


def _decays(log_decays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns exp(G_i), [B, Hv, K], and exp(G_ij), [B, Hv, K, K], zero above i = j."""
    num_rows = log_decays.shape[2]
    causal = np.tri(num_rows, dtype=bool)
    # Row i holds the log decays up to itself.
    until = jnp.where(causal, log_decays[:, :, None, :], 0)
    sums = _contract(until, _after(num_rows))  # [B, Hv, K, 1 + K]
    between = jnp.where(causal, jnp.exp(sums[..., 1:]), 0)
    return jnp.exp(sums[..., 0]), between


def _after(num_rows: int) -> np.ndarray:
    """Returns [K, 1 + K]: column 0 takes all rows, column 1 + j those after row j."""
    after = np.tri(num_rows, k=-1, dtype=np.float32)
    return np.concatenate([np.ones((num_rows, 1), np.float32), after], axis=1)


def _contract(x: jax.Array, matrix: np.ndarray) -> jax.Array:
    """[..., K] times [K, N], to full float32 precision."""
    return jnp.einsum("...i,ij->...j", x, matrix, precision=lax.Precision.HIGHEST)


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """[B, H, I, J] times [B, H, J, N], to full float32 precision."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _select(live: jax.Array, x: jax.Array) -> jax.Array:
    """Zero where bool[B, K] says that a row of x, [B, K, ...], isn't live."""
    return jnp.where(live.reshape(*live.shape, *(1,) * (x.ndim - 2)), x, 0)


def _rows_to_heads(x: jax.Array) -> jax.Array:
    """[B, K, H, ...] -> [B, H, K, ...], and back."""
    return jnp.swapaxes(x, 1, 2)


def _split(x: jax.Array, chunk_size: int) -> jax.Array:
    """[B, H, T, ...] -> [chunks, B, H, chunk_size, ...], padded with zeros."""
    padding = -x.shape[2] % chunk_size
    x = jnp.pad(x, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 3))
    x = x.reshape(*x.shape[:2], -1, chunk_size, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)


def _join(x: jax.Array, num_rows: int) -> jax.Array:
    """[chunks, B, H, chunk_size, D] -> [B, H, T, D]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[4])[:, :, :num_rows]
