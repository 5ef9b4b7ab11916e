"""Partial rotary positions (https://arxiv.org/abs/2104.09864), half-split pairing.

Only the first `rotary_dim` dimensions of a head rotate. The families' interleaved
multi-axis form reduces to this for text, where all axes share one position.
"""

import jax.numpy as jnp

from metrale_jax.axes import Array, Float, Float32, Int32


def rotation(
    positions: Int32[Array, "B K"], rotary_dim: int, theta: float
) -> tuple[Float32[Array, "B K half"], Float32[Array, "B K half"]]:
    """Returns cosines and sines of each position's angles, half = rotary_dim / 2."""
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    inverse_frequencies = theta**-exponents
    angles = positions.astype(jnp.float32)[..., None] * inverse_frequencies[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def row_positions(length: Int32[Array, " B"], num_rows: int) -> Int32[Array, "B K"]:
    """Positions of K rows behind a prefix."""
    row = jnp.arange(num_rows, dtype=jnp.int32)
    return length[:, None] + row[None, :]


def rotate(
    heads: Float[Array, "B K H D"],
    cosines: Float32[Array, "B K half"],
    sines: Float32[Array, "B K half"],
) -> Float[Array, "B K H D"]:
    """Rotates the pairs (i, i + half) of each head by its position's angles."""
    half = cosines.shape[-1]
    cosines = cosines[:, :, None, :]
    sines = sines[:, :, None, :]
    first = heads[..., :half].astype(jnp.float32)
    second = heads[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )
    return jnp.concatenate(
        [rotated.astype(heads.dtype), heads[..., 2 * half :]], axis=-1
    )
