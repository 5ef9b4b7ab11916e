"""Writes `ModelParams` as a published checkpoint: the family's own names and forms."""

import copy
import dataclasses
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import jax
import numpy as np

from metrale_jax import config as config_lib
from metrale_jax.axes import Array
from metrale_jax.checkpoint import configs, errors, inventory, layout
from metrale_jax.model import params as params_lib
from metrale_jax.model.params import ModelParams

_DTYPE_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_STORED_CODES = _DTYPE_CODES | {"int64": "I64"}
_SINGLE_NAME = "model.safetensors"
_SHARD_NAME = "model-{number:05d}-of-{count:05d}.safetensors"
_LENGTH_BYTES = 8
# Parameters whose host copies are kept while their tensors are written one by one.
_MAX_HOST_COPIES = 2


@dataclasses.dataclass
class Tensor:
    """A tensor to write: its shape, and the boxes of parameters that fill it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: list[tuple[Array, layout.Piece]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save_checkpoint(
    folder: str | os.PathLike[str],
    params: ModelParams[Array],
    config_json: Mapping[str, Any],
    config: config_lib.ModelConfig,
    *,
    generation_json: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint that this package and others load.

    Names, shapes and forms are those that the family publishes, below `model.` for a
    flat config and `model.language_model.` for a nested one; `max_shard_bytes` splits
    files and adds an index. The written config tells the truth about the file: the
    parameters' dtype, no quantisation, and no multi-token-prediction head when `params`
    has none. Vision towers aren't loaded, so they aren't written either.

    All is written under a temporary name in the folder first; config.json moves into
    place last and, when overwriting, is the first to go. So a folder with a config.json
    is a whole checkpoint, old or new, whenever the writing stops. Other files of the
    folder stay, such as the tokenizer.

    Args:
      folder: made if it is not there.
      params: as loaded; all of it must be addressable from this process.
      config_json: config.json to start from, as `read_config` returns it.
      config: the target that it describes.
      generation_json: generation_config.json; None writes the config's end tokens.
      max_shard_bytes: largest file, unless a single tensor is larger.
      overwrite: replace the checkpoint that is there.

    Raises:
      CheckpointError: the folder holds a checkpoint already, or cannot be written.
      ValueError: params, config and config_json do not describe the same target.
    """
    path = pathlib.Path(folder)
    dtype = _check_params(params, config)
    raw = _describe_truthfully(config_json, params, config, dtype)
    generation = _generation_json(generation_json, config)
    tensors = _tensors(params, config, is_nested="text_config" in raw)
    documents = {configs.GENERATION_NAME: generation, configs.CONFIG_NAME: raw}
    write_folder(
        path, tensors, documents, max_shard_bytes=max_shard_bytes, overwrite=overwrite
    )


