"""RMS norms: computed in float32, returned in the input's dtype."""

import jax
import jax.numpy as jnp

from metrale_jax.axes import Array, Float, Float32


def zero_centred_rms_norm(
    x: Float[Array, "... M"], weight: Float[Array, " M"], epsilon: float
) -> Float[Array, "... M"]:
    """x / rms(x) * (1 + weight): the stored weight is around 0.

    Used by layer, query, key, final and all multi-token-prediction norms.
    """
    scale = 1.0 + weight.astype(jnp.float32)
    return (_normalise(x, epsilon) * _as_row(scale, x.ndim)).astype(x.dtype)


def plain_rms_norm(
    x: Float[Array, "... M"], weight: Float[Array, " M"], epsilon: float
) -> Float[Array, "... M"]:
    """x / rms(x) * weight: the stored weight is around 1."""
    scale = weight.astype(jnp.float32)
    return (_normalise(x, epsilon) * _as_row(scale, x.ndim)).astype(x.dtype)


def _normalise(x: Array, epsilon: float) -> Float32[Array, "..."]:
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + epsilon)


def _as_row(vector: Array, ndim: int) -> Array:
    return vector.reshape((1,) * (ndim - 1) + vector.shape)
