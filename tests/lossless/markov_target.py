"""A target and a drafter whose laws are known: Markov chains over eight tokens.

The target's one layer adds nothing to the residual stream, so the logits after a token
are that token's row of a table, whatever came before. The law of its output can be
written down, while everything that decodes it is the library's own: `propose`,
`decode_rounds`, and all that they call.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import tiny_models as models
from metrale_jax import config as config_lib
from metrale_jax import picks, proposal, state, statistics, steps, verify
from metrale_jax.axes import Array
from metrale_jax.drafters import confidence, protocol
from metrale_jax.model import params as params_lib

VOCAB_SIZE = 8
NUM_DRAFTS = 3
# How many tokens a run is judged by: that many rounds give each slot at least as many.
NUM_TOKENS = 3
# The prompt is one token long; the token after it is known.
LENGTH = 1
FIRST_TOKEN = 0
# Candidates among which the drafter with sparse q draws.
NUM_CANDIDATES = 4
# A logit whose token has probability 0 in float32, while the logit is finite.
NEVER = -1e4

CONFIG = config_lib.parse_model_config(
    models.RAW_DENSE
    | dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=VOCAB_SIZE,
        intermediate_size=1,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
)

DrafterKind = Literal["one-hot", "dense", "sparse"]


def make_params(table: np.ndarray) -> params_lib.ModelParams:
    """A target with logits table[a] after token a; f32[V, V]."""
    # What the final norm makes of a one-hot embedding is undone by the output head.
    scale = np.sqrt(1.0 / VOCAB_SIZE + CONFIG.rms_norm_eps)
    neutral = jax.tree.map(jnp.zeros_like, models.make_params(CONFIG))
    return neutral.replace(
        embedding=jnp.eye(VOCAB_SIZE, dtype=jnp.float32),
        lm_head=jnp.asarray(table.T * scale, jnp.float32),
    )


@struct.dataclass
class MarkovDrafter(protocol.DrafterBase):
    """Drafts one token after the other, by rows of a table of logits.

    "one-hot" drafts the likeliest token. The other kinds draw, from the whole warped
    distribution or among the likeliest `NUM_CANDIDATES`, and say what they drew from.

    Attributes:
      table: f32[V, V].
      offered: i32[B], drafts offered each round.
      kind: how it drafts.
    """

    table: Array
    offered: Array
    kind: DrafterKind = struct.field(pytree_node=False)

    @property
    def max_drafts(self) -> int:
        return NUM_DRAFTS

    def describe_probs(self, config, decode) -> Any:
        def columns(dtype: Any, width: int) -> Any:
            return jax.ShapeDtypeStruct((decode.num_slots, NUM_DRAFTS, width), dtype)

        match self.kind:
            case "one-hot":
                return None, None
            case "dense":
                probs: Any = columns(jnp.float32, VOCAB_SIZE)
                return proposal.DenseProbs(probs), None
            case "sparse":
                ids: Any = columns(jnp.int32, NUM_CANDIDATES)
                probs = columns(jnp.float32, NUM_CANDIDATES)
                return proposal.SparseProbs(ids=ids, probs=probs), None

    def propose(self, params, state, *, config, implementation) -> proposal.Proposal:
        def add_draft(token: Array, column: Array) -> tuple[Array, tuple]:
            logits = self.table[token]
            draft, drawn_from = self._draw(logits, column, state)
            chosen = jnp.take_along_axis(logits, draft[:, None], axis=1)[:, 0]
            log_prob = chosen - jax.nn.logsumexp(logits, axis=-1)
            return draft, (draft, log_prob, drawn_from)

        columns = jnp.arange(NUM_DRAFTS, dtype=jnp.int32)
        _, by_column = jax.lax.scan(add_draft, state.last_token, columns)
        drafts, log_probs, probs = jax.tree.map(
            lambda leaf: jnp.swapaxes(leaf, 0, 1), by_column
        )
        return proposal.Proposal(
            drafts=drafts,
            num_drafts=self.offered,
            log_probs=log_probs,
            probs=probs,
        )

    def _draw(self, logits: Array, column: Array, state: Any) -> tuple[Array, Any]:
        """One draft per slot, and what it was drawn from."""
        draw = functools.partial(
            picks.draw_drafts,
            start=state.length + 1,
            sampling=state.sampling,
            first_column=column,
        )
        match self.kind:
            case "one-hot":
                return jnp.argmax(logits, axis=-1).astype(jnp.int32), None
            case "dense":
                token, probs = draw(logits[:, None])
                return token[:, 0], proposal.DenseProbs(probs[:, 0])
            case "sparse":
                best, ids = jax.lax.top_k(logits, NUM_CANDIDATES)
                choice, probs = draw(best[:, None])
                ids = ids.astype(jnp.int32)
                token = jnp.take_along_axis(ids, choice, axis=1)[:, 0]
                return token, proposal.SparseProbs(ids=ids, probs=probs[:, 0])


def make_state(
    num_slots: int,
    drafter: MarkovDrafter | None,
    *,
    length_limit: Array | int | None = None,
    **options: Any,
) -> state.SequenceState:
    """Slots that wait for the token after `FIRST_TOKEN`.

    Each slot's request key is its own number; `with_keys` sets others.

    Args:
      num_slots: B.
      drafter: the drafter to come, if any.
      length_limit: of all slots, or of each.
      options: fields of `Sampling`, for all slots or for each; the rest is greedy.
    """
    # No slot outgrows this in NUM_TOKENS rounds.
    max_length = LENGTH + 1 + NUM_TOKENS * (NUM_DRAFTS + 1)
    decode = config_lib.for_slots(
        num_slots, max_length, page_size=max_length, max_drafts=NUM_DRAFTS
    )
    batch = state.init_state(
        CONFIG, decode, dtype=jnp.dtype(jnp.float32), drafter=drafter
    )

    def per_slot(value: Any, like: Array) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, like.dtype), like.shape)

    sampling = {
        name: per_slot(value, getattr(batch.sampling, name))
        for name, value in options.items()
    }
    limit = max_length if length_limit is None else length_limit
    batch = batch.replace(
        length=per_slot(LENGTH, batch.length),
        prompt_length=per_slot(LENGTH, batch.length),
        length_limit=per_slot(limit, batch.length),
        last_token=per_slot(FIRST_TOKEN, batch.length),
        active=jnp.ones(num_slots, bool),
        page_table=jnp.arange(num_slots, dtype=jnp.int32)[:, None],
        sampling=batch.sampling.replace(**sampling),
    )
    return with_keys(batch, 0)


def with_keys(batch: state.SequenceState, high: int) -> state.SequenceState:
    """Gives slot b the request key of the 64-bit seed `high` * 2**32 + b."""
    low = np.arange(batch.num_slots, dtype=np.uint32)
    key = np.stack([np.full_like(low, high), low], axis=1)
    return batch.replace(sampling=batch.sampling.replace(request_key=jnp.asarray(key)))


class Decoded(struct.PyTreeNode):
    """What a run gave: the first `NUM_TOKENS` tokens of every slot, and counters."""

    tokens: Array  # i32[B, NUM_TOKENS]
    reason: Array  # i32[B]
    stats: statistics.Statistics


# Draws are many and programs too: a program is run some dozens of times. XLA's full
# optimisation takes longer than it saves there.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 1}

# The steps, without donating: a state is decoded again with other keys.
_propose = jax.jit(
    lambda *arguments, **options: steps.propose(*arguments, **options),
    static_argnames=("config", "limits"),
    compiler_options=_COMPILER_OPTIONS,
)


def make_decode_rounds() -> Callable[..., Any]:
    """A program of its own: it is traced anew, for tests that replace a function."""
    return jax.jit(
        lambda *arguments, **options: steps.decode_rounds.__wrapped__(
            *arguments, **options
        ),
        static_argnames=("num_rounds", "config", "accept_rule", "limits"),
        compiler_options=_COMPILER_OPTIONS,
    )


_decode_rounds = make_decode_rounds()


def decode(
    params: params_lib.ModelParams,
    batch: state.SequenceState,
    drafter: MarkovDrafter | None,
    *,
    accept_rule: verify.AcceptRule = "match",
    limits: confidence.DraftLimits = confidence.NO_LIMITS,
    decode_rounds: Callable[..., Any] = _decode_rounds,
) -> Decoded:
    """Decodes `NUM_TOKENS` rounds; without a drafter, plainly."""
    options: Any = dict(config=CONFIG, limits=limits)
    if drafter is not None:
        batch = _propose(params, batch, drafter, **options)
    batch, emission = decode_rounds(
        params,
        batch,
        drafter,
        num_rounds=NUM_TOKENS,
        accept_rule=accept_rule,
        **options,
    )
    return Decoded(
        tokens=emission.tokens[:, :NUM_TOKENS],
        reason=emission.reason,
        stats=batch.stats,
    )


def warped(
    table: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """The distributions that rows of logits are sampled from, by the definition.

    Temperature, top-k, top-p, min-p; each renormalises what it leaves. f64[V, V].
    """
    rows = []
    for logits in table.astype(np.float64):
        scaled = (logits - logits.max()) / temperature
        probs = np.exp(scaled) / np.exp(scaled).sum()
        order = np.argsort(-probs, kind="stable")
        if top_k:
            probs[order[top_k:]] = 0
            probs /= probs.sum()
        mass_before = np.cumsum(probs[order]) - probs[order]
        if top_p < 1:
            probs[order[mass_before >= top_p]] = 0
            probs /= probs.sum()
        probs[probs < min_p * probs.max()] = 0
        rows.append(probs / probs.sum())
    return np.stack(rows)


def joint_law(transitions: np.ndarray) -> np.ndarray:
    """The law of the tokens after `FIRST_TOKEN`: f64[V, V, V]."""
    first = transitions[FIRST_TOKEN]
    second = first[:, None] * transitions
    return second[:, :, None] * transitions[None, :, :]
