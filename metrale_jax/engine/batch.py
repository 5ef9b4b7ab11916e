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
from metrale_jax import sampling as sampling_lib
from metrale_jax import state as state_lib
from metrale_jax import statistics as statistics_lib
from metrale_jax import steps
from metrale_jax import verdict as verdict_lib
from metrale_jax import verify as verify_lib
from metrale_jax.drafters import confidence, protocol
from metrale_jax.engine import pages as pages_lib
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch

# Called with (index of the request, its new tokens); True ends that sequence.
OnTokens = Callable[[int, list[int]], bool]

# Smallest room of a slot, in tokens.
_SHORTEST_CAPACITY = 256

_FINISH_REASONS = {
    state_lib.FINISHED_END_TOKEN: "stop",
    state_lib.FINISHED_LENGTH: "length",
    state_lib.FINISHED_ERROR: "error",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and what to make of it.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: tokens to generate at most; the context may end earlier.
      sampling: how they are picked.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: sampling_lib.SamplingOptions = sampling_lib.GREEDY

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"`max_new_tokens` must be at least 1, got {self.max_new_tokens}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How a batch runs; but for `accept_rule`, none of it changes more than rounding.

    Attributes:
      rounds_per_visit: decode rounds between two visits of the host.
      chunk_length: prompt tokens per prefill call at most; a power of two.
      page_size: tokens per KV page.
      accept_rule: how sampled sequences judge drafts.
      num_log_probs: see `verify.verify`.
      limits: which drafts are not worth a row.
      is_plain: offer none of the drafter's drafts: plain decoding, in the program that
        verifies drafts.
      strict: see `steps.separate_round`: a strict run and a plain strict run with the
        same drafter give the same tokens whatever the rounding.
      implementation: of the kernels; None is the backend's own. A strict run decodes by
        the reference.
    """

    rounds_per_visit: int = 8
    chunk_length: int = 512
    page_size: int = 64
    accept_rule: verify_lib.AcceptRule = "match"
    num_log_probs: int | None = None
    limits: confidence.DraftLimits = confidence.NO_LIMITS
    is_plain: bool = False
    strict: bool = False
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
        if self.strict and self.implementation not in (None, "reference"):
            raise ValueError(
                "`implementation` must be None or 'reference' when `strict`, got "
                f"{self.implementation!r}."
            )

    @property
    def round_implementation(self) -> dispatch.Implementation | None:
        return "reference" if self.strict else self.implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogProbs:
    """Log-probabilities of one emitted token, and of the likeliest in its place."""

    emitted: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What one request got.

    Attributes:
      token_ids: generated tokens, an end token included.
      finish_reason: "stop" (end token or caller), "length", or "error" (the target's
        logits were not finite, or no token was allowed; those before are good).
      log_probs: one per token if they were asked for, else empty.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    log_probs: tuple[TokenLogProbs, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchResult:
    """Completions in the order of the requests, and where the time went (seconds).

    `statistics` is what the rounds did, for `statistics.summarize`.
    """

    completions: tuple[Completion, ...]
    statistics: tuple[statistics_lib.Statistics, ...]
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float


def run_batch(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    requests: Sequence[Request],
    *,
    dtype: jax.typing.DTypeLike,
    drafter: protocol.Drafter | None = None,
    options: BatchOptions | None = None,
    on_tokens: OnTokens | None = None,
) -> BatchResult:
    """Generates a completion for every request, all in one batch.

    Args:
      params: of the target.
      config: of the target.
      requests: at least one.
      dtype: of the caches; that of the parameters, usually.
      drafter: None decodes plainly.
      options: None takes the defaults.
      on_tokens: told of new tokens as they arrive, request by request.

    Raises:
      ValueError: a prompt is empty, longer than the context, or holds an id outside of
        the vocabulary; an option names such an id; or the drafter doesn't fit.
    """
    options = options or BatchOptions()
    check_prompts(config, [request.prompt for request in requests])
    batch = _Batch(params, config, requests, dtype, drafter, options)
    compile_seconds = batch.warm_up()
    begin = time.perf_counter()
    batch.prefill(on_tokens)
    prefilled = time.perf_counter()
    batch.decode(on_tokens)
    decoded = time.perf_counter()
    return BatchResult(
        completions=batch.completions(),
        statistics=batch.statistics(),
        compile_seconds=compile_seconds,
        prefill_seconds=prefilled - begin,
        decode_seconds=decoded - prefilled,
    )


def check_prompts(
    config: config_lib.ModelConfig, prompts: Sequence[Sequence[int]]
) -> None:
    """Raises ValueError, naming the first prompt that cannot run."""
    if not prompts:
        raise ValueError("There must be at least one prompt, got none.")
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
        requests: Sequence[Request],
        dtype: jax.typing.DTypeLike,
        drafter: protocol.Drafter | None,
        options: BatchOptions,
    ) -> None:
        self._params = params
        self._config = config
        self._requests = requests
        self._drafter = drafter
        self._options = options
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._log_probs: list[list[TokenLogProbs]] = [[] for _ in requests]
        self._reasons: list[str | None] = [None] * len(requests)
        # Counters of slots that were released, which loses them.
        self._past_statistics: list[statistics_lib.Statistics] = []
        limits = [
            min(len(request.prompt) + request.max_new_tokens, config.max_position)
            for request in requests
        ]
        # Few distinct shapes, so that compiled programs serve again.
        max_length = max(_SHORTEST_CAPACITY, _next_power_of_two(max(limits)))
        decode = config_lib.for_slots(
            len(requests),
            min(max_length, config.max_position),
            page_size=options.page_size,
            max_drafts=0 if drafter is None else drafter.max_drafts,
            max_logit_bias=max(len(r.sampling.logit_bias) for r in requests),
        )
        self._state = state_lib.init_state(config, decode, dtype=dtype, drafter=drafter)
        allocator = pages_lib.PageAllocator(decode.num_pages, decode.page_size)
        self._slot_requests = [
            state_lib.make_request(
                config,
                decode,
                pages=allocator.grow(slot, limit),
                length_limit=limit,
                options=request.sampling,
            )
            for slot, (request, limit) in enumerate(zip(requests, limits, strict=True))
        ]
        self._insert_all()

    def _insert_all(self) -> None:
        for slot, slot_request in enumerate(self._slot_requests):
            self._state = steps.insert(self._state, jnp.int32(slot), slot_request)

    def warm_up(self) -> float:
        """Compiles and runs every shape that this batch needs; returns the seconds.

        The first run of a program costs more than the next, so each runs once here, on
        slots that decode nothing in particular and are inserted anew after it.
        """
        begin = time.perf_counter()
        inert = self._state.num_slots
        for length in sorted(
            {_next_power_of_two(size) for size in self._chunk_sizes()}
        ):
            self._prefill_chunk(inert, [0] * length, length, is_last=False)
        self._state = dataclasses.replace(
            self._state, active=jnp.ones_like(self._state.active)
        )
        self._propose()
        self._run_rounds()
        self._insert_all()
        jax.block_until_ready(self._state)
        return time.perf_counter() - begin

    def prefill(self, on_tokens: OnTokens | None) -> None:
        """Runs every prompt, chunk by chunk, its first token, and the first drafts."""
        for slot, request in enumerate(self._requests):
            prompt = request.prompt
            chunk_length = self._options.chunk_length
            for begin in range(0, len(prompt), chunk_length):
                chunk = list(prompt[begin : begin + chunk_length])
                is_last = begin + len(chunk) == len(prompt)
                length = _next_power_of_two(len(chunk))
                emission = self._prefill_chunk(slot, chunk, length, is_last=is_last)
                if is_last:
                    self._take(slot, [jax.device_get(emission)], 0, on_tokens)
        self._propose()

    def decode(self, on_tokens: OnTokens | None) -> None:
        """Runs rounds until every sequence has finished."""
        while any(reason is None for reason in self._reasons):
            emissions = jax.device_get(self._run_rounds())
            for slot, reason in enumerate(self._reasons):
                if reason is None:
                    self._take(slot, emissions, slot, on_tokens)

    def completions(self) -> tuple[Completion, ...]:
        return tuple(
            Completion(
                token_ids=tuple(tokens),
                finish_reason=str(reason),
                log_probs=tuple(log_probs),
            )
            for tokens, reason, log_probs in zip(
                self._tokens, self._reasons, self._log_probs, strict=True
            )
        )

    def statistics(self) -> tuple[statistics_lib.Statistics, ...]:
        return (*self._past_statistics, jax.device_get(self._state.stats))

    def _chunk_sizes(self) -> set[int]:
        length = self._options.chunk_length
        sizes = [len(request.prompt) for request in self._requests]
        whole = {min(size, length) for size in sizes}
        return whole | {size % length or length for size in sizes}

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
            self._drafter,
            config=self._config,
            num_log_probs=self._options.num_log_probs,
            implementation=self._options.implementation,
        )
        return output.emission

    def _propose(self) -> None:
        if self._drafter is None:
            return
        self._state = steps.propose(
            self._params,
            self._state,
            self._drafter,
            self._most_drafts(self._drafter),
            config=self._config,
            limits=self._options.limits,
            implementation=self._options.round_implementation,
        )

    def _most_drafts(self, drafter: protocol.Drafter) -> jax.Array:
        most = 0 if self._options.is_plain else drafter.max_drafts
        return jnp.full(self._state.num_slots, most, jnp.int32)

    def _run_rounds(self) -> list[verdict_lib.Emission]:
        """One visit: emissions of one or several rounds, in order."""
        drafter, options = self._drafter, self._options
        is_separate = options.strict or options.is_plain
        if drafter is not None and is_separate:
            return [self._run_round(drafter) for _ in range(options.rounds_per_visit)]
        self._state, emission = steps.decode_rounds(
            self._params,
            self._state,
            self._drafter,
            num_rounds=self._options.rounds_per_visit,
            config=self._config,
            accept_rule=self._options.accept_rule,
            num_log_probs=self._options.num_log_probs,
            limits=self._options.limits,
            implementation=self._options.round_implementation,
        )
        return [emission]

    def _run_round(self, drafter: protocol.Drafter) -> verdict_lib.Emission:
        """One round of separate programs."""
        self._state, emission = steps.separate_round(
            self._params,
            self._state,
            drafter,
            self._most_drafts(drafter),
            config=self._config,
            accept_rule=self._options.accept_rule,
            num_log_probs=self._options.num_log_probs,
            limits=self._options.limits,
            implementation=self._options.round_implementation,
        )
        return emission

    def _take(
        self,
        slot: int,
        emissions: list[verdict_lib.Emission],
        row: int,
        on_tokens: OnTokens | None,
    ) -> None:
        """Takes a slot's new tokens, tells the caller, and notes how it ended.

        `emissions` are those of one visit, fetched from the device.
        """
        new_tokens = []
        for emission in emissions:
            count = int(emission.count[row])
            new_tokens += emission.tokens[row, :count].tolist()
            self._log_probs[slot] += _log_probs_of(emission.log_probs, row, count)
            if emission.finished[row]:
                self._reasons[slot] = _FINISH_REASONS[int(emission.reason[row])]
        self._tokens[slot] += new_tokens
        if not new_tokens or on_tokens is None:
            return
        if on_tokens(slot, new_tokens) and self._reasons[slot] is None:
            self._reasons[slot] = "stop"
            self._past_statistics.append(
                jax.device_get(
                    jax.tree.map(lambda leaf: leaf[slot : slot + 1], self._state.stats)
                )
            )
            self._state = steps.release(self._state, jnp.int32(slot))


def _log_probs_of(
    log_probs: verdict_lib.LogProbs | None, row: int, count: int
) -> list[TokenLogProbs]:
    if log_probs is None:
        return []
    return [
        TokenLogProbs(
            emitted=float(log_probs.emitted[row, place]),
            top=tuple(
                zip(
                    log_probs.top_ids[row, place].tolist(),
                    log_probs.top[row, place].tolist(),
                    strict=True,
                )
            ),
        )
        for place in range(count)
    ]


def _next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`; chunks are padded to it."""
    return 1 << (size - 1).bit_length()
