"""The forward against transformers, on checkpoints written by it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import oracle
from metrale_jax import checkpoint, steps
from metrale_jax import config as config_lib
from metrale_jax import state as state_lib
from metrale_jax.model import transformer

# Of the three prompts of a batch: around the conv window and the chunk of 64.
LENGTHS = ((1, 65, 2), (200, 3, 63), (4, 64, 200))
MAX_LENGTH = 256
NUM_SLOTS = 3
PAGE_SIZE = 16

# |logit difference| over max(1, max |logit|), float32.
FLOAT32_TOLERANCE = 1e-4

# bfloat16, one layer fed with the oracle's own input: root mean square of the
# difference over that of what the layer adds to the residual stream. bfloat16 keeps 8
# bits, so one rounding is 2**-9; the layers round at a dozen points. A mixture adds
# near-ties that route a token elsewhere, so there the bound is on the median token.
BFLOAT16_TOLERANCE = {"full_attention": 0.02, "linear_attention": 0.02}


@pytest.fixture(params=oracle.MAKERS, scope="module")
def pair(request, tmp_path_factory):
    model = oracle.make_model(request.param)
    folder = oracle.save(model, tmp_path_factory.mktemp("checkpoint"))
    config, _ = checkpoint.read_config(folder)
    params = checkpoint.load_params(folder, config, dtype=jnp.dtype(jnp.float32))
    return model, params, config


def random_tokens(length, seed=0):
    generator = np.random.default_rng([seed, length])
    return generator.integers(0, oracle.VOCAB_SIZE, length).tolist()


def new_state(config):
    """Three greedy slots without a limit, each with pages of its own."""
    decode = config_lib.for_slots(NUM_SLOTS, MAX_LENGTH, page_size=PAGE_SIZE)
    state = state_lib.init_state(config, decode, dtype=jnp.dtype(jnp.float32))
    for slot in range(NUM_SLOTS):
        request = state_lib.make_request(config, decode, slot=slot)
        state = steps.insert(state, jnp.int32(slot), request)
    return state


def prefill(params, config, state, chunks, is_last=True, length=MAX_LENGTH):
    """Runs one chunk per slot; returns the state and logits per slot."""
    padded = [[*chunk, *[0] * (length - len(chunk))] for chunk in chunks]
    state, output = steps.prefill(
        params,
        state,
        jnp.arange(NUM_SLOTS, dtype=jnp.int32),
        jnp.array(padded, jnp.int32),
        jnp.array([len(chunk) for chunk in chunks], jnp.int32),
        jnp.full(NUM_SLOTS, is_last),
        config=config,
    )
    logits = np.asarray(transformer.project_logits(params, output.hidden))
    return state, [row[: len(chunk)] for row, chunk in zip(logits, chunks, strict=True)]


def assert_close(actual, expected):
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=FLOAT32_TOLERANCE * scale)


def test_logits_of_a_batch_of_different_lengths(pair):
    model, params, config = pair
    for lengths in LENGTHS:
        prompts = [random_tokens(length) for length in lengths]
        _, logits = prefill(params, config, new_state(config), prompts)
        for prompt, actual in zip(prompts, logits, strict=True):
            assert_close(actual, oracle.logits(model, prompt))


def test_chunked_prefill(pair):
    model, params, config = pair
    prompts = [random_tokens(200, seed) for seed in range(NUM_SLOTS)]
    # Each slot splits its prompt elsewhere; chunks of no tokens are part of it.
    ends = [(64, 128, 192, 200), (1, 65, 128, 192, 200), (0, 63, 64, 127, 150, 200)]
    state = new_state(config)
    logits = [[] for _ in prompts]
    begins = [0] * NUM_SLOTS
    for step in range(6):
        stops = [end[min(step, len(end) - 1)] for end in ends]
        chunks = [
            prompt[begin:stop]
            for prompt, begin, stop in zip(prompts, begins, stops, strict=True)
        ]
        state, parts = prefill(params, config, state, chunks, length=64)
        for slot, part in enumerate(parts):
            logits[slot].append(part)
        begins = stops
    for prompt, parts in zip(prompts, logits, strict=True):
        assert_close(np.concatenate(parts), oracle.logits(model, prompt))


def test_decode_after_prefill(pair):
    model, params, config = pair
    prompts = [random_tokens(length, seed=1) for length in (1, 63, 5)]
    state, _ = prefill(params, config, new_state(config), prompts)
    num_rounds = 8
    logits = []
    for _ in range(num_rounds):
        state, emission = steps.decode_round(params, state, config=config)
        assert emission.count.tolist() == [1] * NUM_SLOTS
        logits.append(np.asarray(transformer.project_logits(params, state.hidden)))
    for slot, prompt in enumerate(prompts):
        length = int(state.length[slot])
        tokens = np.asarray(state.tokens[slot, : length + 1]).tolist()
        assert tokens[: len(prompt)] == prompt
        expected = oracle.logits(model, tokens[:-1])
        assert_close(np.stack(logits)[:, slot], expected[len(prompt) :])
        # Greedy: each token is the oracle's best, but for ties within the tolerance.
        rows = expected[len(prompt) - 1 :]
        chosen = rows[np.arange(num_rounds + 1), tokens[len(prompt) :]]
        assert (rows.max(-1) - chosen < FLOAT32_TOLERANCE * np.abs(rows).max()).all()


@pytest.mark.parametrize("kind", ["qwen3_5 dense", "qwen3_5 moe", "qwen3_next"])
def test_bfloat16_layer_by_layer(kind, tmp_path):
    model = oracle.make_model(kind, torch.bfloat16)
    folder = oracle.save(model, tmp_path / "checkpoint")
    config, _ = checkpoint.read_config(folder)
    params = checkpoint.load_params(folder, config, dtype=jnp.dtype(jnp.bfloat16))
    streams = oracle.residual_streams(model, random_tokens(64))
    for index, layer_kind in enumerate(config.layers):
        before, expected = streams[index], streams[index + 1]
        actual = run_one_layer(params, config, index, before)
        error = np.sqrt(np.mean((actual - expected) ** 2, axis=-1))
        added = np.sqrt(np.mean((expected - before) ** 2))
        assert np.median(error) < BFLOAT16_TOLERANCE[layer_kind] * added, layer_kind


def run_one_layer(params, config, index, inputs):
    """One layer on given inputs [T, M]: they become the embedding of tokens 0..T-1."""
    num_tokens = len(inputs)
    one_layer = dataclasses.replace(
        config,
        layers=config.layers[index : index + 1],
        moe_layers=(0,) if index in config.moe_layers else (),
        vocab_size=num_tokens,
        end_token_ids=(),
    )
    bfloat16 = jnp.dtype(jnp.bfloat16)
    layer_params = params.replace(
        embedding=jnp.asarray(inputs, bfloat16),
        layers=params.layers[index : index + 1],
    )
    decode = config_lib.for_slots(1, num_tokens, page_size=PAGE_SIZE)
    output = jax.jit(
        functools.partial(transformer.prefill_chunk, config=one_layer, taps=(0,))
    )(
        layer_params,
        state_lib.init_state(one_layer, decode, dtype=bfloat16),
        jnp.arange(num_tokens, dtype=jnp.int32)[None],
        jnp.array([num_tokens], jnp.int32),
    )
    return np.asarray(output.taps[0][0], np.float32)
