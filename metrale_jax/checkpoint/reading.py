"""Reads boxes of stored tensors: the bytes that a shard needs, converted on the way.

Plain reads rather than a memory map: mapped pages count as the process's memory, and a
file that shrinks under a map kills the process instead of raising.
"""

import collections
import io
import math
import pathlib
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from metrale_jax.checkpoint import errors, headers, layout, matching

# Elements converted at once: bounds the temporary arrays to some tens of MiB.
_BAND_ELEMENTS = 1 << 22
# Runs closer than this are read in one go: storage reads whole pages anyway.
_MERGE_GAP_BYTES = 4096
_MAX_OPEN_FILES = 64
# Device buffers can adopt host memory with this alignment instead of copying it.
_ALIGNMENT_BYTES = 64

_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": jnp.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    matching.FP8_DTYPE: np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
# The value of each float8_e4m3fn byte.
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)

Shape = tuple[int, ...]


def empty_aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialised array that a CPU device can adopt without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[offset : offset + num_bytes].view(dtype).reshape(shape)


class TensorReader:
    """Reads stored tensors of one checkpoint; a context manager that closes its files.

    Attributes:
      bytes_read: bytes asked of the file system so far.
    """

    def __init__(
        self, stored: Mapping[str, headers.StoredTensor], *, check_finite: bool = False
    ) -> None:
        """Args: stored: tensors by name; check_finite: raise for NaN and infinity."""
        self._stored = stored
        self._check_finite = check_finite
        self._files: collections.OrderedDict[pathlib.Path, io.FileIO] = (
            collections.OrderedDict()
        )
        self.bytes_read = 0

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *exception: object) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def fill(self, out: np.ndarray, form: layout.Form, start: Shape) -> None:
        """Fills `out` with the box of a parameter that begins at `start`.

        Raises:
          errors.CheckpointError: a file cannot be read any more, or a value isn't
            finite (checked when asked for, and whenever a range narrows to float16's).
        """
        for piece in form.pieces():
            overlap = _overlap(piece, start, out.shape)
            if overlap is None:
                continue
            stored_start, out_box = overlap
            self._fill_piece(out[out_box], piece, stored_start)

    def _fill_piece(self, out: np.ndarray, piece: layout.Piece, start: Shape) -> None:
        tensor = self._stored[piece.tensor]
        narrows = out.dtype == np.float16 and tensor.dtype != "F16"
        for band_start, band_size in _bands(out.shape, piece.view):
            band = out[_box(band_start, band_size)]
            stored_start = _added(start, band_start)
            with np.errstate(over="ignore", invalid="ignore"):
                band[...] = self._values(tensor, piece.view, stored_start, band_size)
            if self._check_finite or narrows:
                _require_finite(band, tensor, piece.view, stored_start)

    def _values(
        self, tensor: headers.StoredTensor, view: Shape, start: Shape, size: Shape
    ) -> np.ndarray:
        """Returns a box of the tensor's values, as stored or made float32."""
        values = self.read_box(tensor, view, start, size)
        if tensor.dtype != matching.FP8_DTYPE:
            return values
        first = tuple(index // matching.FP8_BLOCK for index in start[-2:])
        rows, columns = (
            np.arange(begin, begin + length) // matching.FP8_BLOCK - block
            for begin, length, block in zip(start[-2:], size[-2:], first, strict=True)
        )
        scale = self.read_box(
            self._stored[tensor.name + matching.SCALE_SUFFIX],
            matching.scale_shape(view),
            (*start[:-2], *first),
            (*size[:-2], int(rows[-1]) + 1, int(columns[-1]) + 1),
        )
        spread = scale.astype(np.float32)[..., rows[:, None], columns]
        return _FP8_VALUES[values] * spread

    def read_box(
        self, tensor: headers.StoredTensor, view: Shape, start: Shape, size: Shape
    ) -> np.ndarray:
        """Returns a box of the tensor as it is stored, its shape taken to be `view`.

        Read as runs that are contiguous in the file: one per index of the axes before
        the last one that the box covers only in part.
        """
        axis = max((i for i in range(len(view)) if size[i] != view[i]), default=0)
        dtype = _DTYPES[tensor.dtype]
        strides = [math.prod(view[i + 1 :]) * dtype.itemsize for i in range(len(view))]
        num_runs = math.prod(size[:axis])
        if (
            num_runs > 1
            and (view[axis] - size[axis]) * strides[axis] <= _MERGE_GAP_BYTES
        ):
            wide_start = (*start[:axis], 0, *start[axis + 1 :])
            wide_size = (*size[:axis], view[axis], *size[axis + 1 :])
            wide = self.read_box(tensor, view, wide_start, wide_size)
            kept = slice(start[axis], start[axis] + size[axis])
            return wide[(slice(None),) * axis + (kept,)]
        first = sum(i * stride for i, stride in zip(start, strides, strict=True))
        runs = np.empty((num_runs, size[axis] * strides[axis]), np.uint8)
        for run, index in zip(runs, np.ndindex(*size[:axis]), strict=True):
            skipped = sum(i * stride for i, stride in zip(index, strides, strict=False))
            self._read_into(run, tensor, first + skipped)
        return runs.reshape(-1).view(dtype).reshape(size)

    def _read_into(
        self, run: np.ndarray, tensor: headers.StoredTensor, offset: int
    ) -> None:
        """Fills `run` with the tensor's bytes from `offset` on."""
        unread = run.data
        try:
            file = self._open(tensor)
            file.seek(tensor.offset + offset)
            while unread:
                count = file.readinto(unread)
                if not count:
                    raise errors.CheckpointError(
                        "file ended while its tensors were read; did it change?",
                        file=tensor.file,
                        tensor=tensor.name,
                    )
                unread = unread[count:]
        except OSError as error:
            raise errors.CheckpointError(
                f"cannot be read: {error.strerror}",
                file=tensor.file,
                tensor=tensor.name,
            ) from error
        self.bytes_read += run.nbytes

    def _open(self, tensor: headers.StoredTensor) -> io.FileIO:
        file = self._files.pop(tensor.file, None)
        if file is None:
            if len(self._files) == _MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            file = io.FileIO(tensor.file)
        self._files[tensor.file] = file
        return file


def require_equal(
    reader: TensorReader, first: headers.StoredTensor, second: headers.StoredTensor
) -> None:
    """Requires that two stored tensors hold the same bytes.

    Raises:
      errors.CheckpointError: they differ in dtype, shape or a value.
    """
    same_kind = (first.dtype, first.shape) == (second.dtype, second.shape)
    if not same_kind or not _have_equal_bytes(reader, first, second):
        raise errors.CheckpointError(
            "config.json ties the output head to the embedding, but a different head "
            "is stored; set `tie_word_embeddings` to false, or remove the tensor",
            file=second.file,
            tensor=second.name,
            expected=f"the values of `{first.name}`, {first.dtype} {list(first.shape)}",
            found=f"{second.dtype} {list(second.shape)}",
        )


def _have_equal_bytes(
    reader: TensorReader, first: headers.StoredTensor, second: headers.StoredTensor
) -> bool:
    return all(
        np.array_equal(
            reader.read_box(first, first.shape, start, size).view(np.uint8),
            reader.read_box(second, second.shape, start, size).view(np.uint8),
        )
        for start, size in _bands(first.shape, first.shape)
    )


def _overlap(
    piece: layout.Piece, start: Shape, size: Shape
) -> tuple[Shape, tuple[slice, ...]] | None:
    """Returns where a parameter's box meets a piece: in the file, and in the box."""
    stored_start, box = [], []
    for axis, begin in enumerate(start):
        low = max(begin, piece.start[axis])
        high = min(begin + size[axis], piece.start[axis] + piece.size[axis])
        if low >= high:
            return None
        stored_start.append(piece.stored_start[axis] + low - piece.start[axis])
        box.append(slice(low - begin, high - begin))
    return tuple(stored_start), tuple(box)


def _bands(size: Shape, view: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Yields (start, size) of boxes that tile `size`, each with few enough elements.

    What counts is what a read of the box may touch: the gaps that it reads through too.
    """
    touched = [
        min(whole, part + _MERGE_GAP_BYTES)
        for whole, part in zip(view, size, strict=True)
    ]
    num_touched = [math.prod(touched[axis + 1 :]) for axis in range(len(size))]
    # Whole slices along the first axis whose slices are small enough.
    axis = next(i for i, count in enumerate(num_touched) if count <= _BAND_ELEMENTS)
    step = max(1, _BAND_ELEMENTS // num_touched[axis])
    for index in np.ndindex(*size[:axis]):
        for begin in range(0, size[axis], step):
            length = min(step, size[axis] - begin)
            after = size[axis + 1 :]
            start = (*index, begin, *(0 for _ in after))
            yield start, (*(1 for _ in index), length, *after)


def _box(start: Shape, size: Shape) -> tuple[slice, ...]:
    return tuple(
        slice(begin, begin + length) for begin, length in zip(start, size, strict=True)
    )


def _added(first: Shape, second: Shape) -> Shape:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _require_finite(
    values: np.ndarray, tensor: headers.StoredTensor, view: Shape, start: Shape
) -> None:
    is_finite = np.isfinite(values)
    if is_finite.all():
        return
    local = np.unravel_index(int(np.argmin(is_finite)), values.shape)
    flat = np.ravel_multi_index(_added(start, tuple(map(int, local))), view)
    index = [int(i) for i in np.unravel_index(flat, tensor.shape)]
    raise errors.CheckpointError(
        f"value at {index} is not finite in {values.dtype}",
        file=tensor.file,
        tensor=tensor.name,
        expected="a finite number",
        found=float(values[local]),
    )
