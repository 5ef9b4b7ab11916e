"""Experts by a loop over tiles of rows that share one; others are never read."""

import jax
import jax.numpy as jnp
from jax import lax

_TILE_ROWS = 8


def expert_ffn(
    inputs: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    expert_index: jax.Array,
    expert_weight: jax.Array,
) -> jax.Array:
    """See `api.expert_ffn`."""
    num_rows, num_choices = expert_index.shape
    num_experts, width, ffn_size = down.shape
    flat = expert_index.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    tile_rows = min(_TILE_ROWS, num_rows)
    counts = jnp.bincount(flat, length=num_experts + 1)[:num_experts]
    num_tiles = (counts + tile_rows - 1) // tile_rows
    tile_end = jnp.cumsum(num_tiles)
    group_start = jnp.cumsum(counts) - counts
    padding = [(0, tile_rows), (0, 0)]
    rows = jnp.pad(inputs[order // num_choices], padding)

    def body(tile, outputs):
        expert = jnp.searchsorted(tile_end, tile, side="right")
        within = tile - (tile_end[expert] - num_tiles[expert])
        start = group_start[expert] + within * tile_rows
        x = lax.dynamic_slice_in_dim(rows, start, tile_rows)
        projected = _product(x, gate_up[expert])
        hidden = jax.nn.silu(projected[:, :ffn_size]) * projected[:, ffn_size:]
        output = _product(hidden, down[expert])
        # Tiles come in order: what one writes past its group, the next overwrites.
        return lax.dynamic_update_slice_in_dim(outputs, output, start, axis=0)

    outputs = jnp.zeros((flat.shape[0] + tile_rows, width), jnp.float32)
    outputs = lax.fori_loop(0, tile_end[-1], body, outputs)
    outputs = outputs[jnp.argsort(order)].reshape(num_rows, num_choices, width)
    weighted = expert_weight[..., None] * outputs
    weighted = jnp.where((expert_index < num_experts)[..., None], weighted, 0)
    return jnp.sum(weighted, axis=1).astype(inputs.dtype)


def _product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """Float32 product of rows [R, in] with a matrix [out, in]."""
    return lax.dot_general(
        rows.astype(jnp.float32),
        matrix.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
