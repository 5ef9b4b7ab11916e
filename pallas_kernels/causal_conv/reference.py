"""Causal convolution, one row at a time: the definition."""

import jax
import jax.numpy as jnp
from jax import lax


def causal_conv(
    inputs: jax.Array, conv_state: jax.Array, weight: jax.Array
) -> jax.Array:
    """See `api.causal_conv`."""
    weight = weight.astype(jnp.float32)

    def step(window, row):
        taps = jnp.concatenate([window, row[:, None]], axis=1)  # [B, W + 1, C]
        total = jnp.sum(taps * weight.T[None], axis=1)
        return taps[:, 1:], jax.nn.silu(total)

    rows = jnp.moveaxis(inputs.astype(jnp.float32), 1, 0)
    _, outputs = lax.scan(step, conv_state.astype(jnp.float32), rows)
    return jnp.moveaxis(outputs, 0, 1).astype(inputs.dtype)


def shift_window(
    conv_state: jax.Array, inputs: jax.Array, num_rows: jax.Array
) -> jax.Array:
    """See `api.shift_window`."""

    def step(window, row):
        index, values = row
        shifted = jnp.concatenate([window, values[:, None]], axis=1)[:, 1:]
        live = (index < num_rows)[:, None, None]
        return jnp.where(live, shifted, window), None

    rows = (jnp.arange(inputs.shape[1]), jnp.moveaxis(inputs, 1, 0))
    conv_state, _ = lax.scan(step, conv_state, rows)
    return conv_state
