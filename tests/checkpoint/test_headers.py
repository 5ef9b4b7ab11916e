"""safetensors headers: read like the format's own library, or refused with a reason."""

import json
import os
import pathlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors

from checkpoint import builders
from metrale_jax.checkpoint import CheckpointError, headers

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def read(folder: pathlib.Path, content: bytes) -> tuple[headers.StoredTensor, ...]:
    path = folder / "x.safetensors"
    path.write_bytes(content)
    return headers.read_header(path)


def test_header_names_every_tensor_and_its_bytes(tmp_path):
    tensors = builders.make_tensors(builders.raw_config("qwen3_next"))
    path = tmp_path / "x.safetensors"
    builders.write_tensors(path, tensors)
    stored = {tensor.name: tensor for tensor in headers.read_header(path)}
    content = path.read_bytes()
    assert stored.keys() == tensors.keys()
    for name, values in tensors.items():
        tensor = stored[name]
        data = content[tensor.offset : tensor.offset + tensor.num_bytes]
        assert tensor.shape == values.shape
        assert data == values.tobytes()


def test_empty_tensors_and_padded_headers_are_read(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [0, 4], "data_offsets": [0, 0]},
        "b": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
    }
    text = json.dumps(header).encode() + b"   "
    a, b = read(tmp_path, builders.raw_file(text, b"\x01"))
    assert (a.num_bytes, b.num_bytes, b.shape) == (0, 1, ())


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": ENTRY | changes}


OVERLAP = {
    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "x": {"dtype": "U8", "shape": [4], "data_offsets": [3, 7]},
}
HOLE = {
    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "x": {"dtype": "U8", "shape": [4], "data_offsets": [5, 9]},
}
DATA = bytes(24)
TWICE = b'{"x": %s, "x": %s}' % ((json.dumps(ENTRY).encode(),) * 2)
KEY_TWICE = (
    b'{"x": {"dtype": "U8", "dtype": "U8", "shape": [], "data_offsets": [0, 1]}}'
)

MALFORMED = {
    "empty file": (b"", "truncated", None),
    "seven bytes": (bytes(7), "truncated", None),
    "length past the end": (b"\xff" * 8 + b"{}", "header length", None),
    "length one too long": (b"\x03" + bytes(7) + b"{}", "header length", None),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1", "git lfs", None),
    "no header": (bytes(8), "not JSON", None),
    "a list": (builders.raw_file([]), "not JSON", None),
    "leading blank": (builders.raw_file(b" {}"), "not JSON", None),
    "broken json": (builders.raw_file(b'{"x": '), "not valid JSON", None),
    "broken utf-8": (builders.raw_file(b'{"\xff": 1}'), "not valid JSON", None),
    "byte order mark": (builders.raw_file(b"\xef\xbb\xbf{}"), "not JSON", None),
    "deep nesting": (builders.raw_file(b'{"x":' * 100_000), "not valid JSON", None),
    "huge integer": (
        builders.raw_file(b'{"x": ' + b"9" * 10_000 + b"}"),
        "not valid JSON",
        None,
    ),
    "nan": (builders.raw_file(b'{"x": NaN}'), "NaN", None),
    "name twice": (builders.raw_file(TWICE, DATA), "`x` is given twice", None),
    "key twice": (builders.raw_file(KEY_TWICE, b"0"), "`dtype` is given twice", None),
    "metadata list": (builders.raw_file({"__metadata__": []}), "__metadata__", None),
    "metadata number": (
        builders.raw_file({"__metadata__": {"a": 1}}),
        "__metadata__",
        None,
    ),
    "entry is a number": (builders.raw_file({"x": 3}), "wrong keys", "x"),
    "entry lacks a key": (builders.raw_file({"x": {"dtype": "U8"}}), "keys", "x"),
    "entry has a key more": (builders.raw_file(entry(more=1), DATA), "keys", "x"),
    "unknown dtype": (builders.raw_file(entry(dtype="F31"), DATA), "dtype", "x"),
    "dtype is a list": (builders.raw_file(entry(dtype=["F32"]), DATA), "dtype", "x"),
    "negative size": (builders.raw_file(entry(shape=[-2, -3]), DATA), "shape", "x"),
    "bool size": (builders.raw_file(entry(shape=[True]), DATA), "shape", "x"),
    "float size": (builders.raw_file(entry(shape=[6.0]), DATA), "shape", "x"),
    "shape is a number": (builders.raw_file(entry(shape=6), DATA), "shape", "x"),
    "too many axes": (builders.raw_file(entry(shape=[1] * 33), DATA), "shape", "x"),
    "enormous shape": (
        builders.raw_file(entry(shape=[10**30] * 32), DATA),
        "expected far more bytes",
        "x",
    ),
    "one offset": (builders.raw_file(entry(data_offsets=[0]), DATA), "offsets", "x"),
    "offsets reversed": (
        builders.raw_file(entry(data_offsets=[24, 0]), DATA),
        "offsets",
        "x",
    ),
    "negative offset": (
        builders.raw_file(entry(data_offsets=[-24, 0]), DATA),
        "offsets",
        "x",
    ),
    "too few bytes for the shape": (
        builders.raw_file(entry(data_offsets=[0, 20]), bytes(20)),
        "do not fit F32 [2, 3]; expected 24 bytes; found 20",
        "x",
    ),
    "data missing": (builders.raw_file(entry(), bytes(23)), "truncated", "x"),
    "data out of range": (
        builders.raw_file(entry(data_offsets=[2**62, 2**62 + 24]), DATA),
        "hole",
        "x",
    ),
    "overlap": (builders.raw_file(OVERLAP, bytes(7)), "overlaps `a`", "x"),
    "hole": (builders.raw_file(HOLE, bytes(9)), "hole after `a`", "x"),
    "hole at the start": (
        builders.raw_file(entry(data_offsets=[1, 25]), bytes(25)),
        "hole after the header",
        "x",
    ),
    "bytes left over": (builders.raw_file(entry(), bytes(25)), "no tensor", None),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused_with_its_reason(tmp_path, case):
    content, problem, tensor = MALFORMED[case]
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, content)
    message = str(raised.value)
    assert problem in message
    assert message.isprintable() and len(message) < 1500
    assert raised.value.file == str(tmp_path / "x.safetensors")
    assert raised.value.tensor == tensor


