"""Sampling options: what they pack into, what they refuse, what they leave alone."""

import dataclasses
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import tiny_models as models
from metrale_jax import config as config_lib
from metrale_jax import logit_rules, picks
from metrale_jax import sampling as sampling_lib
from metrale_jax import state as state_lib

VOCAB_SIZE = 40
CONFIG = config_lib.parse_model_config(models.RAW_DENSE | dict(vocab_size=VOCAB_SIZE))
DECODE = config_lib.DecodeConfig(
    num_slots=2, max_length=8, page_size=8, num_pages=2, max_logit_bias=3
)


def make(**options):
    return sampling_lib.make_sampling(
        CONFIG, DECODE, sampling_lib.SamplingOptions(**options)
    )


def allowed_ids(sampling):
    unpacked = sampling_lib.unpack_mask(sampling.allowed_tokens, VOCAB_SIZE)
    return np.flatnonzero(unpacked).tolist()


# --- Masks.


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 100])
@hypothesis.settings(max_examples=10)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_masks_survive_packing(vocab_size, seed):
    allowed = np.random.default_rng(seed).random((2, 3, vocab_size)) < 0.5
    words = sampling_lib.pack_mask(allowed)
    assert words.dtype == np.uint32
    assert words.shape == (2, 3, sampling_lib.num_mask_words(vocab_size))
    unpacked = sampling_lib.unpack_mask(jnp.asarray(words), vocab_size)
    np.testing.assert_array_equal(unpacked, allowed)


@pytest.mark.parametrize("vocab_size", [31, 32, 33])
def test_a_mask_that_allows_every_token_is_all_ones(vocab_size):
    words = sampling_lib.pack_mask(np.ones(vocab_size, bool))
    assert (words == 2**32 - 1).all()


def test_token_32_w_plus_i_is_bit_i_of_word_w():
    allowed = np.zeros(64, bool)
    allowed[[0, 5, 31, 33]] = True
    words = sampling_lib.pack_mask(allowed)
    assert words.tolist() == [1 | 1 << 5 | 1 << 31, 1 << 1]


# --- What the options become.


def test_options_become_one_slot_of_the_described_arrays():
    described = sampling_lib.describe_sampling(CONFIG, DECODE)
    made = make(
        logit_bias={3: 1.5, 39: -np.inf},
        dry_breakers=(7,),
        top_k=5,
        dry_range=2**31 - 1,
    )
    assert jax.tree.structure(made) == jax.tree.structure(described)
    for value, batch in zip(
        jax.tree.leaves(made), jax.tree.leaves(described), strict=True
    ):
        assert (DECODE.num_slots, *value.shape) == batch.shape
        assert value.dtype == batch.dtype
    assert made.bias_ids.tolist() == [3, 39, 0]
    assert made.bias_values.tolist() == [1.5, -np.inf, 0.0]
    assert made.dry_breakers.tolist() == [7] + [sampling_lib.NO_TOKEN] * 7
    assert int(made.dry_range) == 2**31 - 1


def test_allowed_and_banned_tokens_share_the_mask():
    assert allowed_ids(make()) == list(range(VOCAB_SIZE))
    assert allowed_ids(make(allowed_token_ids=(39, 2, 2))) == [2, 39]
    assert allowed_ids(make(allowed_token_ids=(1, 2, 39), banned_token_ids=(2,))) == [
        1,
        39,
    ]
    banned = make(banned_token_ids=tuple(range(39)))
    assert allowed_ids(banned) == [39]


def test_the_defaults_are_those_of_a_free_slot_where_these_are_read():
    """Both change no logit; what only counts with a rule on may differ."""
    batch = state_lib.init_state(CONFIG, DECODE, dtype=jnp.dtype(jnp.float32))
    unread = ("dry_base", "dry_allowed_length")
    for field in dataclasses.fields(sampling_lib.Sampling):
        if field.name not in unread:
            free = getattr(batch.sampling, field.name)[0]
            np.testing.assert_array_equal(
                getattr(make(), field.name), free, err_msg=field.name
            )


