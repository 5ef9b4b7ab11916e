"""Routed experts against a float64 oracle, one row and one choice at a time."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from kernels import tolerances
from pallas_kernels import expert_matmul
from pallas_kernels.expert_matmul import shapes

IMPLEMENTATIONS = ("reference", "xla", "ragged_dot")
FFN = {
    name: jax.jit(functools.partial(expert_matmul.expert_ffn, implementation=name))
    for name in IMPLEMENTATIONS
}
SIZES = shapes.TINY["tiny"]
INERT = SIZES.num_experts
# "xla" multiplies 21 rows one by one, and 67 in tiles of which some are not full.
FEW_ROWS, MANY_ROWS = 21, 67

each_number_of_rows = pytest.mark.parametrize("num_rows", [FEW_ROWS, MANY_ROWS])
each_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def make_experts(dtype=np.float32):
    rng = np.random.default_rng(0)
    experts, width, ffn_size = SIZES.num_experts, SIZES.width, SIZES.ffn_size
    gate_up = rng.normal(size=(experts, 2 * ffn_size, width))
    down = rng.normal(size=(experts, width, ffn_size))
    return gate_up.astype(dtype), down.astype(dtype)


def make_rows(num_rows, dtype=np.float32):
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(num_rows, SIZES.width)).astype(dtype)
    index = rng.integers(0, INERT + 1, size=(num_rows, SIZES.num_choices))
    weight = rng.uniform(size=index.shape).astype(np.float32)
    return inputs, index.astype(np.int32), weight


def apply_experts(inputs, gate_up, down, index, weight):
    outputs = np.zeros(inputs.shape)
    for row, x in enumerate(inputs.astype(np.float64)):
        for expert, scale in zip(index[row], weight[row], strict=True):
            if expert == INERT:
                continue
            projected = gate_up[expert].astype(np.float64) @ x
            gate, up = np.split(projected, 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            outputs[row] += scale * (down[expert].astype(np.float64) @ hidden)
    return outputs


def check(name, inputs, experts, index, weight):
    outputs = FFN[name](inputs, *experts, index, weight)
    expected = apply_experts(inputs, *experts, index, weight)
    tolerances.assert_close(outputs, expected, num_terms=SIZES.width + SIZES.ffn_size)
    inert = np.all(index == INERT, axis=1)
    assert not np.any(np.asarray(outputs)[inert])


@each_implementation
@each_number_of_rows
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_rows_match_and_inert_ones_are_exactly_zero(name, num_rows, dtype) -> None:
    inputs, index, weight = make_rows(num_rows, dtype)
    index[[0, 7, 20]] = INERT
    check(name, inputs, make_experts(dtype), index, weight)


@each_implementation
@each_number_of_rows
@pytest.mark.parametrize("expert", [0, SIZES.num_experts - 1, INERT])
def test_one_expert_may_take_every_row(name, num_rows, expert) -> None:
    inputs, index, weight = make_rows(num_rows)
    check(name, inputs, make_experts(), np.full_like(index, expert), weight)


@each_implementation
def test_one_row(name) -> None:
    inputs, index, weight = make_rows(1)
    for choices in ([2, 4], [INERT, 1], [INERT, INERT]):
        index[0] = choices
        check(name, inputs, make_experts(), index, weight)


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    st.lists(st.integers(0, INERT), min_size=2 * MANY_ROWS, max_size=2 * MANY_ROWS)
)
def test_no_route_drops_a_row(index) -> None:
    inputs, _, weight = make_rows(MANY_ROWS)
    check("xla", inputs, make_experts(), np.int32(index).reshape(weight.shape), weight)


@each_implementation
@each_number_of_rows
def test_bits_of_a_row_do_not_depend_on_the_others(name, num_rows) -> None:
    inputs, index, weight = make_rows(num_rows)
    index[10] = [3, 1]
    experts = make_experts()
    beside = np.asarray(FFN[name](inputs, *experts, index, weight))
    for other in (0, 1, 3, INERT):
        moved = np.full_like(index, other)
        moved[10] = index[10]
        changed = np.full_like(inputs, 1e3 if other != INERT else np.nan)
        changed[10] = inputs[10]
        result = np.asarray(FFN[name](changed, *experts, moved, weight))
        tolerances.assert_same_bits(result[10], beside[10])


def test_ragged_dot_has_the_gradient_of_the_sum_over_experts() -> None:
    inputs, index, weight = make_rows(FEW_ROWS)
    experts = make_experts()
    direction = np.random.default_rng(2).normal(size=inputs.shape).astype(np.float32)

    def loss(inputs, gate_up, down, weight):
        args = (inputs, gate_up, down, index, weight)
        outputs = expert_matmul.expert_ffn(*args, implementation="ragged_dot")
        return jnp.sum(outputs * direction)

    def dense_loss(inputs, gate_up, down, weight):
        # Every expert on every row; routes that don't exist weigh nothing.
        projected = jnp.einsum("efm,nm->enf", gate_up, inputs)
        gate, up = jnp.split(projected, 2, axis=2)
        outputs = jnp.einsum("emf,enf->enm", down, jax.nn.silu(gate) * up)
        routes = jax.nn.one_hot(index, INERT, axis=0) * weight[None]
        return jnp.einsum("enm,ena,nm->", outputs, routes, direction)

    args = (inputs, *experts, weight)
    gradients = jax.jit(jax.grad(loss, argnums=range(4)))(*args)
    expected = jax.jit(jax.grad(dense_loss, argnums=range(4)))(*args)
    for actual, wanted in zip(gradients, expected, strict=True):
        tolerances.assert_close(
            actual, np.asarray(wanted, np.float64), num_terms=SIZES.width * FEW_ROWS
        )


def test_memory_follows_one_expert_not_all() -> None:
    # A CPU computes in float32: 16-bit experts must be converted one at a time.
    dtype = jnp.bfloat16
    abstract = (
        jax.ShapeDtypeStruct((2, 64), dtype),
        jax.ShapeDtypeStruct((128, 128, 64), dtype),
        jax.ShapeDtypeStruct((128, 64, 64), dtype),
        jax.ShapeDtypeStruct((2, 2), jnp.int32),
        jax.ShapeDtypeStruct((2, 2), jnp.float32),
    )
    memory = FFN["xla"].lower(*abstract).compile().memory_analysis()
    one_expert_bytes = 4 * 3 * 64 * 64
    assert memory.temp_size_in_bytes < 4 * one_expert_bytes


def test_ffn_sizes_must_agree() -> None:
    inputs, index, weight = make_rows(1)
    gate_up, down = make_experts()
    with pytest.raises(ValueError, match="`gate_up` must have 2F = 24 rows"):
        expert_matmul.expert_ffn(inputs, gate_up[:, 1:], down, index, weight)
