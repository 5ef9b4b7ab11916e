"""Boxes of stored tensors: any box, however it is read, holds the right values."""

import os

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoint import builders
from metrale_jax.checkpoint import CheckpointError, inventory, layout, reading

FLOAT32 = np.dtype(np.float32)
ONE_ROW = layout.Whole("w", (1, 64), (1, 64))


@st.composite
def boxes(draw, max_size=12):
    shape = tuple(draw(st.lists(st.integers(1, max_size), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    size = tuple(
        draw(st.integers(1, whole - begin))
        for whole, begin in zip(shape, start, strict=True)
    )
    return shape, start, size


def slices(start, size):
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reading")


@hypothesis.given(
    box=boxes(),
    band=st.sampled_from([1, 5, 1000]),
    gap=st.sampled_from([0, 8, 64, 4096]),
    stored=st.sampled_from([jnp.bfloat16, np.float16, np.float32]),
)
def test_any_box_is_read_in_any_way(folder, box, band, gap, stored):
    shape, start, size = box
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape).astype(stored)
    builders.write_tensors(folder / "x.safetensors", {"first": values, "w": values})
    out = reading.empty_aligned(size, FLOAT32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_BAND_ELEMENTS", band)
        patch.setattr(reading, "_MERGE_GAP_BYTES", gap)
        with reading.TensorReader(inventory.scan(folder)) as reader:
            reader.fill(out, layout.Whole("w", shape, shape), start)
    np.testing.assert_array_equal(out, values[slices(start, size)].astype(np.float32))
    if gap == 0:
        assert reader.bytes_read == np.prod(size) * values.itemsize


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    box=boxes(max_size=300).filter(lambda box: 2 <= len(box[0]) <= 3),
    band=st.sampled_from([37, 5000, 1 << 20]),
)
def test_any_box_of_a_block_scaled_tensor_is_dequantised(folder, box, band):
    shape, start, size = box
    shape, start, size = (
        ((3, *shape[1:]), (1, *start[1:]), (2, *size[1:])) if len(shape) == 3 else box
    )
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape).astype(jnp.float8_e4m3fn)
    blocks = (*shape[:-2], *(-(-whole // 128) for whole in shape[-2:]))
    scale = rng.uniform(0.5, 2, blocks).astype(np.float32)
    stored = {"w": weight, "w_scale_inv": scale}
    builders.write_tensors(folder / "x.safetensors", stored)
    out = reading.empty_aligned(size, FLOAT32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_BAND_ELEMENTS", band)
        with reading.TensorReader(inventory.scan(folder)) as reader:
            reader.fill(out, layout.Whole("w", shape, shape), start)
    box_slices = slices(start, size)
    spread = scale.repeat(128, axis=-2)[..., : shape[-2], :]
    spread = spread.repeat(128, axis=-1)[..., : shape[-1]]
    expected = weight.astype(np.float32)[box_slices] * spread[box_slices]
    np.testing.assert_array_equal(out, expected)


def test_every_float8_value_is_exact(folder):
    weight = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).reshape(2, 128)
    stored = {"w": weight, "w_scale_inv": np.ones((1, 1), jnp.bfloat16)}
    builders.write_tensors(folder / "x.safetensors", stored)
    out = reading.empty_aligned(weight.shape, FLOAT32)
    with reading.TensorReader(inventory.scan(folder)) as reader:
        reader.fill(out, layout.Whole("w", (2, 128), (2, 128)), (0, 0))
    np.testing.assert_array_equal(out, weight.astype(np.float32))


def test_reads_that_span_gaps_stay_small(folder, monkeypatch):
    # One column of a wide matrix, whose rows are read whole, in bands.
    values = np.arange(4096 * 32, dtype=np.float32).reshape(4096, 32)
    builders.write_tensors(folder / "x.safetensors", {"w": values})
    monkeypatch.setattr(reading, "_BAND_ELEMENTS", 1024)
    largest = []

    class Recording(reading.TensorReader):
        def read_box(self, tensor, view, start, size):
            largest.append(np.prod(size))
            return super().read_box(tensor, view, start, size)

    out = reading.empty_aligned((4096, 1), FLOAT32)
    with Recording(inventory.scan(folder)) as reader:
        reader.fill(out, layout.Whole("w", values.shape, values.shape), (0, 7))
    np.testing.assert_array_equal(out, values[:, 7:8])
    assert max(largest) <= 1024


@pytest.mark.parametrize("change", ["shrinks", "vanishes"])
def test_file_that_changes_after_its_header_was_read_is_an_error(tmp_path, change):
    path = tmp_path / "x.safetensors"
    builders.write_tensors(path, {"w": np.zeros((1, 64), np.float32)})
    stored = inventory.scan(tmp_path)
    if change == "shrinks":
        os.truncate(path, path.stat().st_size - 4)
    else:
        path.unlink()
    with reading.TensorReader(stored) as reader:
        with pytest.raises(
            CheckpointError, match="file ended|cannot be read"
        ) as raised:
            reader.fill(reading.empty_aligned((1, 64), FLOAT32), ONE_ROW, (0, 0))
    assert raised.value.tensor == "w"


def test_many_files_are_read_with_few_open(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_MAX_OPEN_FILES", 2)
    for index in range(5):
        values = np.full((1, 64), index, np.float32)
        builders.write_tensors(tmp_path / f"{index}.safetensors", {f"w{index}": values})
    before = len(os.listdir("/proc/self/fd"))
    with reading.TensorReader(inventory.scan(tmp_path)) as reader:
        for index in (0, 1, 2, 3, 4, 0, 4, 2):
            out = reading.empty_aligned((1, 64), FLOAT32)
            reader.fill(out, layout.Whole(f"w{index}", (1, 64), (1, 64)), (0, 0))
            assert (out == index).all()
            assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert len(os.listdir("/proc/self/fd")) == before
