"""Tests on your own model that a drafter changes nothing but speed.

    python scripts/check_lossless.py --checkpoint=FOLDER_OR_HUB_ID --drafter=mtp

Two parts. Greedy: the same prompts run with drafts and without, and every token is
compared; where the two first differ, the target itself says, by prefill, how far both
tokens are from its best one, since rounding may decide between near ties. With --strict
nothing may differ, no bit of a log-probability either. Sampled: many draws of the same
prompts, speculative round by speculative round, are held against the target's own
distribution by a chi-square test.

Exit code 0 means that the promise held, 2 that it was broken, 1 that the test could not
run; one line on stderr then says why.
"""

import dataclasses
import json
import pathlib
import shlex
import sys
import time
from collections.abc import Iterable, Sequence

import drafter_flags
import jax
import jax.numpy as jnp
import launcher
import lossless_greedy
import lossless_sampled
import lossless_target
import rich.console
import rich.table
import target_flags
from absl import app, flags, logging

from metrale_jax import picks
from metrale_jax import sampling as sampling_lib
from metrale_jax import verify as verify_lib
from metrale_jax.drafters import protocol
from metrale_jax.engine import batch as batch_lib

# So that --help lists them.
flags.adopt_module_key_flags(drafter_flags)
flags.adopt_module_key_flags(launcher)
flags.adopt_module_key_flags(target_flags)
_PROMPT = flags.DEFINE_multi_string(
    "prompt",
    [],
    "A prompt; may be repeated. By default four short ones: code, prose, JSON, a list.",
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 64, "Tokens per prompt in the greedy part.", lower_bound=1
)
_BATCH_SIZES = flags.DEFINE_list(
    "batch_sizes", ["1", "4"], "Sequences that run together in the greedy part."
)
_DRAFT_COUNTS = flags.DEFINE_list(
    "draft_counts",
    None,
    "Drafts per round; by default --num_drafts if it is given, else 1, 3 and 7, or the "
    "drafter's most. The sampled part takes the largest.",
)
_STRICT = flags.DEFINE_bool(
    "strict", False, "Test the strict tier, of which equal bits are demanded."
)
_ACCEPT_RULE = flags.DEFINE_enum(
    "accept_rule",
    "match",
    verify_lib.ACCEPT_RULES,
    "How sampled sequences judge drafts.",
)
_MAX_LOGIT_GAP = flags.DEFINE_float(
    "max_logit_gap",
    None,
    "How far below the best logit both tokens of a first difference may be; by default "
    "1e-3 for float32 and 0.25 for bfloat16. Not with --strict, which allows none.",
    lower_bound=0.0,
)
_NUM_DRAWS = flags.DEFINE_integer(
    "num_draws",
    2000,
    "Draws of the sampled part, over all prompts; 0 skips it.",
    lower_bound=0,
)
_SAMPLED_BATCH_SIZE = flags.DEFINE_integer(
    "sampled_batch_size", 64, "Draws that run together.", lower_bound=1
)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of the sampled part.")
_TOP_K = flags.DEFINE_integer(
    "top_k",
    0,
    "Of the sampled part; 0 keeps all. In bfloat16 rounding may move the edge of what "
    "top_k and top_p keep: test those in float32.",
)
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Of the sampled part; 1 keeps all.")
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of the first draw; the next draws take the next seeds."
)
_SIGNIFICANCE = flags.DEFINE_float(
    "significance",
    1e-4,
    "A p-value below it breaks the promise; so often a kept promise fails a test.",
    lower_bound=0.0,
    upper_bound=1.0,
)
_JSON = flags.DEFINE_string("json", None, "File to write all figures to.")

_PROMPTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The river rose slowly through the night, and by morning the old bridge",
    '{"users": [{"id": 1, "name": "Ada"}, {"id": 2, "name": "Alan"}, {"id": 3,',
    "Shopping list:\n1. apples\n2. bread\n3. cheese\n4.",
)
_DRAFT_COUNTS_DEFAULT = (1, 3, 7)
_MAX_LOGIT_GAPS = {"float32": 1e-3, "bfloat16": 0.25}
_VIOLATION_EXIT_CODE = 2
# Of the table where no terminal says what it can show.
_TABLE_WIDTH = 110


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the flags ask for, beside the checkpoint.

    Attributes:
      prompts: texts.
      dtype: of weights and caches.
      batch_sizes: of the greedy part.
      draft_counts: drafts per round; None for the default ones.
      greedy: how the greedy part runs and what it allows.
      sampled: the same of the sampled part; None skips it.
    """

    prompts: tuple[str, ...]
    dtype: jnp.dtype
    batch_sizes: tuple[int, ...]
    draft_counts: tuple[int, ...] | None
    greedy: lossless_greedy.GreedyOptions
    sampled: lossless_sampled.SampledOptions | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What was found: a row per configuration, and what the user should know."""

    greedy: tuple[lossless_greedy.GreedyRow, ...]
    sampled: tuple[lossless_sampled.SampledRow, ...]
    warnings: tuple[str, ...]
    load_seconds: float
    check_seconds: float

    @property
    def num_violations(self) -> int:
        """Configurations that broke the promise."""
        return sum(row.verdict == "violation" for row in (*self.greedy, *self.sampled))


