"""Times decode steps and prefill beside the time to stream the weights.

    python scripts/bench_decode.py                        # a random 35 M hybrid
    python scripts/bench_decode.py --checkpoint=FOLDER

Beside them, what speculation costs and gains: a bare forward of K rows, to tell the
round's own overhead; an n-gram search; decoding with drafts that are always right.

Every measured program runs once per pass, in turn, so that a slow moment of the machine
meets all of them; reported are medians over the passes. The yardstick is the time of
one-row products with every matrix that a one-row step reads, one after another.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import bench_speculation
import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from absl import app, flags, logging

from metrale_jax import checkpoint as checkpoint_lib
from metrale_jax import chunk, fold, verify
from metrale_jax import config as config_lib
from metrale_jax import state as state_lib
from metrale_jax.axes import Array
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Folder or hub id; without one, a random 35 M hybrid."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of weights and caches."
)
_ROWS = flags.DEFINE_list(
    "rows", ["1", "2", "4", "8", "16"], "Rows per verify, one sequence."
)
_BATCHES = flags.DEFINE_list(
    "batches", ["1", "4", "16"], "Sequences that decode one row each."
)
_LENGTH = flags.DEFINE_integer(
    "length", 128, "Tokens inside the caches of every sequence.", lower_bound=1
)
_DRAFTS = flags.DEFINE_list(
    "drafts", ["3", "7"], "Drafts per round of an always-right drafter."
)
_PREFILL_TOKENS = flags.DEFINE_integer(
    "prefill_tokens", 256, "Tokens of the prefill chunk.", lower_bound=1
)
_PASSES = flags.DEFINE_integer("passes", 25, "Measured passes.", lower_bound=3)
_IMPLEMENTATION = flags.DEFINE_string(
    "implementation", None, "Of the kernels; by default the backend's own."
)
_JSON = flags.DEFINE_string("json", None, "File to write the figures to.")

# 35 M parameters, as small targets for a CPU are: 6 recurrent and 2 attention layers.
_HYBRID_35M = config_lib.parse_model_config(
    dict(
        model_type="qwen3_5_text",
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
    )
)
_PAGE_SIZE = 64
_WARM_UP_PASSES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured.

    Attributes:
      dtype: of weights and caches.
      rows: rows per verify, one sequence.
      batches: sequences that decode one row each.
      length: tokens inside the caches of every sequence.
      drafts: drafts per round of an always-right drafter.
      prefill_tokens: tokens of the prefill chunk.
      num_passes: measured passes.
      implementation: of the kernels; None is the backend's own.
    """

    dtype: jnp.dtype
    rows: tuple[int, ...]
    batches: tuple[int, ...]
    length: int
    drafts: tuple[int, ...]
    prefill_tokens: int
    num_passes: int
    implementation: dispatch.Implementation | None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One program, and its wall times in seconds, one per pass."""

    name: str
    num_tokens: int
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.seconds))


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments {argv[1:]}.")
    logging.set_verbosity(logging.WARNING)
    dtype = jnp.dtype(_DTYPE.value)
    options = Options(
        dtype=dtype,
        rows=tuple(int(rows) for rows in _ROWS.value),
        batches=tuple(int(batch) for batch in _BATCHES.value),
        length=_LENGTH.value,
        drafts=tuple(int(drafts) for drafts in _DRAFTS.value),
        prefill_tokens=_PREFILL_TOKENS.value,
        num_passes=_PASSES.value,
        implementation=_IMPLEMENTATION.value,
    )
    if _CHECKPOINT.value:
        folder = checkpoint_lib.locate(_CHECKPOINT.value)
        config, _ = checkpoint_lib.read_config(folder)
        params = checkpoint_lib.load_params(folder, config, dtype=dtype)
    else:
        config = _HYBRID_35M
        params = params_lib.init_params(config, rng_key=jax.random.key(0), dtype=dtype)
    run(
        params=params,
        # An arbitrary token must not end a sequence in the middle of a measurement.
        config=dataclasses.replace(config, end_token_ids=()),
        options=options,
        json_path=_JSON.value,
    )


def run(
    *,
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    options: Options,
    json_path: str | None,
) -> None:
    matrices = _matrices_of_one_row(params, config)
    makers: dict[str, tuple[int, Callable[[], Callable[[], object]]]] = {}
    for name, product in _ONE_ROW_PRODUCTS.items():
        maker = functools.partial(_stream_program, matrices, product)
        makers[f"stream weights ({name})"] = (1, maker)
    shapes = [(1, num_rows) for num_rows in options.rows]
    shapes += [(batch, 1) for batch in options.batches if (batch, 1) not in shapes]
    for batch, num_rows in shapes:
        if batch == 1:
            # Beside the round that it is compared with.
            makers[_forward_name(num_rows)] = (
                num_rows,
                functools.partial(_forward_program, params, config, options, num_rows),
            )
        maker = functools.partial(
            _step_program, params, config, options, batch, num_rows
        )
        makers[f"batch {batch}, {num_rows} rows"] = (batch * num_rows, maker)
    maker = functools.partial(_prefill_program, params, config, options)
    makers[f"prefill of {options.prefill_tokens}"] = (options.prefill_tokens, maker)

    makers |= _speculation_makers(params, config, options)

    programs = {}
    for index, (name, (num_tokens, make)) in enumerate(makers.items(), start=1):
        _say(f"compiling {name} ({index} of {len(makers)})")
        programs[name] = (num_tokens, make())
    _say(f"timing {options.num_passes} passes over {len(programs)} programs")
    measurements = _measure(programs, options.num_passes)
    num_bytes = sum(matrix.nbytes for matrix in matrices)
    stream = min(
        (m for m in measurements if m.name.startswith("stream")),
        key=lambda m: m.median_seconds,
    )
    _print_table(measurements, stream, num_bytes)
    speculation = _speculation_figures(measurements, options)
    for name, figure in speculation.items():
        print(f"{name}: {figure:.3f}")
    if json_path is not None:
        record = _as_record(measurements, stream, num_bytes, options.dtype)
        record["speculation"] = speculation
        pathlib.Path(json_path).write_text(json.dumps(record, indent=2) + "\n")


def _speculation_makers(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    options: Options,
) -> dict[str, tuple[int, Callable[[], Callable[[], object]]]]:
    makers: dict[str, tuple[int, Callable[[], Callable[[], object]]]] = {}
    makers[_SEARCH] = (
        0,
        functools.partial(bench_speculation.search_program, config, options.dtype),
    )
    decoding = bench_speculation.DecodePrograms(
        params,
        config,
        dtype=options.dtype,
        prompt_length=options.length,
        implementation=options.implementation,
    )
    for num_drafts in (0, *options.drafts):
        makers[_decode_name(num_drafts)] = (
            bench_speculation.DECODED_TOKENS,
            functools.partial(decoding.program, num_drafts),
        )
    return makers


_SEARCH = (
    f"{bench_speculation.NUM_SEARCHES} n-gram searches of "
    f"{bench_speculation.SEARCHED_TOKENS}"
)


def _forward_name(num_rows: int) -> str:
    return f"bare forward, {num_rows} rows"


def _decode_name(num_drafts: int) -> str:
    drafted = f"{num_drafts} right drafts a round" if num_drafts else "plainly"
    return f"decode {bench_speculation.DECODED_TOKENS} tokens, {drafted}"


def _speculation_figures(
    measurements: list[Measurement], options: Options
) -> dict[str, float]:
    """Ratios that say what a round adds to its forward, and what right drafts gain.

    An overhead is the median of differences within a pass, for the machine's speed
    wanders between passes.
    """
    by_name = {m.name: np.array(m.seconds) for m in measurements}
    figures = {}
    for num_rows in options.rows:
        bare = by_name[_forward_name(num_rows)]
        added = np.median(by_name[f"batch 1, {num_rows} rows"] - bare)
        figures[f"overhead of a round of {num_rows} rows"] = float(
            added / np.median(bare)
        )
    plain = by_name[_decode_name(0)]
    step = np.median(plain) / bench_speculation.DECODED_TOKENS
    figures["n-gram search over a plain step"] = float(
        np.median(by_name[_SEARCH]) / bench_speculation.NUM_SEARCHES / step
    )
    for num_drafts in options.drafts:
        figures[f"speed-up of {num_drafts} right drafts"] = float(
            np.median(plain / by_name[_decode_name(num_drafts)])
        )
    return figures


def _matrices_of_one_row(
    params: params_lib.ModelParams, config: config_lib.ModelConfig
) -> list[Array]:
    """Every matrix whose product one row takes; of experts, as many as are active."""
    matrices = [params.output_head]
    for leaf in jax.tree.leaves(params.layers):
        if leaf.ndim == 2 and leaf.shape[1] > config.delta_net.conv_kernel_size:
            matrices.append(leaf)
        if leaf.ndim == 3:
            assert config.moe is not None
            matrices.extend(leaf[: config.moe.num_experts_per_token])
    return matrices


def _plain_product(matrix: Array, row: Array) -> Array:
    return matrix @ row


def _halved_product(matrix: Array, row: Array) -> Array:
    """Both halves of the outputs at once: two cores of a CPU work side by side."""
    if matrix.shape[0] % 2:
        return matrix @ row
    halves = matrix.reshape(2, -1, matrix.shape[1])
    rows = jnp.broadcast_to(row[None, :], (2, row.shape[0]))
    return jnp.einsum("poi,pi->po", halves, rows).reshape(-1)


_ONE_ROW_PRODUCTS = {"plain": _plain_product, "halved": _halved_product}


def _stream_program(
    matrices: list[Array], product: Callable[[Array, Array], Array]
) -> Callable[[], object]:
    def stream(matrices: list[Array], row: Array) -> Array:
        for matrix in matrices:
            # Each product waits for the one before, as layers do.
            inputs = jnp.resize(row, (matrix.shape[1],))
            row = jnp.resize(product(matrix, inputs), row.shape) * 1e-2
        return row

    width = max(matrix.shape[1] for matrix in matrices)
    row = jnp.ones(width, matrices[0].dtype)
    compiled = jax.jit(stream).lower(matrices, row).compile()
    return lambda: jax.block_until_ready(compiled(matrices, row))


def _filled_state(
    config: config_lib.ModelConfig,
    dtype: jnp.dtype,
    num_slots: int,
    num_rows: int,
    length: int,
    room: int,
) -> state_lib.SequenceState:
    """Active slots with `length` tokens in their caches, contents arbitrary."""
    decode = config_lib.for_slots(
        num_slots, length + room, page_size=_PAGE_SIZE, max_drafts=num_rows - 1
    )
    state = state_lib.init_state(config, decode, dtype=dtype)
    pages = jnp.arange(decode.num_pages, dtype=jnp.int32)
    return state.replace(
        length=jnp.full(num_slots, length, jnp.int32),
        length_limit=jnp.full(num_slots, length + room, jnp.int32),
        active=jnp.ones(num_slots, bool),
        page_table=pages.reshape(num_slots, -1),
    )


def _step_program(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    options: Options,
    num_slots: int,
    num_rows: int,
) -> Callable[[], object]:
    """Verify of K rows and apply, all K accepted."""
    length = options.length

    @functools.partial(jax.jit, donate_argnames=("state",))
    def step(
        params: params_lib.ModelParams, state: state_lib.SequenceState
    ) -> tuple[state_lib.SequenceState, object]:
        drafts = jnp.zeros((num_slots, num_rows - 1), jnp.int32)
        num_drafts = jnp.full(num_slots, num_rows - 1, jnp.int32)
        verdict = verify.verify(
            params,
            state,
            drafts,
            num_drafts,
            config=config,
            implementation=options.implementation,
        )
        # As if all had been right: the most that a round can have to commit.
        judgement = verdict.judgement.replace(num_accepted=num_drafts)
        verdict = verdict.replace(judgement=judgement)
        state, emission = fold.apply_verdict(state, verdict, config=config)
        # Back to where it was, so that every pass does the same work.
        return state.replace(length=jnp.full(num_slots, length, jnp.int32)), emission

    state = _filled_state(
        config, options.dtype, num_slots, num_rows, length, room=_PAGE_SIZE
    )
    compiled = step.lower(params, state).compile()
    box = [state]

    def run_once() -> None:
        box[0], emission = compiled(params, box[0])
        jax.block_until_ready(emission)

    return run_once


def _forward_program(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    options: Options,
    num_rows: int,
) -> Callable[[], object]:
    state = _filled_state(
        config, options.dtype, 1, num_rows, options.length, room=_PAGE_SIZE
    )
    return bench_speculation.forward_program(
        params, config, state, num_rows, options.implementation
    )


def _prefill_program(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    options: Options,
) -> Callable[[], object]:
    length = options.prefill_tokens

    @functools.partial(jax.jit, donate_argnames=("state",))
    def step(
        params: params_lib.ModelParams, state: state_lib.SequenceState
    ) -> tuple[state_lib.SequenceState, object]:
        state, output = chunk.prefill(
            params,
            state,
            jnp.zeros(1, jnp.int32),
            jnp.zeros((1, length), jnp.int32),
            jnp.full(1, length, jnp.int32),
            jnp.ones(1, bool),
            config=config,
            implementation=options.implementation,
        )
        return state.replace(length=jnp.zeros(1, jnp.int32)), output.emission

    state = _filled_state(
        config, options.dtype, 1, 1, length=0, room=length + _PAGE_SIZE
    )
    compiled = step.lower(params, state).compile()
    box = [state]

    def run_once() -> None:
        box[0], emission = compiled(params, box[0])
        jax.block_until_ready(emission)

    return run_once


def _measure(
    programs: dict[str, tuple[int, Callable[[], object]]], num_passes: int
) -> list[Measurement]:
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for index in range(_WARM_UP_PASSES + num_passes):
        for name, (_, run_once) in programs.items():
            begin = time.perf_counter()
            run_once()
            if index >= _WARM_UP_PASSES:
                seconds[name].append(time.perf_counter() - begin)
    return [
        Measurement(name, num_tokens, tuple(seconds[name]))
        for name, (num_tokens, _) in programs.items()
    ]


def _print_table(
    measurements: list[Measurement], stream: Measurement, num_bytes: int
) -> None:
    one_row = next(m for m in measurements if m.name == "batch 1, 1 rows")
    table = rich.table.Table(
        title=f"{jax.default_backend()}: {num_bytes / 1e6:.1f} MB of matrices a row"
    )
    for title in ("program", "ms", "x stream", "x one row", "tokens/s"):
        table.add_column(title, justify="left" if title == "program" else "right")
    for m in measurements:
        table.add_row(
            m.name,
            f"{m.median_seconds * 1e3:.2f}",
            f"{m.median_seconds / stream.median_seconds:.2f}",
            f"{m.median_seconds / one_row.median_seconds:.2f}",
            f"{m.num_tokens / m.median_seconds:.0f}" if m.num_tokens else "",
        )
    console = rich.console.Console(width=88)
    console.print(table)
    console.print(
        "Medians of wall time. A row is one token through the model; K rows are "
        "last_token and K - 1 drafts. x stream: over the time to read the same weights "
        "once, by the faster of two one-row products (plain: one product a matrix; "
        "halved: its two halves side by side). x one row: over plain decoding."
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _as_record(
    measurements: list[Measurement],
    stream: Measurement,
    num_bytes: int,
    dtype: jnp.dtype,
) -> dict[str, object]:
    return {
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "dtype": str(dtype),
        "command": " ".join(sys.argv),
        "matrix_bytes": num_bytes,
        "stream_seconds": stream.median_seconds,
        "programs": [
            {
                "name": m.name,
                "num_tokens": m.num_tokens,
                "median_seconds": m.median_seconds,
                "min_seconds": min(m.seconds),
                "over_stream": m.median_seconds / stream.median_seconds,
                "tokens_per_second": m.num_tokens / m.median_seconds,
            }
            for m in measurements
        ],
    }


if __name__ == "__main__":
    app.run(main)
