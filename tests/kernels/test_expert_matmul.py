"""Routed experts against a float64 oracle, one row and one choice at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
NUM_ROWS = 21  # More than two tiles of "xla", and no multiple of one.

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
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_rows_match_and_inert_ones_are_exactly_zero(name, dtype) -> None:
    inputs, index, weight = make_rows(NUM_ROWS, dtype)
    index[[0, 7, 20]] = INERT
    check(name, inputs, make_experts(dtype), index, weight)


@each_implementation
@pytest.mark.parametrize("expert", [0, SIZES.num_experts - 1, INERT])
def test_one_expert_may_take_every_row(name, expert) -> None:
    inputs, index, weight = make_rows(NUM_ROWS)
    check(name, inputs, make_experts(), np.full_like(index, expert), weight)


@each_implementation
def test_one_row(name) -> None:
    inputs, index, weight = make_rows(1)
    for choices in ([2, 4], [INERT, 1], [INERT, INERT]):
        index[0] = choices
        check(name, inputs, make_experts(), index, weight)


@each_implementation
def test_bits_of_a_row_do_not_depend_on_the_others(name) -> None:
    inputs, index, weight = make_rows(NUM_ROWS)
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


def test_ffn_sizes_must_agree() -> None:
    inputs, index, weight = make_rows(1)
    gate_up, down = make_experts()
    with pytest.raises(ValueError, match="`gate_up` must have 2F = 24 rows"):
        expert_matmul.expert_ffn(inputs, gate_up[:, 1:], down, index, weight)
