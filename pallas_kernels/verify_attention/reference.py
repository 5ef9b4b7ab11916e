"""Verify attention over the whole page table at once: the definition.

Every key stands at its own position, whether it comes from a page or is a new row, so
that a sum over keys adds the same numbers in the same places before and after a row is
committed: what a query gets has the same bits, however the rows were cut into calls.
"""

import jax
import jax.numpy as jnp
from jax import lax


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
    group_size = queries.shape[2] // keys.shape[2]
    all_keys = _by_position(key_pages, page_table, keys, lengths, group_size)
    all_values = _by_position(value_pages, page_table, values, lengths, group_size)
    visible = _visible(
        page_table,
        lengths,
        num_pages=key_pages.shape[0],
        page_size=key_pages.shape[1],
        num_rows=queries.shape[1],
        window=window,
        causal=causal,
    )  # [B, K, S + K]
    # Zero times NaN is NaN: what no row sees is replaced, not weighed with zero.
    is_read = jnp.any(visible, axis=1)[..., None, None]
    scores = scale * jnp.einsum(
        "bihd,bshd->bihs",
        queries.astype(jnp.float32),
        jnp.where(is_read, all_keys, 0),
        precision=lax.Precision.HIGHEST,
    )
    scores = jnp.where(visible[:, :, None, :], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    outputs = jnp.einsum(
        "bihs,bshd->bihd",
        weights,
        jnp.where(is_read, all_values, 0),
        precision=lax.Precision.HIGHEST,
    )
    return outputs.astype(queries.dtype)


def _by_position(pages, page_table, rows, lengths, group_size):
    """Lays out prefix and new rows as float32[B, S + K, H, D], by query head."""
    batch, num_rows = rows.shape[:2]
    prefix = pages.at[page_table].get(mode="clip")  # [B, pages, page, Hkv, D]
    prefix = prefix.reshape(batch, -1, *pages.shape[2:])
    padded = jnp.pad(prefix, [(0, 0), (0, num_rows), (0, 0), (0, 0)])
    slot = jnp.arange(batch)[:, None]
    position = lengths[:, None] + jnp.arange(num_rows)[None, :]
    everything = padded.at[slot, position].set(rows).astype(jnp.float32)
    return jnp.repeat(everything, group_size, axis=2)


def _visible(
    page_table, lengths, *, num_pages, page_size, num_rows, window, causal
) -> jax.Array:
    """Returns bool[B, K, S + K]: whether row i sees the key at each position."""
    is_held = jnp.repeat(page_table < num_pages, page_size, axis=1)
    is_held = jnp.pad(is_held, [(0, 0), (0, num_rows)])
    position = jnp.arange(is_held.shape[1])[None, None, :]
    length = lengths[:, None, None]
    query = length + jnp.arange(num_rows)[None, :, None]
    in_prefix = is_held[:, None, :] & (position < length)
    among_rows = (position >= length) & (position < length + num_rows)
    among_rows &= (position <= query) | (not causal)
    visible = in_prefix | among_rows
    if window is None:
        return visible
    return visible & (jnp.abs(query - position) < window)
