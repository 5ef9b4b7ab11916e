"""Logit rules: each against its definition, and rounds with drafts against plain ones.

The definitions here work on one row's explicit text: prompt, output, and the drafts
before the row. One compiled program of `NUM_SLOTS` x `NUM_ROWS` rows serves every case.
"""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import tiny_models as models
from metrale_jax import config as config_lib
from metrale_jax import logit_rules, steps, verify
from metrale_jax import sampling as sampling_lib
from metrale_jax import state as state_lib

NUM_SLOTS, NUM_DRAFTS, MAX_LENGTH = 4, 3, 16
NUM_ROWS = NUM_DRAFTS + 1
# Masks of it have a second, unfilled word.
VOCAB_SIZE = 40
END_TOKENS = (2, 33)
CONFIG = config_lib.parse_model_config(
    models.RAW_DENSE | dict(vocab_size=VOCAB_SIZE, eos_token_id=list(END_TOKENS))
)
DECODE = config_lib.DecodeConfig(
    num_slots=NUM_SLOTS,
    max_length=MAX_LENGTH,
    page_size=MAX_LENGTH,
    num_pages=NUM_SLOTS,
    max_drafts=NUM_DRAFTS,
    max_logit_bias=4,
)
# Every number in a case is a multiple of 1/8, so a wrong count or length is off by far
# more than rounding.
TOLERANCE = dict(rtol=2e-6, atol=1e-4)
# What must never be seen: tokens, and what is none.
STALE = (0, 1, 2, -1, VOCAB_SIZE, 2**31 - 1, -(2**31))


@jax.jit
def run_rules(logits, history, sampling, row_masks):
    return logit_rules.apply_rules(
        logits, history, sampling, end_token_ids=END_TOKENS, row_masks=row_masks
    )


def stack(options_of_slots):
    slots = [
        sampling_lib.make_sampling(
            CONFIG, DECODE, sampling_lib.SamplingOptions(**options)
        )
        for options in options_of_slots
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *slots)


def make_history(texts, stale=0):
    """texts: (prompt, output, drafts) per slot."""
    tokens = np.empty((NUM_SLOTS, MAX_LENGTH), np.int32)
    tokens[:] = np.resize(np.array(STALE[stale:] + STALE[:stale]), MAX_LENGTH)
    for slot, (prompt, output, _) in enumerate(texts):
        tokens[slot, : len(prompt) + len(output)] = [*prompt, *output]
    return logit_rules.History(
        tokens=tokens,
        length=np.array([len(p) + len(o) for p, o, _ in texts], np.int32),
        prompt_length=np.array([len(p) for p, _, _ in texts], np.int32),
        drafts=np.array([d for _, _, d in texts], np.int32),
    )


def apply(*slots, logits=None, row_masks=None, stale=0):
    """Rules of some slots, (prompt, output, drafts, options); others have none.

    Without `logits` every logit is 0. Returns f32[slots, K, V].
    """
    slots = [*slots, *[([1], [], [0] * NUM_DRAFTS, {})] * (NUM_SLOTS - len(slots))]
    if logits is None:
        logits = np.zeros((NUM_SLOTS, NUM_ROWS, VOCAB_SIZE), np.float32)
    if row_masks is None:
        row_masks = np.ones((NUM_SLOTS, NUM_ROWS, VOCAB_SIZE), bool)
    history = make_history([slot[:3] for slot in slots], stale)
    packed = sampling_lib.pack_mask(row_masks)
    return np.asarray(
        run_rules(logits, history, stack([slot[3] for slot in slots]), packed)
    )


def changes(ruled):
    """{token: what it lost} of one row whose logits were 0."""
    return {int(token): float(-ruled[token]) for token in np.flatnonzero(ruled)}


# --- The definitions, one row at a time.


def dry_losses(text, multiplier, base, allowed_length, dry_range, breakers):
    """Token -> loss: every suffix is compared with every place where it may stand."""
    text = text[-dry_range:] if dry_range else text
    longest = {}
    for size in range(1, len(text)):
        suffix = text[-size:]
        if set(suffix) & set(breakers):
            break
        for end in range(size, len(text)):
            if text[end - size : end] == suffix:
                longest[text[end]] = size
    return {
        token: multiplier * min(base ** (size - allowed_length), 1e9)
        for token, size in longest.items()
        if size >= allowed_length and token not in breakers
    }


