"""Which tensors a folder holds: its safetensors files, checked against its index.

Every `*.safetensors` file directly in the folder is part of the checkpoint. An index,
when there is one, must agree exactly with the headers of the files that it names; files
that it does not name are side files (a separate `mtp.safetensors`, say), whose tensors
join the rest. No tensor may come from two files. Headers decide, file names don't.
"""

import os
import pathlib
from collections.abc import Mapping

from metrale_jax.checkpoint import errors, headers, strict_json

INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle")


def scan(folder: str | os.PathLike[str]) -> dict[str, headers.StoredTensor]:
    """Reads every header of a checkpoint folder.

    Returns:
      The stored tensors by name, in the order of files and of their headers.

    Raises:
      errors.CheckpointError: no readable folder, no safetensors files, a malformed or
        truncated one, a tensor twice, or an index that disagrees with the files.
    """
    path = pathlib.Path(folder)
    files = _list_files(path)
    index_path = path / INDEX_NAME
    listed = _read_index(index_path) if os.path.lexists(index_path) else {}
    listed_files = set(listed.values())
    absent = sorted(listed_files - set(files))
    if absent:
        raise errors.CheckpointError(
            f"index names files that are not there: {errors.listed(absent)}; is the "
            "download complete?",
            file=index_path,
        )
    tensors: dict[str, headers.StoredTensor] = {}
    for name in files:
        stored = headers.read_header(path / name)
        if name in listed_files:
            _check_index(listed, name, stored, index_path)
        for tensor in stored:
            if tensor.name in tensors:
                raise errors.CheckpointError(
                    "tensor is stored twice; remove the file that does not belong",
                    file=tensor.file,
                    tensor=tensor.name,
                    expected="one file",
                    found=f"also in {tensors[tensor.name].file.name}",
                )
            tensors[tensor.name] = tensor
    return tensors


def _list_files(folder: pathlib.Path) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise errors.CheckpointError(
            f"is not a readable folder: {errors.shown(reason)}", file=folder
        ) from error
    files = [name for name in names if name.endswith(_SUFFIX)]
    if files:
        return files
    pickled = [name for name in names if name.endswith(_PICKLED_SUFFIXES)]
    if pickled:
        raise errors.CheckpointError(
            f"holds only pickled weights ({errors.listed(pickled)}), which are never "
            "opened; convert them to safetensors",
            file=folder,
        )
    raise errors.CheckpointError("holds no *.safetensors file", file=folder)


def _read_index(path: pathlib.Path) -> dict[str, str]:
    """Returns the file name of each tensor that the index lists."""
    weight_map = strict_json.read_object(path).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise errors.CheckpointError(
            "`weight_map` must map tensors to files", file=path
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise errors.CheckpointError(
                "index must name a *.safetensors file of the folder itself",
                file=path,
                tensor=tensor,
                expected="a plain file name",
                found=name,
            )
    return dict(weight_map)


def _is_plain_name(name: str) -> bool:
    """Refuses every way out of the folder; a link that lies in it may point anywhere.

    The hub's cache is made of such links, and a downloaded file never becomes one.
    """
    has_separator = any(char in name for char in "/\\:\0")
    return name.endswith(_SUFFIX) and not has_separator and not name.startswith(".")


def _check_index(
    listed: Mapping[str, str],
    name: str,
    stored: tuple[headers.StoredTensor, ...],
    index_path: pathlib.Path,
) -> None:
    expected = {tensor for tensor, file_name in listed.items() if file_name == name}
    present = {tensor.name for tensor in stored}
    lacking = sorted(expected - present)
    if lacking:
        raise errors.CheckpointError(
            f"lacks tensors that {INDEX_NAME} places in it: {errors.listed(lacking)}",
            file=index_path.parent / name,
            tensor=lacking[0],
        )
    unlisted = sorted(present - expected)
    if unlisted:
        raise errors.CheckpointError(
            f"holds tensors that {INDEX_NAME} does not place in it: "
            f"{errors.listed(unlisted)}",
            file=index_path.parent / name,
            tensor=unlisted[0],
        )
