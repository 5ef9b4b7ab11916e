"""How published checkpoints store each parameter: names, shapes and boxes.

The families share one set of names and differ in two places:

|              | Qwen3.5                             | Qwen3-Next                   |
| ------------ | ----------------------------------- | ---------------------------- |
| delta inputs | `in_proj_qkv`, `_z`, `_b`, `_a`     | `in_proj_qkvz`, `in_proj_ba` |
| experts      | `experts.gate_up_proj`, `down_proj` | `experts.{e}.gate_proj` ...  |

Either form is read for either family, part by part and layer by layer, because exports
mix them; the family's own is written. A form is a list of pieces: boxes of stored
tensors, and the boxes of the parameter that they are. Loading and saving walk the same
pieces in opposite directions.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from metrale_jax import config as config_lib
from metrale_jax.model.params import (
    AttentionParams,
    DeltaNetParams,
    DenseParams,
    LayerParams,
    ModelParams,
    MoEParams,
    MtpParams,
    ParamSpec,
)

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """What one model family publishes.

    Attributes:
      delta_net: the form of the delta-rule input projections.
      experts: the form of the expert matrices.
      has_vision: checkpoints may hold a vision tower, which is left out.
    """

    delta_net: Literal["split", "fused"]
    experts: Literal["fused", "per_expert"]
    has_vision: bool


_NEXT = Family(delta_net="fused", experts="per_expert", has_vision=False)
_QWEN3_5 = Family(delta_net="split", experts="fused", has_vision=True)

FAMILIES: Mapping[str, Family] = {
    "qwen3_next": _NEXT,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
}


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Where the text model and its untied head are."""

    text: str
    head: str


FLAT_PREFIX = Prefix(text="model.", head="lm_head.weight")
NESTED_PREFIX = Prefix(text="model.language_model.", head="lm_head.weight")
PREFIXES = (
    FLAT_PREFIX,
    NESTED_PREFIX,
    Prefix(text="language_model.model.", head="language_model.lm_head.weight"),
    Prefix(text="language_model.model.", head="lm_head.weight"),
)
MTP_PREFIX = "mtp."
VISION_PREFIXES = ("model.visual.", "visual.")

