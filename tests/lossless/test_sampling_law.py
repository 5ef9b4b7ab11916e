"""Sampled speculation is exact: what it emits follows the target's distribution.

Slots decode three tokens of a Markov target, round after round; the law of the three
together must be the chain's own, whatever the drafter drafts. The keys are fixed, so a
test always sees the same draws; its limit is one that right code exceeds once in a
million choices of them.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from lossless import markov_target as markov
from metrale_jax import picks
from metrale_jax import sampling as sampling_lib
from metrale_jax import state as state_lib

# Every test but one uses this many slots, so that a program serves all of them.
NUM_SLOTS = 8192
# 204,800 draws.
NUM_RUNS = 25
FALSE_ALARM = 1e-6
# Chi-square wants no cell that is expected less often.
MIN_EXPECTED = 5
# Standard errors that a mean of fixed draws may be off.
MAX_ERRORS = 5

RULES = ("match", "rejection", "block")
SAMPLED_RULES = ("rejection", "block")
KINDS = ("one-hot", "dense", "sparse")

# Options that need no sorting, a quarter of the slots each.
WARPS = (
    dict(temperature=0.3),
    dict(temperature=1.0),
    dict(temperature=2.0),
    dict(temperature=1.0, min_p=0.2),
)
TOP = dict(temperature=1.0, top_k=5, top_p=0.8)

SLOT = np.arange(NUM_SLOTS)
ALL_OFFERED = np.full(NUM_SLOTS, markov.NUM_DRAFTS)
# Three quarters of the slots are offered every draft; the others 0, 1, 2 or 3 of them.
RAGGED = np.where(SLOT // 4 % 4 == 0, SLOT // 16 % 4, markov.NUM_DRAFTS)
# A quarter ends with the last token that is judged, which cuts its drafts.
LENGTH_LIMIT = np.where(
    SLOT // 64 % 4 == 0, markov.LENGTH + 1 + markov.NUM_TOKENS, 10**6
)


def make_tables():
    generator = np.random.default_rng(20)
    shape = (2, markov.VOCAB_SIZE, markov.VOCAB_SIZE)
    return generator.normal(size=shape).astype(np.float32)


TARGET_TABLE, DRAFT_TABLE = make_tables()


def with_zeros(table):
    """Leaves each row four tokens, so that the drafter never drafts the others."""
    generator = np.random.default_rng(21)
    left_out = generator.permuted(
        np.tile(np.arange(markov.VOCAB_SIZE), (markov.VOCAB_SIZE, 1)), axis=1
    )
    return np.where(left_out < markov.VOCAB_SIZE // 2, markov.NEVER, table)


def log_table(probs):
    """Every token is followed by this distribution; probability 0 for the rest."""
    row = np.full(markov.VOCAB_SIZE, markov.NEVER)
    row[: len(probs)] = np.log(probs)
    return np.tile(row, (markov.VOCAB_SIZE, 1)).astype(np.float32)


def by_slot(warps):
    """One array per option: slot b has the options warps[b % len(warps)]."""
    off = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    return {
        name: np.array([(off | warp)[name] for warp in warps])[SLOT % len(warps)]
        for name in off
    }


def make_drafter(kind, table=DRAFT_TABLE, offered=ALL_OFFERED):
    return markov.MarkovDrafter(
        table=jnp.asarray(table, jnp.float32),
        offered=jnp.asarray(offered, jnp.int32),
        kind=kind,
    )


def run(rule, drafter, *, target=TARGET_TABLE, high=0, limit=None, step=None, **warp):
    """One run of all slots; `high` chooses their keys."""
    batch = markov.make_state(NUM_SLOTS, drafter, length_limit=limit, **warp)
    options = {} if step is None else dict(decode_rounds=step)
    return markov.decode(
        markov.make_params(target),
        markov.with_keys(batch, high),
        drafter,
        accept_rule=rule,
        **options,
    )


def draw(num_runs, *arguments, **options):
    """The tokens of several runs, i64[runs * B, 3]."""
    runs = [run(*arguments, high=high, **options).tokens for high in range(num_runs)]
    return np.concatenate([np.asarray(tokens) for tokens in runs]).astype(np.int64)


def chi_square(tokens, transitions):
    """Pearson's statistic of the three tokens together, and its degrees of freedom."""
    expected = markov.joint_law(transitions).ravel() * len(tokens)
    cells = np.ravel_multi_index(tuple(tokens.T), (markov.VOCAB_SIZE,) * 3)
    counts = np.bincount(cells, minlength=expected.size)
    # A probability below float32's reach is one that no draw can have.
    assert (counts[expected < 1e-30] == 0).all()
    # The rare cells are one, together with the rarest of the others.
    order = np.argsort(expected)
    expected, counts = expected[order], counts[order]
    num_rare = int(np.searchsorted(expected, MIN_EXPECTED)) + 1
    merged = [np.append(v[num_rare:], v[:num_rare].sum()) for v in (counts, expected)]
    return ((merged[0] - merged[1]) ** 2 / merged[1]).sum(), len(merged[0]) - 1


