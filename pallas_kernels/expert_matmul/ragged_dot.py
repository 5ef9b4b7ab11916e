"""Experts by `jax.lax.ragged_dot` on rows sorted by expert."""

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
    num_rows, num_choices = expert_index.shape
    num_experts, _, ffn_size = down.shape
    flat = expert_index.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    group_sizes = jnp.bincount(flat, length=num_experts + 1)[:num_experts]
    group_sizes = group_sizes.astype(jnp.int32)
    rows = inputs[order // num_choices]
    projected = _ragged_dot(rows, gate_up, group_sizes)
    hidden = jax.nn.silu(projected[:, :ffn_size]) * projected[:, ffn_size:]
    outputs = _ragged_dot(hidden, down, group_sizes)
    # Rows past the last group hold whatever the backend leaves there.
    outputs = outputs[jnp.argsort(order)].reshape(num_rows, num_choices, -1)
    weighted = expert_weight[..., None] * outputs
    weighted = jnp.where((expert_index < num_experts)[..., None], weighted, 0)
    return jnp.sum(weighted, axis=1).astype(inputs.dtype)


def _ragged_dot(rows, matrices, group_sizes):
    """Float32 product of rows [N, in] with matrices [E, out, in] by group."""
    return lax.ragged_dot_general(
        rows.astype(jnp.float32),
        matrices.astype(jnp.float32),
        group_sizes,
        lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((1,), (2,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[0],
        ),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
