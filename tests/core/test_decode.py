"""Laws of prefill and plain decoding on random tiny targets."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import helpers
import tiny_models as models
from metrale_jax import config as config_lib
from metrale_jax import fold, steps
from metrale_jax import state as state_lib
from metrale_jax.model import norm, transformer

PROMPTS = ([5, 17, 3, 99, 21, 8, 64], [2], [101, 7, 7, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9])

# Chunked against row-by-row recurrences, and one row against several, on O(1) values.
ABSOLUTE_TOLERANCE = 2e-5


@pytest.fixture(params=models.CONFIGS, scope="module")
def target(request):
    config = models.CONFIGS[request.param]
    return models.make_params(config), config


@pytest.fixture
def unchecked():
    """Without the tests' type checker, as users run the library."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def assert_same_slot(actual, expected, *, exact=False):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if exact or value.dtype.kind in "iu":
            np.testing.assert_array_equal(actual[name], value, err_msg=name)
        else:
            np.testing.assert_allclose(
                actual[name], value, rtol=0, atol=ABSOLUTE_TOLERANCE, err_msg=name
            )


@pytest.mark.parametrize(
    "split", [(12,), (6, 6), (1, 11), (3, 1, 8), (11, 1), (1,) * 12]
)
def test_any_split_of_a_prompt_gives_the_same_state(target, split):
    params, config = target
    prompt = [int(t) for t in np.random.default_rng(3).integers(0, 128, 12)]
    whole = models.start(params, config, models.make_state(config), 1, prompt)
    parts = models.start(params, config, models.make_state(config), 1, prompt, split)
    assert_same_slot(
        models.slot_values(parts, config, 1), models.slot_values(whole, config, 1)
    )


@pytest.mark.parametrize("prompt_length", [1, 2, 3, 4, 7, 8, 9])
def test_decode_equals_prefill_of_the_same_tokens(target, prompt_length):
    params, config = target
    prompt = list(range(10, 10 + prompt_length))
    decoded = models.start(params, config, models.make_state(config), 0, prompt)
    decoded = models.decode(params, config, decoded, 9)
    tokens = prompt + models.output_tokens(decoded, 0, prompt_length)
    recomputed = models.start(params, config, models.make_state(config), 0, tokens[:-1])
    assert_same_slot(
        models.slot_values(decoded, config, 0),
        models.slot_values(recomputed, config, 0),
    )


@pytest.mark.smoke
def test_a_slot_decodes_the_same_alone_and_in_a_batch(target):
    params, config = target
    batch = models.make_state(config)
    for slot, prompt in enumerate(PROMPTS[:3]):
        batch = models.start(params, config, batch, slot, prompt)
    batch = models.decode(params, config, batch, 20)
    for slot, prompt in enumerate(PROMPTS[:3]):
        alone = models.start(params, config, models.make_state(config), 0, prompt)
        alone = models.decode(params, config, alone, 20)
        assert models.output_tokens(batch, slot, len(prompt)) == models.output_tokens(
            alone, 0, len(prompt)
        )


def test_other_slots_change_no_bit(target):
    params, config = target

    def run(others):
        batch = models.make_state(config)
        for slot, prompt in others.items():
            batch = models.start(params, config, batch, slot, prompt)
        batch = models.start(params, config, batch, 1, PROMPTS[0])
        return models.slot_values(models.decode(params, config, batch, 12), config, 1)

    alone = run({})
    assert_same_slot(run({0: PROMPTS[1], 2: PROMPTS[3]}), alone, exact=True)
    assert_same_slot(run({2: [9] * 30}), alone, exact=True)


