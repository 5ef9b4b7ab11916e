"""Gated delta rule, row by row: the definition (https://arxiv.org/abs/2412.06464).

Per value head, with S the state [Dk, Dv], and rows in order:
  S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = S^T q.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta import records as records_lib


def fold(
    state: jax.Array, pending: records_lib.Records, num_pending: jax.Array
) -> jax.Array:
    """See `api.fold`."""

    def step(state, row):
        index, record = row
        live = (index < num_pending)[:, None, None, None]
        return jnp.where(live, _advance(state, record), state), None

    num_rows = pending.keys.shape[1]
    rows = (jnp.arange(num_rows), jax.tree.map(_rows_first, pending))
    state, _ = lax.scan(step, state, rows)
    return state


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
    rows = tuple(map(_rows_first, (queries, keys, values, log_decays, betas)))
    _, (outputs, deltas) = lax.scan(_step, folded, rows)
    records = records_lib.Records(keys, _rows_second(deltas), log_decays)
    return records_lib.VerifyOutput(_rows_second(outputs), folded, records)


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

    def step(state, row):
        index, inputs = row
        new_state, (output, _) = _step(state, inputs)
        live = index < lengths
        state = jnp.where(live[:, None, None, None], new_state, state)
        return state, jnp.where(live[:, None, None], output, 0)

    rows = tuple(map(_rows_first, (queries, keys, values, log_decays, betas)))
    state, outputs = lax.scan(step, state, (jnp.arange(keys.shape[1]), rows))
    return _rows_second(outputs), state


def _step(state, row):
    """One row: returns the new state and (output, delta), both [B, Hv, Dv]."""
    query, key, value, log_decay, beta = row
    group_size = value.shape[1] // key.shape[1]
    decayed = jnp.exp(log_decay)[..., None, None] * state
    predicted = jnp.sum(decayed * _per_value_head(key, group_size)[..., None], axis=2)
    delta = beta[..., None] * (value - predicted)
    state = _advance(state, records_lib.Records(key, delta, log_decay))
    output = jnp.sum(state * _per_value_head(query, group_size)[..., None], axis=2)
    return state, (output, delta)


def _advance(state: jax.Array, record: records_lib.Records) -> jax.Array:
    """Adds one row, [B, heads, dim] without a row axis, to the state."""
    key, delta, log_decay = record
    key = _per_value_head(key, delta.shape[1] // key.shape[1])
    decayed = jnp.exp(log_decay)[..., None, None] * state
    return decayed + key[..., None] * delta[:, :, None, :]


def _per_value_head(x: jax.Array, group_size: int) -> jax.Array:
    """[B, Hk, D] -> [B, Hv, D]: value head h uses key head h // group_size."""
    return jnp.repeat(x, group_size, axis=1)


def _rows_first(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 1, 0)


def _rows_second(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 0, 1)
