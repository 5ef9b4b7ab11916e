"""N-gram and prompt lookup: what they find, against a search in plain Python."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import tiny_models as models
from metrale_jax import drafters
from metrale_jax import state as state_lib
from metrale_jax.drafters import prompt_lookup, protocol, suffix

MAX_LENGTH = 16
MAX_MATCH = 4
NUM_DRAFTS = 3


def match_length(text, end, max_match):
    """Tokens up to `end` that equal the text's last ones, by definition."""
    length = 0
    while (
        length < max_match
        and length <= end
        and text[end - length] == text[len(text) - 1 - length]
    ):
        length += 1
    return length


match_lengths = jax.jit(suffix.match_lengths, static_argnames=("max_match",))


@hypothesis.given(
    st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LENGTH),
        min_size=3,
        max_size=3,
    )
)
@hypothesis.settings(max_examples=200)
def test_match_lengths_are_those_of_the_definition(texts):
    # Stale tokens beyond a text, equal to what would match, must not matter.
    padded = [[*text, *[text[-1]] * (MAX_LENGTH - len(text))] for text in texts]
    found = match_lengths(
        jnp.array(padded, jnp.int32),
        jnp.array([len(text) for text in texts], jnp.int32),
        max_match=MAX_MATCH,
    )
    for row, text in zip(np.asarray(found), texts, strict=True):
        expected = [match_length(text, end, MAX_MATCH) for end in range(len(text) - 1)]
        assert row.tolist() == expected + [0] * (MAX_LENGTH - len(expected))


def state_of(texts, drafter_state=None):
    """A state whose slots hold these texts, the last token not yet inside."""
    decode = dataclasses.replace(
        models.DECODE, num_slots=len(texts), num_pages=8 * len(texts)
    )
    batch = state_lib.init_state(models.DENSE, decode, dtype=jnp.dtype(jnp.float32))
    tokens = np.full(batch.tokens.shape, 99, np.int32)
    for slot, text in enumerate(texts):
        tokens[slot, : len(text)] = text
    return batch.replace(
        tokens=jnp.asarray(tokens),
        length=jnp.array([len(text) - 1 for text in texts], jnp.int32),
        active=jnp.ones(len(texts), bool),
        drafter=drafter_state,
    )


PARAMS = models.make_params(models.DENSE)


def propose(drafter, texts, drafter_state=None):
    proposal = drafter.propose(
        PARAMS,
        state_of(texts, drafter_state),
        config=models.DENSE,
        implementation=None,
    )
    counts = proposal.num_drafts.tolist()
    return [proposal.drafts[slot, :count].tolist() for slot, count in enumerate(counts)]


def test_ngram_takes_the_longest_and_earliest_match():
    drafter = drafters.NGramDrafter(num_drafts=NUM_DRAFTS, min_match=2)
    assert propose(
        drafter,
        [
            # [1, 2] stands at 0 and, with the 5 before it, at 4: longest wins.
            [1, 2, 3, 5, 1, 2, 4, 9, 5, 1, 2],
            # Twice as long as each other: the earliest wins.
            [1, 2, 3, 8, 1, 2, 4, 9, 1, 2],
            # One token is not enough.
            [1, 2, 3, 1],
            # Nothing repeats, and nothing can.
            [7],
        ],
    ) == [[4, 9, 5], [3, 8, 1], [], []]


def test_a_match_near_the_end_goes_round():
    drafter = drafters.NGramDrafter(num_drafts=5, min_match=2)
    assert propose(drafter, [[9, 1, 2, 1, 2]]) == [[1, 2, 1, 2, 1]]


def test_ngram_caps_long_matches():
    drafter = drafters.NGramDrafter(num_drafts=1, min_match=1, max_match=2)
    # Position 1 and position 4 both match in two or more tokens: the earlier wins.
    assert propose(drafter, [[3, 4, 7, 5, 3, 4, 8, 5, 3, 4]]) == [[7]]