def test_rows_join_and_leave_without_a_trace(target):
    params, config = target
    expected = models.start(params, config, models.make_state(config), 0, PROMPTS[0])
    expected = models.slot_values(
        models.decode(params, config, expected, 24), config, 0
    )
    batch = models.start(params, config, models.make_state(config), 0, PROMPTS[0])
    batch = models.decode(params, config, batch, 5)
    batch = models.start(params, config, batch, 1, PROMPTS[2])
    batch = models.decode(params, config, batch, 4)
    batch = steps.release(batch, jnp.int32(1))
    batch = models.decode(params, config, batch, 3)
    batch = models.start(params, config, batch, 2, PROMPTS[3], (4, 5))
    batch = models.decode(params, config, batch, 12)
    assert_same_slot(models.slot_values(batch, config, 0), expected, exact=True)


def test_what_pages_and_free_slots_hold_is_never_seen(target):
    params, config = target

    def run(poisoned):
        batch = models.make_state(config)
        if poisoned:
            batch = jax.tree.map(models.poison, batch).replace(
                active=batch.active, page_table=batch.page_table
            )
        batch = models.start(params, config, batch, 1, PROMPTS[0])
        return models.slot_values(models.decode(params, config, batch, 10), config, 1)

    assert_same_slot(run(True), run(False), exact=True)


def _leaf_names():
    batch = models.make_state(models.DENSE)
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(batch)]


@pytest.mark.parametrize("name", _leaf_names())
def test_reuse_resets_every_per_slot_value(name):
    config = models.DENSE
    params = models.make_params(config)

    def run(batch):
        batch = models.start(params, config, batch, 1, PROMPTS[0])
        return models.slot_values(models.decode(params, config, batch, 4), config, 1)

    def poison_one(path, leaf):
        if jax.tree_util.keystr(path) != name:
            return leaf
        if leaf.ndim == 4 and name.endswith((".keys", ".values")):
            return models.poison(leaf)
        return leaf.at[1].set(models.poison(leaf[1]))

    fresh = models.make_state(config)
    poisoned = jax.tree_util.tree_map_with_path(poison_one, fresh)
    assert_same_slot(run(poisoned), run(models.make_state(config)), exact=True)


def test_released_slots_equal_new_ones():
    config = models.DENSE
    params = models.make_params(config)
    used = models.start(
        params, config, models.make_state(config), 1, PROMPTS[0], temperature=1.0
    )
    used = steps.release(models.decode(params, config, used, 3), jnp.int32(1))
    new = models.make_state(config)

    def compare(path, leaf, expected):
        np.testing.assert_array_equal(
            leaf[1], expected[1], err_msg=jax.tree_util.keystr(path)
        )

    def hide_pages(batch):
        return batch.replace(
            layers=tuple(
                la for la in batch.layers if not isinstance(la, state_lib.KVCache)
            )
        )

    jax.tree_util.tree_map_with_path(compare, hide_pages(used), hide_pages(new))


@pytest.mark.parametrize("limit", range(1, 8))
def test_length_limit_is_met_exactly(target, limit):
    params, config = target
    prompt = PROMPTS[0]
    batch = models.start(
        params,
        config,
        models.make_state(config),
        1,
        prompt,
        length_limit=len(prompt) + limit,
    )
    batch = models.decode(params, config, batch, 10)
    assert len(models.output_tokens(batch, 1, len(prompt))) == limit
    assert int(batch.finish_reason[1]) == state_lib.FINISHED_LENGTH
    assert int(batch.length[1]) == len(prompt) + limit - 1
    assert not bool(batch.active[1])


def test_context_ends_at_the_last_position_of_the_last_page():
    config = models.DENSE
    params = models.make_params(config)
    prompt = list(range(models.MAX_LENGTH - 3))
    neighbour = models.start(params, config, models.make_state(config), 2, PROMPTS[0])
    expected = models.slot_values(
        models.decode(params, config, neighbour, 6), config, 2
    )
    batch = models.start(params, config, models.make_state(config), 2, PROMPTS[0])
    batch = models.start(params, config, batch, 1, prompt)
    batch = models.decode(params, config, batch, 6)
    assert int(batch.length[1]) == models.MAX_LENGTH - 1
    assert int(batch.finish_reason[1]) == state_lib.FINISHED_LENGTH
    assert_same_slot(models.slot_values(batch, config, 2), expected, exact=True)


