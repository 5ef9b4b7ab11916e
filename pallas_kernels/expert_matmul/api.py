"""SwiGLU experts over the rows that a router sends to them."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, shape_check
from pallas_kernels.expert_matmul import ragged_dot, reference, xla

Implementation = dispatch.Implementation | Literal["ragged_dot"]

_EXPERT_FFN = {
    "reference": reference.expert_ffn,
    "xla": xla.expert_ffn,
    "ragged_dot": ragged_dot.expert_ffn,
}
_BACKEND_DEFAULTS = {"tpu": "ragged_dot", "gpu": "ragged_dot"}


def expert_ffn(
    inputs: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    expert_index: jax.Array,
    expert_weight: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns sum_a weight_a down_e(silu(gate_e x) * up_e x), with e = expert_index_a.

    No expert has a capacity: a row is never dropped, and its bits do not depend on what
    the other rows hold or where they go. Weights are applied and summed in float32.

    Args:
      inputs: [N, M].
      gate_up: [E, 2F, M], gate rows first.
      down: [E, M, F].
      expert_index: i32[N, A] in 0..E; E, one past the end, adds exactly zero.
      expert_weight: f32[N, A].
      implementation: "xla" reads the weights of the experts in use only, in a loop
        whose trip count is not static, so it has no reverse derivative; "ragged_dot"
        has one, and is the default on TPU and GPU.

    Returns:
      [N, M] in the dtype of `inputs`.

    Raises:
      ValueError: a shape or dtype disagrees, or `implementation` is unknown.
      NotImplementedError: `implementation` is not offered.
    """
    axes = shape_check.Axes()
    axes.check("inputs", inputs, "N M", jnp.floating)
    axes.check("gate_up", gate_up, "E 2F M", jnp.floating)
    axes.check("down", down, "E M F", jnp.floating)
    axes.check("expert_index", expert_index, "N A", jnp.integer)
    axes.check("expert_weight", expert_weight, "N A", jnp.float32)
    if axes["2F"] != 2 * axes["F"]:
        raise ValueError(
            f"`gate_up` must have 2F = {2 * axes['F']} rows per expert for a `down` of "
            f"F = {axes['F']} columns, got {axes['2F']}."
        )
    function = dispatch.select(
        "expert_matmul.expert_ffn",
        _EXPERT_FFN,
        implementation,
        backend_defaults=_BACKEND_DEFAULTS,
    )
    return function(inputs, gate_up, down, expert_index, expert_weight)
