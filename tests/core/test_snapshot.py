"""Forking, going back and moving a sequence: as if nothing had happened."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_models as models
from metrale_jax import drafters, steps
from metrale_jax import state as state_lib

PROMPT = [5, 17, 3, 99, 21, 8, 64]
PAGES = models.MAX_LENGTH // models.PAGE_SIZE
CONFIG = models.DENSE
PARAMS = models.make_params(CONFIG)


def pages_of(slot):
    return jnp.arange(PAGES, dtype=jnp.int32) + slot * PAGES


def round_with(batch, drafts):
    """One round in which every slot judges the same three drafts."""
    verdict = steps.verify_batched(
        PARAMS,
        batch,
        jnp.tile(jnp.array(drafts, jnp.int32), (models.NUM_SLOTS, 1)),
        jnp.full(models.NUM_SLOTS, len(drafts), jnp.int32),
        config=CONFIG,
    )
    return steps.apply_verdict(batch, verdict, config=CONFIG)[0]


def after_partial_reject():
    """A slot 1 in the middle of its text, rows pending, some drafts rejected."""
    batch = models.start(PARAMS, CONFIG, models.make_state(CONFIG), 1, PROMPT)
    plain = models.decode(PARAMS, CONFIG, jax.tree.map(jnp.copy, batch), 4)
    right = models.output_tokens(plain, 1, len(PROMPT))
    batch = round_with(batch, [right[1], right[2], (right[3] + 1) % models.VOCAB_SIZE])
    assert int(batch.num_pending[1]) == 3
    return batch


def continuation(batch, slot, num_rounds=6):
    for _ in range(num_rounds):
        batch = round_with(batch, [1, 2, 3])
    return models.slot_values(batch, CONFIG, slot)


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def test_a_fork_and_its_parent_go_their_own_ways():
    batch = after_partial_reject()
    expected = continuation(jax.tree.map(jnp.copy, batch), 1)
    saved = steps.take_snapshot(batch, jnp.int32(1))
    batch = steps.restore_snapshot(batch, jnp.int32(2), saved, pages_of(2))
    # The fork reads another token next; its parent must not notice, nor it the parent.
    other_token = (batch.last_token[2] + 1) % models.VOCAB_SIZE
    batch = batch.replace(last_token=batch.last_token.at[2].set(other_token))
    alone = models.make_state(CONFIG)
    alone = steps.restore_snapshot(alone, jnp.int32(2), saved, pages_of(2))
    alone = alone.replace(last_token=alone.last_token.at[2].set(other_token))
    expected_fork = continuation(alone, 2)
    for _ in range(6):
        batch = round_with(batch, [1, 2, 3])
    assert_equal(models.slot_values(batch, CONFIG, 1), expected)
    assert_equal(models.slot_values(batch, CONFIG, 2), expected_fork)


def test_going_back_undoes_what_came_after():
    batch = after_partial_reject()
    expected = continuation(jax.tree.map(jnp.copy, batch), 1)
    saved = steps.take_snapshot(batch, jnp.int32(1))
    batch = models.decode(PARAMS, CONFIG, batch, 5)
    batch = steps.restore_snapshot(batch, jnp.int32(1), saved, pages_of(1))
    assert_equal(continuation(batch, 1), expected)


def test_a_saved_sequence_goes_on_in_another_batch():
    batch = after_partial_reject()
    saved = jax.device_get(steps.take_snapshot(batch, jnp.int32(1)))
    expected = continuation(batch, 1)
    # Elsewhere: another slot and other pages, in a batch full of foreign values.
    other = jax.tree.map(models.poison, models.make_state(CONFIG))
    fresh = models.make_state(CONFIG)
    other = other.replace(active=fresh.active, page_table=fresh.page_table)
    other = steps.restore_snapshot(
        other, jnp.int32(0), jax.tree.map(jnp.asarray, saved), pages_of(2)
    )
    assert_equal(continuation(other, 0), expected)


def test_every_leaf_of_a_drafter_comes_along():
    config = dataclasses.replace(CONFIG, num_mtp_layers=1)
    head = models.params_lib.init_params(
        config, rng_key=jax.random.key(0), with_mtp=True
    )
    drafter = drafters.mtp_drafter(
        head,
        config,
        num_drafts=models.MAX_DRAFTS,
        draft_sampling="sampled",
        num_candidates=2,
    )
    batch = models.make_state(config, drafter)
    count = iter(range(1, 1000))
    batch = jax.tree.map(
        lambda leaf: (
            jnp.full_like(leaf, next(count) % 100)
            if leaf.dtype != jnp.bool_
            else jnp.ones_like(leaf)
        ),
        batch,
    )
    batch = batch.replace(page_table=pages_of(0)[None] + jnp.arange(3)[:, None] * PAGES)
    saved = steps.take_snapshot(batch, jnp.int32(1))
    other = models.make_state(config, drafter)
    other = steps.restore_snapshot(other, jnp.int32(0), saved, pages_of(2))
    again = steps.take_snapshot(other, jnp.int32(0))
    for (path, one), expected in zip(
        jax.tree.leaves_with_path(again), jax.tree.leaves(saved), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if name != ".slot.page_table":
            np.testing.assert_array_equal(one, expected, err_msg=name)
    # Nothing of the other slots or pages was written.
    untouched = models.make_state(config, drafter)
    assert_equal(
        models.slot_values(other, config, 1), models.slot_values(untouched, config, 1)
    )


def test_a_batch_of_other_sizes_is_refused():
    saved = steps.take_snapshot(models.make_state(CONFIG), jnp.int32(0))
    smaller = dataclasses.replace(models.DECODE, max_drafts=1)
    batch = state_lib.init_state(CONFIG, smaller, dtype=jnp.dtype(jnp.float32))
    with pytest.raises(ValueError, match="same config and DecodeConfig"):
        steps.restore_snapshot(batch, jnp.int32(0), saved, pages_of(0))
    drafter = drafters.PromptLookupDrafter(num_drafts=models.MAX_DRAFTS)
    with pytest.raises(ValueError, match="same target and drafter"):
        steps.restore_snapshot(
            models.make_state(CONFIG, drafter), jnp.int32(0), saved, pages_of(0)
        )


def test_fewer_pages_lower_the_limit():
    batch = after_partial_reject()
    saved = steps.take_snapshot(batch, jnp.int32(1))
    # Two pages of eight: the last of sixteen tokens stays outside the caches.
    room = 2 * models.PAGE_SIZE
    pages = jnp.where(jnp.arange(PAGES) < 2, pages_of(2), models.DECODE.num_pages)
    batch = steps.restore_snapshot(batch, jnp.int32(2), saved, pages)
    assert int(batch.length_limit[2]) == room
    batch = models.decode(PARAMS, CONFIG, batch, 10)
    assert int(batch.finish_reason[2]) == state_lib.FINISHED_LENGTH
    assert int(batch.length[2]) == room - 1
    np.testing.assert_array_equal(batch.tokens[2, :room], batch.tokens[1, :room])


def test_a_slot_without_room_finishes_with_its_next_round():
    batch = after_partial_reject()
    saved = steps.take_snapshot(batch, jnp.int32(1))
    pages = jnp.full(PAGES, models.DECODE.num_pages, jnp.int32)
    batch = steps.restore_snapshot(batch, jnp.int32(2), saved, pages)
    length = int(batch.length[2])
    batch = models.decode(PARAMS, CONFIG, batch, 1)
    assert int(batch.finish_reason[2]) == state_lib.FINISHED_LENGTH
    assert int(batch.length[2]) == length


def test_a_slot_has_pages_of_its_own_unless_others_are_named():
    batch = after_partial_reject()
    saved = steps.take_snapshot(batch, jnp.int32(1))
    expected = continuation(jax.tree.map(jnp.copy, batch), 1)
    batch = steps.restore_snapshot(batch, jnp.int32(2), saved)
    assert batch.page_table[2].tolist() == pages_of(2).tolist()
    assert_equal(continuation(batch, 2), expected)


def test_pages_must_be_named_where_slots_share_them():
    shared = dataclasses.replace(models.DECODE, num_pages=PAGES)
    batch = state_lib.init_state(CONFIG, shared, dtype=jnp.dtype(jnp.float32))
    saved = steps.take_snapshot(batch, jnp.int32(0))
    with pytest.raises(ValueError, match="`pages` must be given"):
        steps.restore_snapshot(batch, jnp.int32(0), saved)
