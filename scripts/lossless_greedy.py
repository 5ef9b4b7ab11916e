"""The greedy part of a lossless test: the same tokens with drafts and without."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import lossless_target
import numpy as np

from metrale_jax import statistics as statistics_lib
from metrale_jax import verify as verify_lib
from metrale_jax.drafters import confidence, protocol
from metrale_jax.engine import batch as batch_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class GreedyOptions:
    """How the greedy part runs, and what it allows.

    Attributes:
      max_new_tokens: tokens per prompt.
      max_logit_gap: how far below the best logit both tokens of a first difference may
        be.
      strict: run the strict tier, and allow no difference, of log-probabilities either.
      accept_rule: of the speculative runs; greedy sequences match under every rule.
      limits: which drafts are not worth a row.
    """

    max_new_tokens: int
    max_logit_gap: float
    strict: bool
    accept_rule: verify_lib.AcceptRule
    limits: confidence.DraftLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Where the two runs of a sequence first differ.

    Attributes:
      sequence: its index in the batch.
      position: generated tokens before it.
      plain_token: without drafts; None if that sequence had ended.
      speculative_token: with them.
      logit_gap: logit of the plain token minus that of the speculative one, by prefill;
        None if one of them is missing.
      plain_below_best: how far the plain token is below the best logit.
      speculative_below_best: and the speculative one.
    """

    sequence: int
    position: int
    plain_token: int | None
    speculative_token: int | None
    logit_gap: float | None
    plain_below_best: float | None
    speculative_below_best: float | None

    @property
    def below_best(self) -> float:
        """How far the worse token is from the best one; infinite if one is missing."""
        if self.plain_below_best is None or self.speculative_below_best is None:
            return float("inf")
        return max(self.plain_below_best, self.speculative_below_best)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GreedyRow:
    """One configuration: a batch size and a number of drafts.

    Attributes:
      batch_size: sequences that ran together.
      num_drafts: drafts per round at most.
      num_tokens: tokens compared, up to the first difference of each sequence.
      differences: first differences, at most one per sequence.
      num_other_bits: tokens that were equal, but whose log-probabilities were not;
        counted when strict.
      largest_gap: largest `below_best` of the differences; None without one, or if a
        token is missing.
      drafted: drafts offered.
      accepted: drafts accepted.
      mean_accepted_length: tokens per round.
      verdict: "near tie" is a difference within the allowed gap.
    """

    batch_size: int
    num_drafts: int
    num_tokens: int
    differences: tuple[Difference, ...]
    num_other_bits: int
    largest_gap: float | None
    drafted: int
    accepted: int
    mean_accepted_length: float
    verdict: Literal["same", "near tie", "violation"]

    def cells(self) -> tuple[str, ...]:
        """Its row of the table."""
        return (
            "greedy",
            str(self.batch_size),
            str(self.num_drafts),
            str(self.num_tokens),
            str(len(self.differences) + self.num_other_bits),
            "" if self.largest_gap is None else f"{self.largest_gap:.3g}",
            "",
            f"{self.mean_accepted_length:.2f}",
            self.verdict,
        )

    def difference_lines(self) -> list[str]:
        """A line per difference, for the user."""
        return [
            f"batch of {self.batch_size}, {self.num_drafts} drafts: sequence "
            f"{difference.sequence} differs at token {difference.position}: "
            f"{difference.plain_token} without drafts, "
            f"{difference.speculative_token} with them, "
            f"{difference.below_best:.3g} below the best logit"
            for difference in self.differences
        ]


def run_plain(
    target: lossless_target.Target,
    drafter: protocol.Drafter,
    prompts: Sequence[tuple[int, ...]],
    options: GreedyOptions,
) -> batch_lib.BatchResult:
    """Runs the prompts without drafts; strictly, in the program that verifies drafts.

    Raises:
      ValueError: a prompt can't run, or the target's logits are not finite.
    """
    if options.strict:
        result = _run(target, drafter, prompts, options, is_plain=True)
    else:
        result = _run(target, None, prompts, options, is_plain=False)
    for index, completion in enumerate(result.completions):
        if completion.finish_reason == "error":
            raise ValueError(
                f"The target's logits are not finite after sequence {index}'s "
                f"{len(completion.token_ids)} tokens, so it can't be tested."
            )
    return result