def test_the_defaults_change_no_logit_and_are_greedy():
    sampling = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), make())
    logits = np.random.default_rng(0).normal(size=(2, 3, VOCAB_SIZE))
    logits = jnp.asarray(logits, jnp.float32).at[0, 0, :3].set(-0.0)
    history = logit_rules.History(
        tokens=jnp.full((2, 8), 3, jnp.int32),
        length=jnp.array([5, 8], jnp.int32),
        prompt_length=jnp.array([2, 1], jnp.int32),
        drafts=jnp.full((2, 2), 3, jnp.int32),
    )
    ruled = jax.jit(logit_rules.apply_rules, static_argnames="end_token_ids")(
        logits, history, sampling, end_token_ids=(3,)
    )
    np.testing.assert_array_equal(
        np.asarray(ruled).view(np.uint32), np.asarray(logits).view(np.uint32)
    )
    assert picks.is_greedy(sampling).all()
    warped = picks.warp_logits(logits, sampling)
    assert np.isfinite(warped).all()


# --- What is refused.

NAN, INFINITY = float("nan"), float("inf")
OUT_OF_RANGE = {
    "temperature": (-0.1, 1e10, NAN, INFINITY),
    "top_k": (-1, 2**31),
    "top_p": (0.0, -0.1, 1.1, NAN),
    "min_p": (-0.1, 1.1, NAN),
    "repetition_penalty": (0.0, -1.0, 1e10, NAN, INFINITY),
    "presence_penalty": (-1e10, 1e10, NAN, INFINITY),
    "frequency_penalty": (-1e10, 1e10, NAN, INFINITY),
    "dry_multiplier": (-0.5, 1e10, NAN, INFINITY),
    "dry_base": (0.5, 1e10, NAN, INFINITY),
    "dry_allowed_length": (0, 2**31),
    "dry_range": (-1, 2**31),
    "min_new_tokens": (-1, 2**31),
    "seed": (-1, 2**64),
    "logit_bias": ({3: NAN}, {3: INFINITY}, {3: 1e10}, {-1: 1.0}, {VOCAB_SIZE: 1.0}),
    "dry_breakers": ((-1,), (VOCAB_SIZE,), tuple(range(9))),
    "allowed_token_ids": ((-1,), (3, VOCAB_SIZE), ()),
    "banned_token_ids": ((-1,), (VOCAB_SIZE,), tuple(range(VOCAB_SIZE))),
}
REFUSED = [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]


def test_every_option_has_a_case_that_is_refused():
    options = {field.name for field in dataclasses.fields(sampling_lib.SamplingOptions)}
    assert options == set(OUT_OF_RANGE)


@pytest.mark.parametrize("name, value", REFUSED, ids=str)
def test_an_option_out_of_its_range_is_named(name, value):
    with pytest.raises(ValueError, match=re.escape(f"`{name}`")):
        make(**{name: value})


def test_bounds_themselves_are_allowed():
    make(
        temperature=0.0,
        top_k=2**31 - 1,
        top_p=1.0,
        min_p=1.0,
        repetition_penalty=1e-3,
        presence_penalty=-1e9,
        frequency_penalty=1e9,
        dry_multiplier=1e9,
        dry_base=1.0,
        dry_allowed_length=2**31 - 1,
        dry_breakers=tuple(range(8)),
        logit_bias={0: -np.inf, VOCAB_SIZE - 1: 1e9},
        min_new_tokens=2**31 - 1,
        seed=2**64 - 1,
    )


def test_more_biases_than_the_batch_has_room_for_are_refused_with_a_way_out():
    make(logit_bias={0: 1.0, 1: 1.0, 2: 1.0})
    with pytest.raises(ValueError, match="at most 3 tokens, got 4.*`max_logit_bias`"):
        make(logit_bias={0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})


def test_options_that_leave_no_token_are_refused():
    with pytest.raises(ValueError, match="leave no token"):
        make(allowed_token_ids=(3, 4), banned_token_ids=(3, 4, 5))


# --- Seeds.


def test_a_request_key_is_the_seed_high_word_first():
    assert sampling_lib.request_key(7).tolist() == [0, 7]
    assert sampling_lib.request_key(2**32 + 5).tolist() == [1, 5]
    assert sampling_lib.request_key(2**64 - 1).tolist() == [2**32 - 1] * 2
    assert make(seed=2**63).request_key.tolist() == [2**31, 0]


@pytest.mark.parametrize("name", ["top_k", "min_new_tokens", "seed", "dry_range"])
def test_counts_are_integers(name):
    with pytest.raises(ValueError, match=f"`{name}` must be an integer"):
        sampling_lib.SamplingOptions(**{name: 1.5})
