"""Verify attention as a loop over runs of pages, with a running softmax.

The loop ends at the longest slot's length, so time and memory follow what is held, not
what the page table could hold. The new rows come first: each sees itself, so that the
largest score is finite from then on. A run of pages that holds nothing for a slot
leaves its running values as they are, bit for bit, so that no slot's result depends on
how long the others are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Tokens of one step of the loop, rounded to whole pages.
_TILE_TOKENS = 128


class _Running(NamedTuple):
    """The softmax over the keys so far; R = K * H / Hkv rows share a key-value head."""

    values: jax.Array  # f32[B, Hkv, R, D], weighed with exp(score - largest)
    total: jax.Array  # f32[B, Hkv, R], of these weights
    largest: jax.Array  # f32[B, Hkv, R]


def verify_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None,
    causal: bool,
) -> jax.Array:
    """See `api.verify_attention`."""
    batch, num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[2]
    group_size = num_heads // num_kv_heads
    by_group = (batch, num_rows, num_kv_heads, group_size, head_dim)
    packed = queries.astype(jnp.float32).reshape(by_group).transpose(0, 2, 1, 3, 4)
    packed = scale * packed.reshape(batch, num_kv_heads, -1, head_dim)
    row = np.repeat(np.arange(num_rows), group_size)  # of each packed query
    running = _absorb(
        _nothing_yet(packed),
        packed,
        jnp.swapaxes(keys, 1, 2),
        jnp.swapaxes(values, 1, 2),
        jnp.asarray(_among_rows(row, num_rows, window, causal))[None],
    )
    running = _absorb_prefix(
        running, packed, row, key_pages, value_pages, page_table, lengths, window
    )
    outputs = running.values / running.total[..., None]
    outputs = outputs.reshape(batch, num_kv_heads, num_rows, group_size, head_dim)
    outputs = outputs.transpose(0, 2, 1, 3, 4).reshape(queries.shape)
    return outputs.astype(queries.dtype)


def _nothing_yet(queries: jax.Array) -> _Running:
    return _Running(
        values=jnp.zeros_like(queries),
        total=jnp.zeros(queries.shape[:-1], jnp.float32),
        largest=jnp.full(queries.shape[:-1], -jnp.inf, jnp.float32),
    )


def _among_rows(
    row: np.ndarray, num_rows: int, window: int | None, causal: bool
) -> np.ndarray:
    """Returns bool[R, K]: which new rows each packed query sees."""
    distance = row[:, None] - np.arange(num_rows)[None, :]
    visible = np.ones(distance.shape, bool)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= np.abs(distance) < window
    return visible


def _absorb_prefix(
    running: _Running,
    queries: jax.Array,
    row: np.ndarray,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    window: int | None,
) -> _Running:
    """Adds the positions below `lengths`, of which the window may hide the oldest."""
    num_pages, page_size = key_pages.shape[:2]
    pages_per_tile = min(max(1, _TILE_TOKENS // page_size), page_table.shape[1])
    tile_tokens = pages_per_tile * page_size
    page_table = jnp.pad(
        page_table,
        [(0, 0), (0, -page_table.shape[1] % pages_per_tile)],
        constant_values=num_pages,
    )
    first = jnp.zeros_like(lengths)
    if window is not None:
        first = jnp.maximum(lengths - window + 1, 0)

    def add_tile(index, running):
        start = index * pages_per_tile
        pages = lax.dynamic_slice_in_dim(page_table, start, pages_per_tile, axis=1)
        position = index * tile_tokens + jnp.arange(tile_tokens)[None, :]
        held = jnp.repeat(pages < num_pages, page_size, axis=1)
        held &= (position < lengths[:, None]) & (position >= first[:, None])
        visible = held[:, None, :]
        if window is not None:
            query_position = lengths[:, None] + jnp.asarray(row)[None, :]
            visible &= query_position[:, :, None] - position[:, None, :] < window
        # XLA:CPU converts a 16-bit array to float32 before it reads parts of it, and
        # would do that to all pages before the loop: the barrier keeps it in here.
        both, pages = lax.optimization_barrier(((key_pages, value_pages), pages))
        tile_keys, tile_values = (_read(x, pages) for x in both)
        # A weight of zero would keep a NaN that nobody may see.
        tile_values = jnp.where(held[:, None, :, None], tile_values, 0)
        new = _absorb(running, queries, tile_keys, tile_values, visible)
        return _choose(jnp.any(held, axis=1), new, running)

    # Empty slots have no say in where the loop starts.
    start = jnp.min(jnp.where(lengths > 0, first, jnp.max(lengths))) // tile_tokens
    stop = (jnp.max(lengths) + tile_tokens - 1) // tile_tokens
    return lax.fori_loop(start, stop, add_tile, running)


def _read(pages: jax.Array, index: jax.Array) -> jax.Array:
    """Reads the pages named by i32[B, N]: [B, Hkv, N * page, D]."""
    tile = pages.at[index].get(mode="clip").transpose(0, 3, 1, 2, 4)
    return tile.reshape(*tile.shape[:2], -1, tile.shape[4])


def _absorb(
    running: _Running,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
) -> _Running:
    """Adds keys and values [B, Hkv, N, D], seen where bool[B or 1, R, N] says so."""
    scores = _einsum("bhrd,bhnd->bhrn", queries, keys.astype(jnp.float32))
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    largest = jnp.maximum(running.largest, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    rescale = jnp.exp(running.largest - largest)
    added = _einsum("bhrn,bhnd->bhrd", weights, values.astype(jnp.float32))
    return _Running(
        values=running.values * rescale[..., None] + added,
        total=running.total * rescale + jnp.sum(weights, axis=-1),
        largest=largest,
    )


def _choose(condition: jax.Array, new: _Running, old: _Running) -> _Running:
    """Takes the slots of `new` where bool[B] says so, the others of `old`."""

    def choose(new, old):
        shape = (-1, *(1,) * (new.ndim - 1))
        return jnp.where(condition.reshape(shape), new, old)

    return jax.tree.map(choose, new, old)


def _einsum(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(axes, x, y, precision=lax.Precision.HIGHEST)