def main(argv: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    launcher.run_main(
        argv,
        _check_and_report,
        way_out="Lower --batch_sizes, --sampled_batch_size or --max_new_tokens.",
    )


def _check_and_report() -> None:
    options = _read_options()
    report = run(options)
    # First what nothing can lose, then the file.
    _print_report(report)
    if _JSON.value is not None:
        _write_json(_JSON.value, report, options)
    if report.num_violations:
        sys.exit(_VIOLATION_EXIT_CODE)


def run(options: Options) -> Report:
    """Loads the checkpoint and runs both parts.

    Raises:
      ValueError: a prompt can't run, the drafter doesn't fit, or the target's logits
        are not finite.
    """
    begin = time.perf_counter()
    opened = target_flags.open_target()
    prompts = [tuple(opened.tokenizer.encode(prompt)) for prompt in options.prompts]
    batch_lib.check_prompts(opened.config, prompts)
    params, drafter = target_flags.load(opened)
    assert drafter is not None, "_read_options refuses --drafter=none"
    target = lossless_target.Target(params, opened.config, options.dtype)
    counts = options.draft_counts or _default_draft_counts(drafter)
    loaded = time.perf_counter()
    # The sampled part goes two tokens beyond a prompt.
    longest = max(map(len, prompts)) + max(options.greedy.max_new_tokens, 2)
    reference = lossless_target.Reference(target, longest, max(map(len, prompts)))
    greedy = _check_greedy(target, reference, drafter, prompts, counts, options)
    sampled = []
    if options.sampled is not None:
        widest = _with_num_drafts(drafter, max(counts))
        sampled = lossless_sampled.check(
            target, reference, widest, prompts, options.sampled, _report_progress
        )
    return Report(
        greedy=tuple(greedy),
        sampled=tuple(sampled),
        warnings=tuple(_warnings(greedy, sampled)),
        load_seconds=loaded - begin,
        check_seconds=time.perf_counter() - loaded,
    )


def _check_greedy(
    target: lossless_target.Target,
    reference: lossless_target.Reference,
    drafter: protocol.Drafter,
    prompts: list[tuple[int, ...]],
    counts: Iterable[int],
    options: Options,
) -> list[lossless_greedy.GreedyRow]:
    rows = []
    # Without drafts and not strictly, plain runs don't depend on the drafter.
    plain_runs: dict[int, batch_lib.BatchResult] = {}
    for num_drafts in counts:
        drafter = _with_num_drafts(drafter, num_drafts)
        for batch_size in options.batch_sizes:
            _report_progress(f"greedy: batch of {batch_size}, {num_drafts} drafts")
            requests = [prompts[index % len(prompts)] for index in range(batch_size)]
            plain = plain_runs.get(batch_size)
            if plain is None:
                plain = lossless_greedy.run_plain(
                    target, drafter, requests, options.greedy
                )
            if not options.greedy.strict:
                plain_runs[batch_size] = plain
            rows.append(
                lossless_greedy.check(
                    target, reference, drafter, requests, plain, options.greedy
                )
            )
    return rows


def _default_draft_counts(drafter: protocol.Drafter) -> tuple[int, ...]:
    wanted = drafter_flags.num_drafts()
    if wanted is not None:
        return (wanted,)
    most = protocol.MAX_NUM_DRAFTS
    if drafter_flags.drafter_kind() == "dflash":
        most = drafter.max_drafts
    return tuple(sorted({min(count, most) for count in _DRAFT_COUNTS_DEFAULT}))


def _with_num_drafts(drafter: protocol.Drafter, num_drafts: int) -> protocol.Drafter:
    return dataclasses.replace(drafter, num_drafts=num_drafts)


def _warnings(
    greedy: list[lossless_greedy.GreedyRow],
    sampled: list[lossless_sampled.SampledRow],
) -> list[str]:
    warnings = []
    if not sum(row.accepted for row in (*greedy, *sampled)):
        warnings.append(
            "No draft was accepted in the whole run, so this proved little; try other "
            "prompts, more tokens, or another drafter."
        )
    untested = [row.prompt for row in sampled if row.least_p_value is None]
    if untested:
        warnings.append(
            f"Too few draws to test the distribution of prompts {untested}; raise "
            "--num_draws, or lower --top_k or --temperature."
        )
    return warnings


def _print_report(report: Report) -> None:
    console = rich.console.Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    table = rich.table.Table()
    for title in ("part", "sequences", "drafts", "tokens", "other"):
        table.add_column(title, justify="left" if title == "part" else "right")
    for title in ("largest gap", "least p", "tokens a round", "verdict"):
        table.add_column(title, justify="left" if title == "verdict" else "right")
    for row in (*report.greedy, *report.sampled):
        table.add_row(*row.cells())
    console.print(table)
    for row in report.greedy:
        for line in row.difference_lines():
            console.print(line, markup=False)
    for warning in report.warnings:
        console.print(f"Warning: {warning}", markup=False)
    if report.num_violations:
        console.print(f"The promise is BROKEN in {report.num_violations} rows.")
    else:
        untested = "" if report.sampled else " Sampling was not tested."
        console.print(f"The promise held.{untested}")


def _write_json(path: str, report: Report, options: Options) -> None:
    figures = {
        "command": shlex.join(sys.argv),
        "checkpoint": target_flags.checkpoint(),
        "revision": target_flags.revision(),
        "backend": jax.default_backend(),
        "dtype": options.dtype.name,
        "drafter": drafter_flags.drafter_kind(),
        "strict": options.greedy.strict,
        "accept_rule": options.greedy.accept_rule,
        "max_logit_gap": options.greedy.max_logit_gap,
        "significance": _SIGNIFICANCE.value,
        "prompts": options.prompts,
        "is_lossless": not report.num_violations,
        "num_violations": report.num_violations,
        **dataclasses.asdict(report),
    }
    pathlib.Path(path).write_text(json.dumps(figures, indent=2) + "\n")


def _report_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read_options() -> Options:
    target_flags.checkpoint()
    drafter_flags.check_flags()
    if drafter_flags.drafter_kind() == "none":
        offered = ", ".join(kind for kind in drafter_flags.KINDS if kind != "none")
        raise launcher.UsageError(
            f"--drafter is missing: without drafts nothing is to check; give {offered}."
        )
    prompts = tuple(_PROMPT.value) or _PROMPTS
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise launcher.UsageError(
                f"Prompt {index} is empty; give at least one character."
            )
    if _STRICT.value and _MAX_LOGIT_GAP.value is not None:
        raise launcher.UsageError(
            "--max_logit_gap is not for --strict, which allows no difference."
        )
    launcher.check_writable("json", _JSON.value)
    dtype = target_flags.dtype()
    max_logit_gap = _MAX_LOGIT_GAP.value
    if max_logit_gap is None:
        max_logit_gap = 0.0 if _STRICT.value else _MAX_LOGIT_GAPS[dtype.name]
    return Options(
        prompts=prompts,
        dtype=dtype,
        batch_sizes=_parse_counts("batch_sizes", _BATCH_SIZES.value, None),
        draft_counts=_read_draft_counts(),
        greedy=lossless_greedy.GreedyOptions(
            max_new_tokens=_MAX_NEW_TOKENS.value,
            max_logit_gap=max_logit_gap,
            strict=_STRICT.value,
            accept_rule=_read_accept_rule(),
            limits=drafter_flags.draft_limits(),
        ),
        sampled=_read_sampled_options(),
    )


def _read_accept_rule() -> verify_lib.AcceptRule:
    # The flag's parser has let nothing else pass.
    rules: dict[str, verify_lib.AcceptRule] = {
        rule: rule for rule in verify_lib.ACCEPT_RULES
    }
    return rules[_ACCEPT_RULE.value]


def _read_draft_counts() -> tuple[int, ...] | None:
    if _DRAFT_COUNTS.value is None:
        return None
    if drafter_flags.num_drafts() is not None:
        raise launcher.UsageError("Give --draft_counts or --num_drafts, not both.")
    return _parse_counts("draft_counts", _DRAFT_COUNTS.value, protocol.MAX_NUM_DRAFTS)


def _read_sampled_options() -> lossless_sampled.SampledOptions | None:
    last_seed = (
        _SEED.value
        + _NUM_DRAWS.value
        + _SAMPLED_BATCH_SIZE.value * max(len(_PROMPT.value), len(_PROMPTS))
    )
    if not 0 <= _SEED.value <= last_seed < 2**64:
        raise launcher.UsageError(
            f"--seed={_SEED.value} must leave every draw a seed in 0..2**64-1."
        )
    sampling = sampling_lib.SamplingOptions(
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        seed=_SEED.value,
    )
    if sampling.temperature < picks.GREEDY_TEMPERATURE:
        raise launcher.UsageError(
            f"--temperature must be at least {picks.GREEDY_TEMPERATURE} to sample, got "
            f"{sampling.temperature}; --num_draws=0 skips the sampled part."
        )
    if _NUM_DRAWS.value == 0:
        return None
    return lossless_sampled.SampledOptions(
        num_draws=_NUM_DRAWS.value,
        batch_size=_SAMPLED_BATCH_SIZE.value,
        sampling=sampling,
        significance=_SIGNIFICANCE.value,
        strict=_STRICT.value,
        accept_rule=_read_accept_rule(),
        limits=drafter_flags.draft_limits(),
    )


def _parse_counts(flag: str, values: list[str], most: int | None) -> tuple[int, ...]:
    rule = "positive numbers" if most is None else f"numbers in 1..{most}"
    try:
        counts = tuple(int(value) for value in values)
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or (most is not None and max(counts) > most):
        raise launcher.UsageError(
            f"--{flag} must be {rule}, as in --{flag}=1,3; got {','.join(values)!r}."
        )
    return tuple(dict.fromkeys(counts))


if __name__ == "__main__":
    app.run(main, flags_parser=launcher.parse_flags)
