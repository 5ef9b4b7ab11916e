"""Laws of verify and apply: rounds with drafts end where plain decoding ends."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import helpers
import tiny_models as models
from metrale_jax import drafters, fold, proposal, statistics, steps, verify
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax.drafters import protocol

PROMPTS = ([5, 17, 3, 99, 21, 8, 64], [2], [101, 7, 7, 7])
NUM_TOKENS = 24
NUM_DRAFTS = models.MAX_DRAFTS
# One row and four rows round differently; a slot's values are of order 1.
ABSOLUTE_TOLERANCE = 2e-5

# Per round and slot: drafts offered, and how many of them are right.
SCRIPTS = {
    "always right": [((3, 3), (3, 3), (3, 3))] * 5,
    "never right": [((3, 0), (3, 0), (3, 0))] * 5,
    "counts down to zero": [
        ((3, 3), (0, 0), (2, 2)),
        ((0, 0), (3, 3), (2, 2)),
        ((2, 2), (0, 0), (0, 0)),
        ((0, 0), (1, 1), (0, 0)),
        ((0, 0), (0, 0), (3, 3)),
        ((3, 3), (2, 2), (1, 1)),
    ],
    "mixed": [
        ((3, 1), (3, 0), (3, 3)),
        ((3, 2), (2, 1), (1, 0)),
        ((1, 0), (3, 3), (3, 2)),
        ((0, 0), (3, 2), (2, 1)),
        ((3, 3), (1, 1), (3, 0)),
    ],
}
SAMPLING = {"greedy": {}, "sampled": dict(temperature=1.0, top_k=40, top_p=0.95)}


@pytest.fixture(params=models.CONFIGS, scope="module")
def target(request):
    config = models.CONFIGS[request.param]
    return models.make_params(config), config


def start_all(params, config, **options):
    batch = models.make_state(config)
    for slot, prompt in enumerate(PROMPTS):
        batch = models.start(params, config, batch, slot, prompt, seed=slot, **options)
    return batch


def plain_tokens(params, config, **options):
    """What plain decoding emits in each slot."""
    batch = models.decode(
        params, config, start_all(params, config, **options), NUM_TOKENS
    )
    return [
        models.output_tokens(batch, slot, len(prompt))
        for slot, prompt in enumerate(PROMPTS)
    ]


def make_drafts(right_tokens, num_right):
    """Drafts of which the first `num_right` are what plain decoding emits next."""
    drafts = list(right_tokens[:NUM_DRAFTS])
    drafts += [0] * (NUM_DRAFTS - len(drafts))
    for index in range(num_right, NUM_DRAFTS):
        drafts[index] = (drafts[index] + 1) % models.VOCAB_SIZE
    return drafts


def run_round(params, config, batch, expected, script):
    drafts = []
    for slot, (_, num_right) in enumerate(script):
        done = len(models.output_tokens(batch, slot, len(PROMPTS[slot])))
        drafts.append(make_drafts(expected[slot][done:], num_right))
    offered = jnp.array([count for count, _ in script], jnp.int32)
    verdict = steps.verify_batched(
        params, batch, jnp.array(drafts, jnp.int32), offered, config=config
    )
    batch, emission = steps.apply_verdict(batch, verdict, config=config)
    return batch, verdict, emission


def assert_equals_plain(params, config, batch, **options):
    """Every slot's value is that of plain decoding at the same length."""
    for slot, prompt in enumerate(PROMPTS):
        num_emitted = int(batch.length[slot]) + 1 - len(prompt)
        plain = models.make_state(config)
        plain = models.start(params, config, plain, slot, prompt, seed=slot, **options)
        plain = models.decode(params, config, plain, num_emitted - 1)
        actual = models.slot_values(batch, config, slot)
        for name, value in models.slot_values(plain, config, slot).items():
            np.testing.assert_allclose(
                actual[name], value, rtol=0, atol=ABSOLUTE_TOLERANCE, err_msg=name
            )


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", SCRIPTS)
def test_rounds_end_where_plain_decoding_ends(target, name, sampling):
    params, config = target
    options = SAMPLING[sampling]
    expected = plain_tokens(params, config, **options)
    batch = start_all(params, config, **options)
    for script in SCRIPTS[name]:
        batch, verdict, emission = run_round(params, config, batch, expected, script)
        num_right = [right for _, right in script]
        assert verdict.num_accepted.tolist() == num_right
        assert emission.count.tolist() == [count + 1 for count in num_right]
    for slot, prompt in enumerate(PROMPTS):
        tokens = models.output_tokens(batch, slot, len(prompt))
        assert tokens == expected[slot][: len(tokens)]
    assert_equals_plain(params, config, batch, **options)


