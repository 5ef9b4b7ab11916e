"""Dropping drafts of little promise, against the rule written out in Python."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

from metrale_jax.drafters import confidence

NUM_SLOTS, NUM_DRAFTS = 4, 3


def prune_by_hand(num_drafts, log_probs, ratio, row_budget):
    scored = []
    for slot, count in enumerate(num_drafts):
        for column in range(1, count):
            chain = math.fsum(log_probs[slot][: column + 1])
            scored.append((-chain, slot, column))
    num_kept = math.floor(len(scored) * ratio + 0.5)
    serving = sum(count > 0 for count in num_drafts)
    num_kept = max(min(num_kept, row_budget - 2 * serving), 0)
    depth = [min(count, 1) for count in num_drafts]
    for _, slot, column in sorted(scored)[:num_kept]:
        depth[slot] = max(depth[slot], column + 1)
    return depth


prune = jax.jit(confidence.prune, static_argnames=("ratio", "row_budget"))


@hypothesis.given(
    st.lists(st.integers(0, NUM_DRAFTS), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    # Eighths add up without rounding, so ties are ties.
    st.lists(
        st.lists(st.integers(-24, 0), min_size=NUM_DRAFTS, max_size=NUM_DRAFTS),
        min_size=NUM_SLOTS,
        max_size=NUM_SLOTS,
    ),
    st.sampled_from([(0.0, 160), (0.25, 160), (0.5, 160), (0.75, 160), (1.0, 10)]),
)
@hypothesis.settings(max_examples=200)
def test_pruning_keeps_the_likeliest_chains(num_drafts, eighths, setting):
    ratio, row_budget = setting
    log_probs = [[value / 8 for value in row] for row in eighths]
    pruned = prune(
        jnp.array(num_drafts, jnp.int32),
        jnp.array(log_probs, jnp.float32),
        ratio=ratio,
        row_budget=row_budget,
    )
    assert pruned.tolist() == prune_by_hand(num_drafts, log_probs, ratio, row_budget)


def limit(num_drafts, log_probs, **limits):
    return confidence.limit_drafts(
        jnp.array(num_drafts, jnp.int32),
        jnp.array(log_probs, jnp.float32),
        confidence.DraftLimits(**limits),
    ).tolist()


def test_a_chain_ends_with_its_first_unlikely_draft():
    log_probs = jnp.log(
        jnp.array([[0.9, 0.4, 0.9], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9], [0.9, 0.2, 0.9]])
    ).tolist()
    assert limit([3, 3, 3, 1], log_probs, confidence_stop=0.5) == [2, 3, 1, 1]
    assert limit([3, 3, 3, 1], log_probs) == [3, 3, 3, 1]


def test_a_wide_batch_is_not_pruned():
    log_probs = [[0.0] * NUM_DRAFTS] * NUM_SLOTS
    assert limit([3] * 4, log_probs, prune_ratio=0.0) == [1] * 4
    assert limit([3] * 4, log_probs, prune_ratio=0.0, prune_max_slots=3) == [3] * 4
    assert limit([3, 0, 0, 0], log_probs, prune_ratio=0.0, prune_max_slots=1) == [
        1,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize(
    "limits",
    [
        dict(confidence_stop=0.0),
        dict(confidence_stop=1.0),
        dict(prune_ratio=-0.1),
        dict(prune_ratio=1.1),
        dict(prune_max_slots=0),
        dict(row_budget=0),
    ],
)
def test_bad_limits_are_refused(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        confidence.DraftLimits(**limits)
