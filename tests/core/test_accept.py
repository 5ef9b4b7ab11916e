"""The acceptance rules, enumerated: what comes out follows the target, exactly."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax import accept

VOCAB_SIZE = 3
NUM_DRAFTS = 3
TOLERANCE = 1e-12
# A threshold of 1 but for rounding leaves such an outcome, which no uniform reaches.
NEGLIGIBLE = 1e-15
# The largest uniform that a draft can meet.
ALMOST_ONE = np.nextafter(1.0, 0.0)

# What a row past the offered drafts may hold.
PADDING = np.full(VOCAB_SIZE, 1e9)


def make_tables(seed, *, drafter="dense", same=False):
    """p and q after every context of up to NUM_DRAFTS tokens."""
    generator = np.random.default_rng(seed)
    target, draft = {}, {}
    for length in range(NUM_DRAFTS + 1):
        for context in itertools.product(range(VOCAB_SIZE), repeat=length):
            p = generator.dirichlet(np.ones(VOCAB_SIZE))
            q = generator.dirichlet(np.ones(VOCAB_SIZE))
            if drafter == "with zeros":
                q[generator.integers(VOCAB_SIZE)] = 0
                p[generator.integers(VOCAB_SIZE)] = 0
            if drafter == "sparse":
                q[np.argmin(q)] = 0
            if drafter == "one-hot":
                q = np.eye(VOCAB_SIZE)[generator.integers(VOCAB_SIZE)]
            target[context] = p / p.sum()
            draft[context] = target[context] if same else q / q.sum()
    return target, draft


def thresholds(rule, target, draft, path):
    """For each prefix of a path, the uniform below which its own test passes."""
    count = len(path)
    p = [target[path[:i]] for i in range(count + 1)]
    q = [draft[path[:i]] for i in range(count)]
    ratios = [p[i][path[i]] / q[i][path[i]] for i in range(count)]
    if rule is accept.rejection_sampling:
        return [min(1.0, ratio) for ratio in ratios]
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(1.0, weights[-1] * ratio))
    limits = []
    for i in range(1, count):
        left = np.maximum(weights[i] * p[i] - q[i], 0).sum()
        total = left + 1 - weights[i]
        limits.append(left / total if total > 0 else 0.0)
    return [*limits, weights[-1]] if count else []


def outcomes(rule, limits):
    """(number accepted, its probability, uniforms that lead to it)."""
    passes = np.asarray(limits)
    for count in range(len(limits) + 1):
        uniforms = np.full(NUM_DRAFTS, ALMOST_ONE)
        if rule is accept.rejection_sampling:
            probability = np.prod(passes[:count])
            uniforms[:count] = 0.0
            if count < len(limits):
                probability *= 1 - passes[count]
        else:
            # The longest prefix that passes, whatever shorter ones say.
            probability = np.prod(1 - passes[count:])
            if count > 0:
                probability *= passes[count - 1]
                uniforms[count - 1] = 0.0
        if probability > NEGLIGIBLE:
            yield count, probability, uniforms


def as_proposed(drafter, rows, drafts):
    """q of [J, V] as `verify` makes it of what a drafter of that kind proposes."""
    if drafter == "one-hot":
        return accept.one_hot_probs(drafts, VOCAB_SIZE).astype(jnp.float64)
    if drafter == "sparse":
        ids = np.argsort(-rows, axis=1)[:, : VOCAB_SIZE - 1]
        kept = np.take_along_axis(rows, ids, axis=1)
        ids = jnp.asarray(ids[None], jnp.int32)
        return accept.sparse_probs(ids, jnp.asarray(kept[None]), VOCAB_SIZE)
    return jnp.asarray(rows[None])


def emitted_law(rule, target, draft, *, drafter="dense", num_drafts=NUM_DRAFTS):
    """The law of the first NUM_DRAFTS + 1 tokens, and the expected number accepted."""
    run = jax.jit(rule)
    law = dict.fromkeys(
        itertools.product(range(VOCAB_SIZE), repeat=NUM_DRAFTS + 1), 0.0
    )
    expected_accepted = 0.0
    missing = NUM_DRAFTS - num_drafts
    for path in itertools.product(range(VOCAB_SIZE), repeat=num_drafts):
        q = np.prod([draft[path[:i]][path[i]] for i in range(num_drafts)])
        if q == 0:
            continue
        p_rows = [target[path[:i]] for i in range(num_drafts + 1)]
        q_rows = [draft[path[:i]] for i in range(num_drafts)]
        drafts = jnp.array([[*path, *[0] * missing]], jnp.int32)
        proposed = as_proposed(drafter, np.array(q_rows + [PADDING] * missing), drafts)
        for count, probability, uniforms in outcomes(
            rule, thresholds(rule, target, draft, path)
        ):
            result = run(
                jnp.array([p_rows + [PADDING] * missing]),
                proposed,
                drafts,
                jnp.array([num_drafts], jnp.int32),
                jnp.array([uniforms]),
            )
            assert int(result.num_accepted[0]) == count
            expected_accepted += q * probability * count
            for token, next_prob in enumerate(np.asarray(result.next_probs[0])):
                emitted = (*path[:count], token)
                weight = q * probability * next_prob
                add_continuations(law, target, emitted, weight)
    return law, expected_accepted


def add_continuations(law, target, emitted, weight):
    """What follows the round is plain decoding's: it draws from the target."""
    missing = NUM_DRAFTS + 1 - len(emitted)
    for rest in itertools.product(range(VOCAB_SIZE), repeat=missing):
        sequence = (*emitted, *rest)
        steps = range(len(emitted), NUM_DRAFTS + 1)
        law[sequence] += weight * np.prod(
            [target[sequence[:i]][sequence[i]] for i in steps]
        )