def test_verify_without_drafts_after_accepted_ones_reads_the_moved_state(target):
    params, config = target
    expected = plain_tokens(params, config)
    batch = start_all(params, config)
    batch, _, _ = run_round(params, config, batch, expected, [(3, 3)] * 3)
    batch = models.decode(params, config, batch, 4)
    batch, _, _ = run_round(params, config, batch, expected, [(3, 2), (0, 0), (3, 0)])
    assert_equals_plain(params, config, batch)


@pytest.mark.parametrize("room", range(1, 6))
def test_a_limit_inside_accepted_drafts(target, room):
    """Slot 1 may emit `room` more tokens, and four are at hand."""
    params, config = target
    expected = plain_tokens(params, config)
    batch = start_all(params, config)
    limit = len(PROMPTS[1]) + 1 + room
    batch = models.start(
        params, config, batch, 1, PROMPTS[1], seed=1, length_limit=limit
    )
    batch, _, emission = run_round(params, config, batch, expected, [(3, 3)] * 3)
    assert emission.count.tolist() == [4, min(room, 4), 4]
    assert emission.finished.tolist() == [False, room <= 4, False]
    tokens = models.output_tokens(batch, 1, len(PROMPTS[1]))
    assert tokens == expected[1][: len(tokens)]
    assert_equals_plain(params, config, batch)
    # A finished slot stays as it is.
    again, _, emission = run_round(params, config, batch, expected, [(0, 0)] * 3)
    assert int(emission.count[1]) == (room == 5)
    if room <= 4:
        assert int(again.length[1]) == limit - 1


@pytest.mark.parametrize("place", range(4))
def test_an_end_token_inside_accepted_drafts(target, place):
    """The end token is draft 0, 1, 2 or the bonus token; nothing follows it."""
    params, config = target
    expected = plain_tokens(params, config)
    # The first token of slot 0 that no earlier token of any slot equals.
    end_index = next(
        index
        for index in range(4, NUM_TOKENS)
        if all(expected[0][index] not in tokens[:index] for tokens in expected)
    )
    end = expected[0][end_index]
    batch = start_all(params, config)
    batch = models.decode(params, config, batch, end_index - 1 - place)
    ending = models.with_end_tokens(config, end)
    batch, verdict, emission = run_round(params, ending, batch, expected, [(3, 3)] * 3)
    # Drafts behind an end token are not judged.
    assert int(verdict.num_accepted[0]) == min(place + 1, 3)
    assert int(emission.count[0]) == place + 1
    assert bool(emission.finished[0])
    assert int(batch.finish_reason[0]) == state_lib.FINISHED_END_TOKEN
    tokens = models.output_tokens(batch, 0, len(PROMPTS[0]))
    assert tokens == expected[0][: end_index + 1]
    assert int(batch.length[0]) == len(PROMPTS[0]) + len(tokens) - 1
    assert_equals_plain(params, config, batch)


def test_other_slots_and_stale_contents_change_no_bit_of_a_verdict(target):
    params, config = target
    expected = plain_tokens(params, config)

    def run(poisoned):
        batch = models.make_state(config)
        if poisoned:
            batch = jax.tree.map(models.poison, batch).replace(
                active=batch.active, page_table=batch.page_table
            )
        batch = models.start(params, config, batch, 1, PROMPTS[1], seed=1)
        drafts = make_drafts(expected[1][1:], 2)
        other = [127] * 3 if poisoned else [0] * 3
        for _ in range(2):
            verdict = steps.verify_batched(
                params,
                batch,
                jnp.array([other, drafts, other], jnp.int32),
                jnp.array([3 if poisoned else 0, 3, 0], jnp.int32),
                config=config,
            )
            accepted = int(verdict.num_accepted[1])
            batch, _ = steps.apply_verdict(batch, verdict, config=config)
            drafts = make_drafts(expected[1][accepted + 2 :], 3)
        return models.slot_values(batch, config, 1)

    clean = run(poisoned=False)
    for name, value in run(poisoned=True).items():
        np.testing.assert_array_equal(value, clean[name], err_msg=name)


