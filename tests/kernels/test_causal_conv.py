"""Causal convolution and its window against a float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import tolerances
from pallas_kernels import causal_conv
from pallas_kernels.causal_conv import shapes

IMPLEMENTATIONS = ("reference", "xla")
CONV = {
    name: jax.jit(functools.partial(causal_conv.causal_conv, implementation=name))
    for name in IMPLEMENTATIONS
}
SHIFT = {
    name: jax.jit(functools.partial(causal_conv.shift_window, implementation=name))
    for name in IMPLEMENTATIONS
}
SIZES = shapes.TINY["tiny"]
BATCH = 9
NUM_ROWS = 8

each_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def convolve(inputs, window, weight):
    """Oracle of one slot: outputs [T, C], float64."""
    taps = np.concatenate([window, inputs]).astype(np.float64)
    outputs = []
    for t in range(len(inputs)):
        total = np.zeros(taps.shape[1])
        for w in range(weight.shape[1]):
            total += weight[:, w].astype(np.float64) * taps[t + w]
        outputs.append(total / (1 + np.exp(-total)))
    return np.array(outputs).reshape(inputs.shape)


def run(name, inputs, window, num_rows, weight):
    """Outputs and next window; rows at or past `num_rows` are NaN."""
    inputs = np.array(inputs)
    for slot, count in enumerate(num_rows):
        inputs[slot, count:] = np.nan
    outputs = CONV[name](inputs, window, weight)
    window = SHIFT[name](window, inputs, np.int32(num_rows))
    return jax.device_get((outputs, window))


@each_implementation
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_outputs_and_window_match_for_every_number_of_rows(name, dtype) -> None:
    num_rows = list(range(NUM_ROWS + 1))
    inputs = draw(BATCH, NUM_ROWS, SIZES.num_channels).astype(dtype)
    window = draw(BATCH, SIZES.window, SIZES.num_channels, seed=1).astype(dtype)
    weight = draw(SIZES.num_channels, SIZES.window + 1, seed=2).astype(dtype)
    outputs, new_window = run(name, inputs, window, num_rows, weight)
    for i, count in enumerate(num_rows):
        expected = convolve(inputs[i, :count], window[i], weight)
        tolerances.assert_close(
            outputs[i, :count], expected, num_terms=SIZES.window + 1
        )
        held = np.concatenate([window[i], inputs[i, :count]])[-SIZES.window :]
        tolerances.assert_same_bits(new_window[i], held)


@each_implementation
@pytest.mark.parametrize(
    "parts", [(12,), (6, 6), (1, 11), (3, 1, 8), (1, 2, 3, 6)], ids=str
)
def test_splits_and_short_prompts_equal_one_pass(name, parts) -> None:
    inputs = draw(1, 12, SIZES.num_channels, seed=3)
    weight = draw(SIZES.num_channels, SIZES.window + 1, seed=4)
    window = np.zeros((1, SIZES.window, SIZES.num_channels), np.float32)
    expected = convolve(inputs[0], window[0], weight)
    outputs, start = [], 0
    for part in parts:
        # One program for all parts: rows past the part are NaN.
        padded = np.resize(inputs[:, start : start + part], (1, 12, SIZES.num_channels))
        output, window = run(name, padded, window, [part], weight)
        outputs.append(output[0, :part])
        start += part
    tolerances.assert_close(
        np.concatenate(outputs), expected, num_terms=SIZES.window + 1
    )
    tolerances.assert_same_bits(window[0], inputs[0, -SIZES.window :])


def test_window_of_another_dtype_is_refused() -> None:
    inputs = draw(1, 2, SIZES.num_channels)
    window = jnp.zeros((1, SIZES.window, SIZES.num_channels), jnp.bfloat16)
    with pytest.raises(ValueError, match="`conv_state` must have the dtype"):
        causal_conv.shift_window(window, inputs, np.int32([1]))


def test_weight_must_have_one_more_column_than_the_window() -> None:
    inputs = draw(1, 2, SIZES.num_channels)
    with pytest.raises(ValueError, match="`weight` must have W \\+ 1 = 4 columns"):
        causal_conv.causal_conv(
            inputs, draw(1, 3, SIZES.num_channels), draw(SIZES.num_channels, 3)
        )
