"""Inert indices write nothing; jax's own behaviour that makes the helper necessary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax import indices

ROWS = jnp.arange(12.0).reshape(4, 3)


def test_inert_rows_are_not_written():
    index = indices.inert_unless(
        jnp.array([True, False, True, True, True]),
        jnp.array([1, 0, 4, -1, 3], jnp.int32),
        4,
    )
    assert index.tolist() == [1, 4, 4, 4, 3]
    written = indices.write_rows(ROWS, (index,), jnp.full((5, 3), 99.0))
    expected = np.asarray(ROWS).copy()
    expected[[1, 3]] = 99.0
    np.testing.assert_array_equal(written, expected)


def test_written_values_take_the_dtype_of_the_array():
    rows = ROWS.astype(jnp.bfloat16)
    written = indices.write_rows(
        rows, (jnp.array([2], jnp.int32),), jnp.full((1, 3), 7.0)
    )
    assert written.dtype == jnp.bfloat16
    assert written[2].tolist() == [7.0] * 3


def test_negative_indices_are_inert():
    written = indices.write_rows(
        ROWS, (jnp.array([-1, -4, 0], jnp.int32),), jnp.full((3, 3), 99.0)
    )
    np.testing.assert_array_equal(written[1:], ROWS[1:])
    assert written[0].tolist() == [99.0] * 3


@pytest.mark.parametrize("jit", [False, True])
def test_jax_still_treats_minus_one_as_the_last_row(jit):
    """If this fails, the reason for the helper has gone, or has changed."""

    def write(rows, index):
        return rows.at[index].set(99.0, mode="drop")

    write = jax.jit(write) if jit else write
    assert write(ROWS, jnp.array([-1]))[3].tolist() == [99.0] * 3
    np.testing.assert_array_equal(write(ROWS, jnp.array([4])), ROWS)


def test_jax_still_shifts_a_slice_that_does_not_fit():
    shifted = jax.lax.dynamic_update_slice(ROWS, jnp.full((2, 3), 99.0), (3, 0))
    assert shifted[2].tolist() == [99.0] * 3