def write_folder(
    folder: pathlib.Path,
    tensors: list[Tensor],
    documents: Mapping[str, Mapping[str, Any]],
    *,
    max_shard_bytes: int,
    overwrite: bool,
) -> None:
    """Writes tensors and JSON documents, of which config.json comes last.

    How a folder is replaced, and the errors, are as for `save_checkpoint`.
    """
    shards = _split(tensors, max_shard_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_free(folder, overwrite=overwrite)
        staging = pathlib.Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
        try:
            _write_weights(staging, shards)
            for name, document in documents.items():
                _write_json(staging / name, document)
            _move_into_place(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise errors.CheckpointError(
            f"cannot be written: {error.strerror}", file=error.filename or folder
        ) from error


def _check_params(
    params: ModelParams[Array], config: config_lib.ModelConfig
) -> np.dtype:
    """Returns the parameters' dtype, having held each one against the config."""
    dtype = np.dtype(params.embedding.dtype)
    if dtype.name not in _DTYPE_CODES:
        raise ValueError(
            f"`params` must be one of {', '.join(_DTYPE_CODES)} to be saved, "
            f"got {dtype}."
        )
    specs = params_lib.describe_params(
        config, dtype=dtype, with_mtp=params.mtp is not None
    )
    check_leaves(params, specs)
    return dtype


def check_leaves(params: Any, specs: Any) -> None:
    """Requires that parameters are what their description says, and all at hand.

    Raises:
      ValueError: names the parameter.
    """
    if jax.tree.structure(specs) != jax.tree.structure(params):
        raise ValueError(
            "`params` must have the structure that `config` describes, got "
            f"{jax.tree.structure(params)}."
        )
    leaves = jax.tree.leaves(params)
    for (place, spec), leaf in zip(
        jax.tree.leaves_with_path(specs), leaves, strict=True
    ):
        name = f"`params{jax.tree_util.keystr(place)}`"
        if leaf.shape != spec.shape or leaf.dtype != spec.dtype:
            raise ValueError(
                f"{name} must be {spec.dtype}{list(spec.shape)} as `config` says, got "
                f"{leaf.dtype}{list(leaf.shape)}."
            )
        if not leaf.is_fully_addressable:
            raise ValueError(
                f"{name} must be addressable from this process to be saved; gather it "
                "first, for instance with `process_allgather`."
            )


def _describe_truthfully(
    config_json: Mapping[str, Any],
    params: ModelParams[Array],
    config: config_lib.ModelConfig,
    dtype: np.dtype,
) -> dict[str, Any]:
    """Returns a config.json that says of the parameters what is true of them."""
    raw = copy.deepcopy(dict(config_json))
    text = raw.get("text_config", raw)
    has_dtype = False
    for values in (raw, text):
        values.pop("quantization_config", None)
        values.pop("compression_config", None)
        for key in ("dtype", "torch_dtype"):
            if key in values:
                values[key], has_dtype = dtype.name, True
    if not has_dtype:
        text["dtype"] = dtype.name
    num_mtp_layers = 0 if params.mtp is None else config.num_mtp_layers
    text["mtp_num_hidden_layers"] = num_mtp_layers
    if "num_nextn_predict_layers" in text:
        text["num_nextn_predict_layers"] = num_mtp_layers
    written = dataclasses.replace(
        config_lib.parse_model_config(raw),
        end_token_ids=config.end_token_ids,
        num_mtp_layers=config.num_mtp_layers,
    )
    if written != config:
        raise ValueError(
            "`config_json` must describe the same target as `config`, got "
            f"{written} instead of {config}."
        )
    return raw


def _generation_json(
    generation_json: Mapping[str, Any] | None, config: config_lib.ModelConfig
) -> dict[str, Any]:
    if generation_json is not None:
        return dict(generation_json)
    return {"eos_token_id": list(config.end_token_ids)} if config.end_token_ids else {}


def _tensors(
    params: ModelParams[Array], config: config_lib.ModelConfig, *, is_nested: bool
) -> list[Tensor]:
    """Returns the tensors to write, in the parameters' order."""
    prefix = layout.NESTED_PREFIX if is_nested else layout.FLAT_PREFIX
    dtype = np.dtype(params.embedding.dtype)
    specs = params_lib.describe_params(
        config, dtype=dtype, with_mtp=params.mtp is not None
    )
    forms = jax.tree.leaves(layout.describe_layout(config, specs, prefix))
    tensors: dict[str, Tensor] = {}
    for leaf, known in zip(jax.tree.leaves(params), forms, strict=True):
        form = known.published
        shapes = form.tensors()
        for piece in form.pieces():
            name = piece.tensor
            if name not in tensors:
                tensors[name] = Tensor(name, shapes[name], np.dtype(leaf.dtype), [])
            tensors[name].parts.append((leaf, piece))
    return list(tensors.values())


def _split(tensors: list[Tensor], max_shard_bytes: int) -> list[list[Tensor]]:
    """Fills files one after the other, in order."""
    if max_shard_bytes < 1:
        raise ValueError(f"`max_shard_bytes` must be positive, got {max_shard_bytes}.")
    shards: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def _check_free(folder: pathlib.Path, *, overwrite: bool) -> None:
    taken = _checkpoint_files(folder)
    if taken and not overwrite:
        raise errors.CheckpointError(
            "holds a checkpoint already; choose another folder, or `overwrite=True`",
            file=folder,
            found=errors.listed(taken),
        )


def _checkpoint_files(folder: pathlib.Path) -> list[str]:
    """Returns the files that a new checkpoint would replace, config.json first."""
    fixed = [configs.CONFIG_NAME, configs.GENERATION_NAME, inventory.INDEX_NAME]
    weights = sorted(file.name for file in folder.glob("*.safetensors"))
    return [name for name in fixed + weights if os.path.lexists(folder / name)]


def _write_weights(folder: pathlib.Path, shards: list[list[Tensor]]) -> None:
    hosts = _HostCopies()
    if len(shards) == 1:
        _write_safetensors(folder / _SINGLE_NAME, shards[0], hosts)
        return
    weight_map: dict[str, str] = {}
    for index, tensors in enumerate(shards):
        name = _SHARD_NAME.format(number=index + 1, count=len(shards))
        _write_safetensors(folder / name, tensors, hosts)
        weight_map |= {tensor.name: name for tensor in tensors}
    total_bytes = sum(tensor.num_bytes for tensors in shards for tensor in tensors)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(folder / inventory.INDEX_NAME, index)


class _HostCopies:
    """Host copies of the parameters written last."""

    def __init__(self) -> None:
        self._copies: dict[int, np.ndarray] = {}

    def get(self, leaf: Array) -> np.ndarray:
        if id(leaf) not in self._copies:
            if len(self._copies) == _MAX_HOST_COPIES:
                del self._copies[next(iter(self._copies))]
            # An array remembers the host copy that it was asked for. This one is ours
            # alone, so that its host copy goes when we let go of it.
            own = jax.device_put(leaf, leaf.sharding, may_alias=False)
            self._copies[id(leaf)] = np.asarray(own)
        return self._copies[id(leaf)]


def _write_safetensors(
    path: pathlib.Path, tensors: list[Tensor], hosts: _HostCopies
) -> None:
    """Writes one file, a tensor at a time, so that memory does not grow with it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _STORED_CODES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": [position, end],
        }
        position = end
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % _LENGTH_BYTES)
    with path.open("xb") as file:
        file.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
        file.write(data)
        for tensor in tensors:
            _write_tensor(file, tensor, hosts)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, tensor: Tensor, hosts: _HostCopies) -> None:
    view = tensor.parts[0][1].view
    values = np.empty(view, tensor.dtype)
    for leaf, piece in tensor.parts:
        source = _box(piece.start, piece.size)
        values[_box(piece.stored_start, piece.size)] = hosts.get(leaf)[source]
    file.write(values.reshape(-1).view(np.uint8).data)


def _box(start: Iterable[int], size: Iterable[int]) -> tuple[slice, ...]:
    return tuple(
        slice(begin, begin + length) for begin, length in zip(start, size, strict=True)
    )


def _write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(values, file, indent=2, allow_nan=False, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _move_into_place(staging: pathlib.Path, folder: pathlib.Path) -> None:
    for name in _checkpoint_files(folder):
        (folder / name).unlink()
    for name in reversed(_checkpoint_files(staging)):
        os.rename(staging / name, folder / name)
