"""Sampled speculation is exact: what it emits follows the target's distribution.

Slots decode three tokens of a Markov target, round after round; the law of the three
together must be the chain's own, whatever the drafter drafts. The keys are fixed, so a
test always sees the same draws; its limit is one that right code exceeds once in a
million choices of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from lossless import markov_target as markov
from metrale_jax import picks, steps
from metrale_jax import sampling as sampling_lib
from metrale_jax import state as state_lib
from metrale_jax.drafters import confidence

# Every test but one uses this many slots, so that a program serves all of them.
NUM_SLOTS = 8192
# Draws of a law: 204,800 where q is dense, 81,920 elsewhere.
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

# A target and a drafter that show best whether a block's random numbers are its own.
EVEN, SKEWED = [0.5, 0.5], [0.8, 0.2]

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


@pytest.mark.parametrize("rule", SAMPLED_RULES)
@pytest.mark.parametrize(
    "kind",
    [
        # Each kind compiles programs of its own.
        kind if kind == "dense" else pytest.param(kind, marks=pytest.mark.slow)
        for kind in (*KINDS, "with zeros")
    ],
)
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
    assert int(jnp.sum(drafted.stats.accepted)) > NUM_SLOTS // 16
    plain = run("match", None, limit=LENGTH_LIMIT, **warps)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)


def test_numbers_of_a_round_must_not_come_back_in_the_next(monkeypatch):
    """Keyed by a draft's own position, they would: it is drafted again after a fall.

    How far a block goes depends on every uniform in it, those behind the fall too. So
    such keys break the law of block verification, most where a block's weight stays
    near 1: the same case is below, with the library's keys. (Rejection sampling only
    reads the uniforms up to the fall.)
    """
    by_round = picks.accept_uniforms

    def by_position(request_key, start, num_drafts):
        columns = [
            by_round(request_key, start + column, 1) for column in range(num_drafts)
        ]
        return jnp.concatenate(columns, axis=1)

    monkeypatch.setattr(picks, "accept_uniforms", by_position)
    target = log_table(EVEN)
    tokens = draw(
        3,
        "block",
        make_drafter("dense", log_table(SKEWED)),
        target=target,
        step=markov.make_decode_rounds(),
        temperature=1.0,
    )
    statistic, freedom = chi_square(tokens, markov.warped(target))
    assert statistic > 3 * scipy.special.chdtri(freedom, FALSE_ALARM)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "target, draft", [([0.7, 0.2, 0.1], [0.1, 0.2, 0.7]), (EVEN, SKEWED)]
)
def test_a_drafter_that_prefers_what_the_target_avoids(rule, target, draft):
    drafter = make_drafter("dense", log_table(draft))
    options = dict(target=log_table(target), temperature=1.0)
    tokens = draw(4, rule, drafter, **options)
    assert_law(tokens, [dict()], log_table(target))


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_always_says_the_same(rule):
    """Token 2 is accepted as often as the target picks it, and no more follows."""
    target = log_table([0.5, 0.3, 0.2])
    drafter = make_drafter("one-hot", log_table([1e-9, 1e-9, 1.0]))
    runs = [
        run(rule, drafter, target=target, high=high, temperature=1.0)
        for high in range(4)
    ]
    tokens = np.concatenate([np.asarray(r.tokens) for r in runs]).astype(np.int64)
    assert_law(tokens, [dict()], target)
    if rule != "block":
        # Block verification may accept a draft for those behind it.
        reached = sum(int(jnp.sum(r.stats.reached[:, 0])) for r in runs)
        accepted = sum(int(jnp.sum(r.stats.accepted_at[:, 0])) for r in runs)
        error = np.sqrt(0.2 * 0.8 / reached)
        assert abs(accepted / reached - 0.2) < MAX_ERRORS * error


@pytest.mark.parametrize("rule", RULES)
def test_drafts_and_tokens_keep_the_same_set(rule):
    """Top-k leaves three tokens, and of these top-p two; of all it would leave three.

    The drafter's distribution is the target's, and only equal sets make q equal p.
    """
    table = log_table([0.4, 0.3, 0.12, 0.1, 0.08])
    warp = dict(temperature=1.0, top_k=3, top_p=0.75)
    result = run(rule, make_drafter("dense", table), target=table, **warp)
    tokens = np.asarray(result.tokens).astype(np.int64)
    assert set(tokens.ravel()) == {0, 1}
    assert_law(tokens, [warp], table)
    if rule != "match":
        assert (result.stats.accepted == markov.NUM_TOKENS * markov.NUM_DRAFTS).all()


@pytest.mark.parametrize("column", range(4))
def test_the_confidence_stop_does_not_look_at_the_draft_it_drops(column):
    """Else those that it leaves would not follow q any more."""
    log_probs = np.log(np.random.default_rng(0).uniform(0, 1, (256, 4)))
    log_probs = jnp.asarray(log_probs, jnp.float32)
    changed = log_probs.at[:, column:].set(log_probs[::-1, column:])
    offered, again = (
        column < np.asarray(confidence.stop_depth(values, 0.5))
        for values in (log_probs, changed)
    )
    assert column == 0 or 0 < offered.sum() < 256
    np.testing.assert_array_equal(offered, again)


@pytest.mark.parametrize("rule", SAMPLED_RULES)
def test_pruning_sampled_drafts_is_refused(rule):
    drafter = make_drafter("dense")
    batch = markov.make_state(NUM_SLOTS, drafter, temperature=1.0)
    with pytest.raises(ValueError, match="prune_ratio"):
        steps.decode_round(
            markov.make_params(TARGET_TABLE),
            batch,
            drafter,
            config=markov.CONFIG,
            accept_rule=rule,
            limits=confidence.DraftLimits(prune_ratio=0.5),
        )


def test_block_verification_accepts_most_and_matching_least():
    """Rows do not depend on the text here, so that rounds are all alike."""
    target = np.array([0.3, 0.25, 0.2, 0.15, 0.1])
    draft = np.array([0.1, 0.4, 0.1, 0.3, 0.1])
    drafter = make_drafter("dense", log_table(draft))
    means, errors = {}, {}
    for rule in RULES:
        result = run(rule, drafter, target=log_table(target), temperature=1.0)
        per_round = np.asarray(result.stats.accepted) / markov.NUM_TOKENS
        means[rule] = per_round.mean()
        errors[rule] = per_round.std() / np.sqrt(NUM_SLOTS)
    rates = {"match": target @ draft, "rejection": np.minimum(target, draft).sum()}
    for rule, rate in rates.items():
        expected = sum(rate**depth for depth in range(1, markov.NUM_DRAFTS + 1))
        assert abs(means[rule] - expected) < MAX_ERRORS * errors[rule], rule
    slack = MAX_ERRORS * (errors["block"] + errors["rejection"])
    assert means["block"] > means["rejection"] + slack
    assert means["rejection"] > means["match"]


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_beside_sampled_ones_are_greedy(rule):
    warps = by_slot([dict(temperature=t) for t in (0.0, 1.0, 0.0, 0.5)])
    result = run(rule, make_drafter("dense", offered=RAGGED), **warps)
    tokens = np.asarray(result.tokens)
    assert (tokens[::2] == greedy_tokens(TARGET_TABLE)).all()
    assert len(np.unique(tokens[1::2], axis=0)) > 100


@pytest.mark.parametrize("rule", RULES)
def test_tiny_temperatures(rule):
    """All are greedy where the best token leads; 1e-5 still samples near a tie."""
    temperatures = (1e-3, 1e-5, 1e-6, 1e-30)
    warps = by_slot([dict(temperature=t) for t in temperatures])
    drafter = make_drafter("dense", offered=RAGGED)
    result = run(rule, drafter, **warps)
    assert (np.asarray(result.reason) == state_lib.RUNNING).all()
    assert (np.asarray(result.tokens) == greedy_tokens(TARGET_TABLE)).all()

    near_tie = np.full_like(TARGET_TABLE, -5.0)
    near_tie[:, 3], near_tie[:, 6] = -1e-5, 0.0
    result = run(rule, drafter, target=near_tie, **warps)
    assert (np.asarray(result.reason) == state_lib.RUNNING).all()
    for index, temperature in enumerate(temperatures):
        seen = set(np.asarray(result.tokens)[index :: len(temperatures)].ravel())
        is_greedy = temperature < picks.GREEDY_TEMPERATURE
        assert seen == ({6} if is_greedy else {3, 6}), temperature


@pytest.mark.parametrize("rule", RULES)
def test_without_drafts_a_slot_emits_plain_tokens(rule):
    warps = by_slot([*WARPS, TOP])
    drafter = make_drafter("dense", offered=np.where(SLOT % 3 == 0, 0, 3))
    drafted, plain = run(rule, drafter, **warps), run("match", None, **warps)
    same = (np.asarray(drafted.tokens) == np.asarray(plain.tokens)).all(axis=1)
    assert same[::3].all()
    assert same[1::3].all() == (rule == "match")


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_gives_its_tokens_in_any_slot_beside_any_others(rule):
    """Four requests move to other slots, and their neighbours to other options."""
    drafter = make_drafter("dense")
    batch = markov.make_state(NUM_SLOTS, drafter, temperature=1.0)
    params = markov.make_params(TARGET_TABLE)
    alone = markov.decode(params, batch, drafter, accept_rule=rule)
    moved = jnp.asarray((SLOT + 1234) % NUM_SLOTS)
    sampling = batch.sampling
    beside = batch.replace(
        active=moved % 5 != 0,
        sampling=sampling.replace(
            request_key=sampling.request_key[moved],
            temperature=jnp.where(
                moved < 4, 1.0, jnp.asarray(SLOT % 3 * 0.7, jnp.float32)
            ),
        ),
    )
    beside = beside.replace(active=beside.active | (moved < 4))
    crowded = markov.decode(params, beside, drafter, accept_rule=rule)
    for request in range(4):
        slot = int(np.flatnonzero(moved == request)[0])
        expected = np.asarray(alone.tokens[request])
        np.testing.assert_array_equal(crowded.tokens[slot], expected)
    # And seeds differ, in either word of their keys.
    other = markov.decode(params, markov.with_keys(batch, 1), drafter, accept_rule=rule)
    assert len(np.unique(alone.tokens[:8], axis=0)) > 1
    assert (np.asarray(other.tokens[:8]) != np.asarray(alone.tokens[:8])).any()


@pytest.mark.slow
def test_a_seed_gives_its_tokens_in_a_batch_of_any_size():
    """Row 3 of 4 is what it is among thousands."""
    params = markov.make_params(TARGET_TABLE)
    large, small = (
        markov.decode(
            params,
            markov.make_state(num_slots, drafter, temperature=1.0),
            drafter,
            accept_rule="block",
        )
        for num_slots, drafter in (
            (NUM_SLOTS, make_drafter("dense")),
            (4, make_drafter("dense", offered=np.full(4, markov.NUM_DRAFTS))),
        )
    )
    np.testing.assert_array_equal(small.tokens, large.tokens[:4])


def test_every_use_of_randomness_has_its_own_purpose(monkeypatch):
    used = []
    key_of = picks.random_key

    def recording(request_key, position, purpose):
        used.append(purpose)
        return key_of(request_key, position, purpose)

    monkeypatch.setattr(picks, "random_key", recording)
    batch = markov.make_state(2, None, temperature=1.0)
    sampling, start = batch.sampling, batch.length
    logits = jnp.zeros((2, 1, markov.VOCAB_SIZE))
    uses = {
        picks.PURPOSE_SAMPLE: lambda: picks.pick_tokens(
            logits, start[:, None], sampling
        ),
        picks.PURPOSE_DRAFT: lambda: picks.draw_drafts(logits, start, sampling),
        picks.PURPOSE_ACCEPT: lambda: picks.accept_uniforms(
            sampling.request_key, start, 3
        ),
        picks.PURPOSE_RESAMPLE: lambda: picks.draw_from_probs(
            logits[:, 0], start, sampling
        ),
    }
    assert len(uses) == 4
    for purpose, use in uses.items():
        used.clear()
        jax.eval_shape(use)
        assert set(used) == {purpose}


def test_no_two_uses_share_a_key():
    """Requests, positions, purposes; and the columns of a round's drafts."""
    seeds = (0, 1, 2**32, 2**64 - 1)
    requests = jnp.stack([sampling_lib.request_key(seed) for seed in seeds])
    positions = jnp.arange(64, dtype=jnp.int32)
    purposes = (
        picks.PURPOSE_SAMPLE,
        picks.PURPOSE_DRAFT,
        picks.PURPOSE_ACCEPT,
        picks.PURPOSE_RESAMPLE,
    )

    def keys_of(request, position):
        keys = [picks.random_key(request, position, p) for p in purposes]
        drafts = keys[purposes.index(picks.PURPOSE_DRAFT)]
        keys += [jax.random.fold_in(drafts, column) for column in range(4)]
        return jnp.stack([jax.random.key_data(key) for key in keys])

    over_positions = jax.vmap(keys_of, in_axes=(None, 0))
    keys = jax.jit(jax.vmap(over_positions, in_axes=(0, None)))(requests, positions)
    keys = np.asarray(keys).reshape(-1, 2)
    assert len(np.unique(keys, axis=0)) == len(seeds) * len(positions) * 8
