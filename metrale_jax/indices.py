"""Inert indices: the one way in which this package says "write nowhere".

Out-of-range indices don't raise in JAX. A scatter drops an index past the end, but -1
is the last row, and `dynamic_update_slice` shifts back onto good rows. So the inert
index is one past the end, every conditional write goes through `write_rows`, and
nothing here uses `dynamic_update_slice`.
"""

import jax.numpy as jnp

from metrale_jax.axes import Array, Bool, Int32


def inert_unless(
    condition: Bool[Array, "..."], index: Int32[Array, "..."], size: int
) -> Int32[Array, "..."]:
    """Returns `index` where `condition` holds and is in 0..size-1, else `size`."""
    is_inside = (index >= 0) & (index < size)
    return jnp.where(condition & is_inside, index, size)


def write_rows(array: Array, indices: tuple[Array, ...], values: Array) -> Array:
    """Returns `array` with `array[indices] = values`; inert indices write nothing.

    `indices` address the leading axes and must be distinct where they are not inert.
    """
    return array.at[indices].set(
        values.astype(array.dtype), mode="drop", unique_indices=False
    )
