"""Values that the gated delta rule's functions exchange."""

from typing import NamedTuple

import jax


class Records(NamedTuple):
    """What a row adds to the recurrent state: S <- exp(log_decay) S + key delta^T.

    Attributes:
      keys: f32[B, K, Hk, Dk], L2-normalised.
      deltas: f32[B, K, Hv, Dv], beta (v - S^T k).
      log_decays: f32[B, K, Hv], of each row alone, not cumulative; at most 0.
    """

    keys: jax.Array
    deltas: jax.Array
    log_decays: jax.Array


class VerifyOutput(NamedTuple):
    """Result of `verify`.

    Attributes:
      outputs: f32[B, K, Hv, Dv].
      state: f32[B, Hv, Dk, Dv], pending rows folded in, new rows not.
      records: `Records` of the K new rows.
    """

    outputs: jax.Array
    state: jax.Array
    records: Records
