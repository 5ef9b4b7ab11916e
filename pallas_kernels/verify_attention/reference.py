"""Verify attention over the whole page table at once: the definition."""

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
    all_keys = _gather(key_pages, page_table, keys, group_size)  # [B, S + K, H, D]
    all_values = _gather(value_pages, page_table, values, group_size)
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


def _gather(pages, page_table, rows, group_size):
    """Lays out prefix and new rows as float32[B, S + K, H, D], by query head."""
    batch = page_table.shape[0]
    prefix = pages.at[page_table].get(mode="clip")  # [B, pages, page, Hkv, D]
    prefix = prefix.reshape(batch, -1, *pages.shape[2:])
    everything = jnp.concatenate([prefix, rows], axis=1).astype(jnp.float32)
    return jnp.repeat(everything, group_size, axis=2)


def _visible(
    page_table, lengths, *, num_pages, page_size, num_rows, window, causal
) -> jax.Array:
    """Returns bool[B, K, S + K]: whether row i sees the prefix position or new row."""
    row = jnp.arange(num_rows)
    query = lengths[:, None] + row[None, :]  # [B, K]
    position = jnp.arange(page_table.shape[1] * page_size)
    is_held = jnp.repeat(page_table < num_pages, page_size, axis=1)
    in_prefix = is_held & (position[None, :] < lengths[:, None])  # [B, S]
    among_rows = (row[None, :] <= row[:, None]) | (not causal)  # [K, K]
    batch, size = in_prefix.shape
    visible = jnp.concatenate(
        [
            jnp.broadcast_to(in_prefix[:, None], (batch, num_rows, size)),
            jnp.broadcast_to(among_rows[None], (batch, num_rows, num_rows)),
        ],
        axis=2,
    )
    if window is None:
        return visible
    key = jnp.concatenate(
        [jnp.broadcast_to(position[None, :], (batch, size)), query], axis=1
    )
    return visible & (jnp.abs(query[:, :, None] - key[:, None, :]) < window)
