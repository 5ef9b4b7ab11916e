"""Products with `[out, in]` matrices, in the form that each platform runs best."""

import jax
import jax.numpy as jnp

from metrale_jax.axes import Array, Float

# XLA:CPU runs a product of few rows on one thread, but the members of a batched product
# side by side. Splitting the outputs in two keeps two cores busy; WORKSPACE.md has
# figures.
_CPU_OUTPUT_PARTS = 2
# From here on XLA:CPU's own threading of one product wins.
_CPU_MAX_SPLIT_ROWS = 32


def linear(
    inputs: Float[Array, "... in"], weight: Float[Array, "out in"]
) -> Float[Array, "... out"]:
    """Returns `einsum("...i,oi->...o", inputs, weight)` in the inputs' dtype."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    outputs = jax.lax.platform_dependent(
        rows, weight, cpu=_linear_on_cpu, default=_linear
    )
    return outputs.reshape(*inputs.shape[:-1], weight.shape[0])


def _linear(rows: Array, weight: Array) -> Array:
    return jnp.einsum("ni,oi->no", rows, weight)


def _linear_on_cpu(rows: Array, weight: Array) -> Array:
    num_rows, num_inputs = rows.shape
    num_outputs = weight.shape[0]
    if num_rows > _CPU_MAX_SPLIT_ROWS or num_outputs % _CPU_OUTPUT_PARTS:
        return _linear(rows, weight)
    # A view of the same memory: no copy of the weight is made.
    parts = weight.reshape(_CPU_OUTPUT_PARTS, -1, num_inputs)
    repeated = jnp.broadcast_to(rows, (_CPU_OUTPUT_PARTS, num_rows, num_inputs))
    outputs = jnp.einsum("poi,pni->pon", parts, repeated)
    return outputs.reshape(num_outputs, num_rows).T
