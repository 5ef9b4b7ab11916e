"""Loads a checkpoint folder into `ModelParams`, shard by shard."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from metrale_jax import config as config_lib
from metrale_jax.axes import Array
from metrale_jax.checkpoint import inventory, layout, matching, reading
from metrale_jax.checkpoint.progress import Progress
from metrale_jax.model import params as params_lib
from metrale_jax.model.params import ModelParams, ParamSpec

_LOADABLE_DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))

Box = tuple[tuple[int, ...], tuple[int, ...]]


def load_params(
    folder: str | os.PathLike[str],
    config: config_lib.ModelConfig,
    *,
    dtype: DTypeLike,
    shardings: ModelParams[jax.sharding.Sharding] | None = None,
    with_mtp: bool = False,
    check_finite: bool = False,
    progress: Progress | None = None,
) -> ModelParams[Array]:
    """Loads the parameters of a target.

    Headers are checked against the config before anything is allocated. Then each
    parameter is read piece by piece, straight into the host memory of each shard that
    this process holds: a process of a larger job reads only its own shards' bytes, and
    the host holds one parameter more than what stays loaded.

    Args:
      folder: a checkpoint folder, such as `locate` returns.
      config: the target, such as `read_config` returns.
      dtype: bfloat16, float16 or float32; of all but `a_log` and `dt_bias`, which are
        float32. Block-scaled float8 is dequantised to it.
      shardings: where each parameter goes; None is the default device.
      with_mtp: load the multi-token-prediction head; the checkpoint must have it.
      check_finite: refuse NaN and infinity. float16 always is checked, its range being
        smaller than what checkpoints are stored in.
      progress: called with (done_bytes, total_bytes, name) before the first and after
        every parameter; bytes are those that this process loads.

    Raises:
      CheckpointError: the folder cannot be read or does not fit the config.
      ValueError: `dtype` is none of the three, or `with_mtp` for a target without a
        head.
      TypeError: `shardings` is not a tree of shardings shaped like the parameters.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in _LOADABLE_DTYPES:
        raise ValueError(
            f"`dtype` must be one of {', '.join(map(str, _LOADABLE_DTYPES))}, "
            f"got {dtype}."
        )
    stored = inventory.scan(folder)
    matching.check_size(stored, config)
    specs = params_lib.describe_params(config, dtype=dtype, with_mtp=with_mtp)
    leaves, treedef = jax.tree.flatten(specs)
    placements = _flatten_shardings(shardings, specs)
    match = matching.match(stored, config, specs)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(specs)]
    with reading.TensorReader(stored, check_finite=check_finite) as reader:
        if match.tied_head is not None:
            tied = stored[match.embedding], stored[match.tied_head]
            reading.require_equal(reader, *tied)
        place = Placer(reader, leaves, placements, progress)
        arrays = [
            place(form, spec, sharding, name.lstrip("."))
            for form, spec, sharding, name in zip(
                jax.tree.leaves(match.forms), leaves, placements, names, strict=True
            )
        ]
    return jax.tree.unflatten(treedef, arrays)


def _flatten_shardings(
    shardings: ModelParams[jax.sharding.Sharding] | None, specs: ModelParams[ParamSpec]
) -> list[jax.sharding.Sharding | None]:
    expected = jax.tree.structure(specs)
    if shardings is None:
        return [None] * expected.num_leaves
    leaves, found = jax.tree.flatten(shardings)
    if found != expected:
        raise TypeError(
            "`shardings` must have the structure of `describe_params(config, ...)` for "
            f"the same config and `with_mtp`, got {found} instead of {expected}."
        )
    for leaf in leaves:
        if not isinstance(leaf, jax.sharding.Sharding):
            raise TypeError(f"`shardings` must have shardings as leaves, got {leaf!r}.")
    return leaves


class Placer:
    """Reads parameters and puts them on their devices, reporting bytes as it goes."""

    def __init__(
        self,
        reader: reading.TensorReader,
        specs: list[ParamSpec],
        shardings: list[jax.sharding.Sharding | None],
        progress: Progress | None,
    ) -> None:
        self._reader = reader
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(
            spec.dtype.itemsize
            * sum(int(np.prod(size)) for _, size in _boxes(spec, sharding))
            for spec, sharding in zip(specs, shardings, strict=True)
        )
        self._report("")

    def __call__(
        self,
        form: layout.Form,
        spec: ParamSpec,
        sharding: jax.sharding.Sharding | None,
        name: str,
    ) -> Array:
        shards: dict[Box, np.ndarray] = {}
        if sharding is None:
            whole = (slice(None),) * len(spec.shape)
            array = jax.device_put(self._shard(form, spec, shards, whole))
        else:
            read = functools.partial(self._shard, form, spec, shards)
            array = jax.make_array_from_callback(
                spec.shape, sharding, read, dtype=spec.dtype
            )
        # One parameter at a time: a transfer in flight keeps its host memory alive.
        array.block_until_ready()
        self._report(name)
        return array

    def _shard(
        self,
        form: layout.Form,
        spec: ParamSpec,
        shards: dict[Box, np.ndarray],
        index: tuple[slice, ...] | None,
    ) -> np.ndarray:
        """Returns a shard's values; devices that hold the same one share a read."""
        box = _as_box(index, spec.shape)
        if box not in shards:
            start, size = box
            shards[box] = reading.empty_aligned(size, spec.dtype)
            self._reader.fill(shards[box], form, start)
            self._done_bytes += shards[box].nbytes
        return shards[box]

    def _report(self, name: str) -> None:
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes, name)


def _boxes(spec: ParamSpec, sharding: jax.sharding.Sharding | None) -> set[Box]:
    """Returns the distinct boxes that this process holds."""
    if sharding is None:
        return {((0,) * len(spec.shape), spec.shape)}
    indices = sharding.addressable_devices_indices_map(spec.shape).values()
    return {_as_box(index, spec.shape) for index in indices}


def _as_box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    """Returns (start, size) of the slices of an array of `shape`."""
    assert index is not None and len(index) == len(shape), f"{index=} {shape=}"
    ranges = [range(*dim.indices(size)) for dim, size in zip(index, shape, strict=True)]
    return tuple(r.start for r in ranges), tuple(len(r) for r in ranges)
