"""Configuration: frozen, hashable dataclasses, and a reader of Hugging Face's JSON.

`ModelConfig` describes a target; `DecodeConfig` the static shape of a batch of slots.
Neither holds a mesh or a run-time switch, so both can be static arguments of `jax.jit`.
"""

import dataclasses
import difflib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

LayerKind = Literal["full_attention", "linear_attention"]
OutputGate = Literal["silu", "sigmoid"]

SUPPORTED_MODEL_TYPES = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)

_MOE_MODEL_TYPES = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
_OUTPUT_GATES: dict[str, OutputGate] = {
    "swish": "silu",
    "silu": "silu",
    "sigmoid": "sigmoid",
}
_DEFAULT_FULL_ATTENTION_INTERVAL = 4
# Bounds on what a config.json may make us build before any tensor is looked at.
_MAX_LAYERS = 10_000
_MAX_INTEGER = 2**53
_LONGEST_NAME = 64
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Gated full attention with partial rotary positions.

    Attributes:
      num_heads: query heads, H.
      num_kv_heads: key and value heads, Hkv; H is a multiple of it.
      head_dim: D.
      rotary_dim: leading dimensions of a head that rotate; even, at most D.
      rope_theta: base of the rotary frequencies.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float

    def __post_init__(self) -> None:
        _require_positive(self, "num_heads", "num_kv_heads", "head_dim")
        _require_multiple(
            "num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads
        )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"`rotary_dim` must be even and in 2..head_dim ({self.head_dim}), "
                f"got {self.rotary_dim}; check `partial_rotary_factor` and `head_dim`."
            )
        if not self.rope_theta > 0:
            raise ValueError(f"`rope_theta` must be positive, got {self.rope_theta}.")

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetConfig:
    """Gated DeltaNet: key heads Hk, value heads Hv, head dims Dk and Dv.

    `conv_kernel_size` counts the current input; `output_gate` is the function that z
    passes before it multiplies the normalised output.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int
    output_gate: OutputGate = "silu"

    def __post_init__(self) -> None:
        _require_positive(
            self, "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
        )
        _require_multiple(
            "num_value_heads", self.num_value_heads, "num_key_heads", self.num_key_heads
        )
        if self.conv_kernel_size < 2:
            raise ValueError(
                f"`conv_kernel_size` must be at least 2, got {self.conv_kernel_size}."
            )

    @property
    def group_size(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_dim(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """C: the flat [Q | K | V] vector that the convolution runs over."""
        return 2 * self.key_dim + self.value_dim

    @property
    def conv_window(self) -> int:
        """W: past inputs that the convolution needs, kernel size - 1."""
        return self.conv_kernel_size - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts with one shared expert, scaled by a sigmoid gate per token."""

    num_experts: int
    num_experts_per_token: int
    expert_ffn_size: int
    shared_expert_ffn_size: int
    normalize_top_k: bool

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "num_experts",
            "num_experts_per_token",
            "expert_ffn_size",
            "shared_expert_ffn_size",
        )
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                "`num_experts_per_token` must be at most num_experts "
                f"({self.num_experts}), got {self.num_experts_per_token}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A hybrid target.

    Attributes:
      model_type: the Hugging Face family, one of `SUPPORTED_MODEL_TYPES`.
      vocab_size: V.
      hidden_size: M.
      layers: the kind of each layer, in order.
      moe_layers: indices of the layers whose feed-forward part is a mixture of experts.
      ffn_size: F of the dense layers; 0 when every layer is a mixture.
      rms_norm_eps: epsilon of every RMS norm.
      tie_word_embeddings: the output head is the embedding.
      max_position: longest context in tokens, prompt and output together.
      end_token_ids: tokens that end a sequence; may be empty.
      num_mtp_layers: layers of the multi-token-prediction head; 0 without one.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerKind, ...]
    attention: AttentionConfig
    delta_net: DeltaNetConfig
    moe: MoEConfig | None
    moe_layers: tuple[int, ...]
    ffn_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position: int
    end_token_ids: tuple[int, ...] = ()
    num_mtp_layers: int = 0

    def __post_init__(self) -> None:
        check_model_type(self.model_type)
        _require_positive(self, "vocab_size", "hidden_size", "max_position")
        if not self.rms_norm_eps > 0:
            raise ValueError(
                f"`rms_norm_eps` must be positive, got {self.rms_norm_eps}."
            )
        if not self.layers:
            raise ValueError("`layers` must name at least one layer, got none.")
        _check_layer_kinds(self.layers)
        if self.moe_layers and self.moe is None:
            raise ValueError("`moe_layers` names layers, but `moe` is None.")
        if len(self.moe_layers) < self.num_layers and self.ffn_size < 1:
            raise ValueError(
                "`intermediate_size` must be positive for dense layers, "
                f"got {self.ffn_size}."
            )
        for token in self.end_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"`eos_token_id` must be in 0..{self.vocab_size - 1} (the "
                    f"vocabulary), got {token}; correct config.json or "
                    "generation_config.json."
                )
        if self.num_mtp_layers not in (0, 1):
            raise NotImplementedError(
                f"`mtp_num_hidden_layers` must be 0 or 1, got {self.num_mtp_layers}."
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """The static shape of a batch of slots.

    Attributes:
      num_slots: B, sequences that decode together.
      max_length: S, tokens a slot can hold, prompt and output together.
      page_size: tokens per KV page.
      num_pages: P, KV pages shared by all slots.
      max_drafts: J, drafts per round; 0 is plain decoding.
      max_logit_bias: tokens whose logit a request may move.
    """

    num_slots: int
    max_length: int
    page_size: int
    num_pages: int
    max_drafts: int = 0
    max_logit_bias: int = 16

    def __post_init__(self) -> None:
        _require_positive(self, "num_slots", "max_length", "page_size", "num_pages")
        for name in ("max_drafts", "max_logit_bias"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"`{name}` must not be negative, got {getattr(self, name)}."
                )

    @property
    def num_rows(self) -> int:
        """K, rows of one verify: `last_token` and the drafts."""
        return self.max_drafts + 1

    @property
    def pages_per_slot(self) -> int:
        """Pages that a slot of `max_length` tokens needs."""
        return pages_for(self.max_length, self.page_size)


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages of `page_size` tokens that hold `num_tokens` tokens."""
    if page_size < 1:
        raise ValueError(f"`page_size` must be positive, got {page_size}.")
    if num_tokens < 0:
        raise ValueError(f"`num_tokens` must not be negative, got {num_tokens}.")
    return -(-num_tokens // page_size)


def for_slots(
    num_slots: int,
    max_length: int,
    *,
    page_size: int = 64,
    max_drafts: int = 0,
    max_logit_bias: int = 16,
) -> DecodeConfig:
    """Returns a DecodeConfig with a page for every position of every slot."""
    pages_per_slot = pages_for(max_length, page_size)
    return DecodeConfig(
        num_slots=num_slots,
        max_length=max_length,
        page_size=page_size,
        num_pages=num_slots * pages_per_slot,
        max_drafts=max_drafts,
        max_logit_bias=max_logit_bias,
    )


def check_model_type(model_type: object) -> None:
    """Raises NotImplementedError for an unknown type, naming the nearest supported."""
    if model_type in SUPPORTED_MODEL_TYPES:
        return
    name = repr(model_type)[:_LONGEST_NAME]
    nearest = difflib.get_close_matches(name, SUPPORTED_MODEL_TYPES, 1, 0.0)
    raise NotImplementedError(
        f"`model_type` {name} is not supported; supported are "
        f"{', '.join(SUPPORTED_MODEL_TYPES)} (nearest: {nearest[0]})."
    )


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Reads a config.json (and generation_config.json) into a ModelConfig.

    Accepts flat and nested (`text_config`) files, `layer_types` or
    `full_attention_interval`, and rope settings in `rope_parameters` or at the top
    level. End tokens of both files count: published generation configs add ids to
    config.json's.

    Raises:
      ValueError: a field is missing, mistyped or contradictory.
      NotImplementedError: a true but unsupported setting; the message says what is
        supported.
    """
    check_model_type(raw.get("model_type"))
    text = raw.get("text_config", raw)
    if not isinstance(text, Mapping):
        raise ValueError(f"`text_config` must be an object, got {type(text).__name__}.")
    reader = ConfigReader(text, outer=raw)
    _refuse_unsupported(reader)
    model_type = raw["model_type"]
    layers = _read_layers(reader)
    moe = _read_moe(reader, model_type)
    moe_layers = _read_moe_layers(reader, len(layers)) if moe else ()
    return ModelConfig(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        layers=layers,
        attention=_read_attention(reader),
        delta_net=_read_delta_net(reader),
        moe=moe,
        moe_layers=moe_layers,
        ffn_size=0
        if len(moe_layers) == len(layers)
        else reader.integer("intermediate_size"),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        max_position=reader.integer("max_position_embeddings", 32768),
        end_token_ids=_read_end_tokens(reader, generation or {}),
        num_mtp_layers=_read_mtp_layers(reader, model_type),
    )


class ConfigReader:
    """Typed access to one JSON object, with the enclosing object as second choice."""

    def __init__(self, values: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        self._values = values
        self._outer = outer

    def get(self, key: str) -> Any:
        value = self._values.get(key)
        return self._outer.get(key) if value is None else value

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], name: str) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"config.json has no `{key}`; it must be {name}.")
        if not isinstance(value, kinds) or (
            isinstance(value, bool) and bool not in kinds
        ):
            raise ValueError(f"`{key}` must be {name}, got {value!r}.")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._typed(key, default, (int,), "an integer")
        if abs(value) > _MAX_INTEGER:
            raise ValueError(f"`{key}` must be at most {_MAX_INTEGER}, got {value}.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._typed(key, default, (int, float), "a number")
        if not abs(value) <= sys.float_info.max:
            raise ValueError(f"`{key}` must be a finite number, got {value!r}.")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        return self._typed(key, default, (bool,), "true or false")

    def string(self, key: str, default: str) -> str:
        return self._typed(key, default, (str,), "a string")


def _refuse_unsupported(reader: ConfigReader) -> None:
    requirements = {
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "attn_output_gate": (True, True),
        "mtp_use_dedicated_embeddings": (False, False),
    }
    for key, (supported, default) in requirements.items():
        value = reader.get(key)
        value = default if value is None else value
        if value != supported:
            raise NotImplementedError(
                f"`{key}` {value!r} is not supported; supported is {supported!r}."
            )


def _read_layers(reader: ConfigReader) -> tuple[LayerKind, ...]:
    num_layers = reader.integer("num_hidden_layers")
    if not 0 < num_layers <= _MAX_LAYERS:
        raise ValueError(
            f"`num_hidden_layers` must be in 1..{_MAX_LAYERS}, got {num_layers}."
        )
    kinds = reader.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            found = len(kinds) if isinstance(kinds, list) else repr(kinds)
            raise ValueError(
                f"`layer_types` must list {num_layers} kinds (num_hidden_layers), "
                f"got {found}."
            )
        _check_layer_kinds(kinds)
        return tuple(kinds)
    interval = reader.integer(
        "full_attention_interval", _DEFAULT_FULL_ATTENTION_INTERVAL
    )
    if interval < 1:
        raise ValueError(f"`full_attention_interval` must be positive, got {interval}.")
    return tuple(
        "full_attention" if (index + 1) % interval == 0 else "linear_attention"
        for index in range(num_layers)
    )


def _read_attention(reader: ConfigReader) -> AttentionConfig:
    head_dim = reader.integer("head_dim", 256)
    theta, partial_rotary_factor = _read_rope(reader)
    if not 0 < partial_rotary_factor <= 1:
        raise ValueError(
            f"`partial_rotary_factor` must be in (0, 1], got {partial_rotary_factor}."
        )
    return AttentionConfig(
        num_heads=reader.integer("num_attention_heads"),
        num_kv_heads=reader.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * partial_rotary_factor),
        rope_theta=theta,
    )


