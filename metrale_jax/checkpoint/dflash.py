"""Published folders of DFlash drafters: loads and saves them.

A folder holds config.json and the drafter's tensors, below no prefix or below `model.`.
What a drafter shares with its target is not in it. Some bring their own embedding, head
or mask embedding, or a head for a part of the vocabulary: then `d2t` has for each row
of the head how far its token is ahead of the row, and `t2d`, where stored, marks the
tokens that have a row.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from metrale_jax import config as config_lib
from metrale_jax.axes import Array
from metrale_jax.checkpoint import (
    configs,
    errors,
    headers,
    inventory,
    layout,
    load,
    matching,
    reading,
    save,
    strict_json,
)
from metrale_jax.drafters import dflash_config, dflash_params
from metrale_jax.drafters.dflash_config import DFlashConfig
from metrale_jax.drafters.dflash_params import DFlashLayerParams, DFlashParams
from metrale_jax.model.params import DenseParams, Leaf, ParamSpec

# float16 is not among them: the sums of `fc` over a target's outliers overflow it.
_DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float32)))
_INTEGER_DTYPES = ("I32", "I64")
_PREFIX = "model."
_D2T, _T2D = "d2t", "t2d"

# Parameter field -> stored name.
_TOP = {
    "fc": "fc.weight",
    "hidden_norm": "hidden_norm.weight",
    "final_norm": "norm.weight",
    "embedding": "embed_tokens.weight",
    "lm_head": "lm_head.weight",
    "mask_embedding": "mask_embedding",
}
# Parameter field -> stored name, below `layers.{index}.`.
_LAYER = {
    "input_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_norm": "post_attention_layernorm.weight",
}
_MLP = {
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}


def load_dflash(
    folder: str | os.PathLike[str],
    *,
    dtype: DTypeLike,
    target_config: config_lib.ModelConfig | None = None,
) -> tuple[DFlashConfig, DFlashParams[Array]]:
    """Loads a drafter. Headers are checked before anything is allocated.

    Args:
      folder: such as `locate` returns.
      dtype: bfloat16 or float32; float16 overflows in drafters.
      target_config: the target that it is to draft for; checked against if given.

    Returns:
      The config, with what the tensors add to it, and the parameters.

    Raises:
      CheckpointError: a file is missing or malformed, config.json makes no drafter,
        tensors are missing, unused or of a wrong shape, or the ids of the reduced
        vocabulary make no sense.
      ValueError: `dtype` is neither, or the drafter was made for another target.
      NotImplementedError: a true but unsupported drafter.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in _DTYPES:
        raise ValueError(
            f"`dtype` must be one of {', '.join(map(str, _DTYPES))} for a drafter, got "
            f"{dtype}."
        )
    path = pathlib.Path(folder)
    raw = strict_json.read_object(path / configs.CONFIG_NAME)
    stored = inventory.scan(path)
    try:
        config = _with_stored(dflash_config.parse_dflash_config(raw), stored)
    except ValueError as error:
        raise errors.CheckpointError(
            errors.shown(error), file=path / configs.CONFIG_NAME
        ) from error
    if target_config is not None:
        dflash_config.check_target(config, target_config)
    specs = _without_d2t(dflash_params.describe_dflash_params(config, dtype=dtype))
    forms = _match(stored, specs, config, path)
    places, treedef = jax.tree.flatten_with_path(specs)
    with reading.TensorReader(stored) as reader:
        d2t = _read_d2t(reader, stored, config, path)
        unplaced: list[Any] = [None] * len(places)
        place = load.Placer(reader, [spec for _, spec in places], unplaced, None)
        arrays = [
            place(form, spec, None, jax.tree_util.keystr(at))
            for form, (at, spec) in zip(jax.tree.leaves(forms), places, strict=True)
        ]
    params = jax.tree.unflatten(treedef, arrays)
    return config, dataclasses.replace(params, d2t=d2t)


def save_dflash(
    folder: str | os.PathLike[str],
    config: DFlashConfig,
    params: DFlashParams[Array],
    *,
    overwrite: bool = False,
) -> None:
    """Writes config.json and model.safetensors as drafters are published.

    Written aside first and moved into place at the end, as `save_checkpoint` does.

    Args:
      folder: made if it is not there.
      config: of the drafter.
      params: its parameters, bfloat16 or float32, all of them addressable.
      overwrite: replace the checkpoint that is there.

    Raises:
      CheckpointError: the folder holds a checkpoint already, or cannot be written.
      ValueError: `params` are not those that `config` describes.
    """
    dtype = jnp.dtype(params.fc.dtype)
    if dtype not in _DTYPES:
        raise ValueError(
            f"`params` must be one of {', '.join(map(str, _DTYPES))} to be saved, got "
            f"{dtype}."
        )
    specs = dflash_params.describe_dflash_params(config, dtype=dtype)
    save.check_leaves(params, specs)
    forms = _layout(_without_d2t(specs))
    tensors = [
        save.Tensor(
            form.published.tensor,
            form.published.stored_shape,
            np.dtype(leaf.dtype),
            [(leaf, piece) for piece in form.published.pieces()],
        )
        for leaf, form in zip(
            jax.tree.leaves(_without_d2t(params)), jax.tree.leaves(forms), strict=True
        )
    ]
    if params.d2t is not None:
        whole = layout.Whole(_D2T, params.d2t.shape, params.d2t.shape)
        parts = [(params.d2t, piece) for piece in whole.pieces()]
        # Other readers expect 64 bits.
        tensors.append(save.Tensor(_D2T, whole.shape, np.dtype(np.int64), parts))
    raw = dflash_config.config_json(config) | {"dtype": dtype.name}
    save.write_folder(
        pathlib.Path(folder),
        tensors,
        {configs.CONFIG_NAME: raw},
        max_shard_bytes=sum(tensor.num_bytes for tensor in tensors),
        overwrite=overwrite,
    )


