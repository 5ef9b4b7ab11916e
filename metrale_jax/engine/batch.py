"""Runs a fixed batch of prompts to completion: the host loop around the steps.

The device decodes several rounds per visit; the host turns new tokens over to the
caller, who may end a sequence early (a stop string, say). No sequence joins after the
start.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from metrale_jax import config as config_lib
from metrale_jax import state as state_lib
from metrale_jax import steps
from metrale_jax import verdict as verdict_lib
from metrale_jax.engine import pages as pages_lib
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch

# Called with (index of the prompt, its new tokens); True ends that sequence.
OnTokens = Callable[[int, list[int]], bool]

# Beyond it every distribution is uniform in float32.
_MAX_TEMPERATURE = 1e9
# Smallest room of a slot, in tokens.
_SHORTEST_CAPACITY = 256

_FINISH_REASONS = {
    state_lib.FINISHED_END_TOKEN: "stop",
    state_lib.FINISHED_STOP: "stop",
    state_lib.FINISHED_LENGTH: "length",
    state_lib.FINISHED_ERROR: "error",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one sequence's tokens are picked; the defaults are greedy.

    Attributes:
      max_new_tokens: tokens to generate at most; the context may end earlier.
      temperature: 0 is greedy, 1 the model's own distribution.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the most likely tokens that together reach this probability.
      min_p: drop tokens less likely than this fraction of the most likely one.
      seed: in 0..2**64-1; the same seed gives the same tokens in any batch.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"`max_new_tokens` must be at least 1, got {self.max_new_tokens}."
            )
        if not 0.0 <= self.temperature <= _MAX_TEMPERATURE:
            raise ValueError(
                f"`temperature` must be in 0..{_MAX_TEMPERATURE:.0e}, got "
                f"{self.temperature}."
            )
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"`top_k` must be in 0..2**31-1, got {self.top_k}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"`top_p` must be in (0, 1], got {self.top_p}.")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"`min_p` must be in [0, 1], got {self.min_p}.")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"`seed` must be in 0..2**64-1, got {self.seed}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How a batch runs; none of it changes a token but by rounding.

    Attributes:
      rounds_per_visit: decode rounds between two visits of the host.
      chunk_length: prompt tokens per prefill call at most; a power of two.
      page_size: tokens per KV page.
      implementation: of the kernels; None is the backend's own.
    """

    rounds_per_visit: int = 8
    chunk_length: int = 512
    page_size: int = 64
    implementation: dispatch.Implementation | None = None

    def __post_init__(self) -> None:
        for name in ("rounds_per_visit", "chunk_length", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}."
                )
        if self.chunk_length & (self.chunk_length - 1):
            raise ValueError(
                f"`chunk_length` must be a power of two, got {self.chunk_length}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What one prompt got.

    Attributes:
      token_ids: generated tokens, an end token included.
      finish_reason: "stop" (end token or caller), "length", or "error" (the target's
        logits were not finite; the tokens before that are good).
    """

    token_ids: tuple[int, ...]
    finish_reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchResult:
    """Completions in the order of the prompts, and where the time went (seconds)."""

    completions: tuple[Completion, ...]
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float


def run_batch(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    dtype: jax.typing.DTypeLike,
    options: BatchOptions | None = None,
    on_tokens: OnTokens | None = None,
) -> BatchResult:
    """Generates a completion for every prompt, all in one batch.

    Args:
      params: of the target.
      config: of the target.
      prompts: token ids, at least one each.
      sampling: one per prompt.
      dtype: of the caches; that of the parameters, usually.
      options: None takes the defaults.
      on_tokens: told of new tokens as they arrive, prompt by prompt.

    Raises:
      ValueError: a prompt is empty, longer than the context, or holds an id outside of
        the vocabulary; or the counts of prompts and sampling differ.
    """
    options = options or BatchOptions()
    check_prompts(config, prompts)
    if len(prompts) != len(sampling):
        raise ValueError(
            f"`sampling` must have one entry per prompt ({len(prompts)}), "
            f"got {len(sampling)}."
        )
    batch = _Batch(params, config, prompts, sampling, dtype, options)
    compile_seconds = batch.warm_up()
    begin = time.perf_counter()
    batch.prefill(on_tokens)
    prefilled = time.perf_counter()
    batch.decode(on_tokens)
    return BatchResult(
        completions=batch.completions(),
        compile_seconds=compile_seconds,
        prefill_seconds=prefilled - begin,
        decode_seconds=time.perf_counter() - prefilled,
    )


def check_prompts(
    config: config_lib.ModelConfig, prompts: Sequence[Sequence[int]]
) -> None:
    """Raises ValueError, naming the first prompt that cannot run."""
    if not prompts:
        raise ValueError("`prompts` must hold at least one prompt, got none.")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"Prompt {index} is empty; give at least one token.")
        if len(prompt) >= config.max_position:
            raise ValueError(
                f"Prompt {index} has {len(prompt)} tokens, but the target's context is "
                f"{config.max_position} tokens, output included; shorten the prompt."
            )
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"Prompt {index} holds token {token}, outside of the vocabulary "
                    f"0..{config.vocab_size - 1}."
                )


class _Batch:
    """One batch in flight: the device state, and what the host knows of it."""

    def __init__(
        self,
        params: params_lib.ModelParams,
        config: config_lib.ModelConfig,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        dtype: jax.typing.DTypeLike,
        options: BatchOptions,
    ) -> None:
        self._params = params
        self._config = config
        self._prompts = prompts
        self._options = options
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._reasons: list[str | None] = [None] * len(prompts)
        limits = [
            min(len(prompt) + request.max_new_tokens, config.max_position)
            for prompt, request in zip(prompts, sampling, strict=True)
        ]
        # Few distinct shapes, so that compiled programs serve again.
        max_length = max(_SHORTEST_CAPACITY, _next_power_of_two(max(limits)))
        decode = config_lib.for_slots(
            len(prompts),
            min(max_length, config.max_position),
            page_size=options.page_size,
        )
        self._state = state_lib.init_state(config, decode, dtype=dtype)
        allocator = pages_lib.PageAllocator(decode.num_pages, decode.page_size)
        for slot, (request, limit) in enumerate(zip(sampling, limits, strict=True)):
            slot_request = state_lib.make_request(
                config,
                decode,
                pages=allocator.grow(slot, limit),
                length_limit=limit,
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                min_p=request.min_p,
                seed=request.seed,
            )
            self._state = steps.insert(self._state, jnp.int32(slot), slot_request)

    def warm_up(self) -> float:
        """Compiles every shape that this batch needs; returns the seconds it took."""
        begin = time.perf_counter()
        inert = self._state.num_slots
        for length in sorted(
            {_next_power_of_two(size) for size in self._chunk_sizes()}
        ):
            self._prefill_chunk(inert, [0] * length, length, is_last=False)
        # No slot is active yet: this runs no round.
        self._run_rounds()
        jax.block_until_ready(self._state)
        return time.perf_counter() - begin

    def prefill(self, on_tokens: OnTokens | None) -> None:
        """Runs every prompt, chunk by chunk, and its first token."""
        for slot, prompt in enumerate(self._prompts):
            chunk_length = self._options.chunk_length
            for begin in range(0, len(prompt), chunk_length):
                chunk = list(prompt[begin : begin + chunk_length])
                is_last = begin + len(chunk) == len(prompt)
                length = _next_power_of_two(len(chunk))
                emission = self._prefill_chunk(slot, chunk, length, is_last=is_last)
                if is_last:
                    self._take(slot, jax.device_get(emission), 0, on_tokens)

    def decode(self, on_tokens: OnTokens | None) -> None:
        """Runs rounds until every sequence has finished."""
        while any(reason is None for reason in self._reasons):
            emission = jax.device_get(self._run_rounds())
            for slot, reason in enumerate(self._reasons):
                if reason is None:
                    self._take(slot, emission, slot, on_tokens)

    def completions(self) -> tuple[Completion, ...]:
        return tuple(
            Completion(token_ids=tuple(tokens), finish_reason=str(reason))
            for tokens, reason in zip(self._tokens, self._reasons, strict=True)
        )

    def _chunk_sizes(self) -> set[int]:
        length = self._options.chunk_length
        sizes = {min(len(prompt), length) for prompt in self._prompts}
        sizes |= {len(prompt) % length or length for prompt in self._prompts}
        return sizes

    def _prefill_chunk(
        self, slot: int, chunk: list[int], length: int, *, is_last: bool
    ) -> verdict_lib.Emission:
        padded = chunk + [0] * (length - len(chunk))
        self._state, output = steps.prefill(
            self._params,
            self._state,
            jnp.array([slot], jnp.int32),
            jnp.array([padded], jnp.int32),
            jnp.array([len(chunk)], jnp.int32),
            jnp.array([is_last]),
            config=self._config,
            implementation=self._options.implementation,
        )
        return output.emission

    def _run_rounds(self) -> verdict_lib.Emission:
        self._state, emission = steps.decode_rounds(
            self._params,
            self._state,
            num_rounds=self._options.rounds_per_visit,
            config=self._config,
            implementation=self._options.implementation,
        )
        return emission

    def _take(
        self,
        slot: int,
        emission: verdict_lib.Emission,
        row: int,
        on_tokens: OnTokens | None,
    ) -> None:
        """Takes a slot's new tokens, tells the caller, and notes how it ended.

        `emission` has been fetched from the device.
        """
        new_tokens = emission.tokens[row, : int(emission.count[row])].tolist()
        self._tokens[slot].extend(new_tokens)
        if emission.finished[row]:
            self._reasons[slot] = _FINISH_REASONS[int(emission.reason[row])]
        if not new_tokens or on_tokens is None:
            return
        if on_tokens(slot, new_tokens) and self._reasons[slot] is None:
            self._reasons[slot] = "stop"
            self._state = steps.release(self._state, jnp.int32(slot))


def _next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`; chunks are padded to it."""
    return 1 << (size - 1).bit_length()