def _read_rope(reader: ConfigReader) -> tuple[float, float]:
    """Returns (theta, partial_rotary_factor) from whichever spelling the file uses."""
    top_theta = reader.number("rope_theta", _DEFAULT_ROPE_THETA)
    top_factor = reader.number("partial_rotary_factor", _DEFAULT_PARTIAL_ROTARY_FACTOR)
    for key in ("rope_parameters", "rope_scaling"):
        rope = reader.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ValueError(f"`{key}` must be an object, got {rope!r}.")
        nested = ConfigReader(rope, outer={})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise NotImplementedError(
                f"`{key}.rope_type` {kind!r} is not supported; supported is 'default'."
            )
        top_theta = nested.number("rope_theta", top_theta)
        top_factor = nested.number("partial_rotary_factor", top_factor)
    return top_theta, top_factor


def _read_delta_net(reader: ConfigReader) -> DeltaNetConfig:
    gate = reader.string("output_gate_type", "swish")
    if gate not in _OUTPUT_GATES:
        raise NotImplementedError(
            f"`output_gate_type` {gate!r} is not supported; supported are "
            f"{', '.join(_OUTPUT_GATES)}."
        )
    return DeltaNetConfig(
        num_key_heads=reader.integer("linear_num_key_heads"),
        num_value_heads=reader.integer("linear_num_value_heads"),
        key_head_dim=reader.integer("linear_key_head_dim", 128),
        value_head_dim=reader.integer("linear_value_head_dim", 128),
        conv_kernel_size=reader.integer("linear_conv_kernel_dim", 4),
        output_gate=_OUTPUT_GATES[gate],
    )


