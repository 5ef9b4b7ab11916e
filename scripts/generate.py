"""Prints a model's continuation of one or several prompts.

    python scripts/generate.py --checkpoint=FOLDER_OR_HUB_ID --prompt="def fib(n):"

Text goes to stdout, everything else to stderr. Exit code 1 means that the request could
not be run, and one line on stderr says why.
"""

import dataclasses
import io
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import rich.console
from absl import app, flags, logging

from metrale_jax import checkpoint as checkpoint_lib
from metrale_jax import config as config_lib
from metrale_jax import text as text_lib
from metrale_jax.engine import batch as batch_lib

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Folder of a checkpoint, or its id on the Hugging Face hub."
)
_REVISION = flags.DEFINE_string(
    "revision", None, "Branch, tag or commit of a hub checkpoint, for every file."
)
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
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of the first prompt; the next prompts take the next seeds."
)
_STOP = flags.DEFINE_multi_string("stop", [], "End before this text; may be repeated.")
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "auto",
    ["auto", "float32", "bfloat16"],
    "Of weights and caches; auto is float32 on a CPU, else bfloat16.",
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 8, "Prompts that run together.", lower_bound=1
)
_OUTPUT = flags.DEFINE_enum(
    "output",
    "text",
    ["text", "jsonl"],
    "jsonl prints an object per prompt: prompt, text, token_ids, finish_reason.",
)
_STATS_JSON = flags.DEFINE_string("stats_json", None, "File to write timings to.")
_CHECK_FINITE = flags.DEFINE_bool(
    "check_finite", False, "Refuse weights that hold NaN or infinity."
)
_COMPILATION_CACHE = flags.DEFINE_string(
    "compilation_cache",
    None,
    "Folder for compiled programs; by default one in the user's cache, readable by "
    "nobody else. Empty switches it off.",
)


_HELP_FLAGS = ("help", "helpshort", "helpfull", "helpxml", "?")


class _UsageError(Exception):
    """The request can't be run; the message is one line for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the flags ask for, beside the checkpoint."""

    prompts: tuple[str, ...]
    is_chat: bool
    sampling: batch_lib.SamplingParams
    stop_strings: tuple[str, ...]
    dtype: jnp.dtype
    batch_size: int
    output: str
    stats_path: str | None


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        _exit(f"Unexpected arguments {argv[1:]}; a prompt is given as --prompt=TEXT.")
    logging.set_verbosity(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Whatever the locale says: a model's text may hold any character.
        sys.stdout.reconfigure(encoding="utf-8")
    try:
        if not _CHECKPOINT.value:
            raise _UsageError(
                "--checkpoint is missing; give a folder or a Hugging Face id."
            )
        _use_compilation_cache(_COMPILATION_CACHE.value)
        run(
            checkpoint=_CHECKPOINT.value,
            revision=_REVISION.value,
            request=_read_request(),
            check_finite=_CHECK_FINITE.value,
        )
    # What the library raises for a bad request; anything else is our bug and is shown
    # as such.
    except (_UsageError, ValueError, NotImplementedError, OSError) as error:
        _exit(str(error))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _exit(
            f"The device's memory is too small: {str(error).splitlines()[0]} "
            "Lower --batch_size or --max_new_tokens."
        )
    except KeyboardInterrupt:
        sys.exit(130)


def run(
    *, checkpoint: str, revision: str | None, request: Request, check_finite: bool
) -> None:
    """Loads the checkpoint, runs the prompts, prints what they got."""
    console = rich.console.Console(stderr=True)
    begin = time.perf_counter()
    folder = checkpoint_lib.locate(checkpoint, revision=revision)
    config, _ = checkpoint_lib.read_config(folder)
    tokenizer = text_lib.Tokenizer.from_folder(folder)
    tokenizer.check_vocab_size(config.vocab_size)
    prompt_ids = _encode(tokenizer, request, config)
    with checkpoint_lib.progress_bar("loading weights") as progress:
        params = checkpoint_lib.load_params(
            folder,
            config,
            dtype=request.dtype,
            check_finite=check_finite,
            progress=progress,
        )
    load_seconds = time.perf_counter() - begin

    print("compiling, or reading what an earlier run compiled", file=sys.stderr)
    printer = _Printer(request, console)
    results = []
    for first in range(0, len(prompt_ids), request.batch_size):
        group = range(first, min(first + request.batch_size, len(prompt_ids)))
        results.append(
            _run_group(params, config, tokenizer, request, prompt_ids, group, printer)
        )
    if request.stats_path is not None:
        stats = _statistics(results, prompt_ids, load_seconds)
        pathlib.Path(request.stats_path).write_text(json.dumps(stats, indent=2) + "\n")


def _run_group(
    params: object,
    config: config_lib.ModelConfig,
    tokenizer: text_lib.Tokenizer,
    request: Request,
    prompt_ids: list[list[int]],
    group: range,
    printer: "_Printer",
) -> batch_lib.BatchResult:
    streams = [
        text_lib.TextStream(
            tokenizer,
            end_token_ids=config.end_token_ids,
            stop_strings=request.stop_strings,
        )
        for _ in group
    ]

    def on_tokens(slot: int, tokens: list[int]) -> bool:
        stream = streams[slot]
        printer.add(group[slot], stream.feed(tokens))
        return stream.is_finished

    result = batch_lib.run_batch(
        params,
        config,
        [prompt_ids[index] for index in group],
        [
            dataclasses.replace(request.sampling, seed=request.sampling.seed + index)
            for index in group
        ],
        dtype=request.dtype,
        on_tokens=on_tokens,
    )
    for slot, (stream, completion) in enumerate(
        zip(streams, result.completions, strict=True)
    ):
        printer.add(group[slot], stream.finish(completion.finish_reason))
        kept = completion.token_ids[: stream.num_tokens]
        printer.finish(group[slot], kept, stream.finish_reason)
    return result


class _Printer:
    """Prints pieces of text in the order of the prompts, as early as that allows."""

    def __init__(self, request: Request, console: rich.console.Console) -> None:
        self._request = request
        self._console = console
        self._texts = [""] * len(request.prompts)
        self._num_shown = [0] * len(request.prompts)
        self._finished: dict[int, tuple[tuple[int, ...], str]] = {}
        self._current = 0
        self._begin_prompt()

    def add(self, index: int, piece: str) -> None:
        self._texts[index] += piece
        self._show_current()

    def finish(self, index: int, token_ids: tuple[int, ...], reason: str) -> None:
        self._finished[index] = (token_ids, reason)
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
        token_ids, reason = self._finished[index]
        if self._request.output == "jsonl":
            record = {
                "prompt": self._request.prompts[index],
                "text": self._texts[index],
                "token_ids": list(token_ids),
                "finish_reason": reason,
            }
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
    results: list[batch_lib.BatchResult],
    prompt_ids: list[list[int]],
    load_seconds: float,
) -> dict[str, float | int | str]:
    """Times exclude compilation; the first token of a prompt counts as prefill."""
    num_tokens = sum(
        len(completion.token_ids)
        for result in results
        for completion in result.completions
    )
    num_prompt_tokens = sum(map(len, prompt_ids))
    prefill_seconds = sum(result.prefill_seconds for result in results)
    decode_seconds = sum(result.decode_seconds for result in results)
    num_decoded = num_tokens - len(prompt_ids)
    return {
        "backend": jax.default_backend(),
        "num_prompts": len(prompt_ids),
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": num_tokens,
        "tokens_per_second": num_decoded / decode_seconds if decode_seconds else 0.0,
        "prefill_tokens_per_second": num_prompt_tokens / prefill_seconds,
        "prefill_seconds": prefill_seconds,
        "decode_seconds": decode_seconds,
        "compile_seconds": sum(result.compile_seconds for result in results),
        "load_seconds": load_seconds,
    }