def test_padding_drafts_may_hold_anything(target):
    params, config = target
    batch = start_all(params, config)
    counts = jnp.array([0, 1, 2], jnp.int32)

    def judge(padding):
        drafts = jnp.full((3, NUM_DRAFTS), padding, jnp.int32)
        return steps.verify_batched(params, batch, drafts, counts, config=config)

    expected = judge(7)
    for padding in (-1, models.VOCAB_SIZE, 2**31 - 1):
        verdict = judge(padding)
        assert (verdict.num_accepted <= counts).all()
        assert int(verdict.bonus_token[0]) == int(expected.bonus_token[0])
        assert verdict.judgement.is_valid.all()


def test_one_trace_of_a_round():
    config = models.DENSE
    params = models.make_params(config)
    steps.verify_batched.clear_cache()
    steps.apply_verdict.clear_cache()
    expected = plain_tokens(params, config)
    batch = start_all(params, config)
    with helpers.count_compilations() as counter:
        for script in SCRIPTS["mixed"]:
            batch, _, _ = run_round(params, config, batch, expected, script)
    assert counter.num_traces("verify") == 1
    assert counter.num_traces("apply_verdict") == 1


judge = jax.jit(verify.judge, static_argnames=("config", "accept_rule"))


def sampling_state():
    """Three slots that sample and have room, nothing inside."""
    batch = models.make_state(models.DENSE)
    return batch.replace(
        length_limit=jnp.full(3, 64, jnp.int32),
        sampling=batch.sampling.replace(temperature=jnp.ones(3, jnp.float32)),
    )


@pytest.mark.parametrize("rule", verify.ACCEPT_RULES)
def test_what_is_no_token_is_never_accepted(rule):
    """A draft outside of the vocabulary ends the chain, and changes no token."""
    logits = jax.random.normal(
        jax.random.key(0), (3, NUM_DRAFTS + 1, models.VOCAB_SIZE), jnp.float32
    )

    def judged(drafts, counts):
        return judge(
            sampling_state(),
            logits,
            jnp.array(drafts, jnp.int32),
            jnp.array(counts, jnp.int32),
            config=models.DENSE,
            accept_rule=rule,
        )

    plain = judged([[0] * NUM_DRAFTS] * 3, [0] * 3)
    ids = (-1, -models.VOCAB_SIZE, models.VOCAB_SIZE)
    judgement = judged([[token] * NUM_DRAFTS for token in ids], [NUM_DRAFTS] * 3)
    assert judgement.num_accepted.tolist() == [0, 0, 0]
    np.testing.assert_array_equal(judgement.bonus_token, plain.bonus_token)


def test_rows_that_plain_decoding_never_reaches_decide_nothing():
    """Logits that are not finite fail a slot behind accepted drafts, and only there."""
    logits = jnp.zeros((3, NUM_DRAFTS + 1, models.VOCAB_SIZE), jnp.float32)
    # Every pick is token 5; row 2 is broken.
    logits = logits.at[:, :, 5].set(100.0).at[:, 2].set(jnp.nan)
    judgement = judge(
        sampling_state(),
        logits,
        jnp.array([[5, 4, 5], [5, 5, 5], [5, 5, 5]], jnp.int32),
        jnp.array([3, 3, 1], jnp.int32),
        config=models.DENSE,
        accept_rule="match",
    )
    assert judgement.is_valid.tolist() == [True, False, True]


