"""Programs that `bench_decode.py` times to tell what speculation costs and gains."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from metrale_jax import config as config_lib
from metrale_jax import drafters, steps
from metrale_jax import proposal as proposal_lib
from metrale_jax import state as state_lib
from metrale_jax.axes import Array
from metrale_jax.drafters import protocol
from metrale_jax.model import params as params_lib
from metrale_jax.model import transformer
from pallas_kernels import dispatch

# Text that the n-gram drafter searches, and how often one program does it: a single
# search takes less time than starting a program, and in a round it is part of one.
SEARCHED_TOKENS = 4096
NUM_SEARCHES = 32
# Tokens that a decode with an always-right drafter is timed over.
DECODED_TOKENS = 48
_PAGE_SIZE = 64

# Runs a program once and waits for it.
Program = Callable[[], object]


@struct.dataclass
class OracleDrafter(protocol.DrafterBase):
    """Always right: reads its drafts from the text that plain decoding gave."""

    texts: Array  # i32[B, S], by position
    num_drafts: int = struct.field(pytree_node=False)

    @property
    def max_drafts(self) -> int:
        return self.num_drafts

    def propose(
        self, params: Any, state: state_lib.SequenceState, **options: Any
    ) -> proposal_lib.Proposal:
        column = jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :]
        position = jnp.minimum(
            state.length[:, None] + 1 + column, self.texts.shape[1] - 1
        )
        drafts = jnp.take_along_axis(self.texts, position, axis=1)
        return proposal_lib.Proposal(
            drafts=drafts,
            num_drafts=jnp.full_like(state.length, self.num_drafts),
            log_probs=jnp.zeros(drafts.shape, jnp.float32),
        )


def forward_program(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    state: state_lib.SequenceState,
    num_rows: int,
    implementation: dispatch.Implementation | None,
) -> Program:
    """The bare forward of K rows per slot, with logits: what a round can't do without.

    Nothing is judged, applied or kept.
    """

    def forward(
        params: params_lib.ModelParams, state: state_lib.SequenceState
    ) -> tuple[Array, tuple]:
        tokens = jnp.zeros((state.num_slots, num_rows), jnp.int32)
        output = transformer.verify_rows(
            params, state, tokens, config=config, implementation=implementation
        )
        logits = transformer.project_logits(params, output.hidden)
        # The rows are results too, as they are of a verify.
        return jnp.argmax(logits, axis=-1), output.layers

    compiled = jax.jit(forward).lower(params, state).compile()
    return lambda: jax.block_until_ready(compiled(params, state))


def search_program(config: config_lib.ModelConfig, dtype: jnp.dtype) -> Program:
    """`NUM_SEARCHES` n-gram searches over `SEARCHED_TOKENS` random tokens."""
    drafter = drafters.NGramDrafter(num_drafts=7)
    decode = config_lib.for_slots(
        1, SEARCHED_TOKENS, page_size=_PAGE_SIZE, max_drafts=drafter.max_drafts
    )
    tokens = jax.random.randint(
        jax.random.key(0), (1, SEARCHED_TOKENS), 0, config.vocab_size
    )
    described = state_lib.describe_state(config, decode, dtype=dtype)
    # Of the state the search reads these two; the rest needs no memory.
    state = described.replace(
        tokens=tokens.astype(jnp.int32),
        length=jnp.array([SEARCHED_TOKENS - 1], jnp.int32),
        layers=(),
    )

    def search(tokens: Array, length: Array) -> proposal_lib.Proposal:
        return drafter.propose(
            None,
            state.replace(tokens=tokens, length=length),
            config=config,
            implementation=None,
        )

    def search_all(tokens: Array, lengths: Array) -> proposal_lib.Proposal:
        return jax.lax.map(lambda length: search(tokens, length), lengths)

    # Every search has a text of its own, or they would be one.
    lengths = state.length - jnp.arange(NUM_SEARCHES, dtype=jnp.int32)[:, None]
    compiled = jax.jit(search_all).lower(state.tokens, lengths).compile()
    return lambda: jax.block_until_ready(compiled(state.tokens, lengths))


class DecodePrograms:
    """Decoding the same tokens plainly and with an always-right drafter."""

    def __init__(
        self,
        params: params_lib.ModelParams,
        config: config_lib.ModelConfig,
        *,
        dtype: jnp.dtype,
        prompt_length: int,
        implementation: dispatch.Implementation | None,
    ) -> None:
        self._params = params
        self._config = config
        self._dtype = dtype
        self._implementation = implementation
        vocab_size = config.vocab_size
        self._prompt = jax.random.randint(
            jax.random.key(1), (1, prompt_length), 0, vocab_size
        ).astype(jnp.int32)

    @functools.cached_property
    def texts(self) -> Array:
        """What plain decoding gives, prompt included: i32[1, S]."""
        return self._decode(self._params, self._start(0), None, DECODED_TOKENS)[0]

    def program(self, num_drafts: int) -> Program:
        """Decodes `DECODED_TOKENS` tokens, with that many drafts a round; 0 plainly.

        The state is not donated, so that every run starts from the same one; copying it
        is part of what is timed.
        """
        state, drafter = self._start(num_drafts), None
        if num_drafts:
            drafter = OracleDrafter(self.texts, num_drafts)
            state = steps.propose(
                self._params,
                state,
                drafter,
                config=self._config,
                implementation=self._implementation,
            )
        num_rounds = -(-DECODED_TOKENS // (num_drafts + 1))
        decode = jax.jit(self._decode, static_argnums=3)
        compiled = decode.lower(self._params, state, drafter, num_rounds).compile()
        tokens, count = compiled(self._params, state, drafter)
        if num_drafts and int(count[0]) < DECODED_TOKENS:
            raise RuntimeError(
                f"The always-right drafter was wrong: {int(count[0])} tokens in "
                f"{num_rounds} rounds of {num_drafts} drafts."
            )
        del tokens
        return lambda: jax.block_until_ready(compiled(self._params, state, drafter))

    def _start(self, num_drafts: int) -> state_lib.SequenceState:
        length = self._prompt.shape[1]
        decode = config_lib.for_slots(
            1,
            length + DECODED_TOKENS + _PAGE_SIZE,
            page_size=_PAGE_SIZE,
            max_drafts=num_drafts,
        )
        state = state_lib.init_state(self._config, decode, dtype=self._dtype)
        request = state_lib.make_request(self._config, decode, slot=0)
        state = steps.insert(state, jnp.int32(0), request)
        state, _ = steps.prefill(
            self._params,
            state,
            jnp.zeros(1, jnp.int32),
            self._prompt,
            jnp.full(1, length, jnp.int32),
            jnp.ones(1, bool),
            config=self._config,
            implementation=self._implementation,
        )
        return state

    def _decode(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        drafter: OracleDrafter | None,
        num_rounds: int,
    ) -> tuple[Array, Array]:
        state, emission = steps.decode_rounds(
            params,
            state,
            drafter,
            num_rounds=num_rounds,
            config=self._config,
            implementation=self._implementation,
        )
        return state.tokens, emission.count