def _read_request() -> Request:
    prompts = [*_PROMPT.value, *_read_prompt_file(_PROMPT_FILE.value)]
    if not prompts:
        raise _UsageError("No prompt; give --prompt=TEXT or --prompt_file=PATH.")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise _UsageError(f"Prompt {index} is empty; give at least one character.")
    last_seed = _SEED.value + len(prompts) - 1
    if not 0 <= _SEED.value <= last_seed < 2**64:
        raise _UsageError(
            f"--seed={_SEED.value} must leave every prompt a seed in 0..2**64-1."
        )
    _check_writable(_STATS_JSON.value)
    dtype = _DTYPE.value
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return Request(
        prompts=tuple(prompts),
        is_chat=_CHAT.value,
        sampling=batch_lib.SamplingParams(
            max_new_tokens=_MAX_NEW_TOKENS.value,
            temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value,
            top_p=_TOP_P.value,
            min_p=_MIN_P.value,
            seed=_SEED.value,
        ),
        stop_strings=tuple(_STOP.value),
        dtype=jnp.dtype(dtype),
        batch_size=_BATCH_SIZE.value,
        output=_OUTPUT.value,
        stats_path=_STATS_JSON.value,
    )


def _check_writable(path: str | None) -> None:
    """Refuses an impossible path before the work rather than after it."""
    if path is None:
        return
    if pathlib.Path(path).is_dir() or not pathlib.Path(path).absolute().parent.is_dir():
        raise _UsageError(
            f"--stats_json={path} must be a file in a folder that exists."
        )


def _read_prompt_file(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        content = pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _UsageError(f"--prompt_file={path} is not UTF-8 text: {error}.") from None
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
            raise _UsageError(f"{path}:{number} is not JSON: {error}.") from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise _UsageError(f'{path}:{number} must be an object {{"prompt": TEXT}}.')
        prompts.append(record["prompt"])
    return prompts


def _use_compilation_cache(folder: str | None) -> None:
    """Compiled programs are code: the default folder is private to the user."""
    if folder == "":
        return
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        folder = str(pathlib.Path(base) / "metrale_jax" / "compiled")
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise _UsageError(
                f"The cache of compiled programs can't be made: {error}. Give "
                "--compilation_cache=FOLDER, or an empty one for none."
            ) from None
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _exit(message: str) -> None:
    print("generate.py: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(1)


def _parse_flags(argv: list[str]) -> list[str]:
    """Like absl's own parser, with one line and exit code 1 for a bad flag."""
    try:
        return (
            app.parse_flags_with_usage(argv) if _asks_help(argv) else flags.FLAGS(argv)
        )
    except flags.Error as error:
        _exit(f"{error} See --help.")
        return []


def _asks_help(argv: list[str]) -> bool:
    return any(
        argument.startswith("-") and argument.strip("-") in _HELP_FLAGS
        for argument in argv[1:]
    )


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
