"""Depthwise causal convolution with SiLU, and the window of inputs that it needs."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, shape_check
from pallas_kernels.causal_conv import reference, xla

_CAUSAL_CONV = {"reference": reference.causal_conv, "xla": xla.causal_conv}
_SHIFT_WINDOW = {"reference": reference.shift_window, "xla": xla.shift_window}


def causal_conv(
    inputs: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array,
    *,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Convolves T inputs that follow a window of W past ones, then applies SiLU.

    outputs[t] = silu(sum_w weight[:, w] * x[t + w]) with x = [conv_state | inputs].
    Computed in float32. An output depends on no later input, so stale rows at the end
    leave the others alone.

    Args:
      inputs: [B, T, C].
      conv_state: [B, W, C], the inputs before the first, oldest first; zeros at the
        start of a sequence.
      weight: [C, W + 1]; the last column weighs the current input.
      implementation: a name, or None for the backend's default.

    Returns:
      Outputs [B, T, C] in the dtype of `inputs`.

    Raises:
      ValueError: a shape or dtype disagrees, or `implementation` is unknown.
      NotImplementedError: `implementation` is not offered.
    """
    axes = shape_check.Axes()
    _check_window(axes, inputs, conv_state)
    axes.check("weight", weight, "C W+1", jnp.floating)
    if axes["W+1"] != axes["W"] + 1:
        raise ValueError(
            f"`weight` must have W + 1 = {axes['W'] + 1} columns for a `conv_state` of "
            f"{axes['W']} inputs, got {axes['W+1']}."
        )
    function = dispatch.select("causal_conv", _CAUSAL_CONV, implementation)
    return function(inputs, conv_state, weight)


def shift_window(
    conv_state: jax.Array,
    inputs: jax.Array,
    num_rows: jax.Array,
    *,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Returns the last W of [conv_state | first `num_rows` inputs].

    Args:
      conv_state: [B, W, C].
      inputs: [B, T, C], of the same dtype.
      num_rows: i32[B] in 0..T; inputs at or past it may hold anything, NaN included.
      implementation: a name, or None for the backend's default.

    Raises:
      ValueError: a shape or dtype disagrees, or `implementation` is unknown.
      NotImplementedError: `implementation` is not offered.
    """
    axes = shape_check.Axes()
    _check_window(axes, inputs, conv_state)
    axes.check("num_rows", num_rows, "B", jnp.integer)
    function = dispatch.select(
        "causal_conv.shift_window", _SHIFT_WINDOW, implementation
    )
    return function(conv_state, inputs, num_rows)


def _check_window(
    axes: shape_check.Axes, inputs: jax.Array, conv_state: jax.Array
) -> None:
    axes.check("inputs", inputs, "B T C", jnp.floating)
    axes.check("conv_state", conv_state, "B W C", jnp.floating)
    if conv_state.dtype != inputs.dtype:
        raise ValueError(
            f"`conv_state` must have the dtype of `inputs` ({inputs.dtype}), got "
            f"{conv_state.dtype}; cast the inputs first, so that they read alike from "
            "both."
        )
