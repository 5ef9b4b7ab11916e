"""Experts, one row and one expert at a time: the definition."""

import jax
import jax.numpy as jnp
from jax import lax


def expert_ffn(
    inputs: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    expert_index: jax.Array,
    expert_weight: jax.Array,
) -> jax.Array:
    """See `api.expert_ffn`."""
    num_experts, _, ffn_size = down.shape

    def apply_expert(x, index):
        projected = _product(gate_up[index], x)
        hidden = jax.nn.silu(projected[:ffn_size]) * projected[ffn_size:]
        return _product(down[index], hidden)

    def step(total, choice):
        x, index, weight = choice
        output = weight * apply_expert(x, jnp.minimum(index, num_experts - 1))
        return total + jnp.where(index < num_experts, output, 0), None

    def row(carry, row):
        x, indices, weights = row
        zero = jnp.zeros(x.shape, jnp.float32)
        choices = (jnp.broadcast_to(x[None], (indices.shape[0], *x.shape)), indices)
        total, _ = lax.scan(step, zero, (*choices, weights))
        return carry, total.astype(x.dtype)

    _, outputs = lax.scan(row, None, (inputs, expert_index, expert_weight))
    return outputs


def _product(matrix: jax.Array, x: jax.Array) -> jax.Array:
    """Float32 product of [out, in] and [in]."""
    return jnp.sum(matrix.astype(jnp.float32) * x.astype(jnp.float32)[None], axis=1)
