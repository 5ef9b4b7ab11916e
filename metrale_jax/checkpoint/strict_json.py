"""JSON as checkpoints may hold it: one object, UTF-8, no key twice, no NaN, bounded."""

import functools
import json
import os
import pathlib
import stat
from typing import Any

from metrale_jax.checkpoint import errors

# The safetensors format's own limit on a header; no config or index comes near it.
MAX_BYTES = 100_000_000


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON file that holds one object.

    Raises:
      errors.CheckpointError: the file is missing, unreadable, too large or malformed.
    """
    size = regular_file_size(path)
    if size > MAX_BYTES:
        raise errors.CheckpointError(
            "JSON file is too large",
            file=path,
            expected=f"<= {MAX_BYTES} bytes",
            found=size,
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise errors.CheckpointError(
            f"cannot be read: {error.strerror}", file=path
        ) from error
    return parse_object(data, file=path)


def parse_object(data: bytes, *, file: str | os.PathLike[str]) -> dict[str, Any]:
    """Parses one JSON object; `file` is named in errors.

    Raises:
      errors.CheckpointError: not JSON, not an object, a key twice, NaN or infinity.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=functools.partial(_unique_pairs, file),
            parse_constant=functools.partial(_refuse_constant, file),
        )
    except errors.CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise errors.CheckpointError(
            f"is not valid JSON: {errors.shown(error)}", file=file
        ) from error
    if not isinstance(value, dict):
        raise errors.CheckpointError(
            "JSON must be an object",
            file=file,
            expected="{...}",
            found=type(value).__name__,
        )
    return value


def _unique_pairs(
    file: str | os.PathLike[str], items: list[tuple[str, Any]]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in items:
        if name in values:
            raise errors.CheckpointError(
                f"JSON key `{errors.shown(name)}` is given twice", file=file
            )
        values[name] = value
    return values


def _refuse_constant(file: str | os.PathLike[str], name: str) -> Any:
    raise errors.CheckpointError(
        f"JSON holds {name}, which is not a JSON number", file=file
    )


def regular_file_size(path: pathlib.Path) -> int:
    """Returns a file's size in bytes; links are followed, pipes and devices refused.

    Raises:
      errors.CheckpointError: there is no such file, or it is not a plain one.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise errors.CheckpointError(
            f"cannot be read: {errors.shown(reason)}", file=path
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise errors.CheckpointError("is not a plain file", file=path)
    return status.st_size
