"""How far a result may be from its float64 oracle: one table for all kernels.

Every op accumulates in float32, whatever its inputs are. A result may thus be off by
its own rounding to the result's dtype, and by float32 roundings that grow with the root
of the number of terms added up, measured against the largest result.
"""

import jax
import numpy as np

# Relative rounding of a result, by its dtype: half a unit in the last place.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

# Float32 error of a sum, relative to the largest result, by the root of its length.
ACCUMULATED = 2.0**-22


def assert_close(
    actual: jax.Array, expected: np.ndarray, *, num_terms: int, name: str = "result"
) -> None:
    """Checks a result of an op, NaN and infinity included, against float64."""
    values = np.asarray(actual).astype(np.float64)
    assert values.shape == expected.shape, name
    assert expected.dtype == np.float64, "the oracle must be float64"
    assert np.all(np.isfinite(values)), f"{name} has values that are not finite"
    largest = np.max(np.abs(expected), initial=0.0)
    allowed = ROUNDING[str(actual.dtype)] * np.abs(expected)
    allowed += ACCUMULATED * np.sqrt(num_terms) * largest
    excess = np.max(np.abs(values - expected) - allowed, initial=0.0)
    assert excess <= 0, f"{name} exceeds its tolerance by {excess} of {largest}"


def assert_same_bits(actual: object, expected: object) -> None:
    """Checks that two trees of arrays are equal bit for bit; a NaN equals none."""
    actual_leaves, actual_tree = jax.tree.flatten(actual)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    assert actual_tree == expected_tree
    for one, other in zip(actual_leaves, expected_leaves, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert not np.any(np.isnan(one.astype(np.float64)))
        assert one.tobytes() == other.tobytes()
