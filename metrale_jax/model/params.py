"""The target's parameters: pytrees, their one abstract description, and random values.

Matrices are kept as checkpoints store them, `[out, in]`, so that loading is a copy and
a row of the product reads one contiguous row of memory. `describe_params` is the single
source of shapes, dtypes and logical axes: initialisation, sharding and loading map over
it. The classes are generic in their leaf, an array unless written otherwise:
`ModelParams[ParamSpec]` is a description.
"""

import dataclasses
import itertools
import math
from typing import Generic

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from typing_extensions import TypeVar

from metrale_jax import config as config_lib
from metrale_jax.axes import Array

Leaf = TypeVar("Leaf", default=Array)

_FLOAT32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape, dtype and logical axis names of one parameter; a leaf, not a pytree."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"{self.shape=} {self.axes=}"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@struct.dataclass
class AttentionParams(Generic[Leaf]):
    """Gated full attention.

    Rows of `q_proj` come per head: D rows of query, then D rows of gate.
    """

    q_proj: Leaf  # [H * 2D, M]
    k_proj: Leaf  # [Hkv * D, M]
    v_proj: Leaf  # [Hkv * D, M]
    o_proj: Leaf  # [M, H * D]
    q_norm: Leaf  # [D], zero-centred
    k_norm: Leaf  # [D], zero-centred


@struct.dataclass
class DeltaNetParams(Generic[Leaf]):
    """Gated DeltaNet. `a_log` and `dt_bias` are float32 whatever the model's dtype."""

    in_proj_qkv: Leaf  # [C, M], rows Q, K, V
    in_proj_z: Leaf  # [Hv * Dv, M]
    in_proj_b: Leaf  # [Hv, M]
    in_proj_a: Leaf  # [Hv, M]
    conv: Leaf  # [C, W + 1], the last column weighs the current input
    a_log: Leaf  # [Hv] float32
    dt_bias: Leaf  # [Hv] float32
    norm: Leaf  # [Dv], plain
    out_proj: Leaf  # [M, Hv * Dv]


@struct.dataclass
class DenseParams(Generic[Leaf]):
    """SwiGLU feed-forward."""

    gate_proj: Leaf  # [F, M]
    up_proj: Leaf  # [F, M]
    down_proj: Leaf  # [M, F]


@struct.dataclass
class MoEParams(Generic[Leaf]):
    """Experts with one shared expert."""

    router: Leaf  # [E, M]
    gate_up_proj: Leaf  # [E, 2F, M], gate rows first
    down_proj: Leaf  # [E, M, F]
    shared_expert: DenseParams[Leaf]
    shared_expert_gate: Leaf  # [1, M]


@struct.dataclass
class LayerParams(Generic[Leaf]):
    """One decoder layer; both norms are zero-centred."""

    input_norm: Leaf  # [M]
    mixer: AttentionParams[Leaf] | DeltaNetParams[Leaf]
    post_norm: Leaf  # [M]
    mlp: DenseParams[Leaf] | MoEParams[Leaf]


@struct.dataclass
class MtpParams(Generic[Leaf]):
    """The multi-token-prediction head; embedding and output head are the target's."""

    fc: Leaf  # [M, 2M], embedding half of the inputs first
    embedding_norm: Leaf  # [M], zero-centred
    hidden_norm: Leaf  # [M], zero-centred
    layers: tuple[LayerParams[Leaf], ...]
    final_norm: Leaf  # [M], zero-centred


@struct.dataclass
class ModelParams(Generic[Leaf]):
    """A target. `lm_head` is None when tied to `embedding`; `mtp` when not loaded."""

    embedding: Leaf  # [V, M]
    layers: tuple[LayerParams[Leaf], ...]
    final_norm: Leaf  # [M], zero-centred
    lm_head: Leaf | None  # [V, M]
    mtp: MtpParams[Leaf] | None

    @property
    def output_head(self) -> Leaf:
        return self.embedding if self.lm_head is None else self.lm_head


def describe_params(
    config: config_lib.ModelConfig, *, dtype: DTypeLike, with_mtp: bool = False
) -> ModelParams[ParamSpec]:
    """Returns the description of a target's parameters.

    Args:
      config: the target.
      dtype: floating dtype of all but `a_log` and `dt_bias`.
      with_mtp: describe the multi-token-prediction head too.

    Raises:
      ValueError: `with_mtp` for a target without a head.
    """
    if with_mtp and config.num_mtp_layers == 0:
        raise ValueError(
            "`with_mtp` needs a checkpoint with a multi-token-prediction head, but "
            "`mtp_num_hidden_layers` is 0 or missing in config.json."
        )
    describe = _Describer(config, jnp.dtype(dtype))
    layers = tuple(describe.layer(index) for index in range(config.num_layers))
    head = describe.spec((config.vocab_size, "vocab"), (config.hidden_size, "embed"))
    return ModelParams(
        embedding=head,
        layers=layers,
        final_norm=describe.norm(config.hidden_size),
        lm_head=None if config.tie_word_embeddings else head,
        mtp=describe.mtp() if with_mtp else None,
    )