def test_a_round_counts_the_candidates_that_would_have_been_right():
    """The target picks token 5; slot 0's second draft falls, slot 2's first."""
    batch = sampling_state()
    candidates = jnp.array(
        [
            [[5, 1], [4, 5], [5, 1]],
            [[5, 1], [5, 1], [5, 1]],
            [[9, 8], [5, 1], [5, 1]],
        ],
        jnp.int32,
    )
    described = statistics.describe_statistics(3, NUM_DRAFTS, 2)
    batch = batch.replace(
        active=jnp.ones(3, bool),
        layers=(),
        proposal=batch.proposal.replace(candidates=candidates),
        stats=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), described),
    )
    judgement = judge(
        batch,
        jnp.zeros((3, NUM_DRAFTS + 1, models.VOCAB_SIZE)).at[:, :, 5].set(100.0),
        jnp.array([[5, 4, 5], [5, 5, 5], [9, 5, 5]], jnp.int32),
        jnp.full(3, NUM_DRAFTS, jnp.int32),
        config=models.DENSE,
        accept_rule="match",
    )
    hidden = jnp.zeros((3, NUM_DRAFTS + 1, models.DENSE.hidden_size), jnp.float32)
    verdict = verdict_lib.Verdict(judgement, hidden, taps=(), layers=())
    batch, _ = fold.apply_verdict(batch, verdict, config=models.DENSE)
    assert judgement.num_accepted.tolist() == [1, 3, 0]
    # Slot 0: its second candidate of that place. Slot 1: no draft fell. Slot 2: none.
    assert batch.stats.candidate_hits.tolist() == [[0, 1], [0, 0], [0, 0]]


BAD_OPTIONS = {
    "row_masks": lambda: dict(row_masks=jnp.ones((3, 1, 4), jnp.uint32)),
    "draft_probs": lambda: dict(
        accept_rule="rejection",
        draft_probs=proposal.DenseProbs(jnp.ones((1, NUM_DRAFTS, models.VOCAB_SIZE))),
    ),
    "num_log_probs": lambda: dict(num_log_probs=models.VOCAB_SIZE + 1),
    "accept_rule": lambda: dict(accept_rule="always"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_of_another_shape_are_refused(name):
    config = models.DENSE
    batch = models.make_state(config)
    shape = (3, NUM_DRAFTS + 1, models.VOCAB_SIZE)
    with jaxtyping_off(), pytest.raises(ValueError, match=f"`{name}`"):
        verify.judge(
            batch,
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((3, NUM_DRAFTS), jnp.int32),
            jnp.zeros(3, jnp.int32),
            config=config,
            **BAD_OPTIONS[name](),
        )


@dataclasses.dataclass(frozen=True)
class TappingDrafter(protocol.DrafterBase):
    """Reads two layers; proposes nothing here."""

    num_drafts: int = NUM_DRAFTS
    taps: tuple[int, ...] = (0, 2)

    def propose(self, params, state, *, config, implementation):
        raise NotImplementedError


def test_a_verdict_without_the_drafters_taps_is_refused():
    config = models.DENSE
    params = models.make_params(config)
    batch = models.make_state(config)
    verdict = jax.eval_shape(
        functools.partial(verify.verify, config=config, taps=(1, 2)),
        params,
        batch,
        batch.proposal.drafts,
        batch.proposal.num_drafts,
    )
    with pytest.raises(ValueError, match=r"taps \[0\]"):
        fold.apply_verdict(batch, verdict, params, TappingDrafter(), config=config)


@contextlib.contextmanager
def jaxtyping_off():
    """Without the tests' type checker, as users run the library."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_arguments_that_do_not_fit_are_refused():
    config = models.DENSE
    params = models.make_params(config)
    batch = models.make_state(config)
    drafter = drafters.NGramDrafter(num_drafts=NUM_DRAFTS)
    with jaxtyping_off():
        with pytest.raises(ValueError, match=r"`max_num_drafts` must be int32\[3\]"):
            steps.propose(params, batch, drafter, jnp.ones(1, jnp.int32), config=config)
        with pytest.raises(ValueError, match="`num_rounds` must be at least 1"):
            steps.decode_rounds(params, batch, num_rounds=0, config=config)
        fewer = dataclasses.replace(config, layers=config.layers[:2])
        with pytest.raises(ValueError, match="`config` has 2 layers"):
            steps.decode_round(params, batch, config=fewer)
        lookup = drafters.PromptLookupDrafter(num_drafts=NUM_DRAFTS)
        with pytest.raises(ValueError, match="give `init_state` and every step"):
            steps.propose(params, batch, lookup, config=config)
        with pytest.raises(ValueError, match="no `drafter` is given"):
            steps.decode_round(params, models.make_state(config, lookup), config=config)
        with pytest.raises(ValueError, match="make the state with that `max_drafts`"):
            steps.propose(params, batch, drafter.replace(num_drafts=15), config=config)
