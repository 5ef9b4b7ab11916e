"""Gated delta rule of hybrid models: verify K rows, fold accepted rows, prefill.

The recurrence is that of Gated DeltaNet (https://arxiv.org/abs/2412.06464); the closed
form over several rows is that of DeltaNet (https://arxiv.org/abs/2406.06484).
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, shape_check
from pallas_kernels.gated_delta import records as records_lib
from pallas_kernels.gated_delta import reference, xla

_VERIFY = {"reference": reference.verify, "xla": xla.verify}
_FOLD = {"reference": reference.fold, "xla": xla.fold}
_PREFILL = {"reference": reference.prefill, "xla": xla.prefill}


def verify(
    state: jax.Array,
    pending: records_lib.Records,
    num_pending: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_decays: jax.Array,
    betas: jax.Array,
    *,
    implementation: dispatch.Implementation | None = None,
) -> records_lib.VerifyOutput:
    """Folds the pending rows into the state and runs K new rows on it.

    The new rows are not folded in: their `Records` are returned, and the caller makes
    the accepted ones the next call's `pending`. So the state is read once and written
    once, whatever K is. K = 1 is a plain decode step.

    Per value head and row:
      S = exp(g) S; u = beta (v - S^T k); S = S + k u^T; o = S^T q.
    Value head h uses key head h // (Hv / Hk).

    Args:
      state: f32[B, Hv, Dk, Dv].
      pending: records of rows accepted earlier, at least `num_pending` of them.
      num_pending: i32[B], how many pending rows to fold; later rows may hold anything,
        NaN included.
      queries: f32[B, K, Hk, Dk], L2-normalised and scaled.
      keys: f32[B, K, Hk, Dk], L2-normalised.
      values: f32[B, K, Hv, Dv].
      log_decays: f32[B, K, Hv], at most 0, of each row alone.
      betas: f32[B, K, Hv].
      implementation: "reference" applies row after row, so that K rows give the bits of
        K calls of one row; "xla" uses the closed form; None is the backend's default.

    Returns:
      A `VerifyOutput`: outputs f32[B, K, Hv, Dv], the state with the pending rows in
      it, and the new rows' records.

    Raises:
      ValueError: a shape or dtype disagrees, or `implementation` is unknown.
      NotImplementedError: `implementation` is not offered.
    """
    axes = _check_pending(state, pending, num_pending)
    _check_rows(axes, "K", queries, keys, values, log_decays, betas)
    function = dispatch.select("gated_delta.verify", _VERIFY, implementation)
    return function(
        state, pending, num_pending, queries, keys, values, log_decays, betas
    )


def fold(
    state: jax.Array,
    pending: records_lib.Records,
    num_pending: jax.Array,
    *,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Returns the state with the first `num_pending` records folded in.

    Per value head and record, in row order: S = exp(g) S + k u^T.

    Args:
      state: f32[B, Hv, Dk, Dv].
      pending: records; rows at or past `num_pending` may hold anything.
      num_pending: i32[B].
      implementation: see `verify`.

    Raises:
      ValueError: a shape or dtype disagrees, or `implementation` is unknown.
      NotImplementedError: `implementation` is not offered.
    """
    _check_pending(state, pending, num_pending)
    function = dispatch.select("gated_delta.fold", _FOLD, implementation)
    return function(state, pending, num_pending)


def prefill(
    state: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_decays: jax.Array,
    betas: jax.Array,
    lengths: jax.Array,
    *,
    chunk_size: int = 64,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs and folds the first `lengths` of T rows: the recurrence of `verify`.

    Any split of a sequence into calls gives the same state, up to float32 rounding.

    Args:
      state: f32[B, Hv, Dk, Dv].
      queries: f32[B, T, Hk, Dk], L2-normalised and scaled.
      keys: f32[B, T, Hk, Dk], L2-normalised.
      values: f32[B, T, Hv, Dv].
      log_decays: f32[B, T, Hv], at most 0.
      betas: f32[B, T, Hv].
      lengths: i32[B]; rows at or past it change nothing and may hold anything.
      chunk_size: rows that "xla" treats as one block; need not divide T.
      implementation: see `verify`.

    Returns:
      Outputs f32[B, T, Hv, Dv], zero at or past `lengths`, and the new state.

    Raises:
      ValueError: a shape or dtype disagrees, `chunk_size` is not positive, or
        `implementation` is unknown.
      NotImplementedError: `implementation` is not offered.
    """
    axes = shape_check.Axes()
    axes.check("state", state, "B Hv Dk Dv", jnp.float32)
    _check_rows(axes, "T", queries, keys, values, log_decays, betas)
    axes.check("lengths", lengths, "B", jnp.integer)
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be positive, got {chunk_size}.")
    function = dispatch.select("gated_delta.prefill", _PREFILL, implementation)
    return function(
        state,
        queries,
        keys,
        values,
        log_decays,
        betas,
        lengths,
        chunk_size=chunk_size,
    )


def _check_pending(
    state: jax.Array, pending: records_lib.Records, num_pending: jax.Array
) -> shape_check.Axes:
    axes = shape_check.Axes()
    axes.check("state", state, "B Hv Dk Dv", jnp.float32)
    axes.check("pending.keys", pending.keys, "B Kp Hk Dk", jnp.float32)
    axes.check("pending.deltas", pending.deltas, "B Kp Hv Dv", jnp.float32)
    axes.check("pending.log_decays", pending.log_decays, "B Kp Hv", jnp.float32)
    axes.check("num_pending", num_pending, "B", jnp.integer)
    axes.check_multiple("Hv", "Hk")
    return axes


def _check_rows(
    axes: shape_check.Axes,
    row: str,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_decays: jax.Array,
    betas: jax.Array,
) -> None:
    axes.check("keys", keys, f"B {row} Hk Dk", jnp.float32)
    axes.check("queries", queries, f"B {row} Hk Dk", jnp.float32)
    axes.check("values", values, f"B {row} Hv Dv", jnp.float32)
    axes.check("log_decays", log_decays, f"B {row} Hv", jnp.float32)
    axes.check("betas", betas, f"B {row} Hv", jnp.float32)
    axes.check_multiple("Hv", "Hk")
