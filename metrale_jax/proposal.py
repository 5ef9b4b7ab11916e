"""What a drafter proposes for every slot: `Proposal`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from metrale_jax.axes import Array


@struct.dataclass
class DenseProbs:
    """The distribution that each draft was drawn from, over the whole vocabulary."""

    probs: Array  # f32[B, J, V]


@struct.dataclass
class SparseProbs:
    """The same for a drafter that chooses among N candidates; 0 elsewhere."""

    ids: Array  # i32[B, J, N], distinct within a row
    probs: Array  # f32[B, J, N]


# None: each draft was chosen, not drawn, so its distribution is one-hot.
DraftProbs = DenseProbs | SparseProbs | None


@struct.dataclass
class Proposal:
    """Pending drafts.

    Attributes:
      drafts: i32[B, J], anything past `num_drafts`.
      num_drafts: i32[B], 0..J.
      log_probs: f32[B, J], the drafter's own log-probability of each draft: its
        confidence; 0 where it has none. A drafter may leave it None, which says that it
        has none at all.
      probs: what sampled drafts were drawn from.
      candidates: i32[B, J, N], the drafter's N likeliest tokens per position, best
        first, if it was asked for them (the shadow top-k probe); else None.
    """

    drafts: Array
    num_drafts: Array
    log_probs: Any = None
    probs: Any = None
    candidates: Any = None


def describe_proposal(
    num_slots: int, max_drafts: int, probs: Any = None, candidates: Any = None
) -> Proposal:
    """Returns a Proposal of `jax.ShapeDtypeStruct`."""

    def per_slot(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((num_slots, *shape), dtype)

    return Proposal(
        drafts=per_slot(jnp.int32, max_drafts),
        num_drafts=per_slot(jnp.int32),
        log_probs=per_slot(jnp.float32, max_drafts),
        probs=probs,
        candidates=candidates,
    )
