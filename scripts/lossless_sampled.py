"""The sampled part of a lossless test: emitted tokens against the target's own law."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special
import lossless_target
import numpy as np

from metrale_jax import config as config_lib
from metrale_jax import picks, steps
from metrale_jax import sampling as sampling_lib
from metrale_jax import state as state_lib
from metrale_jax import statistics as statistics_lib
from metrale_jax import verify as verify_lib
from metrale_jax.drafters import confidence, protocol

# Every draw runs as many rounds, each of which emits a token at least.
_NUM_TESTED_TOKENS = 2
# The chi-square law of the statistic needs as many expected draws in every cell.
_SMALLEST_EXPECTED = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledOptions:
    """How the sampled part runs.

    Attributes:
      num_draws: over all prompts; each gets the same number, rounded up to whole
        batches.
      batch_size: draws that run together.
      sampling: how tokens are picked; its seed is that of the first draw.
      significance: a p-value below it is a violation.
      strict: verify by the reference kernels.
      accept_rule: how drafts are judged.
      limits: which drafts are not worth a row.
    """

    num_draws: int
    batch_size: int
    sampling: sampling_lib.SamplingOptions
    significance: float
    strict: bool
    accept_rule: verify_lib.AcceptRule
    limits: confidence.DraftLimits


@dataclasses.dataclass(frozen=True)
class Fit:
    """A test of draws against a distribution.

    Attributes:
      num_draws: draws that were tested.
      num_cells: cells after merging.
      statistic: chi-square; None where one cell holds nearly all, and the number of
        other draws is tested by itself, or where there was nothing to test.
      p_value: None where there were too few draws to test.
    """

    num_draws: int
    num_cells: int
    statistic: float | None
    p_value: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledRow:
    """The draws of one prompt.

    Attributes:
      prompt: its index.
      batch_size: draws that ran together.
      num_drafts: drafts per round at most.
      num_draws: draws in all.
      first_token: fit of the first token after the prompt's greedy one.
      second_token: fit of the token after `most_frequent`, over draws that began so.
      most_frequent: the commonest first token that ends no sequence; None without one.
      drafted: drafts offered.
      accepted: drafts accepted.
      mean_accepted_length: tokens per round.
      verdict: "too few draws" where neither token could be tested.
    """

    prompt: int
    batch_size: int
    num_drafts: int
    num_draws: int
    first_token: Fit
    second_token: Fit
    most_frequent: int | None
    drafted: int
    accepted: int
    mean_accepted_length: float
    verdict: Literal["fits", "violation", "too few draws"]

    @property
    def least_p_value(self) -> float | None:
        """The smaller p-value of the two tests; None if there was none."""
        return _least(self.first_token, self.second_token)

    def cells(self) -> tuple[str, ...]:
        """Its row of the table."""
        least = self.least_p_value
        return (
            f"sampled, prompt {self.prompt}",
            str(self.batch_size),
            str(self.num_drafts),
            str(self.first_token.num_draws + self.second_token.num_draws),
            "",
            "",
            "" if least is None else f"{least:.2g}",
            f"{self.mean_accepted_length:.2f}",
            self.verdict,
        )


def check(
    target: lossless_target.Target,
    reference: lossless_target.Reference,
    drafter: protocol.Drafter,
    prompts: Sequence[tuple[int, ...]],
    options: SampledOptions,
    report_progress: Callable[[str], None],
) -> list[SampledRow]:
    """Draws for every prompt, and tests the draws.

    Raises:
      ValueError: a prompt leaves no room in the context, or the target's logits are not
        finite.
    """
    draws_per_prompt = -(-options.num_draws // len(prompts))
    batch_size = min(options.batch_size, draws_per_prompt)
    num_batches = -(-draws_per_prompt // batch_size)
    sampler = _Sampler(target, drafter, options, batch_size, max(map(len, prompts)))
    rows = []
    for index, prompt in enumerate(prompts):
        report_progress(
            f"sampled: prompt {index}, {num_batches * batch_size} draws, "
            f"{drafter.max_drafts} drafts"
        )
        first_seed = options.sampling.seed + index * num_batches * batch_size
        draws = sampler.draw(prompt, first_seed, num_batches)
        rows.append(_judge(target, reference, index, prompt, draws, sampler, options))
    return rows


def fit_draws(counts: np.ndarray, probs: np.ndarray) -> Fit:
    """Tests draws against a distribution by Pearson's chi-square.

    Tokens of which fewer than 5 draws are expected share a cell; if these are fewer
    than 5 in all, they join the rarest other. Where a single token is expected so
    often that no second cell is left, the number of other draws is tested instead, by
    its binomial law. A token of probability 0 that was drawn gives p-value 0.

    Args:
      counts: i64[V], draws of each token.
      probs: f64[V], the distribution.
    """
    num_draws = int(counts.sum())
    if num_draws == 0:
        return Fit(0, 0, None, None)
    if counts[probs == 0].any():
        return Fit(num_draws, 0, None, 0.0)
    expected = probs * num_draws
    is_large = expected >= _SMALLEST_EXPECTED
    rest_expected = float(expected[~is_large].sum())
    rest_count = int(counts[~is_large].sum())
    observed_cells = counts[is_large].astype(np.float64)
    expected_cells = expected[is_large]
    if rest_expected >= _SMALLEST_EXPECTED:
        observed_cells = np.append(observed_cells, rest_count)
        expected_cells = np.append(expected_cells, rest_expected)
    elif len(expected_cells) == 1:
        rest_prob = rest_expected / num_draws
        return Fit(num_draws, 1, None, _binomial_tail(rest_count, num_draws, rest_prob))
    elif len(expected_cells):
        rarest = int(np.argmin(expected_cells))
        observed_cells[rarest] += rest_count
        expected_cells[rarest] += rest_expected
    if len(expected_cells) < 2:
        return Fit(num_draws, len(expected_cells), None, None)
    statistic = float(np.sum((observed_cells - expected_cells) ** 2 / expected_cells))
    freedom = len(expected_cells) - 1
    p_value = jax.scipy.special.gammaincc(
        jnp.float32(freedom / 2), jnp.float32(statistic / 2)
    )
    return Fit(num_draws, len(expected_cells), statistic, float(p_value))


class _Draws(NamedTuple):
    """Draws of one prompt.

    Attributes:
      greedy_token: the prompt's own first token, from which the rounds went on.
      tokens: per draw, what the rounds emitted.
      summary: what the rounds did.
    """

    greedy_token: int
    tokens: list[list[int]]
    summary: statistics_lib.Summary


class _Sampler:
    """B slots that all hold one prompt; the programs serve every prompt."""

    def __init__(
        self,
        target: lossless_target.Target,
        drafter: protocol.Drafter,
        options: SampledOptions,
        batch_size: int,
        longest_prompt: int,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._options = options
        self.batch_size = batch_size
        self.num_drafts = drafter.max_drafts
        self._chunk_length = lossless_target.chunk_length(longest_prompt)
        # The greedy token, and rounds of all drafts and a bonus token.
        room = 1 + _NUM_TESTED_TOKENS * (drafter.max_drafts + 1)
        if longest_prompt + room > target.config.max_position:
            raise ValueError(
                f"A prompt has {longest_prompt} tokens; the sampled part needs {room} "
                f"more within the target's context of {target.config.max_position}. "
                "Shorten the prompt, or skip the part with --num_draws=0."
            )
        self._decode = config_lib.for_slots(
            batch_size, longest_prompt + room, max_drafts=drafter.max_drafts
        )

    def draw(
        self, prompt: tuple[int, ...], first_seed: int, num_batches: int
    ) -> _Draws:
        """Runs the rounds of every draw; each has a seed of its own."""
        state, greedy_tokens = self._prefill(prompt)
        # Rounding may let slots differ at a near tie; the commonest token counts.
        [(greedy_token, _)] = collections.Counter(greedy_tokens).most_common(1)
        tokens = []
        statistics = []
        for batch in range(num_batches):
            seeds = range(
                first_seed + batch * self.batch_size,
                first_seed + (batch + 1) * self.batch_size,
            )
            emitted, stats = self._run_rounds(self._with_sampling(state, seeds))
            statistics.append(stats)
            tokens += [
                emitted[slot]
                for slot, token in enumerate(greedy_tokens)
                if token == greedy_token
            ]
        summary = statistics_lib.summarize(*statistics)
        return _Draws(greedy_token, tokens, summary)

    def _prefill(
        self, prompt: tuple[int, ...]
    ) -> tuple[state_lib.SequenceState, list[int]]:
        """Every slot after the prompt, and its greedy token, which ends no sequence."""
        target = self._target
        state = state_lib.init_state(
            target.config, self._decode, dtype=target.dtype, drafter=self._drafter
        )
        greedy = sampling_lib.SamplingOptions(min_new_tokens=1)
        for slot in range(self.batch_size):
            request = state_lib.make_request(
                target.config, self._decode, slot=slot, options=greedy
            )
            state = steps.insert(state, jnp.int32(slot), request)
        for chunk in lossless_target.split(prompt, self._chunk_length):
            state, output = steps.prefill(
                target.params,
                state,
                jnp.arange(self.batch_size, dtype=jnp.int32),
                jnp.array([chunk.padded] * self.batch_size, jnp.int32),
                jnp.full(self.batch_size, chunk.num_tokens, jnp.int32),
                jnp.full(self.batch_size, chunk.is_last),
                self._drafter,
                config=target.config,
            )
        if not bool(jnp.all(state.active)):
            raise ValueError("The target's logits are not finite; it can't be tested.")
        return state, np.asarray(output.emission.tokens)[:, 0].tolist()

    def _with_sampling(
        self, state: state_lib.SequenceState, seeds: range
    ) -> state_lib.SequenceState:
        """A copy of the state whose slots sample, each with a seed of its own."""
        options = dataclasses.replace(self._options.sampling, seed=0)
        one_slot = sampling_lib.make_sampling(
            self._target.config, self._decode, options
        )
        sampling = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (self.batch_size, *leaf.shape)),
            one_slot,
        )
        keys = [sampling_lib.request_key(seed) for seed in seeds]
        sampling = dataclasses.replace(sampling, request_key=jnp.stack(keys))
        # The steps donate their state, but the prompt's is needed again.
        return jax.tree.map(jnp.copy, dataclasses.replace(state, sampling=sampling))

    def _run_rounds(
        self, state: state_lib.SequenceState
    ) -> tuple[list[list[int]], statistics_lib.Statistics]:
        """What each slot emitted; propose, verify and apply, as the engine does."""
        target, options = self._target, self._options
        implementation = "reference" if options.strict else None
        emitted: list[list[int]] = [[] for _ in range(self.batch_size)]
        state = steps.propose(
            target.params,
            state,
            self._drafter,
            config=target.config,
            limits=options.limits,
            implementation=implementation,
        )
        for _ in range(_NUM_TESTED_TOKENS):
            state, emission = steps.separate_round(
                target.params,
                state,
                self._drafter,
                config=target.config,
                accept_rule=options.accept_rule,
                limits=options.limits,
                implementation=implementation,
            )
            emission = jax.device_get(emission)
            if np.any(emission.reason == state_lib.FINISHED_ERROR):
                raise ValueError(
                    "The target's logits are not finite; it can't be tested."
                )
            for slot, count in enumerate(emission.count.tolist()):
                emitted[slot] += emission.tokens[slot, :count].tolist()
        return emitted, jax.device_get(state.stats)


def _judge(
    target: lossless_target.Target,
    reference: lossless_target.Reference,
    index: int,
    prompt: tuple[int, ...],
    draws: _Draws,
    sampler: _Sampler,
    options: SampledOptions,
) -> SampledRow:
    """Tests the first token, and the second one after the commonest first."""
    prefix = [*prompt, draws.greedy_token]
    firsts = [tokens[0] for tokens in draws.tokens]
    first_fit = _test_tokens(target, reference, prefix, firsts, options)
    # After an end token there is no second one.
    going_on = [token for token in firsts if token not in target.config.end_token_ids]
    commonest = collections.Counter(going_on).most_common(1)
    second_fit = Fit(0, 0, None, None)
    most_frequent = None
    if commonest:
        [(most_frequent, _)] = commonest
        seconds = [tok[1] for tok in draws.tokens if tok[0] == most_frequent]
        prefix.append(most_frequent)
        second_fit = _test_tokens(target, reference, prefix, seconds, options)
    least = _least(first_fit, second_fit)
    verdict = "too few draws"
    if least is not None:
        verdict = "violation" if least < options.significance else "fits"
    return SampledRow(
        prompt=index,
        batch_size=sampler.batch_size,
        num_drafts=sampler.num_drafts,
        num_draws=len(draws.tokens),
        first_token=first_fit,
        second_token=second_fit,
        most_frequent=most_frequent,
        drafted=draws.summary.drafted,
        accepted=draws.summary.accepted,
        mean_accepted_length=draws.summary.mean_accepted_length,
        verdict=verdict,
    )


def _test_tokens(
    target: lossless_target.Target,
    reference: lossless_target.Reference,
    prefix: Sequence[int],
    tokens: list[int],
    options: SampledOptions,
) -> Fit:
    """Tests tokens drawn after a prefix against the target's distribution there."""
    logits = reference.logits(prefix)
    sampling = sampling_lib.make_sampling(
        target.config, config_lib.for_slots(1, 1), options.sampling
    )
    warped = picks.warp_logits(
        jnp.asarray(logits)[None, None], jax.tree.map(lambda leaf: leaf[None], sampling)
    )
    # Sums of many small probabilities are kept in float64.
    weights = np.exp(np.asarray(warped[0, 0], np.float64))
    counts = np.bincount(tokens, minlength=len(logits))
    return fit_draws(counts, weights / weights.sum())


def _binomial_tail(count: int, num_draws: int, prob: float) -> float:
    """Probability of at least `count` hits."""
    if count == 0:
        return 1.0
    if count == num_draws:
        return prob**num_draws
    tail = jax.scipy.special.betainc(
        jnp.float32(count), jnp.float32(num_draws - count + 1), jnp.float32(prob)
    )
    return float(tail)


def _least(*fits: Fit) -> float | None:
    return min((fit.p_value for fit in fits if fit.p_value is not None), default=None)
