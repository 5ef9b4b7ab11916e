"""Counters of speculation: only what was emitted counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax import statistics

NUM_DRAFTS = 5


def counters(num_slots, num_candidates=0):
    described = statistics.describe_statistics(num_slots, NUM_DRAFTS, num_candidates)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), described)


def add(stats, count, num_drafts, num_accepted, hits, finished=None, ranks=None):
    num_slots = len(count)
    return statistics.add_round(
        stats,
        jnp.array(count, jnp.int32),
        jnp.array(num_drafts, jnp.int32),
        jnp.array(num_accepted, jnp.int32),
        jnp.array(hits, bool),
        jnp.array(finished or [False] * num_slots),
        jnp.array(ranks or [-1] * num_slots, jnp.int32),
    )


def test_positions_are_counted_with_and_without_what_came_before():
    # Right, wrong, right: the third is a hit that no chain reached.
    stats = add(counters(1), [2], [3], [1], [[1, 0, 1, 1, 1]])
    stats = add(stats, [4], [3], [3], [[1, 1, 1, 0, 0]])
    stats = add(stats, [1], [1], [0], [[0, 0, 0, 0, 0]])
    stats = add(stats, [1], [0], [0], [[0, 0, 0, 0, 0]])
    assert stats.rounds.tolist() == [4]
    assert stats.emitted.tolist() == [8]
    assert stats.drafted.tolist() == [7]
    assert stats.accepted.tolist() == [4]
    assert stats.offered[0].tolist() == [3, 2, 2, 0, 0]
    assert stats.hits[0].tolist() == [2, 1, 2, 0, 0]
    assert stats.reached[0].tolist() == [3, 2, 1, 0, 0]
    assert stats.accepted_at[0].tolist() == [2, 1, 1, 0, 0]
    assert stats.outcomes[0].tolist() == [1, 1, 0, 1, 0, 0]
    summary = statistics.summarize(stats)
    assert summary.mean_accepted_length == 2.0
    assert summary.acceptance_rate == pytest.approx(4 / 7)
    assert summary.conditional == (2 / 3, 1 / 2, 1.0, 0.0, 0.0)
    assert summary.cumulative == (2 / 3, 1 / 3, 1 / 3, 0.0, 0.0)
    assert summary.unconditional == (2 / 3, 1 / 2, 1.0, 0.0, 0.0)


def test_a_sequence_that_ends_inside_a_block_used_what_it_could():
    """Drafts [a, b, END, d, e], all right: three tokens, three drafts."""
    stats = add(counters(1), [3], [5], [5], [[1] * 5], finished=[True])
    assert stats.emitted.tolist() == [3]
    assert stats.drafted.tolist() == [3]
    assert stats.accepted.tolist() == [3]
    assert stats.offered[0].tolist() == [1, 1, 1, 0, 0]
    assert statistics.summarize(stats).mean_accepted_length == 3.0
    # The end token as the bonus token: every draft could be used.
    stats = add(counters(1), [3], [2], [2], [[1, 1, 0, 0, 0]], finished=[True])
    assert (stats.drafted.tolist(), stats.accepted.tolist()) == ([2], [2])


def test_a_slot_that_was_not_served_counts_nothing():
    stats = add(counters(2), [0, 2], [5, 1], [3, 1], [[1] * 5] * 2)
    for leaf in jax.tree.leaves(stats):
        assert not np.asarray(leaf[0]).any()
    assert stats.rounds.tolist() == [0, 1]


def test_candidates_are_counted_where_a_draft_fell():
    stats = counters(3, num_candidates=4)
    stats = add(stats, [2, 3, 1], [3, 2, 2], [1, 2, 0], [[0] * 5] * 3, ranks=[2, 0, -1])
    assert stats.candidate_hits.tolist() == [[0, 0, 1, 0], [0] * 4, [0] * 4]


def test_nothing_counted_is_no_error():
    summary = statistics.summarize(counters(2))
    assert summary.mean_accepted_length == 0.0
    assert summary.acceptance_rate == 0.0
    assert summary.conditional == (0.0,) * NUM_DRAFTS
