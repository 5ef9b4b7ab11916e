"""Gated delta rule, row by row: the definition (https://arxiv.org/abs/2412.06464).

Per value head, with S the state [Dk, Dv], and rows in order:
  S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = S^T q.

This is also the strict tier: folding rows together gives the bits of folding them one
by one, and K rows those of K single rows. Every state is advanced by the same loop,
`fold`, whose trip count the compiler cannot know: it would otherwise fuse the update
with what surrounds it, and round its two products now together, now apart.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta import records as records_lib


def fold(
    state: jax.Array, pending: records_lib.Records, num_pending: jax.Array
) -> jax.Array:
    """See `api.fold`."""
    num_rows = pending.keys.shape[1]
    # A row of padding, never read, keeps the loop's record a function of its index:
    # what does not depend on the index is computed outside, and rounded otherwise.
    pending = jax.tree.map(_pad_one_row, pending)

    def add_row(index, state):
        record = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False),
            pending,
        )
        live = (index < num_pending)[:, None, None, None]
        return jnp.where(live, _advance(state, record), state)

    stop = jnp.minimum(jnp.max(num_pending), num_rows)
    return lax.fori_loop(0, stop, add_row, state)


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
    # Always all rows, but not to the compiler's knowledge; see the module's docstring.
    lengths = jnp.where(num_pending >= 0, keys.shape[1], 0)
    rows = (queries, keys, values, log_decays, betas)
    _, outputs, deltas = _run_rows(state, rows, lengths)
    records = records_lib.Records(keys, deltas, log_decays)
    return records_lib.VerifyOutput(outputs, state, records)


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
    """See `api.prefill`; rows are not grouped, so `chunk_size` has no effect."""
    del chunk_size
    rows = (queries, keys, values, log_decays, betas)
    state, outputs, _ = _run_rows(state, rows, lengths)
    return outputs, state


def _run_rows(state, rows, lengths):
    """Returns the state after `lengths` rows, outputs and deltas [B, K, Hv, Dv]."""

    def step(state, row):
        index, (query, key, value, log_decay, beta) = row
        group_size = value.shape[1] // key.shape[1]
        decayed = jnp.exp(log_decay)[..., None, None] * state
        predicted = _read(decayed, _per_value_head(key, group_size))
        delta = beta[..., None] * (value - predicted)
        record = records_lib.Records(key[:, None], delta[:, None], log_decay[:, None])
        live = index < lengths
        state = fold(state, record, live.astype(jnp.int32))
        output = _read(state, _per_value_head(query, group_size))
        return state, (jnp.where(live[:, None, None], output, 0), delta)

    index = jnp.arange(rows[0].shape[1])
    by_row = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), rows)
    state, (outputs, deltas) = lax.scan(step, state, (index, by_row))
    return state, jnp.moveaxis(outputs, 0, 1), jnp.moveaxis(deltas, 0, 1)


def _advance(state: jax.Array, record: records_lib.Records) -> jax.Array:
    """Adds one row, [B, heads, dim] without a row axis, to the state."""
    key, delta, log_decay = record
    key = _per_value_head(key, delta.shape[1] // key.shape[1])
    decayed = jnp.exp(log_decay)[..., None, None] * state
    return decayed + key[..., None] * delta[:, :, None, :]


def _read(state: jax.Array, x: jax.Array) -> jax.Array:
    """S^T x: [B, Hv, Dk, Dv] and [B, Hv, Dk] give [B, Hv, Dv]."""
    return jnp.einsum("bhk,bhkv->bhv", x, state, precision=lax.Precision.HIGHEST)


def _per_value_head(x: jax.Array, group_size: int) -> jax.Array:
    """[B, Hk, D] -> [B, Hv, D]: value head h uses key head h // group_size."""
    return jnp.repeat(x, group_size, axis=1)


def _pad_one_row(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2))
