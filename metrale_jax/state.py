"""The state of a batch of sequences: one frozen pytree, and its life cycle.

Every leaf but the KV pages has the slots B in front. `insert` and `release` are the
only ways in which a slot changes owner; both reset every leaf of the slot to what a new
state holds (`_neutral_value`), so a new field is reset without being listed anywhere.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from metrale_jax import config as config_lib
from metrale_jax import indices
from metrale_jax import proposal as proposal_lib
from metrale_jax import sampling as sampling_lib
from metrale_jax import statistics as statistics_lib
from metrale_jax.axes import Array
from pallas_kernels import gated_delta

# Values of `SequenceState.finish_reason`.
RUNNING = 0
FINISHED_END_TOKEN = 1
FINISHED_LENGTH = 2
FINISHED_ERROR = 3


@struct.dataclass
class KVCache:
    """Keys and values of one attention layer, in pages that all slots share."""

    keys: Array  # [P, page, Hkv, D]
    values: Array  # [P, page, Hkv, D]


@struct.dataclass
class RecurrentState:
    """One Gated DeltaNet layer.

    Its value is `recurrent_state` with the first `SequenceState.num_pending` rows of
    `pending` folded in; rows past them are stale.
    """

    recurrent_state: Array  # f32[B, Hv, Dk, Dv]
    pending: gated_delta.Records  # of [B, K, ...]
    conv_state: Array  # [B, W, C], the last W inputs of the convolution, oldest first


LayerState = KVCache | RecurrentState


@struct.dataclass
class SequenceState:
    """B slots.

    Attributes:
      length: i32[B], tokens whose state is inside the caches.
      last_token: i32[B], emitted and not yet inside; its position is `length`.
      prompt_length: i32[B], leading tokens that are the prompt; 0 until it is complete.
      length_limit: i32[B], prompt and output tokens together at which a slot finishes.
      tokens: i32[B, S], ids at positions 0..length, `last_token` included; stale
        beyond.
      active: bool[B], the slot decodes.
      finish_reason: i32[B], `RUNNING` or one of the `FINISHED_` values.
      hidden: [B, M], final hidden (after the last norm) of the newest committed row.
      num_pending: i32[B], pending rows of every recurrent layer that are not folded
        yet.
      page_table: i32[B, pages per slot]; an entry without a page is P, one past the
        end.
      sampling: per-slot sampling options.
      proposal: pending drafts; J columns, `num_drafts` 0 where there are none.
      drafter: what the drafter knows of the sequences; its own pytree, or None.
      stats: counters of speculation.
      layers: one `KVCache` or `RecurrentState` per layer, in order.
    """

    length: Array
    last_token: Array
    prompt_length: Array
    length_limit: Array
    tokens: Array
    active: Array
    finish_reason: Array
    hidden: Array
    num_pending: Array
    page_table: Array
    sampling: sampling_lib.Sampling
    proposal: proposal_lib.Proposal
    drafter: Any
    stats: statistics_lib.Statistics
    layers: tuple[LayerState, ...]

    @property
    def num_slots(self) -> int:
        return self.length.shape[0]

    @property
    def max_length(self) -> int:
        """S, tokens a slot can hold."""
        return self.tokens.shape[1]

    @property
    def max_drafts(self) -> int:
        """J, drafts that a slot can hold."""
        return self.proposal.drafts.shape[1]


@struct.dataclass
class SlotRequest:
    """What a new owner brings to a slot: everything else is reset.

    Attributes:
      pages: i32[pages per slot], page of each run of positions; P where there is none.
      length_limit: i32[], see `SequenceState`.
      prompt_length: i32[], see `SequenceState`; 0 lets `prefill` set it. A sequence
        that is resumed brings it, since its prefill holds output tokens too.
      sampling: of one slot.
    """

    pages: Array
    length_limit: Array
    prompt_length: Array
    sampling: sampling_lib.Sampling


@runtime_checkable
class KeepsState(Protocol):
    """What `describe_state` asks of a drafter; see `drafters.protocol.Drafter`."""

    @property
    def max_drafts(self) -> int: ...

    def describe_state(
        self,
        config: config_lib.ModelConfig,
        decode: config_lib.DecodeConfig,
        *,
        dtype: DTypeLike,
    ) -> Any: ...

    def describe_probs(
        self, config: config_lib.ModelConfig, decode: config_lib.DecodeConfig
    ) -> Any: ...


def describe_state(
    config: config_lib.ModelConfig,
    decode: config_lib.DecodeConfig,
    *,
    dtype: DTypeLike,
    drafter: KeepsState | None = None,
) -> SequenceState:
    """Returns a SequenceState of `jax.ShapeDtypeStruct`: the one list of its shapes.

    Args:
      config: the target.
      decode: sizes of the batch.
      dtype: of keys, values, conv inputs and hidden; the recurrent matrix is float32.
      drafter: the drafter that will propose, if any.

    Raises:
      ValueError: the sizes exceed the target's context, or the KV cache 2**31 rows, or
        the drafter proposes more than `max_drafts`.
    """
    _check_sizes(config, decode)
    if drafter is not None and drafter.max_drafts > decode.max_drafts:
        raise ValueError(
            f"`max_drafts` must be at least the drafter's {drafter.max_drafts}, got "
            f"{decode.max_drafts}."
        )
    probs, candidates = (
        (None, None) if drafter is None else drafter.describe_probs(config, decode)
    )
    num_candidates = 0 if candidates is None else candidates.shape[-1]
    num_slots = decode.num_slots

    def per_slot(value_dtype: DTypeLike, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((num_slots, *shape), value_dtype)

    counts = per_slot(jnp.int32)
    return SequenceState(
        length=counts,
        last_token=counts,
        prompt_length=counts,
        length_limit=counts,
        tokens=per_slot(jnp.int32, decode.max_length),
        active=per_slot(jnp.bool_),
        finish_reason=counts,
        hidden=per_slot(dtype, config.hidden_size),
        num_pending=counts,
        page_table=per_slot(jnp.int32, decode.pages_per_slot),
        sampling=sampling_lib.describe_sampling(config, decode),
        proposal=proposal_lib.describe_proposal(
            num_slots, decode.max_drafts, probs, candidates
        ),
        drafter=None
        if drafter is None
        else drafter.describe_state(config, decode, dtype=dtype),
        stats=statistics_lib.describe_statistics(
            num_slots, decode.max_drafts, num_candidates
        ),
        layers=tuple(
            _describe_layer(kind, config, decode, dtype) for kind in config.layers
        ),
    )


def init_state(
    config: config_lib.ModelConfig,
    decode: config_lib.DecodeConfig,
    *,
    dtype: DTypeLike,
    drafter: KeepsState | None = None,
) -> SequenceState:
    """Returns B free slots; see `describe_state` for arguments and errors.

    Every leaf is a buffer of its own, so that the state can be donated.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _neutral_value(
            path, leaf.shape, leaf.dtype, decode.num_pages
        ),
        describe_state(config, decode, dtype=dtype, drafter=drafter),
    )