def _without_d2t(params: DFlashParams[Leaf]) -> DFlashParams[Leaf]:
    """The map of ids is no number to be converted: it is read and written apart."""
    return dataclasses.replace(params, d2t=None)


def _layout(specs: DFlashParams[ParamSpec]) -> DFlashParams[layout.Forms]:
    """Returns how each parameter may be stored: plainly, or below `model.`."""

    def forms(owner: object, field: str, name: str) -> Any:
        spec = getattr(owner, field)
        if spec is None:
            return None
        return layout.Forms(
            layout.Whole(name, spec.shape, spec.shape),
            layout.Whole(_PREFIX + name, spec.shape, spec.shape),
        )

    layers = tuple(
        DFlashLayerParams(
            mlp=DenseParams(
                **{
                    field: forms(layer.mlp, field, f"layers.{index}.{name}")
                    for field, name in _MLP.items()
                }
            ),
            **{
                field: forms(layer, field, f"layers.{index}.{name}")
                for field, name in _LAYER.items()
            },
        )
        for index, layer in enumerate(specs.layers)
    )
    top = {field: forms(specs, field, name) for field, name in _TOP.items()}
    return DFlashParams(layers=layers, d2t=None, **top)


def _find(
    stored: Mapping[str, headers.StoredTensor], name: str
) -> headers.StoredTensor | None:
    return stored.get(name, stored.get(_PREFIX + name))


def _with_stored(
    config: DFlashConfig, stored: Mapping[str, headers.StoredTensor]
) -> DFlashConfig:
    """Adds what only the tensors tell."""
    d2t = _find(stored, _D2T)
    size = config.draft_vocab_size
    if size is None and d2t is not None:
        size = d2t.shape[0] if len(d2t.shape) == 1 else 0
    return dataclasses.replace(
        config,
        has_embedding=_find(stored, _TOP["embedding"]) is not None,
        has_head=size is not None or _find(stored, _TOP["lm_head"]) is not None,
        has_mask_embedding=_find(stored, _TOP["mask_embedding"]) is not None,
        draft_vocab_size=size,
    )


def _match(
    stored: Mapping[str, headers.StoredTensor],
    specs: DFlashParams[ParamSpec],
    config: DFlashConfig,
    folder: pathlib.Path,
) -> DFlashParams[layout.Form]:
    """Finds how each parameter is stored, and accounts for every stored tensor."""
    if len(stored) < config.num_layers:
        raise errors.CheckpointError(
            "holds fewer tensors than config.json has layers",
            file=folder,
            expected=f"{config.num_layers} layers",
            found=f"{len(stored)} tensors",
        )
    account = matching.Account(stored)
    forms = jax.tree.map(account.choose, _layout(specs))
    if config.draft_vocab_size is not None:
        maps = {prefix + name for prefix in ("", _PREFIX) for name in (_D2T, _T2D)}
        account.skip(lambda name: name in maps)
    account.settle()
    return forms


def _read_d2t(
    reader: reading.TensorReader,
    stored: Mapping[str, headers.StoredTensor],
    config: DFlashConfig,
    folder: pathlib.Path,
) -> Array | None:
    """Reads the map of ids, and holds it against the vocabulary and `t2d`."""
    size = config.draft_vocab_size
    if size is None:
        return None
    d2t = _find(stored, _D2T)
    if d2t is None:
        raise errors.CheckpointError(
            f"is missing, though `draft_vocab_size` is {size}", file=folder, tensor=_D2T
        )
    if d2t.shape != (size,) or d2t.dtype not in _INTEGER_DTYPES:
        raise errors.CheckpointError(
            "must have an offset for each row of the head",
            file=d2t.file,
            tensor=d2t.name,
            expected=f"I64 or I32 [{size}]",
            found=f"{d2t.dtype} {list(d2t.shape)}",
        )
    offsets = reader.read_box(d2t, d2t.shape, (0,), d2t.shape).astype(np.int64)
    tokens = np.arange(size) + offsets
    is_inside = (tokens >= 0) & (tokens < config.vocab_size)
    if not is_inside.all() or len(np.unique(tokens)) < size:
        raise errors.CheckpointError(
            "must give distinct tokens of the vocabulary",
            file=d2t.file,
            tensor=d2t.name,
            expected=f"row + offset in 0..{config.vocab_size - 1}, none twice",
            found=f"{tokens.min()}..{tokens.max()}, {len(np.unique(tokens))} distinct",
        )
    _check_t2d(reader, _find(stored, _T2D), tokens, config.vocab_size)
    return jax.device_put(offsets.astype(np.int32))


def _check_t2d(
    reader: reading.TensorReader,
    t2d: headers.StoredTensor | None,
    tokens: np.ndarray,
    vocab_size: int,
) -> None:
    if t2d is None:
        return
    if t2d.shape != (vocab_size,) or t2d.dtype != "BOOL":
        raise errors.CheckpointError(
            "must say of each token whether the head has it",
            file=t2d.file,
            tensor=t2d.name,
            expected=f"BOOL [{vocab_size}]",
            found=f"{t2d.dtype} {list(t2d.shape)}",
        )
    marked = reader.read_box(t2d, t2d.shape, (0,), t2d.shape)
    if not np.array_equal(np.flatnonzero(marked), np.sort(tokens)):
        raise errors.CheckpointError(
            f"marks other tokens than `{_D2T}` names; the two belong to different "
            "vocabularies",
            file=t2d.file,
            tensor=t2d.name,
        )