def rule_row(logits, prompt, output, mask, options):
    """One row by the definitions; `output` includes the drafts before the row."""
    options = dataclasses.asdict(sampling_lib.SamplingOptions(**options))
    logits = logits.astype(np.float64)
    for token in {*prompt, *output}:
        penalty = options["repetition_penalty"]
        logits[token] *= 1 / penalty if logits[token] > 0 else penalty
    for token in set(output):
        logits[token] -= options["presence_penalty"]
        logits[token] -= options["frequency_penalty"] * output.count(token)
    losses = dry_losses(
        [*prompt, *output],
        options["dry_multiplier"],
        options["dry_base"],
        options["dry_allowed_length"],
        options["dry_range"],
        options["dry_breakers"],
    )
    for token, loss in losses.items():
        logits[token] -= loss
    for token, bias in options["logit_bias"].items():
        logits[token] += bias
    allowed = options["allowed_token_ids"]
    for token in range(VOCAB_SIZE):
        removed = allowed is not None and token not in allowed
        removed |= token in options["banned_token_ids"] or not mask[token]
        removed |= token in END_TOKENS and len(output) < options["min_new_tokens"]
        if removed:
            logits[token] = -np.inf
    return logits


# Few distinct tokens, so that texts repeat themselves.
TOKENS = st.integers(0, 3)
OPTIONS = st.fixed_dictionaries(
    {},
    optional=dict(
        repetition_penalty=st.sampled_from([0.5, 1.0, 1.25, 2.0]),
        presence_penalty=st.sampled_from([-1.5, 0.0, 0.75]),
        frequency_penalty=st.sampled_from([-0.5, 0.0, 0.25]),
        dry_multiplier=st.sampled_from([0.0, 0.5, 2.0]),
        dry_base=st.sampled_from([1.0, 1.5, 2.0, 1e9]),
        dry_allowed_length=st.sampled_from([1, 2, 3, 5, 2**31 - 1]),
        dry_range=st.sampled_from([0, 1, 2, 3, 5, 8, 2**31 - 1]),
        dry_breakers=st.lists(TOKENS, max_size=2).map(tuple),
        logit_bias=st.dictionaries(
            st.integers(0, 5) | st.just(VOCAB_SIZE - 1),
            st.sampled_from([-np.inf, -4.0, 0.0, 2.5, 100.0]),
            max_size=4,
        ),
        allowed_token_ids=st.lists(TOKENS).map(lambda ids: (*ids, 5, VOCAB_SIZE - 1)),
        banned_token_ids=st.lists(TOKENS).map(tuple),
        min_new_tokens=st.integers(0, 10),
    ),
)
SLOTS = st.tuples(
    st.lists(TOKENS, min_size=1, max_size=MAX_LENGTH // 2),
    st.lists(TOKENS, max_size=MAX_LENGTH // 2),
    st.lists(TOKENS, min_size=NUM_DRAFTS, max_size=NUM_DRAFTS),
    OPTIONS,
)
LOGITS = np.array([-np.inf, -3.5, -1.0, -0.0, 0.0, 0.5, 4.0, np.nan], np.float32)


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    slots=st.lists(SLOTS, min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    seed=st.integers(0, 2**32 - 1),
    is_masked=st.booleans(),
    stale=st.integers(0, len(STALE) - 1),
)
def test_every_row_is_ruled_as_its_own_text_says(slots, seed, is_masked, stale):
    rng = np.random.default_rng(seed)
    shape = (NUM_SLOTS, NUM_ROWS, VOCAB_SIZE)
    logits = rng.choice(LOGITS, shape)
    masks = rng.random(shape) < (0.8 if is_masked else 1.0)
    ruled = apply(*slots, logits=logits, row_masks=masks, stale=stale)
    for slot, (prompt, output, drafts, options) in enumerate(slots):
        for row in range(NUM_ROWS):
            expected = rule_row(
                logits[slot, row],
                prompt,
                [*output, *drafts[:row]],
                masks[slot, row],
                options,
            )
            np.testing.assert_allclose(
                ruled[slot, row], expected, **TOLERANCE, err_msg=f"{slot=} {row=}"
            )


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    slots=st.lists(SLOTS, min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    neutral=st.integers(0, NUM_SLOTS - 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_slot_without_options_keeps_every_bit(slots, neutral, seed):
    logits = np.random.default_rng(seed).choice(
        LOGITS, (NUM_SLOTS, NUM_ROWS, VOCAB_SIZE)
    )
    slots[neutral] = (*slots[neutral][:3], {})
    ruled = apply(*slots, logits=logits)
    np.testing.assert_array_equal(
        ruled[neutral].view(np.uint32), logits[neutral].view(np.uint32)
    )


# --- Each rule on a text that can be followed by hand.


def test_repetition_penalty_counts_each_token_once():
    logits = np.full((NUM_SLOTS, NUM_ROWS, VOCAB_SIZE), 3.0, np.float32)
    logits[:, :, 4:] = -3.0
    text = ([1, 1, 4], [1, 5], [6, 3, 6])
    ruled = apply((*text, dict(repetition_penalty=2.0)), logits=logits)[0]
    penalised = {1: 1.5, 3: 1.5, 4: -6.0, 5: -6.0, 6: -6.0}
    for row, seen in enumerate([{1, 4, 5}, {1, 4, 5, 6}, {1, 3, 4, 5, 6}]):
        expected = logits[0, row].copy()
        for token in seen:
            expected[token] = penalised[token]
        assert ruled[row].tolist() == expected.tolist()
    # The last draft is there already.
    assert ruled[3].tolist() == ruled[2].tolist()


def test_presence_and_frequency_count_output_and_earlier_drafts():
    """The prompt does not count, not even for a token that the output holds too."""
    text = ([7, 7, 8], [7, 9], [9, 9, 10])
    ruled = apply(
        (*text, dict(presence_penalty=1.5)),
        (*text, dict(frequency_penalty=0.5)),
        (*text, dict(presence_penalty=1.5, frequency_penalty=-0.5)),
    )
    assert [changes(row) for row in ruled[0]] == [{7: 1.5, 9: 1.5}] * 3 + [
        {7: 1.5, 9: 1.5, 10: 1.5}
    ] * (NUM_ROWS - 3)
    assert [changes(row) for row in ruled[1]] == [
        {7: 0.5, 9: 0.5},
        {7: 0.5, 9: 1.0},
        {7: 0.5, 9: 1.5},
        {7: 0.5, 9: 1.5, 10: 0.5},
    ]
    # Three 9s cost 1.5 - 3 * 0.5 = 0.
    assert changes(ruled[2][3]) == {7: 1.0, 10: 1.0}


# The text, options, and what each row's tokens lose; the drafts are 5, 6, 7.
DRY_CASES = {
    # Row 1 repeats 5, row 2 repeats 5 6, row 3 repeats 5 6 7.
    "each draft makes the match longer": (
        [5, 6, 7, 8],
        {},
        [{}, {6: 1.0}, {7: 2.0}, {8: 4.0}],
    ),
    "a run of the allowed length costs the multiplier": (
        [5, 6, 7, 8],
        dict(dry_allowed_length=3, dry_multiplier=0.25),
        [{}, {}, {}, {8: 0.25}],
    ),
    # After 9 5 came 6, after 5 alone came 8: one match of 2 and one of 1.
    "every continuation by its own match": (
        [9, 5, 6, 4, 5, 8, 9],
        {},
        [{5: 1.0}, {6: 2.0, 8: 1.0}, {4: 4.0}, {}],
    ),
    # 6 followed 5 after 9 and after 4: the longer match counts, not 2 + 1.
    "the longest match of a token counts": (
        [9, 5, 6, 4, 5, 6, 9],
        {},
        [{5: 1.0}, {6: 2.0}, {4: 4.0, 9: 2.0}, {}],
    ),
    "no match goes beyond a breaker": (
        [5, 6, 7, 8],
        dict(dry_breakers=(5,)),
        [{}, {}, {7: 1.0}, {8: 2.0}],
    ),
    "a breaker is not penalised": (
        [5, 6, 7, 8],
        dict(dry_breakers=(8,)),
        [{}, {6: 1.0}, {7: 2.0}, {}],
    ),
    # Of row 3's text 5 6 7 8 5 6 7 the newest six are seen: a match of 2.
    "matches end where the range begins": (
        [5, 6, 7, 8],
        dict(dry_range=6),
        [{}, {6: 1.0}, {7: 2.0}, {8: 2.0}],
    ),
    "a range that just holds the last token": (
        [5, 6, 7, 8],
        dict(dry_range=1),
        [{}, {}, {}, {}],
    ),
    # 3 3 3 3 equals itself one earlier up to a length of 3.
    "a match may overlap the end of the text": (
        [3, 3, 3, 3],
        {},
        [{3: 4.0}, {}, {}, {}],
    ),
    "a base of 1 costs the same for every length": (
        [5, 6, 7, 8],
        dict(dry_base=1.0),
        [{}, {6: 1.0}, {7: 1.0}, {8: 1.0}],
    ),
}


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("name", DRY_CASES)
def test_dry_penalises_what_continued_the_match(name, split):
    """Over prompt and output alike, wherever the output begins."""
    text, options, expected = DRY_CASES[name]
    options = dict(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1) | options
    ruled = apply((text[:split], text[split:], [5, 6, 7], options))[0]
    assert [changes(row) for row in ruled] == expected


def test_the_dry_penalty_stays_finite_whatever_the_length_and_base():
    options = dict(
        dry_multiplier=1e9, dry_base=1e9, dry_allowed_length=1, logit_bias={3: -1e9}
    )
    ruled = apply(([3] * MAX_LENGTH, [], [3, 3, 3], options))[0]
    assert np.isfinite(ruled).all()
    assert (ruled[:, 3] < -1e17).all()
    assert (np.delete(ruled, 3, axis=1) == 0).all()


def test_min_new_tokens_removes_every_end_token_up_to_the_boundary():
    """Rows 0..3 pick output tokens 2..5; the prompt does not count."""
    text = ([9] * 6, [8, 8], [8, 8, 8])
    for minimum in range(8):
        ruled = apply((*text, dict(min_new_tokens=minimum)))[0]
        for row in range(NUM_ROWS):
            is_early = 2 + row < minimum
            removed = np.flatnonzero(ruled[row] == -np.inf).tolist()
            assert removed == (list(END_TOKENS) if is_early else [])
            assert (ruled[row] == 0).sum() == VOCAB_SIZE - len(removed)


def test_biases_hold_at_every_row():
    logits = np.zeros((NUM_SLOTS, NUM_ROWS, VOCAB_SIZE), np.float32)
    logits[:, :, 7] = 50.0
    text = ([1], [2], [3, 4, 5])
    ban, force = dict(logit_bias={7: -np.inf, 0: -1.0}), dict(logit_bias={39: 100.0})
    ruled = apply((*text, ban), (*text, force), logits=logits)
    assert (ruled[0, :, 7] == -np.inf).all()
    assert (ruled[0, :, 0] == -1.0).all()
    assert (np.delete(ruled[0], (0, 7), axis=1) == 0).all()
    assert (ruled[1].argmax(axis=-1) == 39).all()
    assert (np.delete(ruled[1], 39, axis=1) == np.delete(logits[1], 39, axis=1)).all()


def test_no_bias_brings_a_removed_token_back():
    logits = np.zeros((NUM_SLOTS, NUM_ROWS, VOCAB_SIZE), np.float32)
    logits[0, :, 3] = -np.inf
    history = make_history([([1], [], [0] * NUM_DRAFTS)] * NUM_SLOTS)
    sampling = stack([dict(banned_token_ids=(5,))] * NUM_SLOTS)
    # Beyond what `make_sampling` lets through.
    sampling.bias_ids[:] = [3, 4, 5, 6]
    sampling.bias_values[:] = [np.inf, -np.inf, np.inf, 0.0]
    masks = np.full((NUM_SLOTS, NUM_ROWS, 2), 2**32 - 1, np.uint32)
    ruled = np.asarray(run_rules(logits, history, sampling, masks))
    assert (ruled[0, :, 3:6] == -np.inf).all()
    assert not np.isnan(ruled).any()


def test_one_slots_rule_changes_no_other_slot():
    text = ([1, 2], [1, 2], [1, 2, 1])
    banned = dict(banned_token_ids=(3, 9), repetition_penalty=2.0, dry_multiplier=1.0)
    logits = np.full((NUM_SLOTS, NUM_ROWS, VOCAB_SIZE), -0.0, np.float32)
    ruled = apply(*[(*text, {})] * 2, (*text, banned), (*text, {}), logits=logits)
    removed = np.argwhere(ruled == -np.inf)
    assert set(removed[:, 0]) == {2}
    assert set(removed[:, 2]) == {3, 9}
    others = [0, 1, 3]
    np.testing.assert_array_equal(
        ruled[others].view(np.uint32), logits[others].view(np.uint32)
    )


def test_only_even_ids_are_left():
    even = tuple(range(0, VOCAB_SIZE, 2))
    ruled = apply(([1], [3], [5, 7, 9], dict(allowed_token_ids=even)))[0]
    assert (ruled[:, ::2] == 0).all()
    assert (ruled[:, 1::2] == -np.inf).all()


def test_row_masks_and_allowed_tokens_both_count():
    masks = np.zeros((NUM_SLOTS, NUM_ROWS, VOCAB_SIZE), bool)
    for row in range(NUM_ROWS):
        masks[0, row, [row, 20 + row, 39]] = True
    options = dict(banned_token_ids=(39,))
    ruled = apply(([1], [], [0, 1, 2], options), row_masks=masks)
    for row in range(NUM_ROWS):
        assert np.flatnonzero(ruled[0, row] == 0).tolist() == [row, 20 + row]
    assert (ruled[1:] == -np.inf).all()


@functools.cache
def judge_program():
    def judge(batch, logits, drafts, num_drafts, masks):
        return verify.judge(
            batch, logits, drafts, num_drafts, config=CONFIG, row_masks=masks
        )

    return jax.jit(judge)


def judge(drafts, num_drafts, masks):
    """Judges slot 0; every row's likeliest token is 9, then 8."""
    batch = state_lib.init_state(CONFIG, DECODE, dtype=jnp.dtype(jnp.float32))
    batch = batch.replace(
        length_limit=jnp.full(NUM_SLOTS, DECODE.max_length, jnp.int32)
    )
    logits = np.zeros((NUM_SLOTS, NUM_ROWS, VOCAB_SIZE), np.float32)
    logits[:, :, 9], logits[:, :, 8] = 5.0, 4.0
    all_drafts = np.zeros((NUM_SLOTS, NUM_DRAFTS), np.int32)
    all_drafts[0] = drafts
    counts = np.array([num_drafts] + [0] * (NUM_SLOTS - 1), np.int32)
    all_masks = np.ones((NUM_SLOTS, NUM_ROWS, VOCAB_SIZE), bool)
    all_masks[0] = masks
    verdict = judge_program()(
        batch, logits, all_drafts, counts, sampling_lib.pack_mask(all_masks)
    )
    return jax.device_get(verdict)


@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
@pytest.mark.parametrize("num_drafts", range(NUM_DRAFTS + 1))
def test_the_bonus_token_is_legal_behind_any_number_of_drafts(num_drafts, num_right):
    """Row i's mask allows only token 10 + i; padding drafts hold the likeliest."""
    masks = np.zeros((NUM_ROWS, VOCAB_SIZE), bool)
    masks[range(NUM_ROWS), range(10, 10 + NUM_ROWS)] = True
    drafts = [10 + i if i < num_right else 9 for i in range(NUM_DRAFTS)]
    judgement = judge(drafts, num_drafts, masks)
    accepted = min(num_right, num_drafts)
    assert judgement.num_accepted.tolist() == [accepted, 0, 0, 0]
    assert judgement.bonus_token.tolist() == [10 + accepted, 9, 9, 9]
    assert judgement.is_valid.all()


@pytest.mark.parametrize("empty_row", range(NUM_ROWS))
@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_a_row_without_a_token_fails_its_slot_only_if_it_is_reached(
    num_right, empty_row
):
    """Behind a wrong draft a grammar has no state, hence no mask to give."""
    masks = np.ones((NUM_ROWS, VOCAB_SIZE), bool)
    masks[empty_row] = False
    drafts = [9 if i < num_right else 7 for i in range(NUM_DRAFTS)]
    judgement = judge(drafts, NUM_DRAFTS, masks)
    assert judgement.is_valid.tolist() == [num_right < empty_row, True, True, True]


def test_no_row_behind_an_accepted_end_token_is_reached():
    """A grammar is complete there; plain decoding has stopped."""
    masks = np.ones((NUM_ROWS, VOCAB_SIZE), bool)
    masks[1] = np.arange(VOCAB_SIZE) == END_TOKENS[1]
    masks[2:] = False
    judgement = judge([9, END_TOKENS[1], 7], NUM_DRAFTS, masks)
    assert judgement.num_accepted[0] == 2
    assert judgement.is_valid.all()
    masks[1] = np.arange(VOCAB_SIZE) == 8
    judgement = judge([9, 8, 7], NUM_DRAFTS, masks)
    assert judgement.num_accepted[0] == 2
    assert judgement.is_valid.tolist() == [False, True, True, True]


TARGET_END_TOKENS = (7, 120)
TARGET = models.with_end_tokens(models.DENSE, *TARGET_END_TOKENS)
PROMPTS = ([5, 17, 3, 99, 21, 5, 17], [2, 40, 2], [101, 9, 9, 9])
NEUTRAL_SLOT = 1
# Every slot may use these only, so that texts repeat themselves.
FEW_TOKENS = (3, 9, 17, 40, 77, 98)
BASE = dict(allowed_token_ids=FEW_TOKENS)
WITH_END_TOKENS = dict(allowed_token_ids=(*FEW_TOKENS, *TARGET_END_TOKENS))
FAMILIES = {
    "repetition": dict(repetition_penalty=1.5),
    "presence": dict(presence_penalty=0.75),
    "frequency": dict(frequency_penalty=0.5),
    "dry": dict(dry_multiplier=4.0, dry_allowed_length=1, dry_breakers=(9,)),
    "bias": dict(logit_bias={3: -np.inf, 17: 0.5}),
    "masks": dict(allowed_token_ids=tuple(range(0, TARGET_END_TOKENS[1], 2))),
    # The bias would end the text at once; it ends at the first token that may.
    "min_new_tokens": WITH_END_TOKENS
    | dict(min_new_tokens=6, logit_bias={7: 100.0, 120: 90.0}),
}
FAMILIES["all"] = (
    {name: value for options in FAMILIES.values() for name, value in options.items()}
    | WITH_END_TOKENS
    | dict(min_new_tokens=14, logit_bias={7: 100.0, 3: -np.inf, 17: 0.5})
)
SAMPLING = {"greedy": {}, "sampled": dict(temperature=1.0, top_k=40, top_p=0.95)}
# Drafts that are right, per round and slot; three are offered.
NUM_RIGHT = ((3, 0, 2), (0, 3, 1), (1, 2, 3), (2, 1, 0))
# What twice these rounds emit.
NUM_TOKENS = 20


@functools.cache
def target_params():
    return models.make_params(TARGET)


def start_all(family_options, sampling_options):
    """Two slots with the options, and a neutral one between them."""
    batch = models.make_state(TARGET)
    for slot, prompt in enumerate(PROMPTS):
        options = BASE | ({} if slot == NEUTRAL_SLOT else family_options)
        batch = models.start(
            target_params(),
            TARGET,
            batch,
            slot,
            prompt,
            seed=slot,
            **options,
            **sampling_options,
        )
    return batch


def all_outputs(batch):
    return [
        models.output_tokens(batch, slot, len(prompt))
        for slot, prompt in enumerate(PROMPTS)
    ]


def plain_outputs(family_options, sampling_options):
    batch = start_all(family_options, sampling_options)
    batch = models.decode(target_params(), TARGET, batch, NUM_TOKENS)
    return all_outputs(batch)


@functools.cache
def neutral_outputs(sampling):
    return plain_outputs({}, SAMPLING[sampling])


def other_token(token):
    """A wrong draft that could be right, and that rules would count."""
    return FEW_TOKENS[0] if token != FEW_TOKENS[0] else FEW_TOKENS[1]


def scripted_round(batch, expected, num_right):
    """A round whose first `num_right` drafts are what plain decoding emits next."""
    drafts = np.zeros((len(PROMPTS), NUM_DRAFTS), np.int32)
    for slot, output in enumerate(all_outputs(batch)):
        following = expected[slot][len(output) :][:NUM_DRAFTS]
        drafts[slot, : len(following)] = following
        for column in range(num_right[slot], NUM_DRAFTS):
            drafts[slot, column] = other_token(drafts[slot, column])
    offered = jnp.full(len(PROMPTS), NUM_DRAFTS, jnp.int32)
    verdict = steps.verify_batched(
        target_params(), batch, jnp.asarray(drafts), offered, config=TARGET
    )
    return steps.apply_verdict(batch, verdict, config=TARGET)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_with_drafts_emit_what_plain_decoding_emits(family, sampling):
    options = FAMILIES[family]
    expected = plain_outputs(options, SAMPLING[sampling])
    neutral = neutral_outputs(sampling)
    # The rule does something where it is on, and nothing where it is off.
    for slot in range(len(PROMPTS)):
        assert (expected[slot] == neutral[slot]) == (slot == NEUTRAL_SLOT)

    batch = start_all(options, SAMPLING[sampling])
    for num_right in NUM_RIGHT * 2:
        was_active = np.asarray(batch.active)
        batch, emission = scripted_round(batch, expected, num_right)
        goes_on = was_active & ~np.asarray(emission.finished)
        np.testing.assert_array_equal(
            np.asarray(emission.count)[goes_on], np.array(num_right)[goes_on] + 1
        )
    assert all_outputs(batch) == expected
    check_family(family, all_outputs(batch))


def check_family(family, outputs):
    """What the rule promises, by itself, of the slots that have it."""
    for slot, output in enumerate(outputs):
        if slot == NEUTRAL_SLOT:
            continue
        if family == "masks":
            assert all(token % 2 == 0 for token in output)
        if "logit_bias" in FAMILIES[family] and family != "min_new_tokens":
            assert 3 not in output
        if "min_new_tokens" in FAMILIES[family]:
            assert len(output) == FAMILIES[family]["min_new_tokens"] + 1
            assert output[-1] == 7
            assert not set(output[:-1]) & set(TARGET_END_TOKENS)


def test_a_slot_to_which_no_token_is_left_fails_alone():
    batch = start_all({}, {})
    expected = neutral_outputs("greedy")
    masks = batch.sampling.allowed_tokens.at[2].set(0)
    batch = batch.replace(sampling=batch.sampling.replace(allowed_tokens=masks))
    before = models.slot_values(batch, TARGET, 2)
    for num_right in NUM_RIGHT:
        batch, emission = scripted_round(batch, expected, num_right)
        assert emission.count.tolist() == [num_right[0] + 1, num_right[1] + 1, 0]
    assert batch.finish_reason.tolist() == [
        state_lib.RUNNING,
        state_lib.RUNNING,
        state_lib.FINISHED_ERROR,
    ]
    assert batch.active.tolist() == [True, True, False]
    for slot, output in enumerate(all_outputs(batch)):
        assert output == expected[slot][: len(output)]
    after = models.slot_values(batch, TARGET, 2)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_a_mask_says_what_the_first_token_may_be():
    params = models.make_params(TARGET)
    masks = np.zeros((1, 1, models.VOCAB_SIZE), bool)
    masks[0, 0, [44, 55]] = True
    batch = models.make_state(TARGET)
    request = models.make_request(TARGET, 1)
    batch = steps.insert(batch, jnp.int32(1), request)
    chunk = [*PROMPTS[0], *[0] * (models.CHUNK_LENGTH - len(PROMPTS[0]))]

    def first_token(masks):
        _, output = steps.prefill(
            params,
            jax.tree.map(jnp.copy, batch),
            jnp.array([1], jnp.int32),
            jnp.array([chunk], jnp.int32),
            jnp.array([len(PROMPTS[0])], jnp.int32),
            jnp.array([True]),
            config=TARGET,
            row_masks=sampling_lib.pack_mask(masks),
        )
        return int(output.emission.tokens[0, 0]), int(output.emission.reason[0])

    token, reason = first_token(masks)
    assert token in (44, 55)
    assert reason == state_lib.RUNNING
    # The token that it may not be any more leaves the other one.
    masks[0, 0, token] = False
    assert first_token(masks) == (44 + 55 - token, state_lib.RUNNING)
    assert first_token(np.zeros_like(masks)) == (0, state_lib.FINISHED_ERROR)