def test_name_cannot_break_the_message(tmp_path):
    name = "line\nbreak \x1b[31m \ud800" + "long" * 1000
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, builders.raw_file({name: 3}))
    message = str(raised.value)
    assert message.isprintable() and len(message) < 1000
    assert message.encode()


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_what_is_no_plain_file_is_refused(tmp_path, kind):
    path = tmp_path / "x.safetensors"
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match="cannot be read|not a plain file"):
        headers.read_header(path)


def parse_or_refuse(content: bytes) -> tuple[headers.StoredTensor, ...] | None:
    """Parses a file's content; any error but CheckpointError fails the test."""
    length = int.from_bytes(content[:8], "little")
    data = content[8 : 8 + length]
    try:
        return headers.parse_header(data, len(content) - 8 - length, file="x")
    except CheckpointError as error:
        assert str(error).isprintable()
        return None


def assert_library_agrees(
    content: bytes, parsed: tuple[headers.StoredTensor, ...]
) -> None:
    expected = {
        name: (tuple(values["shape"]), bytes(values["data"]))
        for name, values in safetensors.deserialize(content)
    }
    found = {
        tensor.name: (
            tensor.shape,
            content[tensor.offset : tensor.offset + tensor.num_bytes],
        )
        for tensor in parsed
    }
    assert found == expected


sizes = st.integers(-1, 3) | st.integers() | st.booleans() | st.none()
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F8_E4M3"]) | json_values,
        "shape": st.lists(sizes, max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-2, 40) | sizes, max_size=3) | json_values,
    }
)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.dictionaries(st.text(max_size=3), entries | json_values), st.integers(0, 64)
)
def test_any_json_header_is_parsed_or_refused(header, num_data_bytes):
    try:
        text = json.dumps(header).encode()
    except UnicodeEncodeError:
        hypothesis.reject()
    content = builders.raw_file(text, bytes(num_data_bytes))
    parsed = parse_or_refuse(content)
    if parsed is not None and not any("\0" in tensor.name for tensor in parsed):
        assert_library_agrees(content, parsed)


@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(["U8", "F32", "BF16"]), st.lists(st.integers(0, 3))),
        max_size=4,
    ),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    st.integers(-9, 9),
)
def test_damaged_file_is_read_right_or_refused(tensors, edits, cut):
    header, position = {}, 0
    for index, (dtype, shape) in enumerate(tensors):
        size = int(np.prod(shape[:4])) * {"U8": 1, "F32": 4, "BF16": 2}[dtype]
        header[f"t{index}"] = {
            "dtype": dtype,
            "shape": shape[:4],
            "data_offsets": [position, position + size],
        }
        position += size
    sound = builders.raw_file(header, bytes(position))
    parsed = parse_or_refuse(sound)
    assert parsed is not None
    assert_library_agrees(sound, parsed)
    damaged = bytearray(sound)
    for place, value in edits:
        damaged[place % len(damaged)] = value
    damaged = damaged[:cut] if cut < 0 else damaged + bytes(cut)
    length = int.from_bytes(damaged[:8], "little")
    hypothesis.assume(len(damaged) >= 8 + length)
    parsed = parse_or_refuse(bytes(damaged))
    if parsed is not None:
        assert_library_agrees(bytes(damaged), parsed)
