"""Rules that drop drafts which the drafter itself holds for unlikely.

Both read the drafter's log-probability of each draft. Whether a draft that was drawn is
offered must not depend on the token drawn for it, or those that are left no longer
follow the probabilities that come with them, and an accept rule that relies on these
emits a biased text. That holds for the confidence stop, which looks at earlier drafts
only, and not for pruning, so `propose` refuses to prune drawn drafts.
"""

import dataclasses
import math

import jax.numpy as jnp

from metrale_jax.axes import Array, Float32, Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftLimits:
    """Which drafts are not worth a row; the defaults drop none.

    Attributes:
      confidence_stop: a chain of drafts ends with its first draft whose probability is
        below this; None never ends it.
      prune_ratio: of the drafts beyond each slot's first, keep this share over the
        whole batch: those whose chain up to them is the most probable. None keeps all.
      prune_max_slots: prune only while at most this many slots have drafts.
      row_budget: verify rows of the whole batch that pruning leaves at most.
    """

    confidence_stop: float | None = None
    prune_ratio: float | None = None
    prune_max_slots: int = 8
    row_budget: int = 160

    def __post_init__(self) -> None:
        stop, ratio = self.confidence_stop, self.prune_ratio
        if stop is not None and not 0.0 < stop < 1.0:
            raise ValueError(f"`confidence_stop` must be in (0, 1), got {stop}.")
        if ratio is not None and not 0.0 <= ratio <= 1.0:
            raise ValueError(f"`prune_ratio` must be in [0, 1], got {ratio}.")
        for name in ("prune_max_slots", "row_budget"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}."
                )


NO_LIMITS = DraftLimits()


def limit_drafts(
    num_drafts: Int32[Array, " B"],
    log_probs: Float32[Array, "B J"],
    limits: DraftLimits,
) -> Int32[Array, " B"]:
    """Applies the confidence stop, then the pruning."""
    if limits.confidence_stop is not None:
        depth = stop_depth(log_probs, limits.confidence_stop)
        num_drafts = jnp.minimum(num_drafts, depth)
    if limits.prune_ratio is not None:
        pruned = prune(num_drafts, log_probs, limits.prune_ratio, limits.row_budget)
        few = jnp.sum(num_drafts > 0) <= limits.prune_max_slots
        num_drafts = jnp.where(few, pruned, num_drafts)
    return num_drafts


def stop_depth(
    log_probs: Float32[Array, "B J"], threshold: float
) -> Int32[Array, " B"]:
    """Drafts up to and with the first that is less probable than the threshold."""
    is_low = log_probs < math.log(threshold)
    first = jnp.argmax(is_low, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(is_low, axis=1), first + 1, log_probs.shape[1])


def prune(
    num_drafts: Int32[Array, " B"],
    log_probs: Float32[Array, "B J"],
    ratio: float,
    row_budget: int,
) -> Int32[Array, " B"]:
    """Keeps each slot's first draft, and of all others the share with the best chains.

    The score of a draft is the summed log-probability of its chain up to it; ties go to
    the lower slot, then to the shallower draft. Halves round up.
    """
    num_slots, num_columns = log_probs.shape
    column = jnp.arange(num_columns, dtype=jnp.int32)[None, :]
    is_prunable = (column > 0) & (column < num_drafts[:, None])
    num_prunable = jnp.sum(is_prunable)
    num_serving = jnp.sum(num_drafts > 0)
    share = num_prunable.astype(jnp.float32) * ratio
    num_kept = jnp.floor(share + 0.5).astype(jnp.int32)
    # Each serving slot has two rows for certain: its last token and its first draft.
    num_kept = jnp.minimum(num_kept, row_budget - 2 * num_serving)
    score = jnp.where(is_prunable, jnp.cumsum(log_probs, axis=1), -jnp.inf).reshape(-1)
    order = jnp.argsort(-score, stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    is_kept = is_prunable & (rank.reshape(num_slots, num_columns) < num_kept)
    depth = jnp.max(jnp.where(is_kept, column + 1, 1), axis=1)
    return jnp.minimum(depth, num_drafts)
