"""Saving: published names and forms, nothing lost, nothing overwritten by accident."""

import json
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from checkpoint import builders
from metrale_jax import checkpoint
from metrale_jax.checkpoint import CheckpointError, save

BFLOAT16 = jnp.dtype(jnp.bfloat16)
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """A tiny checkpoint, loaded."""

    def __init__(self, folder, model_type="qwen3_5", *, dtype=BFLOAT16, **overrides):
        raw = builders.raw_config(model_type, **overrides)
        self.tensors = builders.make_tensors(raw)
        builders.write_checkpoint(folder / "original", self.tensors, raw)
        self.config, self.raw = checkpoint.read_config(folder / "original")
        self.params = self.load(folder / "original", dtype=dtype)

    def load(self, folder, *, dtype=BFLOAT16, with_mtp=True):
        return checkpoint.load_params(
            folder, self.config, dtype=jnp.dtype(dtype), with_mtp=with_mtp
        )

    def save(self, folder, params=None, **kwargs: Any) -> pathlib.Path:
        params = self.params if params is None else params
        checkpoint.save_checkpoint(folder, params, self.raw, self.config, **kwargs)
        return folder


def assert_same_bits(first, second):
    def check(a, b):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(
            np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
        )

    jax.tree.map(check, first, second)


def doubled(params):
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf) * 2), params)


def stored_tensors(folder: pathlib.Path) -> builders.Tensors:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= read_with_library(path)
    return tensors


def read_with_library(path: pathlib.Path) -> builders.Tensors:
    dtypes = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32}
    parsed = safetensors.deserialize(path.read_bytes())
    return {
        name: np.frombuffer(value["data"], dtypes[value["dtype"]]).reshape(
            value["shape"]
        )
        for name, value in parsed
    }


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [(model_type, "bfloat16") for model_type in builders.MODEL_TYPES]
    + [("qwen3_next", "float16"), ("qwen3_5", "float32")],
)
def test_load_save_load_is_bit_equal(tmp_path, model_type, dtype):
    original = Checkpoint(tmp_path, model_type, dtype=dtype)
    folder = original.save(tmp_path / "saved", max_shard_bytes=40_000)
    assert_same_bits(original.load(folder, dtype=dtype), original.params)
    config, _ = checkpoint.read_config(folder)
    assert config == original.config


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", builders.MODEL_TYPES)
def test_names_forms_and_values_are_the_published_ones(tmp_path, model_type, is_tied):
    original = Checkpoint(tmp_path, model_type, tie_word_embeddings=is_tied)
    stored = stored_tensors(original.save(tmp_path / "saved"))
    assert stored.keys() == original.tensors.keys()
    for name, values in original.tensors.items():
        is_decay = name.endswith(("A_log", "dt_bias"))
        dtype = jnp.float32 if is_decay else jnp.bfloat16
        np.testing.assert_array_equal(stored[name], values.astype(dtype))
        assert stored[name].dtype == dtype


def test_large_checkpoint_is_split_and_indexed(tmp_path):
    original = Checkpoint(tmp_path, "qwen3_5_moe")
    folder = original.save(tmp_path / "saved", max_shard_bytes=30_000)
    index = json.loads((folder / INDEX).read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    names = [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert [file.name for file in files] == names
    held = {file.name: read_with_library(file) for file in files}
    placed = {name: file for file, tensors in held.items() for name in tensors}
    assert index["weight_map"] == placed
    sizes = {
        file: sum(value.nbytes for value in tensors.values())
        for file, tensors in held.items()
    }
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 30_000 or len(held[file]) == 1 for file, size in sizes.items())


def test_small_checkpoint_is_one_file_without_index(tmp_path):
    folder = Checkpoint(tmp_path).save(tmp_path / "saved")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_written_config_is_true_of_the_file(tmp_path):
    original = Checkpoint(tmp_path, "qwen3_5_moe")
    original.raw["quantization_config"] = {"quant_method": "fp8"}
    original.raw["text_config"]["torch_dtype"] = "float32"
    before = json.dumps(original.raw)
    folder = original.save(tmp_path / "saved", original.params.replace(mtp=None))
    assert json.dumps(original.raw) == before
    written = json.loads((folder / "config.json").read_text())
    expected = json.loads(before)
    del expected["quantization_config"]
    expected["text_config"] |= {"mtp_num_hidden_layers": 0, "torch_dtype": "bfloat16"}
    assert written == expected
    config, _ = checkpoint.read_config(folder)
    assert config.num_mtp_layers == 0
    assert not any(name.startswith("mtp.") for name in stored_tensors(folder))
    with pytest.raises(ValueError, match="mtp_num_hidden_layers"):
        checkpoint.load_params(folder, config, dtype=BFLOAT16, with_mtp=True)


def test_next_without_its_head_says_so(tmp_path):
    original = Checkpoint(tmp_path, "qwen3_next")
    del original.raw["mtp_num_hidden_layers"]
    folder = original.save(tmp_path / "saved", original.params.replace(mtp=None))
    assert checkpoint.read_config(folder)[0].num_mtp_layers == 0


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5"])
def test_dtype_is_written_where_none_was(tmp_path, model_type):
    original = Checkpoint(tmp_path, model_type, dtype="float16")
    text = builders.text_of(original.raw)
    text.pop("dtype", None)
    text.pop("torch_dtype", None)
    _, written = checkpoint.read_config(original.save(tmp_path / "saved"))
    assert builders.text_of(written)["dtype"] == "float16"


def test_generation_config_is_kept_or_made(tmp_path):
    original = Checkpoint(tmp_path, eos_token_id=[9, 4])
    made = original.save(tmp_path / "made")
    assert checkpoint.read_generation_config(made) == {"eos_token_id": [9, 4]}
    generation = {"eos_token_id": 9, "temperature": 0.7}
    kept = original.save(tmp_path / "kept", generation_json=generation)
    assert checkpoint.read_generation_config(kept) == generation
    assert checkpoint.read_config(kept)[0].end_token_ids == (9, 4)


def test_sharded_parameters_are_saved_whole(tmp_path):
    original = Checkpoint(tmp_path, "qwen3_5_moe")
    mesh = jax.make_mesh((2,), ("x",))
    split = jax.NamedSharding(mesh, jax.P("x"))
    whole = jax.NamedSharding(mesh, jax.P())
    sharded = jax.tree.map(
        lambda leaf: jax.device_put(leaf, split if leaf.shape[0] % 2 == 0 else whole),
        original.params,
    )
    assert_same_bits(
        original.load(original.save(tmp_path / "saved", sharded)), original.params
    )


def test_existing_checkpoint_is_not_overwritten_by_accident(tmp_path):
    original = Checkpoint(tmp_path)
    folder = original.save(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = doubled(original.params)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        original.save(folder, other)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["config.json", "x.safetensors", INDEX])
def test_any_part_of_a_checkpoint_counts_as_one(tmp_path, name):
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / name).write_text("precious")
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        Checkpoint(tmp_path).save(folder)
    assert [path.name for path in folder.iterdir()] == [name]


