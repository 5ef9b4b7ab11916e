"""Verify attention as a loop over runs of pages, with a running softmax.

The loop ends at the longest slot's length, so time and memory follow what is held, not
what the page table could hold. A run of pages that a slot does not reach leaves the
slot's running values as they are, bit for bit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_TILE_TOKENS = 256


class _Running(NamedTuple):
    """Softmax so far: weighted values, sum of weights and largest score."""

    values: jax.Array  # [B, Hkv, K * G, D]
    total: jax.Array  # [B, Hkv, K * G]
    largest: jax.Array  # [B, Hkv, K * G]


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
    group = num_heads // num_kv_heads
    page_size = key_pages.shape[1]
    # Rows of one key-value head: the K rows of each of its query heads.
    packed = queries.reshape(batch, num_rows, num_kv_heads, group, head_dim)
    packed = jnp.transpose(packed, (0, 2, 1, 3, 4)).astype(jnp.float32) * scale
    packed = packed.reshape(batch, num_kv_heads, num_rows * group, head_dim)
    row = jnp.repeat(jnp.arange(num_rows), group)  # of each packed row
    query = lengths[:, None] + row[None, :]  # [B, K * G]

    among = jnp.ones((1, row.shape[0], num_rows), bool)
    key_row = jnp.arange(num_rows)
    distance = row[:, None] - key_row[None, :]
    if causal:
        among &= (distance >= 0)[None]
    if window is not None:
        among &= (jnp.abs(distance) < window)[None]
    running = _Running(
        jnp.zeros(packed.shape, jnp.float32),
        jnp.zeros(packed.shape[:-1], jnp.float32),
        jnp.full(packed.shape[:-1], -jnp.inf, jnp.float32),
    )
    running = _absorb(running, packed, keys, values, among)

    pages_per_tile = max(1, min(_TILE_TOKENS // page_size, page_table.shape[1]))
    tile = pages_per_tile * page_size
    padding = -page_table.shape[1] % pages_per_tile
    page_table = jnp.pad(
        page_table, [(0, 0), (0, padding)], constant_values=key_pages.shape[0]
    )
    first = jnp.zeros_like(lengths)
    if window is not None:
        first = jnp.maximum(lengths - window + 1, 0)

    def body(index, running):
        pages = lax.dynamic_slice_in_dim(
            page_table, index * pages_per_tile, pages_per_tile, axis=1
        )
        position = index * tile + jnp.arange(tile)
        held = jnp.repeat(pages < key_pages.shape[0], page_size, axis=1)
        held &= (position[None] < lengths[:, None]) & (position[None] >= first[:, None])
        visible = held[:, None, :]
        if window is not None:
            visible &= query[:, :, None] - position[None, None, :] < window
        tile_keys = _read(key_pages, pages, held)
        tile_values = _read(value_pages, pages, held)
        new = _absorb(running, packed, tile_keys, tile_values, visible)
        reached = jnp.any(held, axis=1)
        return jax.tree.map(
            lambda new, old: jnp.where(
                reached.reshape(-1, *(1,) * (new.ndim - 1)), new, old
            ),
            new,
            running,
        )

    start = jnp.min(jnp.where(lengths > 0, first, jnp.max(lengths))) // tile
    stop = (jnp.max(lengths) + tile - 1) // tile
    running = lax.fori_loop(start, stop, body, running)
    outputs = running.values / running.total[..., None]
    outputs = outputs.reshape(batch, num_kv_heads, num_rows, group, head_dim)
    outputs = jnp.transpose(outputs, (0, 2, 1, 3, 4))
    return outputs.reshape(queries.shape).astype(queries.dtype)


def _read(pages, index, held):
    """Returns [B, tile, Hkv, D] of the named pages, zero where nothing is held."""
    tile = pages.at[index].get(mode="clip")
    tile = tile.reshape(index.shape[0], -1, *pages.shape[2:])
    return jnp.where(held[..., None, None], tile, 0)


def _absorb(running, queries, keys, values, visible):
    """Adds keys and values [B, S, Hkv, D], seen where bool[B | 1, K * G, S] says so."""
    scores = jnp.einsum(
        "bhrd,bshd->bhrs",
        queries,
        keys.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    largest = jnp.maximum(running.largest, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    rescale = jnp.exp(running.largest - largest)
    added = jnp.einsum(
        "bhrs,bshd->bhrd",
        weights,
        values.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    return _Running(
        running.values * rescale[..., None] + added,
        running.total * rescale + jnp.sum(weights, axis=-1),
        largest,
    )
