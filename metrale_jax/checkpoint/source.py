"""Finds a checkpoint: a local folder, or a repository of the Hugging Face hub."""

import os
import pathlib
import re

import huggingface_hub
import huggingface_hub.errors

from metrale_jax.checkpoint import errors

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Settings, weights, tokenizer and template; nothing in folders, nothing executable.
_WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_UNWANTED_FILES = ("*/*",)
# The base error of the HTTP library that the installed huggingface-hub is built on.
_TransportError: type[Exception] = huggingface_hub.errors.HfHubHTTPError.__mro__[1]


def locate(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_folder: str | os.PathLike[str] | None = None,
) -> pathlib.Path:
    """Returns the local folder of a checkpoint, downloading it first if it must.

    The hub's own environment variables apply (`HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN`):
    huggingface-hub reads them. All files come from one commit.

    Args:
      source: a folder, or an `owner/name` id of the hub; an existing folder wins.
      revision: branch, tag or commit of a hub id; None is its main branch.
      cache_folder: where the hub's files are kept; None is the hub's own choice.

    Raises:
      CheckpointError: neither a readable folder nor a hub id, or a hub id whose files
        are neither cached nor within reach.
      ValueError: `revision` for a local folder.
    """
    name = os.fspath(source)
    folder = pathlib.Path(os.path.expanduser(name))
    if name and _exists(folder):
        if revision is not None:
            raise ValueError(
                f"`revision` belongs to a hub id, got {revision!r} for the local "
                f"{errors.shown(folder)}; leave it out."
            )
        return _require_folder(folder)
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source):
        raise errors.CheckpointError(
            "is not a folder, and not a hub id",
            file=name,
            expected="folder or owner/name",
        )
    return _download(source, revision, cache_folder)


def _exists(path: pathlib.Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise errors.CheckpointError(
            f"cannot be read: {errors.shown(reason)}", file=path
        ) from error


def _require_folder(path: pathlib.Path) -> pathlib.Path:
    if not path.is_dir():
        raise errors.CheckpointError(
            "is a file; name the folder that holds it",
            file=path,
            expected="a folder with config.json and *.safetensors",
        )
    return path


def _download(
    hub_id: str, revision: str | None, cache_folder: str | os.PathLike[str] | None
) -> pathlib.Path:
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            revision=revision,
            cache_dir=None if cache_folder is None else pathlib.Path(cache_folder),
            allow_patterns=list(_WANTED_FILES),
            ignore_patterns=list(_UNWANTED_FILES),
        )
    # RuntimeError is what the hub's transfer library raises.
    except (
        OSError,
        ValueError,
        RuntimeError,
        _TransportError,
    ) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        at = "" if revision is None else f" at revision {errors.shown(revision)}"
        raise errors.CheckpointError(
            f"is no folder, and the hub did not give it{at}: {errors.shown(reason)}",
            file=hub_id,
        ) from error
    return pathlib.Path(folder)
