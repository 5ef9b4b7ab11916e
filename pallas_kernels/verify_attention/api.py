"""Attention of K new rows over a paged prefix and over each other."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, shape_check
from pallas_kernels.verify_attention import reference, xla

_VERIFY_ATTENTION = {
    "reference": reference.verify_attention,
    "xla": xla.verify_attention,
}


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
    window: int | None = None,
    causal: bool = True,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Attends from K new rows to the pages below `lengths` and to the rows themselves.

    Row i is at position lengths + i. It sees the prefix, positions 0..lengths - 1,
    whose keys lie in pages, and of the new rows, which are read from `keys` and
    `values`, those up to itself (all of them with `causal=False`). One softmax, in
    float32, runs over both. Query head h uses key-value head h // (H / Hkv). Nothing is
    written: new rows reach the pages only when they are committed.

    Decode is K = 1; a chunk of a prompt is K in the hundreds.

    Args:
      queries: [B, K, H, D].
      keys: [B, K, Hkv, D].
      values: [B, K, Hkv, D].
      key_pages: [P, page, Hkv, D]; anything, NaN included, at or past `lengths`.
      value_pages: [P, page, Hkv, D].
      page_table: i32[B, pages_per_slot], page of each run of positions; P (one past the
        end) marks a page that is not there, whose positions nobody sees.
      lengths: i32[B], at most pages_per_slot * page.
      scale: multiplies the scores, customarily D ** -0.5.
      window: a key is seen only from less than this many positions away; None for no
        limit.
      causal: whether a new row sees no later one.
      implementation: a name, or None for the backend's default.

    Returns:
      [B, K, H, D] in the dtype of `queries`.

    Raises:
      ValueError: a shape or dtype disagrees, `window` is not positive, or
        `implementation` is unknown.
      NotImplementedError: `implementation` is not offered.
    """
    axes = shape_check.Axes()
    axes.check("queries", queries, "B K H D", jnp.floating)
    axes.check("keys", keys, "B K Hkv D", jnp.floating)
    axes.check("values", values, "B K Hkv D", jnp.floating)
    axes.check("key_pages", key_pages, "P page Hkv D", jnp.floating)
    axes.check("value_pages", value_pages, "P page Hkv D", jnp.floating)
    axes.check("page_table", page_table, "B pages_per_slot", jnp.integer)
    axes.check("lengths", lengths, "B", jnp.integer)
    axes.check_multiple("H", "Hkv")
    for name, rows, pages in (
        ("keys", keys, key_pages),
        ("values", values, value_pages),
    ):
        if rows.dtype != pages.dtype:
            raise ValueError(
                f"`{name}` must have the dtype of the pages ({pages.dtype}), got "
                f"{rows.dtype}; cast the rows first, so that they read alike before "
                "and after they are committed."
            )
    if window is not None and window < 1:
        raise ValueError(f"`window` must be positive or None, got {window}.")
    function = dispatch.select("verify_attention", _VERIFY_ATTENTION, implementation)
    return function(
        queries,
        keys,
        values,
        key_pages,
        value_pages,
        page_table,
        lengths,
        scale=scale,
        window=window,
        causal=causal,
    )