def _read_moe(reader: ConfigReader, model_type: str) -> MoEConfig | None:
    if model_type not in _MOE_MODEL_TYPES or reader.integer("num_experts") == 0:
        return None
    # Only Qwen3-Next has the switch; its successors always renormalise.
    normalize = model_type != "qwen3_next" or reader.boolean("norm_topk_prob", True)
    return MoEConfig(
        num_experts=reader.integer("num_experts"),
        num_experts_per_token=reader.integer("num_experts_per_tok"),
        expert_ffn_size=reader.integer("moe_intermediate_size"),
        shared_expert_ffn_size=reader.integer("shared_expert_intermediate_size"),
        normalize_top_k=normalize,
    )


def _read_moe_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"`mlp_only_layers` must be a list, got {dense!r}.")
    if step < 1:
        raise ValueError(f"`decoder_sparse_step` must be positive, got {step}.")
    return tuple(
        index
        for index in range(num_layers)
        if index not in dense and (index + 1) % step == 0
    )


def _read_mtp_layers(reader: ConfigReader, model_type: str) -> int:
    # Qwen3-Next is published with a head and without a field that says so.
    default = 1 if model_type == "qwen3_next" else 0
    alias = reader.integer("num_nextn_predict_layers", default)
    return reader.integer("mtp_num_hidden_layers", alias)


def _read_end_tokens(
    reader: ConfigReader, generation: Mapping[str, Any]
) -> tuple[int, ...]:
    tokens: dict[int, None] = {}
    for source in (generation.get("eos_token_id"), reader.get("eos_token_id")):
        for token in source if isinstance(source, list) else [source]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool):
                raise ValueError(
                    "`eos_token_id` must be an integer or a list of integers, "
                    f"got {source!r}."
                )
            tokens[token] = None
    return tuple(tokens)


def _check_layer_kinds(kinds: Iterable[Any]) -> None:
    for index, kind in enumerate(kinds):
        if kind not in ("full_attention", "linear_attention"):
            raise ValueError(
                f"`layer_types`[{index}] must be 'full_attention' or "
                f"'linear_attention', got {kind!r}."
            )


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f"`{name}` must be positive, got {value}.")


def _require_multiple(name: str, value: int, unit_name: str, unit: int) -> None:
    if value % unit:
        raise ValueError(
            f"`{name}` must be a multiple of `{unit_name}` ({unit}), got {value}."
        )
