"""Experts by a loop over those in use; the others' weights are never read.

Inside, a loop over tiles of the rows that share the expert. The rows of a tile number
the same in every call of a shape, so that a row's bits do not depend on its company.
"""

import jax
import jax.numpy as jnp
from jax import lax

# Few rows per expert are multiplied one by one: up to about so many, a product of
# several costs a CPU more.
_MAX_SINGLE_ROWS = 16
_TILE_ROWS = 32


def expert_ffn(
    inputs: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    expert_index: jax.Array,
    expert_weight: jax.Array,
) -> jax.Array:
    """See `api.expert_ffn`."""
    num_rows, num_choices = expert_index.shape
    num_experts, width, _ = down.shape
    is_sparse = expert_index.size <= _MAX_SINGLE_ROWS * num_experts
    tile_rows = 1 if is_sparse else _TILE_ROWS
    by_expert = expert_index.reshape(-1)
    order = jnp.argsort(by_expert, stable=True)
    counts = jnp.bincount(by_expert, length=num_experts + 1)[:num_experts]
    starts = jnp.cumsum(counts) - counts
    used_first = jnp.argsort(counts == 0, stable=True)
    rows = jnp.pad(inputs[order // num_choices], [(0, tile_rows), (0, 0)])

    def add_expert(position, outputs):
        expert = used_first[position]
        # XLA would convert all experts to float32 before the loop; the barrier makes
        # them depend on the step.
        matrices, expert = lax.optimization_barrier(((gate_up, down), expert))
        matrices = [_matrix(x, expert) for x in matrices]

        def add_tile(tile, outputs):
            start = starts[expert] + tile * tile_rows
            x = lax.dynamic_slice_in_dim(rows, start, tile_rows)
            # Rows past the expert's last are the next expert's, written again later.
            output = _ffn(x.astype(jnp.float32), *matrices)
            return lax.dynamic_update_slice_in_dim(outputs, output, start, axis=0)

        num_tiles = (counts[expert] + tile_rows - 1) // tile_rows
        return lax.fori_loop(0, num_tiles, add_tile, outputs)

    outputs = jnp.zeros((rows.shape[0], width), jnp.float32)
    outputs = lax.fori_loop(0, jnp.sum(counts > 0), add_expert, outputs)
    outputs = outputs[jnp.argsort(order)].reshape(num_rows, num_choices, width)
    weighted = expert_weight[..., None] * outputs
    weighted = jnp.where((expert_index < num_experts)[..., None], weighted, 0)
    return jnp.sum(weighted, axis=1).astype(inputs.dtype)


def _matrix(matrices: jax.Array, expert: jax.Array) -> jax.Array:
    matrix = lax.dynamic_index_in_dim(matrices, expert, keepdims=False)
    return matrix.astype(jnp.float32)


def _ffn(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    gate, up = jnp.split(_product(x, gate_up), 2, axis=1)
    return _product(jax.nn.silu(gate) * up, down)


def _product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """Product of rows [R, in] with a matrix [out, in]."""
    return jnp.einsum("ri,oi->ro", rows, matrix, precision=lax.Precision.HIGHEST)
