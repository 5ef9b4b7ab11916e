"""safetensors headers: which tensors a file holds, and where their bytes are.

A file is an 8-byte little-endian length N, N bytes of JSON, then the tensors' bytes.
The JSON maps each name to dtype, shape and [begin, end) relative to the first byte
after it. Read here rather than by the safetensors package, whose parser keeps the last
of two equal names and does not say which tensor is at fault.
https://github.com/huggingface/safetensors
"""

import dataclasses
import functools
import math
import os
import pathlib
from typing import Any

from metrale_jax.checkpoint import errors, strict_json

# Bits of one element, for every dtype the format knows.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}

_LENGTH_BYTES = 8
_MAX_RANK = 32
_METADATA = "__metadata__"
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_LFS_MARK = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of one file.

    Attributes:
      name: as stored.
      file: where it is.
      dtype: the format's code, such as "BF16".
      shape: as stored.
      offset: first byte, counted from the start of the file.
    """

    name: str
    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def read_header(path: pathlib.Path) -> tuple[StoredTensor, ...]:
    """Reads the header of one file; touches none of the tensors' bytes.

    Raises:
      errors.CheckpointError: unreadable, truncated or malformed.
    """
    file_bytes = strict_json.regular_file_size(path)
    try:
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            header_bytes = _header_length(prefix + file.read(16), file_bytes, path)
            file.seek(_LENGTH_BYTES)
            data = file.read(header_bytes)
    except OSError as error:
        raise errors.CheckpointError(
            f"cannot be read: {error.strerror}", file=path
        ) from error
    return parse_header(data, file_bytes - _LENGTH_BYTES - header_bytes, file=path)


def _header_length(start: bytes, file_bytes: int, path: pathlib.Path) -> int:
    if start.startswith(_LFS_MARK):
        raise errors.CheckpointError(
            "is a Git LFS pointer, not the weights; fetch them with `git lfs pull`",
            file=path,
        )
    if len(start) < _LENGTH_BYTES:
        raise errors.CheckpointError(
            "is truncated: a safetensors file starts with an 8-byte header length",
            file=path,
            expected=">= 8 bytes",
            found=len(start),
        )
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    limit = min(file_bytes - _LENGTH_BYTES, strict_json.MAX_BYTES)
    if length > limit:
        raise errors.CheckpointError(
            "header length exceeds the file: truncated, or not a safetensors file",
            file=path,
            expected=f"<= {limit} bytes",
            found=length,
        )
    return length


def parse_header(
    data: bytes, data_bytes: int, *, file: str | os.PathLike[str]
) -> tuple[StoredTensor, ...]:
    """Parses header JSON, whose tensors must fill `data_bytes` without overlap.

    Raises:
      errors.CheckpointError: names the file and the tensor.
    """
    path = pathlib.Path(file)
    if not data.startswith(b"{"):
        raise errors.CheckpointError(
            "header is not JSON",
            file=path,
            expected="an object that starts at byte 8",
            found=data[:8],
        )
    entries = strict_json.parse_object(data, file=path)
    _check_metadata(entries.pop(_METADATA, {}), path)
    first_byte = _LENGTH_BYTES + len(data)
    spans = [_parse_entry(name, entry, path) for name, entry in entries.items()]
    _check_spans(spans, data_bytes, path)
    return tuple(
        StoredTensor(name, path, dtype, shape, first_byte + begin)
        for begin, _, name, dtype, shape in spans
    )


_Span = tuple[int, int, str, str, tuple[int, ...]]


def _check_metadata(metadata: Any, path: pathlib.Path) -> None:
    is_valid = isinstance(metadata, dict) and all(
        isinstance(value, str) for value in metadata.values()
    )
    if not is_valid:
        raise errors.CheckpointError(
            f"`{_METADATA}` must map names to strings", file=path
        )


def _parse_entry(name: str, entry: Any, path: pathlib.Path) -> _Span:
    """Returns (begin, end, name, dtype, shape) of one header entry."""
    failure = functools.partial(errors.CheckpointError, file=path, tensor=name)
    if not isinstance(entry, dict) or set(entry) != _ENTRY_KEYS:
        found = sorted(entry) if isinstance(entry, dict) else entry
        raise failure(
            "header entry has the wrong keys", expected=sorted(_ENTRY_KEYS), found=found
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        known = "one of " + ", ".join(DTYPE_BITS)
        raise failure("dtype is unknown", expected=known, found=dtype)
    if not _are_sizes(shape) or len(shape) > _MAX_RANK:
        expected = f"up to {_MAX_RANK} sizes"
        raise failure("shape is malformed", expected=expected, found=shape)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        expected = "[begin, end]"
        raise failure("data offsets are malformed", expected=expected, found=offsets)
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise failure(
            f"data offsets do not fit {dtype} {errors.shown(shape)}",
            expected=f"{bits / 8:g} bytes" if bits < 2**63 else "far more bytes",
            found=offsets[1] - offsets[0],
        )
    return offsets[0], offsets[1], name, dtype, tuple(shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(size) is int and size >= 0 for size in values
    )


def _check_spans(spans: list[_Span], data_bytes: int, path: pathlib.Path) -> None:
    """Requires that the tensors lie one after the other and fill the file."""
    position, previous = 0, None
    for begin, end, name, *_ in sorted(spans):
        if begin != position:
            relation = "overlaps" if begin < position else "leaves a hole after"
            neighbour = (
                "the header" if previous is None else f"`{errors.shown(previous)}`"
            )
            raise errors.CheckpointError(
                f"data {relation} {neighbour}",
                file=path,
                tensor=name,
                expected=f"begin {position}",
                found=begin,
            )
        if end > data_bytes:
            raise errors.CheckpointError(
                "data ends outside the file: truncated",
                file=path,
                tensor=name,
                expected=f"{end} data bytes",
                found=data_bytes,
            )
        position, previous = end, name
    if position != data_bytes:
        raise errors.CheckpointError(
            "has bytes that belong to no tensor",
            file=path,
            expected=f"{position} data bytes",
            found=data_bytes,
        )