# Parameter field -> stored name, below `{prefix}layers.{index}.`.
_LAYER_NORMS = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
}
_ATTENTION = {
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_DELTA_NET = {
    "in_proj_qkv": "linear_attn.in_proj_qkv.weight",
    "in_proj_z": "linear_attn.in_proj_z.weight",
    "in_proj_b": "linear_attn.in_proj_b.weight",
    "in_proj_a": "linear_attn.in_proj_a.weight",
    "conv": "linear_attn.conv1d.weight",
    "a_log": "linear_attn.A_log",
    "dt_bias": "linear_attn.dt_bias",
    "norm": "linear_attn.norm.weight",
    "out_proj": "linear_attn.out_proj.weight",
}
# Parameter field -> stored name, and the parts of each key head's group that make it.
_FUSED_QKVZ = "linear_attn.in_proj_qkvz.weight"
_FUSED_BA = "linear_attn.in_proj_ba.weight"
_FUSED_DELTA_NET = {
    "in_proj_qkv": (_FUSED_QKVZ, ("query", "key", "value")),
    "in_proj_z": (_FUSED_QKVZ, ("gate",)),
    "in_proj_b": (_FUSED_BA, ("beta",)),
    "in_proj_a": (_FUSED_BA, ("decay",)),
}
_DENSE = {
    "gate_proj": "gate_proj.weight",
    "up_proj": "up_proj.weight",
    "down_proj": "down_proj.weight",
}
_MOE = {
    "router": "mlp.gate.weight",
    "shared_expert_gate": "mlp.shared_expert_gate.weight",
}
_SHARED_EXPERT_PREFIX = "mlp.shared_expert."
_FUSED_EXPERTS = {
    "gate_up_proj": "mlp.experts.gate_up_proj",
    "down_proj": "mlp.experts.down_proj",
}
# Parameter field -> the matrices of one expert that are stacked by rows to make it.
_PER_EXPERT = {
    "gate_up_proj": (
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    "down_proj": ("mlp.experts.{expert}.down_proj.weight",),
}
# Parameter field -> stored name, below `mtp.`.
_MTP = {
    "fc": "fc.weight",
    "embedding_norm": "pre_fc_norm_embedding.weight",
    "hidden_norm": "pre_fc_norm_hidden.weight",
    "final_norm": "norm.weight",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stored tensor, and the box of the parameter that it is.

    Attributes:
      tensor: stored name.
      view: the stored shape with axes of size one added or dropped, so that it has the
        parameter's rank.
      stored_start: the box's first index in the view.
      start: the box's first index in the parameter.
      size: the box's size in both.
    """

    tensor: str
    view: Shape
    stored_start: Shape
    start: Shape
    size: Shape


@dataclasses.dataclass(frozen=True)
class Whole:
    """One stored tensor is the parameter, but for axes of size one."""

    tensor: str
    stored_shape: Shape
    shape: Shape

    num_tensors = 1

    def tensors(self) -> dict[str, Shape]:
        return {self.tensor: self.stored_shape}

    def pieces(self) -> Iterator[Piece]:
        zeros = (0,) * len(self.shape)
        yield Piece(self.tensor, self.shape, zeros, zeros, self.shape)


@dataclasses.dataclass(frozen=True)
class KeyHeadGroups:
    """Some rows of a matrix whose rows come key head by key head.

    A group holds the rows of one key head and of the value heads that share it, part
    after part; the parameter holds a part of all groups, then the next part.

    Attributes:
      tensor: stored name.
      num_groups: key heads, Hk.
      parts: rows of each part of a group, in stored order.
      taken: names of the parts that make the parameter, in its order.
      num_columns: M.
    """

    tensor: str
    num_groups: int
    parts: Mapping[str, int]
    taken: tuple[str, ...]
    num_columns: int

    num_tensors = 1

    def tensors(self) -> dict[str, Shape]:
        return {self.tensor: self._stored_shape}

    @property
    def _stored_shape(self) -> Shape:
        return (self.num_groups * sum(self.parts.values()), self.num_columns)

    def pieces(self) -> Iterator[Piece]:
        offsets, group_rows = {}, 0
        for name, rows in self.parts.items():
            offsets[name] = group_rows
            group_rows += rows
        row = 0
        for name in self.taken:
            size = (self.parts[name], self.num_columns)
            for group in range(self.num_groups):
                stored_start = (group * group_rows + offsets[name], 0)
                yield Piece(
                    self.tensor, self._stored_shape, stored_start, (row, 0), size
                )
                row += size[0]


@dataclasses.dataclass(frozen=True)
class PerExpert:
    """One stored matrix per expert, or several that are stacked by rows.

    Attributes:
      templates: stored names with `{expert}` in place of the expert's number.
      shape: of the parameter, [E, rows, columns].
    """

    templates: tuple[str, ...]
    shape: Shape

    @property
    def num_tensors(self) -> int:
        return self.shape[0] * len(self.templates)

    @property
    def _stored_shape(self) -> Shape:
        return (self.shape[1] // len(self.templates), self.shape[2])

    def tensors(self) -> dict[str, Shape]:
        return {piece.tensor: self._stored_shape for piece in self.pieces()}

    def pieces(self) -> Iterator[Piece]:
        view = (1, *self._stored_shape)
        for expert in range(self.shape[0]):
            for index, template in enumerate(self.templates):
                start = (expert, index * view[1], 0)
                name = template.replace("{expert}", str(expert))
                yield Piece(name, view, (0, 0, 0), start, view)


Form = Whole | KeyHeadGroups | PerExpert


@dataclasses.dataclass(frozen=True)
class Forms:
    """The ways in which one parameter may be stored, the published one first.

    Not a pytree: a leaf of `ModelParams[Forms]`.
    """

    published: Form
    other: Form | None = None

    @property
    def all(self) -> tuple[Form, ...]:
        return (self.published,) if self.other is None else (self.published, self.other)


def describe_layout(
    config: config_lib.ModelConfig, specs: ModelParams[ParamSpec], prefix: Prefix
) -> ModelParams[Forms]:
    """Returns how every parameter of `specs` may be stored below `prefix`."""
    builder = _Builder(config)
    layers = tuple(
        builder.layer(layer, f"{prefix.text}layers.{index}.")
        for index, layer in enumerate(specs.layers)
    )
    return ModelParams(
        embedding=_whole(prefix.text + "embed_tokens.weight", specs.embedding),
        layers=layers,
        final_norm=_whole(prefix.text + "norm.weight", specs.final_norm),
        lm_head=None if specs.lm_head is None else _whole(prefix.head, specs.lm_head),
        mtp=None if specs.mtp is None else builder.mtp(specs.mtp),
    )


def _whole(tensor: str, spec: ParamSpec) -> Forms:
    return Forms(Whole(tensor, spec.shape, spec.shape))


def _wholes(prefix: str, names: Mapping[str, str], specs: object) -> dict[str, Forms]:
    """Returns the fields of `specs` that are stored one to one."""
    return {
        field: _whole(prefix + name, getattr(specs, field))
        for field, name in names.items()
    }


class _Builder:
    """Walks the description of a target, naming what it finds."""

    def __init__(self, config: config_lib.ModelConfig) -> None:
        self._family = FAMILIES[config.model_type]
        self._delta_net_config = config.delta_net

    def layer(self, specs: LayerParams[ParamSpec], prefix: str) -> LayerParams[Forms]:
        return LayerParams(
            mixer=(
                AttentionParams(**_wholes(prefix, _ATTENTION, specs.mixer))
                if isinstance(specs.mixer, AttentionParams)
                else self._delta_net(specs.mixer, prefix)
            ),
            mlp=(
                self._moe(specs.mlp, prefix)
                if isinstance(specs.mlp, MoEParams)
                else DenseParams(**_wholes(prefix + "mlp.", _DENSE, specs.mlp))
            ),
            **_wholes(prefix, _LAYER_NORMS, specs),
        )

    def mtp(self, specs: MtpParams[ParamSpec]) -> MtpParams[Forms]:
        layers = tuple(
            self.layer(layer, f"{MTP_PREFIX}layers.{index}.")
            for index, layer in enumerate(specs.layers)
        )
        return MtpParams(layers=layers, **_wholes(MTP_PREFIX, _MTP, specs))

    def _delta_net(
        self, specs: DeltaNetParams[ParamSpec], prefix: str
    ) -> DeltaNetParams[Forms]:
        fields = _wholes(prefix, _DELTA_NET, specs)
        # torch keeps the axis of input channels; a depthwise convolution has one.
        channels, taps = specs.conv.shape
        conv_name = prefix + _DELTA_NET["conv"]
        fields["conv"] = Forms(Whole(conv_name, (channels, 1, taps), specs.conv.shape))
        for field, (name, taken) in _FUSED_DELTA_NET.items():
            fused = self._key_head_groups(prefix + name, taken, getattr(specs, field))
            fields[field] = self._ordered(fields[field].published, fused)
        return DeltaNetParams(**fields)

    def _key_head_groups(
        self, tensor: str, taken: tuple[str, ...], spec: ParamSpec
    ) -> KeyHeadGroups:
        delta_net = self._delta_net_config
        value_rows = delta_net.group_size * delta_net.value_head_dim
        parts = {
            "query": delta_net.key_head_dim,
            "key": delta_net.key_head_dim,
            "value": value_rows,
            "gate": value_rows,
        }
        if tensor.endswith(_FUSED_BA):
            parts = {"beta": delta_net.group_size, "decay": delta_net.group_size}
        return KeyHeadGroups(
            tensor, delta_net.num_key_heads, parts, taken, num_columns=spec.shape[1]
        )

    def _ordered(self, split: Form, fused: Form) -> Forms:
        is_split = self._family.delta_net == "split"
        return Forms(split, fused) if is_split else Forms(fused, split)

    def _moe(self, specs: MoEParams[ParamSpec], prefix: str) -> MoEParams[Forms]:
        experts: dict[str, Forms] = {}
        for field, name in _FUSED_EXPERTS.items():
            shape = getattr(specs, field).shape
            fused = Whole(prefix + name, shape, shape)
            templates = tuple(prefix + template for template in _PER_EXPERT[field])
            per_expert = PerExpert(templates, shape)
            is_fused = self._family.experts == "fused"
            experts[field] = (
                Forms(fused, per_expert) if is_fused else Forms(per_expert, fused)
            )
        shared_expert = _wholes(
            prefix + _SHARED_EXPERT_PREFIX, _DENSE, specs.shared_expert
        )
        return MoEParams(
            shared_expert=DenseParams(**shared_expert),
            **_wholes(prefix, _MOE, specs),
            **experts,
        )
