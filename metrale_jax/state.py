"""The state of a batch of sequences: one frozen pytree, and its life cycle.

Every leaf but the KV pages has the slots B in front. `insert` and `release` are the
only ways in which a slot changes owner; both reset every leaf of the slot to what a new
state holds (`_neutral_value`), so a new field is reset without being listed anywhere.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from metrale_jax import config as config_lib
from metrale_jax import indices
from metrale_jax.axes import Array
from pallas_kernels import gated_delta

# Values of `SequenceState.finish_reason`.
RUNNING = 0
FINISHED_END_TOKEN = 1
FINISHED_STOP = 2
FINISHED_LENGTH = 3
FINISHED_ERROR = 4


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
class Sampling:
    """How each slot's tokens are picked; `picks` gives the order of the rules.

    A temperature below `picks.GREEDY_TEMPERATURE` is greedy. `top_k` 0, `top_p` 1 and
    `min_p` 0 switch their rule off. `request_key` is the 64-bit seed, high word first.
    """

    temperature: Array  # f32[B]
    top_k: Array  # i32[B]
    top_p: Array  # f32[B]
    min_p: Array  # f32[B]
    request_key: Array  # u32[B, 2]


@struct.dataclass
class SequenceState:
    """B slots.

    Attributes:
      length: i32[B], tokens whose state is inside the caches.
      last_token: i32[B], emitted and not yet inside; its position is `length`.
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
      layers: one `KVCache` or `RecurrentState` per layer, in order.
    """

    length: Array
    last_token: Array
    length_limit: Array
    tokens: Array
    active: Array
    finish_reason: Array
    hidden: Array
    num_pending: Array
    page_table: Array
    sampling: Sampling
    layers: tuple[LayerState, ...]

    @property
    def num_slots(self) -> int:
        return self.length.shape[0]

    @property
    def max_length(self) -> int:
        """S, tokens a slot can hold."""
        return self.tokens.shape[1]


@struct.dataclass
class SlotRequest:
    """What a new owner brings to a slot: everything else is reset.

    Attributes:
      pages: i32[pages per slot], page of each run of positions; P where there is none.
      length_limit: i32[], see `SequenceState`.
      sampling: a `Sampling` of scalars (`request_key` u32[2]).
    """

    pages: Array
    length_limit: Array
    sampling: Sampling


def describe_state(
    config: config_lib.ModelConfig,
    decode: config_lib.DecodeConfig,
    *,
    dtype: DTypeLike,
) -> SequenceState:
    """Returns a SequenceState of `jax.ShapeDtypeStruct`: the one list of its shapes.

    Args:
      config: the target.
      decode: sizes of the batch.
      dtype: of keys, values, conv inputs and hidden; the recurrent matrix is float32.

    Raises:
      ValueError: the sizes exceed the target's context, or the KV cache 2**31 rows.
    """
    _check_sizes(config, decode)
    num_slots = decode.num_slots

    def per_slot(value_dtype: DTypeLike, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((num_slots, *shape), value_dtype)

    counts = per_slot(jnp.int32)
    fractions = per_slot(jnp.float32)
    return SequenceState(
        length=counts,
        last_token=counts,
        length_limit=counts,
        tokens=per_slot(jnp.int32, decode.max_length),
        active=per_slot(jnp.bool_),
        finish_reason=counts,
        hidden=per_slot(dtype, config.hidden_size),
        num_pending=counts,
        page_table=per_slot(jnp.int32, decode.pages_per_slot),
        sampling=Sampling(
            temperature=fractions,
            top_k=counts,
            top_p=fractions,
            min_p=fractions,
            request_key=per_slot(jnp.uint32, 2),
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
) -> SequenceState:
    """Returns B free slots; see `describe_state` for arguments and errors.

    Every leaf is a buffer of its own, so that the state can be donated.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _neutral_value(
            path, leaf.shape, leaf.dtype, decode.num_pages
        ),
        describe_state(config, decode, dtype=dtype),
    )


def greedy_request(decode: config_lib.DecodeConfig, *, slot: int) -> SlotRequest:
    """A greedy request without a limit, on the slot's own run of pages.

    For batches in which every slot has `pages_per_slot` pages, as `config.for_slots`
    makes them; a `PageAllocator` shares fewer.
    """
    pages_per_slot = decode.pages_per_slot
    first = slot * pages_per_slot
    if not 0 <= slot < decode.num_slots or first + pages_per_slot > decode.num_pages:
        raise ValueError(
            f"`slot` must be in 0..{decode.num_slots - 1} and have {pages_per_slot} "
            f"pages of its own among {decode.num_pages}, got {slot}."
        )
    return SlotRequest(
        pages=jnp.arange(first, first + pages_per_slot, dtype=jnp.int32),
        length_limit=jnp.int32(decode.max_length),
        sampling=Sampling(
            temperature=jnp.float32(0.0),
            top_k=jnp.int32(0),
            top_p=jnp.float32(1.0),
            min_p=jnp.float32(0.0),
            request_key=jnp.zeros(2, jnp.uint32),
        ),
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
        length_limit=put(
            fresh.length_limit,
            jnp.minimum(request.length_limit, _capacity(state, request.pages)),
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
        case ".sampling.top_p":
            return jnp.ones(shape, dtype)
        case _:
            return jnp.zeros(shape, dtype)


def _capacity(state: SequenceState, pages: Array) -> Array:
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
