"""A batch of prompts run to completion gives each prompt what it would get alone."""

import jax.numpy as jnp
import pytest

import tiny_models as models
from metrale_jax.engine import batch

FLOAT32 = jnp.dtype(jnp.float32)
PROMPTS = ([5, 17, 3], [101, 7, 7, 7, 9, 33, 2, 1, 4], [60])
OPTIONS = batch.BatchOptions(rounds_per_visit=4, chunk_length=8, page_size=8)


def run(prompts, sampling, on_tokens=None, config=models.DENSE, options=OPTIONS):
    return batch.run_batch(
        models.make_params(config),
        config,
        prompts,
        sampling,
        dtype=FLOAT32,
        options=options,
        on_tokens=on_tokens,
    )


def greedy(max_new_tokens, **options):
    return batch.SamplingParams(max_new_tokens=max_new_tokens, **options)


@pytest.fixture(scope="module")
def together():
    seen = {}

    def on_tokens(index, tokens):
        seen.setdefault(index, []).extend(tokens)
        return False

    sampling = [greedy(6), greedy(13, temperature=1.0, seed=2**40 + 3), greedy(1)]
    return run(PROMPTS, sampling, on_tokens), seen


def test_each_prompt_gets_its_limit(together):
    result, seen = together
    assert [len(c.token_ids) for c in result.completions] == [6, 13, 1]
    assert [c.finish_reason for c in result.completions] == ["length"] * 3
    assert {i: tuple(t) for i, t in seen.items()} == {
        i: c.token_ids for i, c in enumerate(result.completions)
    }
    assert result.compile_seconds > 0


def test_each_prompt_gets_what_the_steps_give_it(together):
    result, _ = together
    config = models.DENSE
    params = models.make_params(config)
    for index, options in (
        (0, {}),
        (1, dict(temperature=1.0, seed=2**40 + 3)),
    ):
        state = models.start(
            params, config, models.make_state(config), 2, PROMPTS[index], **options
        )
        state = models.decode(params, config, state, 12)
        alone = models.output_tokens(state, 2, len(PROMPTS[index]))
        tokens = list(result.completions[index].token_ids)
        assert tokens == alone[: len(tokens)]


def test_the_caller_can_end_a_sequence(together):
    expected, _ = together

    def on_tokens(index, tokens):
        return index == 1

    sampling = [greedy(6), greedy(13, temperature=1.0, seed=2**40 + 3), greedy(1)]
    result = run(PROMPTS, sampling, on_tokens)
    assert result.completions[0] == expected.completions[0]
    assert result.completions[1].finish_reason == "stop"
    assert result.completions[1].token_ids == expected.completions[1].token_ids[:1]


def test_the_context_ends_a_sequence():
    config = models.DENSE
    prompt = [3] * (config.max_position - 2)
    options = batch.BatchOptions(rounds_per_visit=4, chunk_length=256, page_size=8)
    result = run([prompt], [greedy(50)], options=options)
    assert len(result.completions[0].token_ids) == 2
    assert result.completions[0].finish_reason == "length"


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([], "at least one prompt"),
        ([[1], []], "Prompt 1 is empty"),
        ([[1] * 256], "256 tokens, but the target's context is 256"),
        ([[1, 128]], r"token 128, outside of the vocabulary 0\.\.127"),
        ([[-1]], "token -1"),
    ],
)
def test_bad_prompts_are_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        run(prompts, [greedy(1)] * len(prompts))


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_bad_sampling_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        batch.SamplingParams(**(dict(max_new_tokens=1) | {name: value}))


def test_counts_must_agree():
    with pytest.raises(ValueError, match="one entry per prompt"):
        run([[1], [2]], [greedy(1)])
    with pytest.raises(ValueError, match="power of two"):
        batch.BatchOptions(chunk_length=12)