@pytest.mark.parametrize("num_drafts", range(NUM_DRAFTS + 1))
@pytest.mark.parametrize("drafter", ["dense", "with zeros", "sparse", "one-hot"])
@pytest.mark.parametrize("rule", [accept.rejection_sampling, accept.block_verification])
def test_joint_law_is_the_targets(rule, drafter, num_drafts):
    with jax.enable_x64(True):
        for seed in range(2 if num_drafts == NUM_DRAFTS else 1):
            target, draft = make_tables(seed, drafter=drafter)
            law, _ = emitted_law(
                rule, target, draft, drafter=drafter, num_drafts=num_drafts
            )
            for sequence, probability in law.items():
                expected = np.prod(
                    [target[sequence[:i]][sequence[i]] for i in range(NUM_DRAFTS + 1)]
                )
                assert abs(probability - expected) < TOLERANCE


def test_block_verification_accepts_at_least_as_much():
    with jax.enable_x64(True):
        for seed in range(3):
            tables = make_tables(seed)
            _, by_token = emitted_law(accept.rejection_sampling, *tables)
            _, by_block = emitted_law(accept.block_verification, *tables)
            assert by_block > by_token


@pytest.mark.parametrize("rule", [accept.rejection_sampling, accept.block_verification])
def test_a_drafter_equal_to_the_target_is_always_accepted(rule):
    with jax.enable_x64(True):
        _, expected_accepted = emitted_law(rule, *make_tables(0, same=True))
    assert expected_accepted == pytest.approx(NUM_DRAFTS, abs=1e-12)


@pytest.mark.parametrize("rule", [accept.rejection_sampling, accept.block_verification])
@pytest.mark.parametrize("num_drafts", range(NUM_DRAFTS + 1))
def test_drafts_past_the_count_are_padding(rule, num_drafts):
    """Ragged counts decide as a block of just that many drafts would."""
    generator = np.random.default_rng(num_drafts)
    target = generator.dirichlet(np.ones(5), size=(64, NUM_DRAFTS + 1))
    draft = generator.dirichlet(np.ones(5), size=(64, NUM_DRAFTS))
    drafts = generator.integers(0, 5, (64, NUM_DRAFTS))
    uniforms = generator.random((64, NUM_DRAFTS))
    arguments = [jnp.asarray(value, jnp.float32) for value in (target, draft, uniforms)]
    target, draft, uniforms = arguments
    drafts = jnp.asarray(drafts, jnp.int32)
    counts = jnp.full(64, num_drafts, jnp.int32)
    ragged = rule(target, draft, drafts, counts, uniforms)
    garbage = draft.at[:, num_drafts:].set(1e9)
    assert (ragged.num_accepted <= num_drafts).all()
    again = rule(target, garbage, drafts, counts, uniforms)
    np.testing.assert_array_equal(ragged.num_accepted, again.num_accepted)
    np.testing.assert_array_equal(ragged.next_probs, again.next_probs)
    if num_drafts:
        exact = rule(
            target[:, : num_drafts + 1],
            draft[:, :num_drafts],
            drafts[:, :num_drafts],
            counts,
            uniforms[:, :num_drafts],
        )
        np.testing.assert_array_equal(ragged.num_accepted, exact.num_accepted)
        np.testing.assert_allclose(ragged.next_probs, exact.next_probs, atol=1e-6)


def test_a_draft_without_probability_never_stands():
    target = jnp.array([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    draft = jnp.array([[[0.0, 0.0, 1.0]]])
    decide = functools.partial(
        accept.rejection_sampling,
        target,
        draft,
        jnp.array([[2]], jnp.int32),
        jnp.array([1], jnp.int32),
    )
    result = decide(jnp.array([[0.0]]))
    assert result.num_accepted.tolist() == [0]
    np.testing.assert_allclose(result.next_probs, [[0.5, 0.5, 0.0]])


def test_sparse_and_one_hot_q():
    ids = jnp.array([[[4, 1]]], jnp.int32)
    dense = accept.sparse_probs(ids, jnp.array([[[0.75, 0.25]]]), 5)
    assert dense.tolist() == [[[0.0, 0.25, 0.0, 0.0, 0.75]]]
    one_hot = accept.one_hot_probs(jnp.array([[3, 0]], jnp.int32), 4)
    assert one_hot.tolist() == [[[0, 0, 0, 1], [1, 0, 0, 0]]]
