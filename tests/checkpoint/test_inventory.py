"""Which files make a checkpoint, and how an index is held against them."""

import json
import os

import numpy as np
import pytest

from checkpoint import builders
from metrale_jax.checkpoint import CheckpointError, inventory

A = np.zeros((2, 3), np.float32)
INDEX = "model.safetensors.index.json"


def write(folder, **files):
    """Writes `name=tensor names` files; underscores stand for hyphens."""
    for name, tensors in files.items():
        path = folder / f"{name.replace('_', '-')}.safetensors"
        builders.write_tensors(path, {tensor: A for tensor in tensors})
    return folder


def test_folder_without_index_is_all_its_files(tmp_path):
    write(tmp_path, model=["a", "b"], mtp=["mtp.c"])
    stored = inventory.scan(tmp_path)
    assert {name: tensor.file.name for name, tensor in stored.items()} == {
        "a": "model.safetensors",
        "b": "model.safetensors",
        "mtp.c": "mtp.safetensors",
    }


@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "unlisted"])
def test_side_file_counts_whether_or_not_the_index_lists_it(tmp_path, is_listed):
    write(tmp_path, one=["a"], two=["b"], mtp=["mtp.c"])
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    weight_map |= {"mtp.c": "mtp.safetensors"} if is_listed else {}
    builders.write_index(tmp_path, weight_map)
    assert inventory.scan(tmp_path).keys() == {"a", "b", "mtp.c"}


def test_hidden_files_and_other_formats_are_no_part(tmp_path):
    write(tmp_path, model=["a"])
    (tmp_path / "._model.safetensors").write_bytes(b"finder data")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    assert inventory.scan(tmp_path).keys() == {"a"}


def test_links_as_in_the_hub_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "commit"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    builders.write_tensors(blobs / "sha", {"a": A})
    (snapshot / "model.safetensors").symlink_to("../../blobs/sha")
    assert inventory.scan(snapshot).keys() == {"a"}


OUTSIDE_NAMES = (
    "../x.safetensors",
    "/etc/x.safetensors",
    "sub/x.safetensors",
    "..\\x.safetensors",
    "C:x.safetensors",
    ".x.safetensors",
    "x\0.safetensors",
    "x.bin",
    "",
    7,
    None,
    ["x.safetensors"],
)


@pytest.mark.parametrize("name", OUTSIDE_NAMES, ids=repr)
def test_index_cannot_leave_the_folder(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, x=["a"])
    write(tmp_path, x=["a"])
    builders.write_index(folder, {"a": name})
    with pytest.raises(CheckpointError, match="of the folder itself") as raised:
        inventory.scan(folder)
    assert raised.value.tensor == "a"


BAD_INDEXES = {
    "broken": (b"{", "not valid JSON"),
    "list": (b"[]", "must be an object"),
    "no map": (b"{}", "weight_map"),
    "empty map": (b'{"weight_map": {}}', "weight_map"),
    "map is a list": (b'{"weight_map": ["a"]}', "weight_map"),
    "tensor twice": (
        b'{"weight_map": {"a": "model.safetensors", "a": "model.safetensors"}}',
        "`a` is given twice",
    ),
    "absent file": (
        b'{"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}',
        "other.safetensors",
    ),
    "absent tensor": (
        b'{"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}',
        "lacks tensors",
    ),
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_bad_index_is_refused(tmp_path, case):
    content, problem = BAD_INDEXES[case]
    write(tmp_path, model=["a"])
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=problem):
        inventory.scan(tmp_path)


def test_tensor_that_the_index_omits_is_refused(tmp_path):
    write(tmp_path, model=["a", "b"])
    builders.write_index(tmp_path, {"a": "model.safetensors"})
    with pytest.raises(CheckpointError, match="does not place in it: `b`") as raised:
        inventory.scan(tmp_path)
    assert (raised.value.tensor, raised.value.file) == (
        "b",
        str(tmp_path / "model.safetensors"),
    )


def test_index_that_swaps_files_is_refused(tmp_path):
    write(tmp_path, one=["a"], two=["b"])
    builders.write_index(tmp_path, {"a": "two.safetensors", "b": "one.safetensors"})
    with pytest.raises(CheckpointError, match="lacks tensors"):
        inventory.scan(tmp_path)


@pytest.mark.parametrize("has_index", [True, False], ids=["indexed", "plain"])
def test_tensor_of_two_files_is_refused(tmp_path, has_index):
    write(tmp_path, one=["a"], two=["a", "b"])
    if has_index:
        builders.write_index(tmp_path, {"a": "one.safetensors"})
    with pytest.raises(CheckpointError, match="stored twice") as raised:
        inventory.scan(tmp_path)
    assert raised.value.tensor == "a"
    assert "one.safetensors" in str(raised.value)
    assert "two.safetensors" in str(raised.value)


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "pkl", "ckpt"])
def test_pickled_weights_are_never_opened(tmp_path, suffix):
    path = tmp_path / f"pytorch_model.{suffix}"
    os.mkfifo(path)  # Opening it would block for ever.
    with pytest.raises(CheckpointError, match="never opened.*safetensors"):
        inventory.scan(tmp_path)


def test_truncated_shard_is_refused(tmp_path):
    write(tmp_path, model=["a", "b"])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        inventory.scan(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "nul"])
def test_folder_without_weights_is_refused(tmp_path, kind):
    folder = tmp_path / ("a\0b" if kind == "nul" else "checkpoint")
    if kind == "file":
        folder.write_text("")
    if kind == "empty":
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="readable folder|no \\*.safetensors"):
        inventory.scan(folder)
