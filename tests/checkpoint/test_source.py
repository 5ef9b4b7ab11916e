"""Locating: local folders, the hub's cache, and one clear line for anything else."""

import os
import subprocess
import sys

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import pytest

from checkpoint import builders
from metrale_jax import checkpoint
from metrale_jax.checkpoint import CheckpointError

HUB_ID = "owner/tiny-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path):
    """A hub cache as huggingface-hub lays it out, with one model in it."""
    repo = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    blobs = repo / "blobs"
    blobs.mkdir(parents=True)
    raw = builders.raw_config("qwen3_5_text")
    builders.write_checkpoint(snapshot, builders.make_tensors(raw), raw)
    for file in list(snapshot.iterdir()):
        file.rename(blobs / f"blob-of-{file.name}")
        file.symlink_to(os.path.relpath(blobs / f"blob-of-{file.name}", snapshot))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "refs" / "v2").write_text(COMMIT)
    return tmp_path / "hub"


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_local_folder_is_returned_as_it_is(tmp_path, monkeypatch):
    assert checkpoint.locate(tmp_path) == tmp_path
    assert checkpoint.locate(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    # A folder wins over a hub id of that name: no network is asked.
    assert str(checkpoint.locate("owner/name")) == "owner/name"


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("revision", [None, "main", "v2", COMMIT])
def test_cached_hub_id_is_found_offline(hub_cache, revision):
    folder = checkpoint.locate(HUB_ID, revision=revision, cache_folder=hub_cache)
    assert folder.name == COMMIT
    config, _ = checkpoint.read_config(folder)
    checkpoint.load_params(folder, config, dtype=builders.jnp.dtype("bfloat16"))


@pytest.mark.usefixtures("offline")
def test_uncached_hub_id_is_one_line_offline(tmp_path):
    with pytest.raises(CheckpointError) as raised:
        checkpoint.locate(HUB_ID, revision="v3", cache_folder=tmp_path)
    message = str(raised.value)
    assert message.startswith(f"{HUB_ID}: is no folder, and the hub did not give it")
    assert "v3" in message and message.isprintable()


_LOCATE_TWO = """
from metrale_jax import checkpoint
print(checkpoint.locate("owner/tiny-model"))
checkpoint.locate("owner/other")
"""


def test_environment_of_the_hub_is_honoured(hub_cache):
    environment = os.environ | {"HF_HOME": str(hub_cache.parent), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", _LOCATE_TWO]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout.strip().endswith(COMMIT)
    assert "CheckpointError: owner/other: is no" in result.stderr.splitlines()[-1]


def test_only_needed_files_of_one_revision_are_asked_for(tmp_path, monkeypatch):
    calls = []

    def download(hub_id, **kwargs):
        calls.append((hub_id, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoint.locate(HUB_ID, revision="v2") == tmp_path
    ((hub_id, kwargs),) = calls
    assert (hub_id, kwargs["revision"]) == (HUB_ID, "v2")
    names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
        "merges.txt",
        "pytorch_model.bin",
        "modeling_custom.py",
        "original/model.safetensors",
        "model.gguf",
    ]
    wanted = huggingface_hub.utils.filter_repo_objects(
        names,
        allow_patterns=kwargs["allow_patterns"],
        ignore_patterns=kwargs["ignore_patterns"],
    )
    assert list(wanted) == names[:6]


NETWORK_ERRORS = [
    huggingface_hub.errors.LocalEntryNotFoundError("not cached\nsecond line"),
    huggingface_hub.errors.OfflineModeIsEnabled("offline"),
    huggingface_hub.errors.HFValidationError("bad id"),
    huggingface_hub.errors.HfHubHTTPError.__mro__[1]("proxy"),
    RuntimeError("transfer failed"),
    PermissionError(13, "cache is read-only"),
    ConnectionError(),
]


@pytest.mark.parametrize(
    "error", NETWORK_ERRORS, ids=lambda error: type(error).__name__
)
def test_failure_of_the_hub_is_one_line(monkeypatch, error):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.locate(HUB_ID)
    assert str(raised.value).isprintable()
    assert raised.value.__cause__ is error


NEITHER = [
    "/nonexistent/model",
    "./model",
    "../a/b",
    "model",
    "a/b/c",
    "",
    "a b/c",
    "~nobody-here/x",
]


@pytest.mark.parametrize("source", [*NEITHER, "a\0b", "x" * 5000])
def test_what_is_neither_folder_nor_id_is_refused(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.locate(source)
    assert str(raised.value).isprintable()


def test_file_is_refused_with_a_hint(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("")
    with pytest.raises(CheckpointError, match="is a file; name the folder"):
        checkpoint.locate(path)


def test_revision_of_a_local_folder_is_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="`revision` belongs to a hub id"):
        checkpoint.locate(tmp_path, revision="main")


def test_unreadable_folder_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="config.json: cannot be read"):
        checkpoint.read_config(tmp_path / "nowhere")
