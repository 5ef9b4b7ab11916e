"""Verify attention against dense float64 attention over an explicit mask."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from kernels import tolerances
from pallas_kernels import verify_attention
from pallas_kernels.verify_attention import shapes

IMPLEMENTATIONS = ("reference", "xla")
PAGE = 8
ATTEND = {
    name: jax.jit(
        functools.partial(verify_attention.verify_attention, implementation=name),
        static_argnames=("scale", "window", "causal"),
    )
    for name in IMPLEMENTATIONS
}

each_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def make_args(sizes, lengths, num_rows, pages_per_slot, inert=(), dtype=np.float32):
    """Arguments in order; everything that no row may see is NaN.

    `inert` names (slot, page) entries of the table that are marked as not there.
    """
    rng = np.random.default_rng(0)
    batch = len(lengths)
    num_pages = batch * pages_per_slot + 2  # Two belong to nobody.
    heads = (sizes.num_kv_heads, sizes.head_dim)
    shape = (batch, num_rows, sizes.num_heads, sizes.head_dim)
    queries = rng.normal(size=shape).astype(np.float32)
    keys, values = rng.normal(size=(2, batch, num_rows, *heads)).astype(np.float32)
    pages = rng.normal(size=(2, num_pages, PAGE, *heads)).astype(np.float32)
    order = rng.permutation(num_pages)
    table = order[: batch * pages_per_slot].reshape(batch, -1).astype(np.int32)
    seen = np.zeros((num_pages, PAGE), bool)
    for slot, length in enumerate(lengths):
        for page in range(pages_per_slot):
            count = np.clip(length - page * PAGE, 0, PAGE)
            if (slot, page) in inert or count == 0:
                table[slot, page] = num_pages
            else:
                seen[table[slot, page], :count] = True
    pages[:, ~seen] = np.nan
    arrays = (x.astype(dtype) for x in (queries, keys, values, *pages))
    return (*arrays, table, np.int32(lengths))


def dense_mask(args, window, causal):
    """bool[B, K, S + K], one cell at a time."""
    queries, _, _, key_pages, _, table, lengths = args
    batch, num_rows = queries.shape[:2]
    size = table.shape[1] * PAGE
    mask = np.zeros((batch, num_rows, size + num_rows), bool)
    for b, i, s in np.ndindex(mask.shape):
        row = lengths[b] + i
        if s < size:
            held = s < lengths[b] and table[b, s // PAGE] < len(key_pages)
            distance = row - s
        else:
            held = not causal or s - size <= i
            distance = abs(i - (s - size))
        mask[b, i, s] = held and (window is None or distance < window)
    return mask


def attend(args, scale, mask):
    queries, keys, values, key_pages, value_pages, table, _ = args
    outputs = np.zeros(queries.shape)
    group_size = queries.shape[2] // keys.shape[2]
    for b, i, h in np.ndindex(queries.shape[:3]):
        held = np.minimum(table[b], len(key_pages) - 1)
        head = h // group_size
        rows = [(key_pages, keys), (value_pages, values)]
        key, value = (
            np.concatenate([p[held, :, head].reshape(-1, p.shape[-1]), r[b, :, head]])
            for p, r in rows
        )
        key = key[mask[b, i]].astype(np.float64)
        value = value[mask[b, i]].astype(np.float64)
        scores = scale * (key @ queries[b, i, h].astype(np.float64))
        weights = np.exp(scores - np.max(scores))
        outputs[b, i, h] = weights @ value / np.sum(weights)
    return outputs


def check(name, sizes, args, window=None, causal=True):
    scale = sizes.head_dim**-0.5
    outputs = ATTEND[name](*args, scale=scale, window=window, causal=causal)
    mask = dense_mask(args, window, causal)
    expected = attend(args, scale, mask)
    tolerances.assert_close(outputs, expected, num_terms=sizes.head_dim + mask.shape[2])


@each_implementation
@pytest.mark.parametrize("size_name", sorted(shapes.TINY))
def test_page_edges(name, size_name) -> None:
    sizes = shapes.TINY[size_name]
    check(name, sizes, make_args(sizes, [0, 7, 8, 9], 3, 3))


@each_implementation
def test_inert_pages_below_the_length_are_not_seen(name) -> None:
    sizes = shapes.TINY["tiny_group_1"]
    inert = {(1, 0), (2, 1), (3, 0), (3, 1)}
    check(name, sizes, make_args(sizes, [0, 7, 17, 9], 3, 3, inert))


@each_implementation
@pytest.mark.parametrize(
    ("window", "causal"),
    [(None, True), (1, True), (5, True), (300, True), (None, False), (5, False)],
)
def test_mask_over_several_tiles(name, window, causal) -> None:
    sizes = shapes.TINY["tiny_group_1"]
    args = make_args(sizes, [0, 255, 257, 310], 3, 40)
    check(name, sizes, args, window, causal)


@each_implementation
@pytest.mark.parametrize("num_rows", [1, 5, 9, 16])
def test_any_number_of_rows(name, num_rows) -> None:
    sizes = shapes.Sizes(3, 1, 80)
    check(name, sizes, make_args(sizes, [0, 7, 17], num_rows, 3))


@each_implementation
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16], ids=["bf16", "f16"])
def test_16_bit_rows_and_pages(name, dtype) -> None:
    sizes = shapes.TINY["tiny_group_2"]
    check(name, sizes, make_args(sizes, [0, 7, 8, 17], 3, 3, dtype=dtype))


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    lengths=st.tuples(*[st.integers(0, 40)] * 3),
    inert=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=3),
)
def test_drawn_lengths_and_inert_pages(lengths, inert) -> None:
    sizes = shapes.TINY["tiny_group_1"]
    check("xla", sizes, make_args(sizes, list(lengths), 3, 5, inert), window=9)


def test_memory_follows_what_is_held_not_the_capacity() -> None:
    # A CPU computes in float32: 16-bit pages must be converted as they are read.
    sizes = shapes.TINY["tiny_group_2"]
    heads = (sizes.num_kv_heads, sizes.head_dim)
    rows = jax.ShapeDtypeStruct((1, 2, *heads), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((4096, PAGE, *heads), jnp.bfloat16)
    abstract = (
        jax.ShapeDtypeStruct((1, 2, sizes.num_heads, sizes.head_dim), jnp.bfloat16),
        *(rows, rows, pages, pages),
        jax.ShapeDtypeStruct((1, 4096), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    lowered = ATTEND["xla"].lower(*abstract, scale=1.0)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < pages.size * 2 // 8


@each_implementation
def test_chunk_of_a_prompt(name) -> None:
    sizes = shapes.TINY["tiny_group_2"]
    check(name, sizes, make_args(sizes, [0, 9], 65, 3))


@each_implementation
def test_slots_are_isolated_bit_for_bit(name) -> None:
    sizes = shapes.TINY["tiny_group_1"]
    args = make_args(sizes, [0, 255, 257, 310], 3, 40)
    run = functools.partial(ATTEND[name], scale=0.125, window=None, causal=True)
    beside = np.asarray(run(*args))
    for slot in range(4):
        others = [i for i in range(4) if i != slot]
        for length in (0, 9, 320):
            changed = [np.array(x) for x in args]
            for x in changed[:3]:
                x[others] = np.nan
            changed[6][others] = length
            tolerances.assert_same_bits(np.asarray(run(*changed))[slot], beside[slot])


def test_window_must_be_positive() -> None:
    sizes = shapes.TINY["tiny_group_1"]
    args = make_args(sizes, [0, 7, 8, 9], 3, 3)
    with pytest.raises(ValueError, match="`window` must be positive or None, got 0"):
        verify_attention.verify_attention(*args, scale=1.0, window=0)


def test_rows_must_have_the_dtype_of_the_pages() -> None:
    sizes = shapes.TINY["tiny_group_1"]
    args = list(make_args(sizes, [0, 7, 8, 9], 3, 3))
    args[2] = args[2].astype(np.float16)
    with pytest.raises(ValueError, match="`values` must have the dtype of the pages"):
        verify_attention.verify_attention(*args, scale=1.0)
