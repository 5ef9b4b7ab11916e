"""A batch of prompts run to completion gives each prompt what it would get alone."""

import dataclasses

import jax.numpy as jnp
import pytest

import tiny_models as models
from metrale_jax import drafters, sampling, statistics
from metrale_jax.engine import batch

FLOAT32 = jnp.dtype(jnp.float32)
PROMPTS = ([5, 17, 3], [101, 7, 7, 7, 9, 33, 2, 1, 4], [60])
OPTIONS = batch.BatchOptions(rounds_per_visit=4, chunk_length=8, page_size=8)


def run(requests, on_tokens=None, config=models.DENSE, options=OPTIONS, drafter=None):
    return batch.run_batch(
        models.make_params(config),
        config,
        requests,
        dtype=FLOAT32,
        drafter=drafter,
        options=options,
        on_tokens=on_tokens,
    )


def request(prompt, max_new_tokens, **options):
    return batch.Request(
        prompt=tuple(prompt),
        max_new_tokens=max_new_tokens,
        sampling=sampling.SamplingOptions(**options),
    )


REQUESTS = (
    request(PROMPTS[0], 6),
    request(PROMPTS[1], 13, temperature=1.0, seed=2**40 + 3),
    request(PROMPTS[2], 1),
)


@pytest.fixture(scope="module")
def together():
    seen = {}

    def on_tokens(index, tokens):
        seen.setdefault(index, []).extend(tokens)
        return False

    return run(REQUESTS, on_tokens), seen


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

    result = run(REQUESTS, on_tokens)
    assert result.completions[0] == expected.completions[0]
    assert result.completions[1].finish_reason == "stop"
    assert result.completions[1].token_ids == expected.completions[1].token_ids[:1]


def test_the_context_ends_a_sequence():
    config = models.DENSE
    prompt = [3] * (config.max_position - 2)
    options = batch.BatchOptions(rounds_per_visit=4, chunk_length=256, page_size=8)
    result = run([request(prompt, 50)], options=options)
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
        run([request(prompt, 1) for prompt in prompts])


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
        request([1], **(dict(max_new_tokens=1) | {name: value}))


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="power of two"):
        batch.BatchOptions(chunk_length=12)
    with pytest.raises(ValueError, match="implementation"):
        batch.BatchOptions(strict=True, implementation="xla")


# A text that repeats itself, so that something is found; and one that does not.
REPETITIVE = (
    request([7, 8, 9, 7, 8, 9, 7, 8], 20),
    request(PROMPTS[1], 20, temperature=1.0, seed=5),
)


@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
def test_drafts_change_no_token(strict):
    drafter = drafters.NGramDrafter(num_drafts=3, min_match=1)
    options = dataclasses.replace(OPTIONS, strict=strict, num_log_probs=2)
    plain_options = dataclasses.replace(options, is_plain=True)
    drafted = run(REPETITIVE, options=options, drafter=drafter)
    plain = run(REPETITIVE, options=plain_options, drafter=drafter)
    for with_drafts, without in zip(
        drafted.completions, plain.completions, strict=True
    ):
        assert with_drafts.token_ids == without.token_ids
        assert len(with_drafts.log_probs) == len(with_drafts.token_ids)
        for one, other in zip(with_drafts.log_probs, without.log_probs, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert one.emitted == pytest.approx(other.emitted, abs=1e-4)
            if strict:
                assert one == other
    with_drafts = statistics.summarize(*drafted.statistics)
    without = statistics.summarize(*plain.statistics)
    assert with_drafts.drafted > 0
    assert with_drafts.num_tokens == without.num_tokens == 38
    assert without.drafted == 0
    assert without.mean_accepted_length == 1.0


def test_counters_survive_a_release():
    drafter = drafters.NGramDrafter(num_drafts=3, min_match=1)
    seen = [0, 0]

    def on_tokens(index, tokens):
        seen[index] += len(tokens)
        return index == 0 and seen[0] >= 5

    options = dataclasses.replace(OPTIONS, num_log_probs=2)
    result = run(REPETITIVE, on_tokens, options=options, drafter=drafter)
    assert result.completions[0].finish_reason == "stop"
    # A caller's stop throws no visit's tokens away: all of them were told and counted,
    # but for the two first ones, which are prefill's.
    assert statistics.summarize(*result.statistics).num_tokens == sum(seen) - 2
