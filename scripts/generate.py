"""Prints a model's continuation of one or several prompts.

    python scripts/generate.py --checkpoint=FOLDER_OR_HUB_ID --prompt="def fib(n):"
    python scripts/generate.py --checkpoint=... --prompt=... --drafter=mtp

Text goes to stdout, everything else to stderr. Exit code 1 means that the request could
not be run, and one line on stderr says why.
"""

import dataclasses
import io
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import drafter_flags
import jax
import jax.numpy as jnp
import launcher
import rich.console
import target_flags
from absl import app, flags, logging

from metrale_jax import config as config_lib
from metrale_jax import sampling as sampling_lib
from metrale_jax import statistics as statistics_lib
from metrale_jax import text as text_lib
from metrale_jax import verify as verify_lib
from metrale_jax.drafters import protocol
from metrale_jax.engine import batch as batch_lib
from metrale_jax.model import params as params_lib

# So that --help lists them.
flags.adopt_module_key_flags(drafter_flags)
flags.adopt_module_key_flags(launcher)
flags.adopt_module_key_flags(target_flags)
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; may be repeated.")
_PROMPT_FILE = flags.DEFINE_string(
    "prompt_file",
    None,
    "A UTF-8 file that is one prompt, after those of --prompt; or, named *.jsonl, an "
    'object {"prompt": ...} per line.',
)
_CHAT = flags.DEFINE_bool(
    "chat", False, "Put each prompt into the checkpoint's chat template, as the user's."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 256, "Tokens to generate per prompt, at most."
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Keep the k likeliest tokens; 0 keeps all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the likeliest tokens up to this mass.")
_MIN_P = flags.DEFINE_float(
    "min_p", 0.0, "Drop tokens less likely than this fraction of the likeliest."
)
_REPETITION_PENALTY = flags.DEFINE_float(
    "repetition_penalty", 1.0, "Weakens tokens of prompt and output; 1 is off."
)
_PRESENCE_PENALTY = flags.DEFINE_float(
    "presence_penalty", 0.0, "Subtracted from tokens that the output holds."
)
_FREQUENCY_PENALTY = flags.DEFINE_float(
    "frequency_penalty", 0.0, "The same, times how often the output holds them."
)
_DRY_MULTIPLIER = flags.DEFINE_float(
    "dry_multiplier", 0.0, "Strength of the DRY penalty on repeated runs; 0 is off."
)
_MIN_NEW_TOKENS = flags.DEFINE_integer(
    "min_new_tokens", 0, "Tokens before which no end token is picked."
)
_LOGIT_BIAS = flags.DEFINE_multi_string(
    "logit_bias", [], "TOKEN_ID:NUMBER, added to that token's logit; may be repeated."
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of the first prompt; the next prompts take the next seeds."
)
_STOP = flags.DEFINE_multi_string("stop", [], "End before this text; may be repeated.")
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 8, "Prompts that run together.", lower_bound=1
)
_OUTPUT = flags.DEFINE_enum(
    "output",
    "text",
    ["text", "jsonl"],
    "jsonl prints an object per prompt: prompt, text, token_ids, finish_reason, and "
    "log_probs if asked for.",
)
_LOG_PROBS = flags.DEFINE_integer(
    "log_probs",
    None,
    "With --output=jsonl: log-probabilities of each token, and of this many likeliest.",
    lower_bound=0,
)
_ACCEPT_RULE = flags.DEFINE_enum(
    "accept_rule",
    "match",
    verify_lib.ACCEPT_RULES,
    "How sampled sequences judge drafts: match gives plain decoding's own tokens; "
    "rejection and block give its distribution and accept more of drawn drafts.",
)
_STRICT = flags.DEFINE_bool(
    "strict",
    False,
    "Give a row the same bits however many drafts ride along: slower, and equal to a "
    "plain strict run whatever the rounding.",
)
_COMPARE_PLAIN = flags.DEFINE_bool(
    "compare_plain", False, "Run the prompts without drafts too, and compare."
)
_STATS_JSON = flags.DEFINE_string("stats_json", None, "File to write timings to.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the flags ask for, beside the checkpoint."""

    prompts: tuple[str, ...]
    is_chat: bool
    max_new_tokens: int
    sampling: sampling_lib.SamplingOptions
    stop_strings: tuple[str, ...]
    dtype: jnp.dtype
    batch_size: int
    batch_options: batch_lib.BatchOptions
    compare_plain: bool
    output: str
    stats_path: str | None


def main(argv: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Whatever the locale says: a model's text may hold any character.
        sys.stdout.reconfigure(encoding="utf-8")
    launcher.run_main(
        argv,
        lambda: run(_read_request()),
        way_out="Lower --batch_size or --max_new_tokens.",
    )


def run(request: Request) -> None:
    """Loads the checkpoint, runs the prompts, prints what they got."""
    console = rich.console.Console(stderr=True)
    begin = time.perf_counter()
    opened = target_flags.open_target()
    prompt_ids = _encode(opened.tokenizer, request, opened.config)
    params, drafter = target_flags.load(opened)
    load_seconds = time.perf_counter() - begin

    print("compiling, or reading what an earlier run compiled", file=sys.stderr)
    target = _Target(params, opened.config, opened.tokenizer)
    printer = _Printer(request, console)
    runs = _run_prompts(target, request, prompt_ids, drafter, printer)
    plain_runs = None
    if request.compare_plain:
        plain_runs = _run_plain(target, request, prompt_ids, drafter)
    stats = _statistics(runs, plain_runs, prompt_ids, load_seconds)
    if drafter is not None:
        console.print(_summary_line(stats))
    if request.stats_path is not None:
        pathlib.Path(request.stats_path).write_text(json.dumps(stats, indent=2) + "\n")


@dataclasses.dataclass(frozen=True)
class _Target:
    params: params_lib.ModelParams
    config: config_lib.ModelConfig
    tokenizer: text_lib.Tokenizer


@dataclasses.dataclass(frozen=True)
class _Run:
    """One batch: what it took, and the tokens kept of each prompt."""

    result: batch_lib.BatchResult
    kept: list[tuple[int, ...]]


def _run_prompts(
    target: _Target,
    request: Request,
    prompt_ids: list[list[int]],
    drafter: protocol.Drafter | None,
    printer: "_Printer | None",
) -> list[_Run]:
    """Runs the prompts, a batch at a time; prints if it has a printer."""
    return [
        _run_group(
            target,
            request,
            prompt_ids,
            range(first, min(first + request.batch_size, len(prompt_ids))),
            drafter,
            printer,
        )
        for first in range(0, len(prompt_ids), request.batch_size)
    ]


def _run_plain(
    target: _Target,
    request: Request,
    prompt_ids: list[list[int]],
    drafter: protocol.Drafter | None,
) -> list[_Run]:
    """The same without drafts; strictly, in the program that verifies drafts."""
    print("decoding without drafts, to compare", file=sys.stderr)
    if not request.batch_options.strict:
        return _run_prompts(target, request, prompt_ids, None, None)
    options = dataclasses.replace(request.batch_options, is_plain=True)
    request = dataclasses.replace(request, batch_options=options)
    return _run_prompts(target, request, prompt_ids, drafter, None)


def _run_group(
    target: _Target,
    request: Request,
    prompt_ids: list[list[int]],
    group: range,
    drafter: protocol.Drafter | None,
    printer: "_Printer | None",
) -> _Run:
    streams = [
        text_lib.TextStream(
            target.tokenizer,
            end_token_ids=target.config.end_token_ids,
            stop_strings=request.stop_strings,
        )
        for _ in group
    ]

    def on_tokens(slot: int, tokens: list[int]) -> bool:
        stream = streams[slot]
        piece = stream.feed(tokens)
        if printer is not None:
            printer.add(group[slot], piece)
        return stream.is_finished

    result = batch_lib.run_batch(
        target.params,
        target.config,
        [
            batch_lib.Request(
                prompt=tuple(prompt_ids[index]),
                max_new_tokens=request.max_new_tokens,
                sampling=dataclasses.replace(
                    request.sampling, seed=request.sampling.seed + index
                ),
            )
            for index in group
        ],
        dtype=request.dtype,
        drafter=drafter,
        options=request.batch_options,
        on_tokens=on_tokens,
    )
    kept = []
    for slot, (stream, completion) in enumerate(
        zip(streams, result.completions, strict=True)
    ):
        piece = stream.finish(completion.finish_reason)
        kept.append(completion.token_ids[: stream.num_tokens])
        if printer is not None:
            printer.add(group[slot], piece)
            printer.finish(group[slot], completion, stream)
    return _Run(result, kept)


class _Finished(NamedTuple):
    completion: batch_lib.Completion
    stream: text_lib.TextStream


class _Printer:
    """Prints pieces of text in the order of the prompts, as early as that allows."""

    def __init__(self, request: Request, console: rich.console.Console) -> None:
        self._request = request
        self._console = console
        self._texts = [""] * len(request.prompts)
        self._num_shown = [0] * len(request.prompts)
        self._finished: dict[int, _Finished] = {}
        self._current = 0
        self._begin_prompt()

    def add(self, index: int, piece: str) -> None:
        self._texts[index] += piece
        self._show_current()

    def finish(
        self,
        index: int,
        completion: batch_lib.Completion,
        stream: text_lib.TextStream,
    ) -> None:
        self._finished[index] = _Finished(completion, stream)
        while self._current in self._finished:
            self._end_current()

    def _begin_prompt(self) -> None:
        if self._request.output == "text" and len(self._request.prompts) > 1:
            if self._current < len(self._request.prompts):
                self._console.rule(f"prompt {self._current}")

    def _show_current(self) -> None:
        if self._request.output != "text":
            return
        text = self._texts[self._current]
        sys.stdout.write(text[self._num_shown[self._current] :])
        sys.stdout.flush()
        self._num_shown[self._current] = len(text)

    def _end_current(self) -> None:
        self._show_current()
        index = self._current
        completion, stream = self._finished[index]
        reason = stream.finish_reason
        if self._request.output == "jsonl":
            record = {
                "prompt": self._request.prompts[index],
                "text": self._texts[index],
                "token_ids": list(completion.token_ids[: stream.num_tokens]),
                "finish_reason": reason,
            }
            if self._request.batch_options.num_log_probs is not None:
                record["log_probs"] = [
                    {"emitted": entry.emitted, "top": dict(entry.top)}
                    for entry in completion.log_probs[: stream.num_tokens]
                ]
            sys.stdout.write(json.dumps(record, ensure_ascii=False))
        sys.stdout.write("\n")
        sys.stdout.flush()
        if reason == "error":
            self._console.print(
                f"Prompt {index} ended early: the model's logits were not finite."
            )
        self._current += 1
        self._begin_prompt()
        if self._current < len(self._request.prompts):
            self._show_current()


def _encode(
    tokenizer: text_lib.Tokenizer, request: Request, config: config_lib.ModelConfig
) -> list[list[int]]:
    if request.is_chat:
        prompt_ids = [
            tokenizer.encode_chat([{"role": "user", "content": prompt}])
            for prompt in request.prompts
        ]
    else:
        prompt_ids = [tokenizer.encode(prompt) for prompt in request.prompts]
    batch_lib.check_prompts(config, prompt_ids)
    return prompt_ids


def _statistics(
    runs: list[_Run],
    plain_runs: list[_Run] | None,
    prompt_ids: list[list[int]],
    load_seconds: float,
) -> dict[str, object]:
    """Times exclude compilation; the first token of a prompt counts as prefill."""
    num_prompt_tokens = sum(map(len, prompt_ids))
    prefill_seconds = sum(run.result.prefill_seconds for run in runs)
    parts = [part for run in runs for part in run.result.statistics]
    stats: dict[str, object] = {
        **dataclasses.asdict(statistics_lib.summarize(*parts)),
        "backend": jax.default_backend(),
        "drafter": drafter_flags.drafter_kind(),
        "num_prompts": len(prompt_ids),
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": sum(len(kept) for run in runs for kept in run.kept),
        "tokens_per_second": _tokens_per_second(runs),
        "prefill_tokens_per_second": num_prompt_tokens / prefill_seconds,
        "prefill_seconds": prefill_seconds,
        "decode_seconds": sum(run.result.decode_seconds for run in runs),
        "compile_seconds": sum(run.result.compile_seconds for run in runs),
        "load_seconds": load_seconds,
    }
    if plain_runs is not None:
        plain = _tokens_per_second(plain_runs)
        stats["plain_tokens_per_second"] = plain
        stats["speedup"] = _tokens_per_second(runs) / plain if plain else 0.0
        stats["identical"] = [run.kept for run in runs] == [
            run.kept for run in plain_runs
        ]
        stats["compile_seconds"] = sum(
            run.result.compile_seconds for run in [*runs, *plain_runs]
        )
    return stats


def _tokens_per_second(runs: list[_Run]) -> float:
    """Kept tokens per second of decoding, over all sequences."""
    seconds = sum(run.result.decode_seconds for run in runs)
    num_decoded = sum(max(len(kept) - 1, 0) for run in runs for kept in run.kept)
    return num_decoded / seconds if seconds else 0.0


def _summary_line(stats: dict[str, object]) -> str:
    line = (
        f"{stats['num_tokens']} tokens, {stats['tokens_per_second']:.1f} tokens/s, "
        f"{stats['mean_accepted_length']:.2f} tokens a round"
    )
    if "speedup" in stats:
        same = "the same" if stats["identical"] else "OTHER"
        line += (
            f"; without drafts {stats['plain_tokens_per_second']:.1f} tokens/s "
            f"({stats['speedup']:.2f} times as fast with them) and {same} tokens"
        )
    return line


def _read_request() -> Request:
    prompts = [*_PROMPT.value, *_read_prompt_file(_PROMPT_FILE.value)]
    if not prompts:
        raise launcher.UsageError(
            "No prompt; give --prompt=TEXT or --prompt_file=PATH."
        )
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise launcher.UsageError(
                f"Prompt {index} is empty; give at least one character."
            )
    last_seed = _SEED.value + len(prompts) - 1
    if not 0 <= _SEED.value <= last_seed < 2**64:
        raise launcher.UsageError(
            f"--seed={_SEED.value} must leave every prompt a seed in 0..2**64-1."
        )
    if _LOG_PROBS.value is not None and _OUTPUT.value != "jsonl":
        raise launcher.UsageError("--log_probs needs --output=jsonl.")
    target_flags.checkpoint()
    drafter_flags.check_flags()
    if drafter_flags.drafter_kind() == "none":
        for flag in (_COMPARE_PLAIN, _STRICT):
            if flag.value:
                raise launcher.UsageError(f"--{flag.name} needs --drafter.")
    launcher.check_writable("stats_json", _STATS_JSON.value)
    return Request(
        prompts=tuple(prompts),
        is_chat=_CHAT.value,
        max_new_tokens=_read_max_new_tokens(),
        sampling=sampling_lib.SamplingOptions(
            temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value,
            top_p=_TOP_P.value,
            min_p=_MIN_P.value,
            repetition_penalty=_REPETITION_PENALTY.value,
            presence_penalty=_PRESENCE_PENALTY.value,
            frequency_penalty=_FREQUENCY_PENALTY.value,
            dry_multiplier=_DRY_MULTIPLIER.value,
            min_new_tokens=_MIN_NEW_TOKENS.value,
            logit_bias=dict(map(_parse_bias, _LOGIT_BIAS.value)),
            seed=_SEED.value,
        ),
        stop_strings=tuple(_STOP.value),
        dtype=target_flags.dtype(),
        batch_size=_BATCH_SIZE.value,
        batch_options=batch_lib.BatchOptions(
            accept_rule=_ACCEPT_RULE.value,
            num_log_probs=_LOG_PROBS.value,
            limits=drafter_flags.draft_limits(),
            strict=_STRICT.value,
        ),
        compare_plain=_COMPARE_PLAIN.value,
        output=_OUTPUT.value,
        stats_path=_STATS_JSON.value,
    )


def _read_max_new_tokens() -> int:
    if _MAX_NEW_TOKENS.value < 1:
        raise launcher.UsageError(
            f"--max_new_tokens must be at least 1, got {_MAX_NEW_TOKENS.value}."
        )
    return _MAX_NEW_TOKENS.value


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        raise launcher.UsageError(
            f"--logit_bias={text} must be TOKEN_ID:NUMBER, as in 42:-1.5."
        ) from None


def _read_prompt_file(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        content = pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise launcher.UsageError(
            f"--prompt_file={path} is not UTF-8 text: {error}."
        ) from None
    if not path.endswith(".jsonl"):
        return [content]
    prompts = []
    # Not splitlines(): JSON strings may hold the other line ends of Unicode.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise launcher.UsageError(
                f"{path}:{number} is not JSON: {error}."
            ) from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise launcher.UsageError(
                f'{path}:{number} must be an object {{"prompt": TEXT}}.'
            )
        prompts.append(record["prompt"])
    return prompts


if __name__ == "__main__":
    app.run(main, flags_parser=launcher.parse_flags)