def test_overwriting_leaves_no_stale_file_and_keeps_others(tmp_path):
    original = Checkpoint(tmp_path)
    folder = original.save(tmp_path / "saved", max_shard_bytes=10_000)
    (folder / "tokenizer.json").write_text("{}")
    other = doubled(original.params)
    original.save(folder, other, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert_same_bits(original.load(folder), other)


def test_links_are_replaced_not_written_through(tmp_path):
    original = Checkpoint(tmp_path)
    blob = tmp_path / "blob"
    folder = original.save(tmp_path / "saved")
    shutil.move(folder / "model.safetensors", blob)
    (folder / "model.safetensors").symlink_to(blob)
    before = blob.read_bytes()
    other = doubled(original.params)
    original.save(folder, other, overwrite=True)
    assert blob.read_bytes() == before
    assert not (folder / "model.safetensors").is_symlink()


@pytest.mark.parametrize("step", ["_write_tensor", "_write_json"])
def test_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch, step):
    original = Checkpoint(tmp_path)
    folder = original.save(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, step, fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        original.save(folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("num_moves", range(4))
def test_interrupted_overwrite_never_mixes_checkpoints(
    tmp_path, monkeypatch, num_moves
):
    original = Checkpoint(tmp_path)
    folder = original.save(tmp_path / "saved", max_shard_bytes=80_000)
    other = doubled(original.params)
    rename, moved = os.rename, []

    def fail_later(source, target):
        if len(moved) == num_moves:
            raise OSError(5, "Input/output error")
        moved.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_later)
    with pytest.raises(CheckpointError, match="Input/output error"):
        original.save(folder, other, overwrite=True, max_shard_bytes=80_000)
    # Without config.json, what is left is no checkpoint for anyone.
    with pytest.raises(CheckpointError, match="config.json"):
        checkpoint.read_config(folder)


def test_contradictions_are_the_callers_mistake(tmp_path):
    original = Checkpoint(tmp_path, "qwen3_5_text")
    params, folder = original.params, tmp_path / "saved"
    wrong = {
        r"`params\.embedding` must be bfloat16\[96, 32\]": params.replace(
            embedding=params.embedding[:, :-1]
        ),
        r"`params\.final_norm` must be bfloat16": params.replace(
            final_norm=params.final_norm.astype(jnp.float32)
        ),
        "structure": params.replace(layers=params.layers[:-1]),
        "to be saved": params.replace(embedding=params.embedding.astype(jnp.int32)),
    }
    for message, bad in wrong.items():
        with pytest.raises(ValueError, match=message):
            original.save(folder, bad)
    other = builders.raw_config("qwen3_5_text", rms_norm_eps=1e-5)
    with pytest.raises(ValueError, match="`config_json` must describe the same"):
        checkpoint.save_checkpoint(folder, params, other, original.config)
    with pytest.raises(ValueError, match="`max_shard_bytes`"):
        original.save(folder, max_shard_bytes=0)
    assert not folder.exists()


def test_target_that_cannot_be_made_is_one_line(tmp_path):
    original = Checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="cannot be written"):
            original.save(folder)