@pytest.mark.parametrize("at", [0, 5])
def test_any_end_token_ends_the_sequence(target, at):
    params, config = target
    prompt = PROMPTS[0]
    batch = models.start(params, config, models.make_state(config), 1, prompt)
    batch = models.decode(params, config, batch, 10)
    free = models.output_tokens(batch, 1, len(prompt))
    end = free[at]
    ending = models.with_end_tokens(config, 127 if end != 127 else 126, end)
    batch = models.start(params, ending, models.make_state(ending), 1, prompt)
    batch = models.decode(params, ending, batch, 10)
    expected = free[: free.index(end) + 1]
    assert models.output_tokens(batch, 1, len(prompt)) == expected
    assert int(batch.finish_reason[1]) == state_lib.FINISHED_END_TOKEN


def test_rounds_on_the_device_equal_rounds_one_by_one(target):
    params, config = target
    one_by_one = models.make_state(config)
    on_device = models.make_state(config)
    for slot, limit in ((0, 18), (2, 64)):
        for_both = dict(length_limit=limit)
        one_by_one = models.start(
            params, config, one_by_one, slot, PROMPTS[slot], **for_both
        )
        on_device = models.start(
            params, config, on_device, slot, PROMPTS[slot], **for_both
        )
    one_by_one = models.decode(params, config, one_by_one, 15)
    on_device, emission = steps.decode_rounds(
        params, on_device, num_rounds=15, config=config
    )
    for slot in (0, 2):
        assert_same_slot(
            models.slot_values(on_device, config, slot),
            models.slot_values(one_by_one, config, slot),
        )
        tokens = models.output_tokens(on_device, slot, len(PROMPTS[slot]))
        count = int(emission.count[slot])
        assert np.asarray(emission.tokens)[slot, :count].tolist() == tokens[1:]
    assert int(emission.count[1]) == 0


def test_rounds_stop_when_every_slot_has_finished():
    config = models.DENSE
    params = models.make_params(config)
    batch = models.start(
        params, config, models.make_state(config), 1, PROMPTS[0], length_limit=10
    )
    batch, emission = steps.decode_rounds(params, batch, num_rounds=50, config=config)
    assert emission.count.tolist() == [0, 2, 0]
    assert emission.finished.tolist() == [False, True, False]


def test_a_bad_value_fails_its_own_slot_only(target):
    params, config = target
    expected = models.start(params, config, models.make_state(config), 2, PROMPTS[2])
    expected = models.slot_values(models.decode(params, config, expected, 6), config, 2)
    batch = models.start(params, config, models.make_state(config), 2, PROMPTS[2])
    batch = models.start(params, config, batch, 1, PROMPTS[0])
    layer = batch.layers[0]
    bad = layer.recurrent_state.at[1, 0, 0, 0].set(jnp.nan)
    batch = batch.replace(
        layers=(layer.replace(recurrent_state=bad), *batch.layers[1:])
    )
    batch = models.decode(params, config, batch, 6)
    assert int(batch.finish_reason[1]) == state_lib.FINISHED_ERROR
    assert not bool(batch.active[1])
    assert len(models.output_tokens(batch, 1, len(PROMPTS[0]))) == 1
    assert_same_slot(models.slot_values(batch, config, 2), expected, exact=True)
    # The slot is clean for its next owner.
    batch = models.start(params, config, batch, 1, PROMPTS[2])
    batch = models.decode(params, config, batch, 6)
    again = models.slot_values(batch, config, 1)
    assert_same_slot(again, expected, exact=True)


