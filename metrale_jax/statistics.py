"""Counters of speculation, per slot, kept on the device; and what they add up to.

Only emitted tokens count: drafts beyond a sequence's end are neither drafted nor
accepted. An insert resets a slot's counters, so they are those of one request.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from metrale_jax.axes import Array, Bool, Int32


@struct.dataclass
class Statistics:
    """Counters of B slots.

    Attributes:
      rounds: i32[B], rounds that emitted a token, plain ones included.
      emitted: i32[B], tokens of these rounds, bonus tokens included.
      drafted: i32[B], drafts offered.
      accepted: i32[B], of them accepted and emitted.
      offered: i32[B, J], rounds that offered a draft at the position.
      hits: i32[B, J], of them right by themselves, whatever came before.
      reached: i32[B, J], rounds that offered it and accepted all before it.
      accepted_at: i32[B, J], of these accepted it too.
      outcomes: i32[B, J + 1], rounds with drafts, by number accepted.
      candidate_hits: i32[B, N], rounds whose first rejected draft would have been
        right with the drafter's candidate of that rank; N is 0 without the probe.
    """

    rounds: Array
    emitted: Array
    drafted: Array
    accepted: Array
    offered: Array
    hits: Array
    reached: Array
    accepted_at: Array
    outcomes: Array
    candidate_hits: Array


def describe_statistics(
    num_slots: int, max_drafts: int, num_candidates: int
) -> Statistics:
    """Returns Statistics of `jax.ShapeDtypeStruct`."""

    def counters(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((num_slots, *shape), jnp.int32)

    per_slot, per_position = counters(), counters(max_drafts)
    return Statistics(
        rounds=per_slot,
        emitted=per_slot,
        drafted=per_slot,
        accepted=per_slot,
        offered=per_position,
        hits=per_position,
        reached=per_position,
        accepted_at=per_position,
        outcomes=counters(max_drafts + 1),
        candidate_hits=counters(num_candidates),
    )


def add_round(
    stats: Statistics,
    count: Int32[Array, " B"],
    num_drafts: Int32[Array, " B"],
    num_accepted: Int32[Array, " B"],
    hits: Bool[Array, "B J"],
    finished: Bool[Array, " B"],
    candidate_ranks: Int32[Array, " B"],
) -> Statistics:
    """Adds one round.

    Args:
      stats: so far; its J may exceed that of the round.
      count: tokens emitted; 0 leaves the slot's counters as they are.
      num_drafts: drafts that were judged.
      num_accepted: and accepted, before the sequence's end cut them.
      hits: each draft right by itself.
      finished: the sequence ended in this round.
      candidate_ranks: rank of the bonus token among the candidates of the draft that
        fell; outside of 0..N-1 where there is none.
    """
    ran = count > 0
    # Beyond the end of a sequence no draft could have been used.
    usable = jnp.where(finished, jnp.minimum(num_drafts, count), num_drafts)
    usable = jnp.where(ran, usable, 0)
    accepted = jnp.minimum(num_accepted, count)
    position = jnp.arange(stats.offered.shape[1], dtype=jnp.int32)[None, :]
    hits = jnp.pad(hits, ((0, 0), (0, stats.offered.shape[1] - hits.shape[1])))
    is_offered = position < usable[:, None]
    is_accepted = is_offered & (position < accepted[:, None])
    is_reached = is_offered & (position <= accepted[:, None])
    outcome = jnp.arange(stats.outcomes.shape[1], dtype=jnp.int32)[None, :]
    has_outcome = (usable > 0)[:, None] & (outcome == accepted[:, None])
    rank = jnp.arange(stats.candidate_hits.shape[1], dtype=jnp.int32)[None, :]
    fell = (accepted < usable)[:, None] & (rank == candidate_ranks[:, None])

    def add(counter: Array, amount: Array) -> Array:
        return counter + amount.astype(jnp.int32)

    return Statistics(
        rounds=add(stats.rounds, ran),
        emitted=add(stats.emitted, count),
        drafted=add(stats.drafted, usable),
        accepted=add(stats.accepted, jnp.where(ran, accepted, 0)),
        offered=add(stats.offered, is_offered),
        hits=add(stats.hits, is_offered & hits),
        reached=add(stats.reached, is_reached),
        accepted_at=add(stats.accepted_at, is_accepted),
        outcomes=add(stats.outcomes, has_outcome),
        candidate_hits=add(stats.candidate_hits, fell),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Counters of some slots added up; every rate is 0 where nothing was counted.

    Attributes:
      rounds: rounds that emitted a token.
      num_tokens: tokens they emitted.
      drafted: drafts offered.
      accepted: drafts accepted.
      mean_accepted_length: tokens per round, the bonus token counted.
      acceptance_rate: accepted / drafted.
      conditional: per position, accepted / reached.
      cumulative: per position, accepted / rounds that offered any draft.
      unconditional: per position, right by itself / offered.
      outcomes: rounds with drafts, by number accepted.
      candidate_hits: see `Statistics`.
    """

    rounds: int
    num_tokens: int
    drafted: int
    accepted: int
    mean_accepted_length: float
    acceptance_rate: float
    conditional: tuple[float, ...]
    cumulative: tuple[float, ...]
    unconditional: tuple[float, ...]
    outcomes: tuple[int, ...]
    candidate_hits: tuple[int, ...]


def summarize(*parts: Statistics) -> Summary:
    """Adds up the slots of all parts, of one J; fetches them from the device."""
    stats = jax.tree.map(lambda *leaves: np.concatenate(leaves), *jax.device_get(parts))

    def total(counter: Any) -> Any:
        """An int, or a list of them."""
        return counter.sum(axis=0, dtype=np.int64).tolist()

    rounds, num_tokens = total(stats.rounds), total(stats.emitted)
    drafted, accepted = total(stats.drafted), total(stats.accepted)
    outcomes = total(stats.outcomes)
    accepted_at = total(stats.accepted_at)
    return Summary(
        rounds=rounds,
        num_tokens=num_tokens,
        drafted=drafted,
        accepted=accepted,
        mean_accepted_length=_rate(num_tokens, rounds),
        acceptance_rate=_rate(accepted, drafted),
        conditional=_rates(accepted_at, total(stats.reached)),
        cumulative=_rates(accepted_at, [sum(outcomes)] * len(accepted_at)),
        unconditional=_rates(total(stats.hits), total(stats.offered)),
        outcomes=tuple(outcomes),
        candidate_hits=tuple(total(stats.candidate_hits)),
    )


def _rate(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0


def _rates(numerators: list[int], denominators: list[int]) -> tuple[float, ...]:
    return tuple(map(_rate, numerators, denominators))