def assert_law(tokens, warps, target=TARGET_TABLE):
    """The tokens follow the target under each slot's options."""
    per_warp = [
        chi_square(tokens[index :: len(warps)], markov.warped(target, **warp))
        for index, warp in enumerate(warps)
    ]
    total, freedom = np.sum(per_warp, axis=0)
    assert total < scipy.special.chdtri(freedom, FALSE_ALARM), f"{per_warp=}"


def greedy_tokens(target):
    best = target.argmax(axis=1)
    tokens = [markov.FIRST_TOKEN]
    for _ in range(markov.NUM_TOKENS):
        tokens.append(int(best[tokens[-1]]))
    return tokens[1:]


# --- The law of three tokens.


@pytest.mark.parametrize("rule", SAMPLED_RULES)
@pytest.mark.parametrize("kind", [*KINDS, "with zeros"])
def test_tokens_follow_the_target_whatever_is_drafted(rule, kind):
    if kind == "with zeros":
        drafter = make_drafter("dense", with_zeros(DRAFT_TABLE), RAGGED)
    else:
        drafter = make_drafter(kind, offered=RAGGED)
    tokens = draw(NUM_RUNS, rule, drafter, limit=LENGTH_LIMIT, **by_slot(WARPS))
    assert_law(tokens, WARPS)


@pytest.mark.parametrize("rule", SAMPLED_RULES)
def test_top_k_and_top_p_keep_the_law(rule):
    tokens = draw(NUM_RUNS, rule, make_drafter("dense"), **TOP)
    assert_law(tokens, [TOP])


@pytest.mark.parametrize("warps", [WARPS, (TOP,)])
def test_plain_tokens_follow_the_target(warps):
    assert_law(draw(NUM_RUNS, "match", None, **by_slot(warps)), warps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_match_emits_the_very_tokens_of_plain_decoding(kind):
    """So they have its law, which the test above has."""
    drafter = make_drafter(kind, offered=RAGGED)
    warps = by_slot([dict(temperature=0.0), *WARPS, TOP])
    drafted = run("match", drafter, limit=LENGTH_LIMIT, **warps)
    assert int(jnp.sum(drafted.stats.accepted)) > NUM_SLOTS // 4
    plain = run("match", None, limit=LENGTH_LIMIT, **warps)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)


@pytest.mark.parametrize("mutated", ["accept tests", "drafts"])
def test_numbers_of_a_round_must_not_come_back_in_the_next(mutated, monkeypatch):
    """Keyed by a draft's own position, they would: it is drafted again after a fall.

    How far a block goes depends on every draft and every uniform in it, those behind
    the fall too. So this breaks the law of block verification, and by how much says
    that the tests above would see it.
    """
    uniforms, draw_drafts = picks.accept_uniforms, picks.draw_drafts

    def uniforms_by_position(request_key, start, num_drafts):
        columns = [
            uniforms(request_key, start + column, 1) for column in range(num_drafts)
        ]
        return jnp.concatenate(columns, axis=1)

    def drafts_by_position(logits, start, sampling, *, first_column):
        return draw_drafts(logits, start + first_column, sampling)

    if mutated == "drafts":
        monkeypatch.setattr(picks, "draw_drafts", drafts_by_position)
    monkeypatch.setattr(picks, "accept_uniforms", uniforms_by_position)
    tokens = draw(
        4,
        "block",
        make_drafter("dense"),
        step=markov.make_decode_rounds(),
        temperature=1.0,
    )
    statistic, freedom = chi_square(tokens, markov.warped(TARGET_TABLE))
    assert statistic > 2 * scipy.special.chdtri(freedom, FALSE_ALARM)