def test_inert_slots_of_a_prefill_write_nothing(target):
    params, config = target
    expected = models.start(params, config, models.make_state(config), 1, PROMPTS[0])
    batch = steps.insert(
        models.make_state(config), jnp.int32(1), models.make_request(config, 1)
    )
    inert = batch.num_slots
    padding = [0] * (models.CHUNK_LENGTH - 7)
    batch, output = steps.prefill(
        params,
        batch,
        jnp.array([inert, 1, inert], jnp.int32),
        jnp.array([[4] * 16, PROMPTS[0] + padding, [9] * 16], jnp.int32),
        jnp.array([7, 7, 16], jnp.int32),
        jnp.array([True, True, True]),
        config=config,
    )
    assert output.emission.count.tolist() == [0, 1, 0]
    for leaf, value in zip(
        jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True
    ):
        # A product of three chunks may round otherwise than that of one.
        np.testing.assert_allclose(leaf, value, rtol=0, atol=ABSOLUTE_TOLERANCE)


def test_a_chunk_of_no_tokens_leaves_the_slot_as_it_is(target):
    params, config = target
    before = models.start(params, config, models.make_state(config), 1, PROMPTS[0])
    before = models.decode(params, config, before, 3)
    expected = models.slot_values(before, config, 1)
    after, _ = steps.prefill(
        params,
        before,
        jnp.array([1], jnp.int32),
        jnp.array([[4] * models.CHUNK_LENGTH], jnp.int32),
        jnp.array([0], jnp.int32),
        jnp.array([True]),
        config=config,
    )
    assert_same_slot(models.slot_values(after, config, 1), expected)
    assert bool(after.active[1])


def test_one_trace_per_shape():
    config = models.MOE
    params = models.make_params(config)
    batch = models.make_state(config)
    steps.decode_round.clear_cache()
    steps.prefill.clear_cache()
    with helpers.count_compilations() as counter:
        for repeat in range(3):
            batch = models.start(params, config, batch, repeat % 2, PROMPTS[0])
            batch = models.decode(params, config, batch, 3)
    assert counter.num_traces("decode_round") == 1
    assert counter.num_traces("prefill") == 1


def test_donated_state_is_reused_and_memory_stays_flat():
    config = models.DENSE
    params = models.make_params(config)
    batch = models.start(params, config, models.make_state(config), 0, PROMPTS[0])
    batch = models.decode(params, config, batch, 2)
    before = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(batch.layers)}
    num_live = len(jax.live_arrays())
    for _ in range(100):
        donated = batch
        batch, _ = steps.decode_round(params, batch, config=config)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    after = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(batch.layers)}
    assert len(jax.live_arrays()) <= num_live + 4
    matrices_and_pages = len(config.layers)
    assert len(after & before) >= matrices_and_pages


@pytest.mark.smoke
def test_verify_leaves_the_state_unchanged(target):
    params, config = target
    batch = models.make_state(config)
    batch = models.start(params, config, batch, 1, PROMPTS[0])
    before = jax.tree.map(np.array, batch)
    verdict = steps.verify_k4(
        params, batch, jnp.full((3, 3), 7, jnp.int32), config=config
    )
    jax.block_until_ready(verdict)
    jax.tree.map(np.testing.assert_array_equal, batch, before)


@pytest.mark.parametrize("num_right", range(4))
def test_accepted_drafts_are_what_plain_decoding_emits(target, num_right):
    params, config = target
    prompt = PROMPTS[0]
    plain = models.make_state(config)
    plain = models.start(params, config, plain, 1, prompt)
    plain = models.decode(params, config, plain, num_right + 1)
    expected = models.output_tokens(plain, 1, len(prompt))

    batch = models.make_state(config)
    batch = models.start(params, config, batch, 1, prompt)
    right = expected[1 : num_right + 1]
    wrong = [(token + 1) % models.VOCAB_SIZE for token in (expected + [0] * 3)]
    drafts = (right + wrong[num_right + 1 :])[:3]
    drafts += [0] * (3 - len(drafts))
    if num_right < 3:
        drafts[num_right] = (expected[num_right + 1] + 1) % models.VOCAB_SIZE
    verdict = steps.verify_k4(
        params, batch, jnp.array([[0] * 3, drafts, [0] * 3], jnp.int32), config=config
    )
    batch, emission = steps.apply_verdict(batch, verdict, config=config)
    assert int(verdict.num_accepted[1]) == num_right
    assert emission.count.tolist() == [0, num_right + 1, 0]
    assert models.output_tokens(batch, 1, len(prompt)) == expected
    assert_same_slot(
        models.slot_values(batch, config, 1), models.slot_values(plain, config, 1)
    )