def lookup_state(window, num_misses=0, pause=0):
    return prompt_lookup.LookupState(
        window=jnp.array([window], jnp.int32),
        num_misses=jnp.array([num_misses], jnp.int32),
        pause=jnp.array([pause], jnp.int32),
    )


LOOKUP = drafters.PromptLookupDrafter(num_drafts=7, min_match=2, max_pause=4)
REPEATS = [1, 2, 3, 8, 1, 2, 4, 5, 6, 7, 1, 2]


def test_lookup_copies_from_the_latest_match_a_window_long():
    assert propose(LOOKUP, [REPEATS], lookup_state(0)) == [[4, 5]]
    assert propose(LOOKUP, [REPEATS], lookup_state(4)) == [[4, 5, 6, 7]]
    assert propose(LOOKUP, [REPEATS], lookup_state(4, pause=1)) == [[]]
    assert propose(LOOKUP, [[1, 2, 3, 4]], lookup_state(4)) == [[]]


def after_round(past, num_drafts, num_accepted, count=1):
    state = state_of([REPEATS], past)
    width = models.DENSE.hidden_size
    rows = protocol.CommittedRows(
        start=state.length,
        count=jnp.array([count], jnp.int32),
        next_tokens=jnp.zeros((1, 8), jnp.int32),
        hidden=jnp.zeros((1, 8, width), jnp.float32),
        taps=(),
        num_drafts=jnp.array([num_drafts], jnp.int32),
        num_accepted=jnp.array([num_accepted], jnp.int32),
    )
    kept = LOOKUP.commit(PARAMS, state, rows, config=models.DENSE, implementation=None)
    return jax.tree.map(lambda leaf: int(leaf[0]), kept)


def test_the_window_doubles_and_halves():
    windows, past = [], lookup_state(0)
    for num_drafts, num_accepted in ((2, 2), (4, 4), (7, 7), (7, 3), (3, 0), (1, 0)):
        kept = after_round(past, num_drafts, num_accepted)
        windows.append(kept.window)
        past = lookup_state(kept.window)
    assert windows == [4, 7, 7, 3, 1, 1]


def test_misses_make_the_search_pause():
    pauses, past = [], lookup_state(2)
    for _ in range(10):
        kept = after_round(past, 0, 0)
        pauses.append(kept.pause)
        past = lookup_state(kept.window, kept.num_misses, kept.pause)
    # 1, 2, then 4 rounds at most; a paused round only counts down.
    assert pauses == [1, 0, 2, 1, 0, 4, 3, 2, 1, 0]
    kept = after_round(past, 2, 1)
    assert (kept.num_misses, kept.pause) == (0, 0)


def test_a_slot_that_was_not_served_keeps_what_it_knows():
    past = lookup_state(4, 2, 1)
    kept = after_round(past, 0, 0, count=0)
    assert (kept.window, kept.num_misses, kept.pause) == (4, 2, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drafters.NGramDrafter(num_drafts=0), "num_drafts"),
        (lambda: drafters.NGramDrafter(num_drafts=16), "num_drafts"),
        (lambda: drafters.NGramDrafter(min_match=0), "min_match"),
        (lambda: drafters.NGramDrafter(min_match=5, max_match=4), "min_match"),
        (lambda: drafters.PromptLookupDrafter(min_match=0), "min_match"),
        (lambda: drafters.PromptLookupDrafter(max_pause=-1), "max_pause"),
        (lambda: drafters.SelfSpeculationDrafter(layers=()), "layers"),
        (lambda: drafters.SelfSpeculationDrafter(layers=(2, 1)), "layers"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_layers_must_be_the_targets():
    drafter = drafters.SelfSpeculationDrafter(layers=(0, 4))
    with pytest.raises(ValueError, match=r"0\.\.3"):
        models.make_state(models.DENSE, drafter)
