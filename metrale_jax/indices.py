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


def write_rows(array: Array, index: tuple[Array, ...], values: Array) -> Array:
    """Returns `array` with `array[index] = values`; inert indices write nothing.

    `index` addresses the leading axes; what is outside of an axis, negative numbers
    included, is inert. The rest must be distinct.
    """
    inside = tuple(
        jnp.where(part < 0, size, part)
        for part, size in zip(index, array.shape, strict=False)
    )
    return array.at[inside].set(values.astype(array.dtype), mode="drop")