def test_taps_are_the_residual_stream_after_their_layers(target):
    params, config = target
    tokens = jnp.array([[3, 1, 4]] * models.NUM_SLOTS, jnp.int32)

    def run(taps):
        forward = functools.partial(transformer.verify_rows, config=config, taps=taps)
        return jax.jit(forward)(params, models.make_state(config), tokens)

    output = run((0, config.num_layers - 1))
    assert len(output.taps) == 2
    np.testing.assert_allclose(
        norm.zero_centred_rms_norm(
            output.taps[1], params.final_norm, config.rms_norm_eps
        ),
        output.hidden,
        atol=1e-6,
    )
    assert not np.allclose(output.taps[0], output.taps[1])
    with pytest.raises(ValueError, match="taps.*layers 0..3, got 4"):
        run((4,))


def test_sizes_beyond_the_target_are_refused():
    decode = config_lib.for_slots(1, models.DENSE.max_position + 1)
    with pytest.raises(ValueError, match="max_length.*256"):
        state_lib.init_state(models.DENSE, decode, dtype=jnp.dtype(jnp.float32))
    huge = config_lib.DecodeConfig(
        num_slots=1, max_length=64, page_size=64, num_pages=2**26
    )
    with pytest.raises(ValueError, match="2\\*\\*31"):
        state_lib.describe_state(models.DENSE, huge, dtype=jnp.dtype(jnp.float32))


def test_more_rows_than_pending_room_are_refused(unchecked):
    config = models.DENSE
    params = models.make_params(config)
    batch = models.start(params, config, models.make_state(config), 0, PROMPTS[0])
    verdict = jax.eval_shape(
        functools.partial(steps.verify_batched, config=config),
        params,
        batch,
        jnp.zeros((3, 5), jnp.int32),
        jnp.zeros(3, jnp.int32),
    )
    with pytest.raises(ValueError, match="max_drafts` 5 or more"):
        jax.eval_shape(
            functools.partial(fold.apply_verdict, config=config), batch, verdict
        )
    with pytest.raises(ValueError, match="3 columns"):
        steps.verify_k4(params, batch, jnp.zeros((3, 5), jnp.int32), config=config)


def test_arguments_that_do_not_fit_are_refused(unchecked):
    config = models.DENSE
    params = models.make_params(config)
    state = models.make_state(config)
    drafts, counts = jnp.zeros((3, 2), jnp.int32), jnp.zeros(3, jnp.int32)
    verify = functools.partial(steps.verify_batched, params, state, config=config)
    with pytest.raises(ValueError, match=r"drafts` must be int32\[3, J\].*\[2, 2\]"):
        verify(drafts[:2], counts)
    with pytest.raises(ValueError, match=r"num_drafts` must be int32\[3\].*\[3, 2\]"):
        verify(drafts, drafts)
    with pytest.raises(ValueError, match="drafts` must be int32.*float32"):
        verify(drafts.astype(jnp.float32), counts)
    prefill = functools.partial(steps.prefill, params, state, config=config)
    one, last = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    with pytest.raises(ValueError, match=r"must be \[R\], \[R, T\]"):
        prefill(one, one, one, last)
    with pytest.raises(ValueError, match=r"must be \[R\], \[R, T\]"):
        prefill(one, drafts, one, last)
    with pytest.raises(ValueError, match="is_last` bool"):
        prefill(one, one[None], one, one)