def make_request(
    config: config_lib.ModelConfig,
    decode: config_lib.DecodeConfig,
    *,
    slot: int | None = None,
    pages: Sequence[int] | None = None,
    length_limit: int | None = None,
    prompt_length: int = 0,
    options: sampling_lib.SamplingOptions = sampling_lib.GREEDY,
) -> SlotRequest:
    """Returns a request for a slot.

    Args:
      config: the target.
      decode: the batch.
      slot: gives the request the slot's own run of pages, for batches in which every
        slot has `pages_per_slot` pages, as `config.for_slots` makes them.
      pages: or names its pages, as a `PageAllocator` that shares fewer hands them out.
      length_limit: prompt and output tokens together; None for what the slot holds.
      prompt_length: see `SlotRequest`.
      options: how tokens are picked; the default is greedy.

    Raises:
      ValueError: an argument is out of range, or `slot` and `pages` are both given.
    """
    if (slot is None) == (pages is None):
        raise ValueError("`make_request` takes either `slot` or `pages`.")
    pages_per_slot = decode.pages_per_slot
    if slot is not None:
        first = slot * pages_per_slot
        is_slot = 0 <= slot < decode.num_slots
        if not is_slot or first + pages_per_slot > decode.num_pages:
            raise ValueError(
                f"`slot` must be in 0..{decode.num_slots - 1} and have "
                f"{pages_per_slot} pages of its own among {decode.num_pages}, "
                f"got {slot}."
            )
        pages = range(first, first + pages_per_slot)
    assert pages is not None
    if len(set(pages)) < len(pages):
        raise ValueError(f"`pages` must be distinct, got {list(pages)}.")
    if len(pages) > pages_per_slot:
        raise ValueError(
            f"`pages` must be at most {pages_per_slot} (`pages_per_slot`), got "
            f"{len(pages)}."
        )
    missing = [decode.num_pages] * (pages_per_slot - len(pages))
    if length_limit is None:
        length_limit = decode.max_length
    for name, value in (
        ("length_limit", length_limit),
        ("prompt_length", prompt_length),
    ):
        if not 0 <= value < 2**31:
            raise ValueError(f"`{name}` must be in 0..2**31-1, got {value}.")
    return SlotRequest(
        pages=jnp.array([*pages, *missing], jnp.int32),
        length_limit=jnp.int32(length_limit),
        prompt_length=jnp.int32(prompt_length),
        sampling=sampling_lib.make_sampling(config, decode, options),
    )


def insert(state: SequenceState, slot: Array, request: SlotRequest) -> SequenceState:
    """Gives a slot (i32[]) to a request: resets it, then sets what the request brings.

    The limit is lowered to what the slot's row of `tokens` and its pages can hold.

    Donates `state` when called as a step; so does `release`.
    The slot is not active until `prefill` has run its whole prompt.
    """
    fresh = _reset_slot(state, slot)

    def put(field: Array, value: Array) -> Array:
        return indices.write_rows(field, (slot,), value)

    return dataclasses.replace(
        fresh,
        page_table=put(fresh.page_table, request.pages),
        prompt_length=put(fresh.prompt_length, request.prompt_length),
        length_limit=put(
            fresh.length_limit,
            jnp.minimum(request.length_limit, page_capacity(state, request.pages)),
        ),
        sampling=jax.tree.map(put, fresh.sampling, request.sampling),
    )