class _Describer:
    """Builds the specs of one target; `spec` pairs each size with its logical axis."""

    def __init__(self, config: config_lib.ModelConfig, dtype: jnp.dtype) -> None:
        self._config = config
        self._dtype = dtype

    def spec(
        self, *dims: tuple[int, str | None], dtype: jnp.dtype | None = None
    ) -> ParamSpec:
        sizes, axes = zip(*dims, strict=True)
        return ParamSpec(sizes, dtype or self._dtype, axes)

    def norm(self, size: int) -> ParamSpec:
        return self.spec((size, None))

    def layer(self, index: int) -> LayerParams[ParamSpec]:
        is_attention = self._config.layers[index] == "full_attention"
        is_moe = index in self._config.moe_layers
        return self._layer(is_attention=is_attention, is_moe=is_moe)

    def mtp(self) -> MtpParams[ParamSpec]:
        width = self._config.hidden_size
        layer = self._layer(is_attention=True, is_moe=bool(self._config.moe_layers))
        return MtpParams(
            fc=self.spec((width, "embed"), (2 * width, None)),
            embedding_norm=self.norm(width),
            hidden_norm=self.norm(width),
            layers=(layer,) * self._config.num_mtp_layers,
            final_norm=self.norm(width),
        )

    def _layer(self, *, is_attention: bool, is_moe: bool) -> LayerParams[ParamSpec]:
        width = self._config.hidden_size
        return LayerParams(
            input_norm=self.norm(width),
            mixer=self._attention() if is_attention else self._delta_net(),
            post_norm=self.norm(width),
            mlp=self._moe() if is_moe else self._dense(self._config.ffn_size),
        )

    def _attention(self) -> AttentionParams[ParamSpec]:
        attention = self._config.attention
        width = (self._config.hidden_size, "embed")
        head_dim = attention.head_dim
        kv = (attention.num_kv_heads * head_dim, "kv_heads")
        return AttentionParams(
            q_proj=self.spec((attention.num_heads * 2 * head_dim, "heads"), width),
            k_proj=self.spec(kv, width),
            v_proj=self.spec(kv, width),
            o_proj=self.spec(width, (attention.num_heads * head_dim, "heads")),
            q_norm=self.norm(head_dim),
            k_norm=self.norm(head_dim),
        )

    def _delta_net(self) -> DeltaNetParams[ParamSpec]:
        delta_net = self._config.delta_net
        width = (self._config.hidden_size, "embed")
        channels = (delta_net.conv_channels, "delta_channels")
        values = (delta_net.value_dim, "delta_heads")
        heads = (delta_net.num_value_heads, "delta_heads")
        return DeltaNetParams(
            in_proj_qkv=self.spec(channels, width),
            in_proj_z=self.spec(values, width),
            in_proj_b=self.spec(heads, width),
            in_proj_a=self.spec(heads, width),
            conv=self.spec(channels, (delta_net.conv_kernel_size, None)),
            a_log=self.spec(heads, dtype=_FLOAT32),
            dt_bias=self.spec(heads, dtype=_FLOAT32),
            norm=self.norm(delta_net.value_head_dim),
            out_proj=self.spec(width, values),
        )

    def _dense(self, ffn_size: int) -> DenseParams[ParamSpec]:
        width = (self._config.hidden_size, "embed")
        ffn = (ffn_size, "ffn")
        return DenseParams(
            gate_proj=self.spec(ffn, width),
            up_proj=self.spec(ffn, width),
            down_proj=self.spec(width, ffn),
        )

    def _moe(self) -> MoEParams[ParamSpec]:
        moe = self._config.moe
        assert moe is not None
        width = (self._config.hidden_size, "embed")
        experts = (moe.num_experts, "experts")
        return MoEParams(
            router=self.spec((moe.num_experts, None), width),
            gate_up_proj=self.spec(
                experts, (2 * moe.expert_ffn_size, "expert_ffn"), width
            ),
            down_proj=self.spec(experts, width, (moe.expert_ffn_size, "expert_ffn")),
            shared_expert=self._dense(moe.shared_expert_ffn_size),
            shared_expert_gate=self.spec((1, None), width),
        )


def init_params(
    config: config_lib.ModelConfig,
    *,
    rng_key: Array,
    dtype: DTypeLike = jnp.float32,
    with_mtp: bool = False,
) -> ModelParams:
    """Draws random parameters: matrices scaled by 1/sqrt(inputs), vectors around 0.

    Vectors are drawn, not set to their customary constants, so that a test on random
    parameters sees every norm weight, decay and bias. `rng_key` is consumed.
    """
    specs = describe_params(config, dtype=dtype, with_mtp=with_mtp)
    leaves, treedef = jax.tree.flatten(specs)
    # One draw for all: a draw per shape would compile a program per shape.
    sizes = [math.prod(spec.shape) for spec in leaves]
    normal = jax.random.normal(rng_key, (sum(sizes),), jnp.float32)
    ends = list(itertools.accumulate(sizes))
    values = [
        (_init_scale(spec) * normal[end - size : end]).reshape(spec.shape)
        for spec, size, end in zip(leaves, sizes, ends, strict=True)
    ]
    return jax.tree.unflatten(
        treedef,
        [value.astype(spec.dtype) for value, spec in zip(values, leaves, strict=True)],
    )


def _init_scale(spec: ParamSpec) -> float:
    is_matrix = len(spec.shape) > 1
    return spec.shape[-1] ** -0.5 if is_matrix else 0.1