@pytest.mark.parametrize("slot", [-1, models.NUM_SLOTS])
def test_slots_outside_of_the_state_are_inert(slot):
    config = models.DENSE
    params = models.make_params(config)
    batch = models.start(params, config, models.make_state(config), 2, PROMPTS[0])
    before = jax.tree.map(np.array, batch)
    batch = steps.insert(batch, jnp.int32(slot), models.make_request(config, 0))
    batch = steps.release(batch, jnp.int32(slot))
    batch, output = steps.prefill(
        params,
        batch,
        jnp.array([slot], jnp.int32),
        jnp.full((1, models.CHUNK_LENGTH), 7, jnp.int32),
        jnp.array([models.CHUNK_LENGTH], jnp.int32),
        jnp.array([True]),
        config=config,
    )
    assert output.emission.count.tolist() == [0]
    jax.tree.map(np.testing.assert_array_equal, batch, before)


@pytest.mark.parametrize("num_pages", [models.MAX_LENGTH // models.PAGE_SIZE, 2, 0])
def test_a_limit_beyond_the_pages_is_lowered_to_them(num_pages):
    config = models.DENSE
    params = models.make_params(config)
    request = models.make_request(config, 1, length_limit=10**6)
    inert = models.NUM_SLOTS * models.MAX_LENGTH // models.PAGE_SIZE
    request = request.replace(pages=request.pages.at[num_pages:].set(inert))
    batch = steps.insert(models.make_state(config), jnp.int32(1), request)
    capacity = num_pages * models.PAGE_SIZE
    assert int(batch.length_limit[1]) == capacity
    batch = prefill_slot_1(params, config, batch, PROMPTS[0])
    batch, _ = steps.decode_rounds(params, batch, num_rounds=15, config=config)
    if capacity == 0:
        assert int(batch.finish_reason[1]) == state_lib.FINISHED_ERROR
        assert int(batch.length[1]) == 0
    else:
        assert int(batch.length[1]) == min(capacity - 1, len(PROMPTS[0]) + 15)


def prefill_slot_1(params, config, batch, prompt, num_tokens=None):
    padding = [0] * (models.CHUNK_LENGTH - len(prompt))
    batch, _ = steps.prefill(
        params,
        batch,
        jnp.array([1], jnp.int32),
        jnp.array([[*prompt, *padding]], jnp.int32),
        jnp.array([len(prompt) if num_tokens is None else num_tokens], jnp.int32),
        jnp.array([True]),
        config=config,
    )
    return batch


def test_a_prompt_that_leaves_no_room_fails_its_slot_and_writes_nothing():
    config = models.DENSE
    params = models.make_params(config)
    batch = models.start(params, config, models.make_state(config), 2, PROMPTS[0])
    request = models.make_request(config, 1, length_limit=len(PROMPTS[0]))
    batch = steps.insert(batch, jnp.int32(1), request)
    pages = [np.array(leaf) for leaf in jax.tree.leaves(batch.layers)]
    for _ in range(2):
        batch = prefill_slot_1(params, config, batch, PROMPTS[0])
        assert int(batch.finish_reason[1]) == state_lib.FINISHED_ERROR
        assert int(batch.length[1]) == 0
        assert not bool(batch.active[1])
    for leaf, before in zip(jax.tree.leaves(batch.layers), pages, strict=True):
        np.testing.assert_array_equal(leaf, before)


def test_a_count_beyond_the_chunk_is_the_chunk():
    config = models.DENSE
    params = models.make_params(config)
    batch = steps.insert(
        models.make_state(config), jnp.int32(1), models.make_request(config, 1)
    )
    batch = prefill_slot_1(params, config, batch, PROMPTS[0], num_tokens=99)
    assert int(batch.length[1]) == models.CHUNK_LENGTH