def release(state: SequenceState, slot: Array) -> SequenceState:
    """Frees a slot (i32[]): every value as in a new state, its pages not named."""
    return _reset_slot(state, slot)


def _reset_slot(state: SequenceState, slot: Array) -> SequenceState:
    """Sets every per-slot value of one slot to a new state's.

    KV pages stay as they are: whatever they hold is beyond the new owner's `length`,
    hence invisible to it.
    """
    num_pages = _num_pages(state)

    def reset(path: tuple, node: Any) -> Any:
        if isinstance(node, KVCache):
            return node
        value = _neutral_value(path, node.shape[1:], node.dtype, num_pages)
        return indices.write_rows(node, (slot,), value)

    return jax.tree_util.tree_map_with_path(
        reset, state, is_leaf=lambda node: isinstance(node, KVCache)
    )


def _neutral_value(
    path: tuple, shape: tuple[int, ...], dtype: DTypeLike, num_pages: int
) -> Array:
    """What a field holds in a free slot: 0, unless 0 would mean something."""
    match jax.tree_util.keystr(path):
        case ".page_table":
            return jnp.full(shape, num_pages, dtype)
        case ".sampling.top_p" | ".sampling.repetition_penalty":
            return jnp.ones(shape, dtype)
        case ".sampling.allowed_tokens":
            return jnp.full(shape, jnp.iinfo(dtype).max, dtype)
        case ".sampling.dry_breakers":
            return jnp.full(shape, sampling_lib.NO_TOKEN, dtype)
        case _:
            return jnp.zeros(shape, dtype)


def own_pages(state: SequenceState, slot: Array) -> Array:
    """Pages of a slot (i32[]) in a batch where every slot has a run of its own.

    Raises:
      ValueError: the batch has too few pages for that.
    """
    num_slots, pages_per_slot = state.page_table.shape
    num_pages = _num_pages(state)
    if num_pages and num_pages < num_slots * pages_per_slot:
        raise ValueError(
            f"`pages` must be given: the batch has {num_pages} pages for {num_slots} "
            f"slots of {pages_per_slot}."
        )
    return slot * pages_per_slot + jnp.arange(pages_per_slot, dtype=jnp.int32)


def page_capacity(state: SequenceState, pages: Array) -> Array:
    """Tokens that a slot with these pages (i32[pages per slot]) can hold, i32[]."""
    capacity = jnp.int32(state.max_length)
    for layer in state.layers:
        if isinstance(layer, KVCache):
            num_pages, page_size = layer.keys.shape[:2]
            is_page = (pages >= 0) & (pages < num_pages)
            # Positions run through the pages in order, up to the first missing one.
            num_leading = jnp.sum(jnp.cumprod(is_page.astype(jnp.int32)))
            capacity = jnp.minimum(capacity, num_leading * page_size)
    return capacity


def _num_pages(state: SequenceState) -> int:
    """P; a target without attention layers has no pages and names none."""
    for layer in state.layers:
        if isinstance(layer, KVCache):
            return layer.keys.shape[0]
    return 0


def _describe_layer(
    kind: config_lib.LayerKind,
    config: config_lib.ModelConfig,
    decode: config_lib.DecodeConfig,
    dtype: DTypeLike,
) -> LayerState:
    def array(value_dtype: DTypeLike, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, value_dtype)

    if kind == "full_attention":
        attention = config.attention
        pages = array(
            dtype,
            decode.num_pages,
            decode.page_size,
            attention.num_kv_heads,
            attention.head_dim,
        )
        return KVCache(keys=pages, values=pages)
    delta_net = config.delta_net
    num_slots, rows = decode.num_slots, (decode.num_slots, decode.num_rows)
    heads = delta_net.num_value_heads
    key_head_dim, value_head_dim = delta_net.key_head_dim, delta_net.value_head_dim
    float32 = jnp.float32
    return RecurrentState(
        recurrent_state=array(float32, num_slots, heads, key_head_dim, value_head_dim),
        pending=gated_delta.Records(
            keys=array(float32, *rows, delta_net.num_key_heads, key_head_dim),
            deltas=array(float32, *rows, heads, value_head_dim),
            log_decays=array(float32, *rows, heads),
        ),
        conv_state=array(
            dtype, num_slots, delta_net.conv_window, delta_net.conv_channels
        ),
    )


def _check_sizes(
    config: config_lib.ModelConfig, decode: config_lib.DecodeConfig
) -> None:
    if decode.max_length > config.max_position:
        raise ValueError(
            f"`max_length` must be at most the target's context ({config.max_position} "
            f"tokens, `max_position_embeddings`), got {decode.max_length}."
        )
    num_rows = decode.num_pages * decode.page_size
    if num_rows >= 2**31:
        raise ValueError(
            f"`num_pages` x `page_size` must be below 2**31 rows, got {num_rows}; "
            "index arithmetic is 32-bit."
        )
