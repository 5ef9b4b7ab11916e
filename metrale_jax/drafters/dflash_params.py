"""Parameters of a DFlash drafter: pytrees, their description, and random values.

Matrices are `[out, in]`, as checkpoints store them; see `model.params`.
"""

import functools
from typing import Generic

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from metrale_jax.axes import Array
from metrale_jax.drafters import dflash_config
from metrale_jax.model.params import DenseParams, Leaf, ParamSpec

_INT32 = jnp.dtype(jnp.int32)


@struct.dataclass
class DFlashLayerParams(Generic[Leaf]):
    """One layer of a drafter. All norms are plain."""

    input_norm: Leaf  # [M]
    q_proj: Leaf  # [H * D, M]
    k_proj: Leaf  # [Hkv * D, M]
    v_proj: Leaf  # [Hkv * D, M]
    o_proj: Leaf  # [M, H * D]
    q_norm: Leaf  # [D]
    k_norm: Leaf  # [D]
    post_norm: Leaf  # [M]
    mlp: DenseParams[Leaf]


@struct.dataclass
class DFlashParams(Generic[Leaf]):
    """A drafter. What is None is the target's, or of no use to this drafter.

    Attributes:
      fc: [M, taps * M], of the target's residual streams, side by side.
      hidden_norm: [M], after `fc`.
      layers: in order.
      final_norm: [M].
      embedding: [V, M] or None.
      lm_head: [V or draft vocabulary, M] or None.
      mask_embedding: [M] or None, in place of the mask token's row.
      d2t: i32[draft vocabulary] or None; row i of `lm_head` is the token i + d2t[i].
    """

    fc: Leaf
    hidden_norm: Leaf
    layers: tuple[DFlashLayerParams[Leaf], ...]
    final_norm: Leaf
    embedding: Leaf | None
    lm_head: Leaf | None
    mask_embedding: Leaf | None
    d2t: Leaf | None


def describe_dflash_params(
    config: dflash_config.DFlashConfig, *, dtype: DTypeLike
) -> DFlashParams[ParamSpec]:
    """Returns the description of a drafter's parameters; all but `d2t` have `dtype`."""

    def spec(*dims: tuple[int, str | None]) -> ParamSpec:
        sizes, axes = zip(*dims, strict=True)
        return ParamSpec(sizes, jnp.dtype(dtype), axes)

    width = (config.hidden_size, "embed")
    norm = spec((config.hidden_size, None))
    head_norm = spec((config.head_dim, None))
    heads = (config.num_heads * config.head_dim, "heads")
    kv_heads = (config.num_kv_heads * config.head_dim, "kv_heads")
    ffn = (config.ffn_size, "ffn")
    layer = DFlashLayerParams(
        input_norm=norm,
        q_proj=spec(heads, width),
        k_proj=spec(kv_heads, width),
        v_proj=spec(kv_heads, width),
        o_proj=spec(width, heads),
        q_norm=head_norm,
        k_norm=head_norm,
        post_norm=norm,
        mlp=DenseParams(
            gate_proj=spec(ffn, width),
            up_proj=spec(ffn, width),
            down_proj=spec(width, ffn),
        ),
    )
    tapped = (len(config.target_layer_ids) * config.hidden_size, None)
    return DFlashParams(
        fc=spec(width, tapped),
        hidden_norm=norm,
        layers=(layer,) * config.num_layers,
        final_norm=norm,
        embedding=spec((config.vocab_size, "vocab"), width)
        if config.has_embedding
        else None,
        lm_head=spec((config.head_size, "vocab"), width) if config.has_head else None,
        mask_embedding=norm if config.has_mask_embedding else None,
        d2t=None
        if config.draft_vocab_size is None
        else ParamSpec((config.draft_vocab_size,), _INT32, ("vocab",)),
    )


def init_dflash_params(
    config: dflash_config.DFlashConfig,
    *,
    rng_key: Array,
    dtype: DTypeLike = jnp.float32,
) -> DFlashParams:
    """Draws random parameters: matrices scaled by 1/sqrt(inputs), norms around 1.

    A reduced vocabulary is spread evenly over the whole one. `rng_key` is consumed.
    """
    return _draw_params(rng_key, config=config, dtype=jnp.dtype(dtype))


# One program for all: drawing and cutting op by op would compile one per shape.
@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _draw_params(
    rng_key: Array, *, config: dflash_config.DFlashConfig, dtype: jnp.dtype
) -> DFlashParams:
    specs = describe_dflash_params(config, dtype=dtype)
    places, treedef = jax.tree.flatten_with_path(specs)
    values = []
    for (path, spec), key in zip(
        places, jax.random.split(rng_key, len(places)), strict=True
    ):
        name = jax.tree_util.keystr(path[-1:]).lstrip(".")
        if name == "d2t":
            values.append(_even_offsets(spec.shape[0], config.vocab_size))
            continue
        noise = jax.random.normal(key, spec.shape, jnp.float32)
        is_norm = name.endswith("norm")
        value = 1.0 + 0.1 * noise if is_norm else noise * spec.shape[-1] ** -0.5
        values.append(value.astype(spec.dtype))
    return jax.tree.unflatten(treedef, values)


def _even_offsets(draft_vocab_size: int, vocab_size: int) -> Array:
    tokens = [i * vocab_size // draft_vocab_size for i in range(draft_vocab_size)]
    return jnp.array([token - i for i, token in enumerate(tokens)], jnp.int32)
