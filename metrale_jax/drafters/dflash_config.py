"""The shape of a DFlash drafter, and the reader of its config.json.

DFlash: https://arxiv.org/abs/2602.06036. Published files keep some settings in a nested
`dflash_config` and others at the top level, and not all files agree on which; each key
is looked up in the nested object first. What the tensors alone can tell (an embedding
or a head of the drafter's own) the loader adds.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from metrale_jax import config as config_lib

LayerKind = Literal["full_attention", "sliding_attention"]

ARCHITECTURE = "DFlashDraftModel"
MODEL_TYPE = "qwen3"

_NESTED = "dflash_config"
_LAYER_KINDS = ("full_attention", "sliding_attention")
_MAX_LAYERS = 1000
_MAX_TAPS = 1000
_DEFAULT_MAX_POSITION = 32768
_DEFAULT_HEAD_DIM = 128
_DEFAULT_ROPE_THETA = 10_000.0
# Keys of DFlash 2, which convolves the block and walks a path through candidates.
_SECOND_VERSION_KEYS = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)
# Settings that change the drafter's forward -> the values that leave it as it is here.
_SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash"),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "sample_from_anchor": (None, False),
    "is_neox_style": (None, True),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1, 1.0),
    "model_type": (None, MODEL_TYPE),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """A DFlash drafter.

    Attributes:
      vocab_size: ids that the drafter was made for; rows of its own embedding and head
        where it has them.
      hidden_size: M, the target's.
      ffn_size: F.
      num_heads: H, of queries.
      num_kv_heads: Hkv; H is a multiple of it.
      head_dim: D; all of it rotates.
      layers: kind of each layer, in order.
      window: positions that a sliding layer sees, the query's own included; None
        without sliding layers.
      is_causal: whether a row of the draft block sees no later row of it; None for the
        customary rule: yes in sliding layers, no in full ones.
      rms_norm_eps: epsilon of every RMS norm; all of them are plain.
      rope_theta: base of the rotary frequencies.
      max_position: positions that the drafter was made for.
      block_size: rows of the longest draft block: the last token and the drafts.
      mask_token_id: stands for each token that is to be drafted.
      target_layer_ids: layers of the target after which its residual stream is read.
      num_target_layers: layers of the target.
      input_embedding_scale: multiplies the block's embeddings.
      output_multiplier: multiplies the logits, before the soft cap.
      final_logit_softcapping: c of c * tanh(logits / c); None for no cap.
      tie_word_embeddings: the head is the embedding; of use only to a drafter with an
        embedding of its own and no head.
      has_embedding: the drafter has its own; else it reads the target's.
      has_head: the same for the output head.
      has_mask_embedding: it has a vector in place of the mask token's embedding.
      draft_vocab_size: rows of a head for a part of the vocabulary only; None
        otherwise.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerKind, ...]
    window: int | None
    is_causal: bool | None
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = False
    has_embedding: bool = False
    has_head: bool = False
    has_mask_embedding: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_layers()
        self._check_numbers()
        self._check_tokens()
        last_layer = self.num_target_layers - 1
        if not self.target_layer_ids:
            raise ValueError("`target_layer_ids` must name at least one layer.")
        for layer in self.target_layer_ids:
            if not 0 <= layer <= last_layer:
                raise ValueError(
                    f"`target_layer_ids` must be in 0..{last_layer} (the "
                    f"{self.num_target_layers} layers of `num_target_layers`), got "
                    f"{layer}."
                )

    def _check_sizes(self) -> None:
        for key, value in {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position,
            "num_target_layers": self.num_target_layers,
        }.items():
            if value < 1:
                raise ValueError(f"`{key}` must be positive, got {value}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "`num_attention_heads` must be a multiple of `num_key_value_heads` "
                f"({self.num_kv_heads}), got {self.num_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even, got {self.head_dim}.")
        if self.block_size < 2:
            raise ValueError(
                "`block_size` must be at least 2 (the last token and one draft), got "
                f"{self.block_size}."
            )

    def _check_layers(self) -> None:
        if not self.layers:
            raise ValueError("`layers` must name at least one layer, got none.")
        _check_layer_kinds(self.layers)
        slides = "sliding_attention" in self.layers
        if slides and self.window is None:
            raise ValueError(
                "`sliding_window` is missing, but `layer_types` names sliding layers."
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"`sliding_window` must be positive, got {self.window}.")

    def _check_numbers(self) -> None:
        for key, value in {
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "input_embedding_scale": self.input_embedding_scale,
            "output_multiplier": self.output_multiplier,
            "final_logit_softcapping": self.final_logit_softcapping,
        }.items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`{key}` must be positive and finite, got {value}.")

    def _check_tokens(self) -> None:
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must be in 0..{self.vocab_size - 1} (the "
                f"vocabulary), got {self.mask_token_id}."
            )
        size = self.draft_vocab_size
        if size is None:
            return
        if not 0 < size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` must be in 1..{self.vocab_size} (vocab_size), got "
                f"{size}."
            )
        if not self.has_head:
            raise ValueError(
                f"`draft_vocab_size` {size} needs a head of the drafter's own."
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def head_size(self) -> int:
        """Rows of the drafter's own head."""
        if self.draft_vocab_size is not None:
            return self.draft_vocab_size
        return self.vocab_size

    def layer_window(self, index: int) -> int | None:
        """Positions that a layer sees, the query's own included; None for all."""
        return self.window if self.layers[index] == "sliding_attention" else None

    def layer_is_causal(self, index: int) -> bool:
        """Whether a row of the draft block sees no later row of it."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layers[index] == "sliding_attention"


def check_target(config: DFlashConfig, target: config_lib.ModelConfig) -> None:
    """Checks that a drafter was made for such a target.

    Raises:
      ValueError: sizes differ, or an id of one is none of the other.
    """
    if config.hidden_size != target.hidden_size:
        raise ValueError(
            f"`hidden_size` of the drafter must be the target's {target.hidden_size}, "
            f"got {config.hidden_size}; was it made for another target?"
        )
    if config.num_target_layers != target.num_layers:
        raise ValueError(
            "`num_target_layers` of the drafter must be the target's "
            f"{target.num_layers}, got {config.num_target_layers}; was it made for "
            "another target?"
        )
    if config.has_embedding and config.vocab_size < target.vocab_size:
        raise ValueError(
            f"`vocab_size` of a drafter with its own embedding must be at least the "
            f"target's {target.vocab_size}, got {config.vocab_size}."
        )
    needs_row = not config.has_embedding and not config.has_mask_embedding
    if needs_row and config.mask_token_id >= target.vocab_size:
        raise ValueError(
            f"`mask_token_id` must be in 0..{target.vocab_size - 1}, the rows of the "
            f"target's embedding, got {config.mask_token_id}."
        )


def parse_dflash_config(raw: Mapping[str, Any]) -> DFlashConfig:
    """Reads the config.json of a drafter; `has_embedding` and the like stay False.

    Raises:
      ValueError: a key is missing, mistyped or contradictory; nothing that the
        drafter's training decided, such as `target_layer_ids`, is guessed.
      NotImplementedError: a true but unsupported setting; the message says what is
        supported.
    """
    nested = raw.get(_NESTED, {})
    if not isinstance(nested, Mapping):
        raise ValueError(f"`{_NESTED}` must be an object, got {nested!r}.")
    reader = config_lib.ConfigReader(nested, outer=raw)
    _refuse_unsupported(reader)
    layers = _read_layers(reader)
    vocab_size = reader.integer("vocab_size")
    draft_vocab_size = reader.integer("draft_vocab_size", vocab_size)
    is_reduced = draft_vocab_size != vocab_size
    return DFlashConfig(
        vocab_size=vocab_size,
        hidden_size=reader.integer("hidden_size"),
        ffn_size=reader.integer("intermediate_size"),
        num_heads=reader.integer("num_attention_heads"),
        num_kv_heads=reader.integer("num_key_value_heads"),
        head_dim=reader.integer("head_dim", _DEFAULT_HEAD_DIM),
        layers=layers,
        window=_read_window(reader, layers),
        is_causal=_read_causal(raw, reader),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=_read_rope_theta(reader),
        max_position=reader.integer("max_position_embeddings", _DEFAULT_MAX_POSITION),
        block_size=reader.integer("block_size"),
        mask_token_id=reader.integer("mask_token_id"),
        target_layer_ids=_read_taps(reader),
        num_target_layers=reader.integer("num_target_layers"),
        input_embedding_scale=reader.number("input_embedding_scale", 1.0),
        output_multiplier=reader.number("output_multiplier", 1.0),
        final_logit_softcapping=None
        if reader.get("final_logit_softcapping") is None
        else reader.number("final_logit_softcapping"),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        has_head=is_reduced,
        draft_vocab_size=draft_vocab_size if is_reduced else None,
    )


def config_json(config: DFlashConfig) -> dict[str, Any]:
    """Returns the config.json of a drafter, as `parse_dflash_config` reads it.

    `is_causal` stands at the top level, where every reader looks first.
    """
    nested: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
    }
    if config.final_logit_softcapping is not None:
        nested["final_logit_softcapping"] = config.final_logit_softcapping
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": list(config.layers),
        "sliding_window": config.window,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": config.tie_word_embeddings,
        _NESTED: nested,
    }
    if config.is_causal is not None:
        raw["is_causal"] = config.is_causal
    if config.draft_vocab_size is not None:
        raw["draft_vocab_size"] = config.draft_vocab_size
    return raw


def _refuse_unsupported(reader: config_lib.ConfigReader) -> None:
    names = reader.get("architectures")
    if names != [ARCHITECTURE]:
        raise NotImplementedError(
            f"`architectures` {names!r} is not supported; supported is "
            f"[{ARCHITECTURE!r}]."
        )
    for key in _SECOND_VERSION_KEYS:
        value = reader.get(key)
        if value is not None:
            raise NotImplementedError(
                f"`{key}` {value!r} belongs to DFlash 2, which is not supported; "
                "supported is the first version, without convolutions or selector."
            )
    for key, supported in _SUPPORTED_VALUES.items():
        value = reader.get(key)
        # 1 == True: a switch is no factor.
        fits = any(value == other and type(value) is type(other) for other in supported)
        if not fits:
            offered = " or ".join(repr(other) for other in supported[1:])
            raise NotImplementedError(
                f"`{key}` {value!r} is not supported; supported is {offered}, or no "
                "such key."
            )


def _read_layers(reader: config_lib.ConfigReader) -> tuple[LayerKind, ...]:
    num_layers = reader.integer("num_hidden_layers")
    if not 0 < num_layers <= _MAX_LAYERS:
        raise ValueError(
            f"`num_hidden_layers` must be in 1..{_MAX_LAYERS}, got {num_layers}."
        )
    kinds = reader.get("layer_types")
    slides = None if reader.get("use_swa") is None else reader.boolean("use_swa")
    if kinds is None:
        kind: LayerKind = "sliding_attention" if slides else "full_attention"
        return (kind,) * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        found = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise ValueError(
            f"`layer_types` must list {num_layers} kinds (num_hidden_layers), got "
            f"{found}."
        )
    _check_layer_kinds(kinds)
    if slides is not None and slides != ("sliding_attention" in kinds):
        raise ValueError(
            f"`use_swa` {slides} contradicts `layer_types` {kinds}; correct one."
        )
    return tuple(kinds)


def _check_layer_kinds(kinds: Iterable[Any]) -> None:
    for index, kind in enumerate(kinds):
        if kind not in _LAYER_KINDS:
            raise ValueError(
                f"`layer_types`[{index}] must be 'full_attention' or "
                f"'sliding_attention', got {kind!r}."
            )


def _read_window(
    reader: config_lib.ConfigReader, layers: tuple[LayerKind, ...]
) -> int | None:
    # Files without sliding layers may name a window all the same.
    if "sliding_attention" not in layers:
        return None
    for key in ("swa_window_size", "sliding_window"):
        if reader.get(key) is not None:
            return reader.integer(key)
    return None


def _read_causal(
    raw: Mapping[str, Any], reader: config_lib.ConfigReader
) -> bool | None:
    top = config_lib.ConfigReader(raw, outer={})
    if top.get("is_causal") is not None:
        return top.boolean("is_causal")
    return None if reader.get("causal") is None else reader.boolean("causal")


def _read_rope_theta(reader: config_lib.ConfigReader) -> float:
    theta = reader.number("rope_theta", _DEFAULT_ROPE_THETA)
    for key in ("rope_parameters", "rope_scaling"):
        rope = reader.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ValueError(f"`{key}` must be an object, got {rope!r}.")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise NotImplementedError(
                f"`{key}.rope_type` {kind!r} is not supported; supported is 'default'."
            )
        if rope.get("partial_rotary_factor", 1) != 1:
            raise NotImplementedError(
                f"`{key}.partial_rotary_factor` {rope['partial_rotary_factor']!r} is "
                "not supported; supported is 1: a drafter's heads rotate whole."
            )
        theta = config_lib.ConfigReader(rope, outer={}).number("rope_theta", theta)
    return theta


def _read_taps(reader: config_lib.ConfigReader) -> tuple[int, ...]:
    taps = reader.get("target_layer_ids")
    if taps is None:
        raise ValueError(
            "config.json has no `target_layer_ids`; which layers of the target feed "
            "the drafter was decided by its training and cannot be guessed."
        )
    is_list = isinstance(taps, list) and 0 < len(taps) <= _MAX_TAPS
    if not is_list or any(type(layer) is not int for layer in taps):
        raise ValueError(
            f"`target_layer_ids` must be a list of 1..{_MAX_TAPS} integers, got "
            f"{taps!r}."
        )
    return tuple(taps)
