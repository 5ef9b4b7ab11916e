"""Logit rules: each against its definition, and rounds with drafts against plain ones.

The definitions here work on one row's explicit text: prompt, output, and the drafts
before the row. One compiled program of `NUM_SLOTS` x `NUM_ROWS` rows serves every case.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import helpers
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
        sampling_lib.make_sampling(CONFIG, DECODE, **options)
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
    options = make_sampling_defaults() | options
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


def make_sampling_defaults():
    return dict(
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        dry_multiplier=0.0,
        dry_base=1.75,
        dry_allowed_length=2,
        dry_range=0,
        dry_breakers=(),
        logit_bias={},
        allowed_token_ids=None,
        banned_token_ids=(),
        min_new_tokens=0,
    )


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
        dry_breakers=st.lists(TOKENS, max_size=2),
        logit_bias=st.dictionaries(
            st.integers(0, 5) | st.just(VOCAB_SIZE - 1),
            st.sampled_from([-np.inf, -4.0, 0.0, 2.5, 100.0]),
            max_size=4,
        ),
        allowed_token_ids=st.lists(TOKENS).map(lambda ids: [*ids, 5, VOCAB_SIZE - 1]),
        banned_token_ids=st.lists(TOKENS),
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
