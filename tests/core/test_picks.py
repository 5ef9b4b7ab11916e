"""Picking: the order of the rules, their edges, and the law of what is drawn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_models as models
from metrale_jax import picks
from metrale_jax import sampling as sampling_lib

# Chi-square over 8 cells, 7 degrees of freedom: exceeded once in a million runs.
CHI_SQUARE_LIMIT = 40.5
NUM_DRAWS = 200_000


def sampling(temperature, top_k=0, top_p=1.0, min_p=0.0, seeds=None):
    temperature = np.atleast_1d(temperature)
    batch = temperature.shape
    seeds = range(batch[0]) if seeds is None else seeds
    one = sampling_lib.make_sampling(
        models.DENSE, models.DECODE, sampling_lib.SamplingOptions()
    )
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * batch[0]), one).replace(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.full(batch, top_k, jnp.int32),
        top_p=jnp.full(batch, top_p, jnp.float32),
        min_p=jnp.full(batch, min_p, jnp.float32),
        request_key=jnp.stack([sampling_lib.request_key(seed) for seed in seeds]),
    )


def kept_tokens(probs, **rules):
    logits = jnp.log(jnp.asarray(probs, jnp.float32))[None, None]
    warped = picks.warp_logits(logits, sampling(1.0, **rules))[0, 0]
    return np.flatnonzero(np.isfinite(warped)).tolist()


PROBS = [0.4, 0.3, 0.12, 0.1, 0.08]


@pytest.mark.parametrize(
    "rules, kept",
    [
        ({}, [0, 1, 2, 3, 4]),
        (dict(top_k=1), [0]),
        (dict(top_k=99), [0, 1, 2, 3, 4]),
        (dict(top_p=0.71), [0, 1, 2]),
        (dict(top_p=1e-9), [0]),
        # top-p sees the distribution that top-k left: 0.49, 0.37, 0.15.
        (dict(top_k=3, top_p=0.75), [0, 1]),
        (dict(min_p=0.29), [0, 1, 2]),
        (dict(min_p=1.0), [0]),
        (dict(top_k=4, top_p=0.95, min_p=0.5), [0, 1]),
    ],
)
def test_rules_apply_in_order(rules, kept):
    assert kept_tokens(PROBS, **rules) == kept


def test_rules_do_not_depend_on_the_order_of_ids():
    assert kept_tokens(PROBS[::-1], top_k=3, top_p=0.75) == [3, 4]


@pytest.mark.smoke
def test_ties_go_to_the_lower_id():
    assert kept_tokens([0.25] * 4, top_k=2) == [0, 1]
    assert kept_tokens([0.25] * 4, top_p=0.6) == [0, 1, 2]
    logits = jnp.zeros((1, 1, 6))
    assert picks.pick_tokens(logits, jnp.ones((1, 1), jnp.int32), sampling(0.0)) == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6, 9e-6])
def test_tiny_temperatures_are_greedy_and_finite(temperature):
    logits = jnp.array([[[3.0, 3.5, -2.0]]])
    one_row = jnp.ones((1, 1), jnp.int32)
    warped = picks.warp_logits(logits, sampling(temperature))
    assert not np.isnan(warped).any()
    assert picks.pick_tokens(logits, one_row, sampling(temperature)) == 1


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_small_temperatures_are_finite_and_pick_the_best(temperature):
    logits = jnp.array([[[300.0, 350.0, -2.0]]])
    one_row = jnp.ones((1, 1), jnp.int32)
    warped = picks.warp_logits(logits, sampling(temperature))
    assert not np.isnan(warped).any()
    assert picks.pick_tokens(logits, one_row, sampling(temperature)) == 1


def test_greedy_rows_beside_sampled_ones():
    logits = jax.random.normal(jax.random.key(0), (4, 3, 50))
    positions = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    mixed = picks.pick_tokens(logits, positions, sampling([0.0, 1.0, 0.0, 0.5]))
    greedy = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(mixed[0], greedy[0])
    np.testing.assert_array_equal(mixed[2], greedy[2])
    assert (np.asarray(mixed[1]) != greedy[1]).any()


@pytest.mark.parametrize(
    "rules",
    [{}, dict(top_k=5), dict(top_p=0.8), dict(min_p=0.2), dict(temperature=0.7)],
)
def test_draws_follow_the_warped_distribution(rules):
    rules = dict(temperature=1.0) | rules
    logits = jnp.array([0.3, -1.0, 2.0, 0.0, 1.0, -0.5, 1.5, 0.7])
    num_slots, num_rows = 400, NUM_DRAWS // 400
    options = sampling(np.full(num_slots, rules.pop("temperature")), **rules)
    positions = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32), (400, num_rows))
    everywhere = jnp.broadcast_to(logits, (num_slots, num_rows, 8))
    drawn = np.asarray(jax.jit(picks.pick_tokens)(everywhere, positions, options))
    expected = np.asarray(jax.nn.softmax(picks.warp_logits(everywhere, options)[0, 0]))
    counts = np.bincount(drawn.ravel(), minlength=8)
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    expected_counts = expected[seen] * drawn.size
    chi_square = ((counts[seen] - expected_counts) ** 2 / expected_counts).sum()
    assert chi_square < CHI_SQUARE_LIMIT


def test_draws_depend_on_seed_and_position_alone():
    logits = jax.random.normal(jax.random.key(1), (1, 1, 100))
    pick = jax.jit(picks.pick_tokens)

    def draw(batch, slot, seed, position):
        seeds = [7] * batch
        seeds[slot] = seed
        options = sampling([1.0] * batch, seeds=seeds)
        rows = jnp.broadcast_to(logits, (batch, 1, 100))
        return int(pick(rows, jnp.full((batch, 1), position), options)[slot, 0])

    draws = {(seed, p): draw(1, 0, seed, p) for seed in (3, 4) for p in range(20)}
    for (seed, position), token in draws.items():
        assert draw(4, 2, seed, position) == token
    assert [draws[3, p] for p in range(20)] != [draws[4, p] for p in range(20)]
    assert len({draws[3, p] for p in range(20)}) > 5


def test_seeds_are_64_bits():
    keys = [
        tuple(np.asarray(sampling_lib.request_key(seed)).tolist())
        for seed in (0, 1, 2**31, 2**32, 2**32 + 1, 2**64 - 1)
    ]
    assert len(set(keys)) == len(keys)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            sampling_lib.request_key(seed)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_stay_in_the_vocabulary_whatever_the_logits(bad, temperature):
    logits = jnp.full((1, 1, 9), bad)
    pick = functools.partial(picks.pick_tokens, positions=jnp.ones((1, 1), jnp.int32))
    for rules in ({}, dict(top_k=2, top_p=0.5, min_p=0.1)):
        token = pick(logits, sampling=sampling(temperature, **rules))
        assert 0 <= int(token[0, 0]) < 9


def test_a_neighbours_rule_changes_no_kept_set():
    logits = jax.random.normal(jax.random.key(0), (1, 1, 20_000)) * 3
    alone = picks.warp_logits(logits, sampling([1.0]))
    together = picks.warp_logits(
        jnp.repeat(logits, 2, axis=0),
        sampling([1.0, 1.0]).replace(top_k=jnp.array([0, 5], jnp.int32)),
    )
    np.testing.assert_array_equal(together[0], alone[0])
    assert np.isfinite(together[1]).sum() == 5