def check(
    target: lossless_target.Target,
    reference: lossless_target.Reference,
    drafter: protocol.Drafter,
    prompts: Sequence[tuple[int, ...]],
    plain: batch_lib.BatchResult,
    options: GreedyOptions,
) -> GreedyRow:
    """Runs the prompts with drafts, and compares with the plain run."""
    speculative = _run(target, drafter, prompts, options, is_plain=False)
    differences = []
    num_tokens = num_other_bits = 0
    for index, prompt in enumerate(prompts):
        one, other = plain.completions[index], speculative.completions[index]
        num_same = _num_leading_same(one.token_ids, other.token_ids)
        num_tokens += num_same
        num_other_bits += sum(
            left.emitted != right.emitted
            for left, right in zip(
                one.log_probs[:num_same], other.log_probs[:num_same], strict=True
            )
        )
        if one.token_ids != other.token_ids:
            num_tokens += 1
            differences.append(
                _describe(reference, index, prompt, one.token_ids, other.token_ids)
            )
    worst = max((difference.below_best for difference in differences), default=None)
    is_broken = worst is not None and (options.strict or worst > options.max_logit_gap)
    verdict = "same" if worst is None else "near tie"
    if is_broken or num_other_bits:
        verdict = "violation"
    summary = statistics_lib.summarize(*speculative.statistics)
    return GreedyRow(
        batch_size=len(prompts),
        num_drafts=drafter.max_drafts,
        num_tokens=num_tokens,
        differences=tuple(differences),
        num_other_bits=num_other_bits,
        largest_gap=worst if worst is not None and np.isfinite(worst) else None,
        drafted=summary.drafted,
        accepted=summary.accepted,
        mean_accepted_length=summary.mean_accepted_length,
        verdict=verdict,
    )


def _run(
    target: lossless_target.Target,
    drafter: protocol.Drafter | None,
    prompts: Sequence[tuple[int, ...]],
    options: GreedyOptions,
    *,
    is_plain: bool,
) -> batch_lib.BatchResult:
    requests = [
        batch_lib.Request(prompt=prompt, max_new_tokens=options.max_new_tokens)
        for prompt in prompts
    ]
    return batch_lib.run_batch(
        target.params,
        target.config,
        requests,
        dtype=target.dtype,
        drafter=drafter,
        options=batch_lib.BatchOptions(
            accept_rule=options.accept_rule,
            limits=options.limits,
            strict=options.strict,
            is_plain=is_plain,
            # Those of the tokens themselves show bits that no token shows.
            num_log_probs=0 if options.strict else None,
        ),
    )


def _num_leading_same(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _describe(
    reference: lossless_target.Reference,
    sequence: int,
    prompt: tuple[int, ...],
    plain: tuple[int, ...],
    speculative: tuple[int, ...],
) -> Difference:
    """The first difference of two token sequences that differ."""
    position = _num_leading_same(plain, speculative)
    gaps = (None, None, None)
    plain_token = plain[position] if position < len(plain) else None
    speculative_token = speculative[position] if position < len(speculative) else None
    if plain_token is not None and speculative_token is not None:
        logits = reference.logits([*prompt, *plain[:position]])
        best = logits.max()
        gaps = (
            float(logits[plain_token] - logits[speculative_token]),
            float(best - logits[plain_token]),
            float(best - logits[speculative_token]),
        )
    return Difference(
        sequence=sequence,
        position=position,
        plain_token=plain_token,
        speculative_token=speculative_token,
        logit_gap=gaps[0],
        plain_below_best=gaps[1],
        speculative_below_best=gaps[2],
    )
