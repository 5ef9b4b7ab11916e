"""Tiny checkpoints for the tests, written without the code under test.

Names and shapes are spelled out from the published table, files are written by the
safetensors package, and `expected_params` assembles parameters by whole-array reshapes.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from metrale_jax.model.params import (
    AttentionParams,
    DeltaNetParams,
    DenseParams,
    LayerParams,
    ModelParams,
    MoEParams,
    MtpParams,
)

HIDDEN = 32
VOCAB = 96
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 12
CONV_TAPS = 4
FFN = 40
EXPERTS, EXPERT_FFN, SHARED_FFN = 4, 24, 20

KEYS = KEY_HEADS * KEY_DIM
VALUES = VALUE_HEADS * VALUE_DIM
CHANNELS = 2 * KEYS + VALUES

Tensors = dict[str, np.ndarray]

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "linear_conv_kernel_dim": CONV_TAPS,
    "linear_key_head_dim": KEY_DIM,
    "linear_value_head_dim": VALUE_DIM,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "full_attention_interval": 4,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 7,
}
_MOE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_FFN,
    "shared_expert_intermediate_size": SHARED_FFN,
}
_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "torch_dtype": "bfloat16",
}
_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
    "dtype": "bfloat16",
}

MODEL_TYPES = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)


def raw_config(model_type: str, **overrides: Any) -> dict[str, Any]:
    """Returns config.json of a tiny target, nested where the family is."""
    text = dict(_TEXT)
    is_moe = model_type == "qwen3_next" or "moe" in model_type
    text |= _MOE if is_moe else {}
    text |= _NEXT if model_type == "qwen3_next" else _ROPE
    text |= overrides
    if model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        return {"model_type": model_type, **text}
    return {
        "model_type": model_type,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {"model_type": f"{model_type}_text", **text},
    }


def text_of(raw: dict[str, Any]) -> dict[str, Any]:
    return raw.get("text_config", raw)


def default_prefix(raw: Mapping[str, Any]) -> str:
    return "model.language_model." if "text_config" in raw else "model."


class TensorMaker:
    """Draws the tensors of one checkpoint, each value exact in bfloat16."""

    def __init__(self, seed: int = 0, dtype: Any = jnp.bfloat16) -> None:
        self._rng = np.random.default_rng(seed)
        self._dtype = jnp.dtype(dtype)
        self.tensors: Tensors = {}

    def add(self, name: str, *shape: int, dtype: Any = None) -> None:
        values = self._rng.standard_normal(shape).astype(jnp.bfloat16)
        self.tensors[name] = values.astype(dtype or self._dtype)

    def attention(self, prefix: str) -> None:
        prefix += "self_attn."
        self.add(prefix + "q_proj.weight", 2 * HEADS * HEAD_DIM, HIDDEN)
        self.add(prefix + "k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        self.add(prefix + "v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        self.add(prefix + "o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        self.add(prefix + "q_norm.weight", HEAD_DIM)
        self.add(prefix + "k_norm.weight", HEAD_DIM)

    def delta_net(self, prefix: str, *, fused: bool) -> None:
        prefix += "linear_attn."
        if fused:
            self.add(prefix + "in_proj_qkvz.weight", CHANNELS + VALUES, HIDDEN)
            self.add(prefix + "in_proj_ba.weight", 2 * VALUE_HEADS, HIDDEN)
        else:
            self.add(prefix + "in_proj_qkv.weight", CHANNELS, HIDDEN)
            self.add(prefix + "in_proj_z.weight", VALUES, HIDDEN)
            self.add(prefix + "in_proj_b.weight", VALUE_HEADS, HIDDEN)
            self.add(prefix + "in_proj_a.weight", VALUE_HEADS, HIDDEN)
        self.add(prefix + "conv1d.weight", CHANNELS, 1, CONV_TAPS)
        self.add(prefix + "A_log", VALUE_HEADS, dtype=np.float32)
        self.add(prefix + "dt_bias", VALUE_HEADS)
        self.add(prefix + "norm.weight", VALUE_DIM, dtype=np.float32)
        self.add(prefix + "out_proj.weight", HIDDEN, VALUES)

    def dense(self, prefix: str, size: int) -> None:
        self.add(prefix + "gate_proj.weight", size, HIDDEN)
        self.add(prefix + "up_proj.weight", size, HIDDEN)
        self.add(prefix + "down_proj.weight", HIDDEN, size)

    def moe(self, prefix: str, *, per_expert: bool) -> None:
        prefix += "mlp."
        self.add(prefix + "gate.weight", EXPERTS, HIDDEN)
        self.add(prefix + "shared_expert_gate.weight", 1, HIDDEN)
        self.dense(prefix + "shared_expert.", SHARED_FFN)
        if not per_expert:
            self.add(prefix + "experts.gate_up_proj", EXPERTS, 2 * EXPERT_FFN, HIDDEN)
            self.add(prefix + "experts.down_proj", EXPERTS, HIDDEN, EXPERT_FFN)
            return
        for expert in range(EXPERTS):
            self.dense(f"{prefix}experts.{expert}.", EXPERT_FFN)

    def layer(self, prefix: str, *, is_full: bool, is_moe: bool, fused: bool) -> None:
        self.add(prefix + "input_layernorm.weight", HIDDEN)
        self.add(prefix + "post_attention_layernorm.weight", HIDDEN)
        if is_full:
            self.attention(prefix)
        else:
            self.delta_net(prefix, fused=fused)
        if is_moe:
            self.moe(prefix, per_expert=fused)
        else:
            self.dense(prefix + "mlp.", FFN)


def make_tensors(
    raw: dict[str, Any],
    *,
    prefix: str | None = None,
    head: str = "lm_head.weight",
    with_mtp: bool = True,
    with_vision: bool = False,
    fused: bool | None = None,
    dtype: Any = jnp.bfloat16,
) -> Tensors:
    """Returns the stored tensors of a tiny target.

    `fused` takes Next's forms (fused delta inputs, one matrix per expert); None takes
    the family's own.
    """
    text = text_of(raw)
    prefix = default_prefix(raw) if prefix is None else prefix
    fused = raw["model_type"] == "qwen3_next" if fused is None else fused
    maker = TensorMaker(dtype=dtype)
    maker.add(prefix + "embed_tokens.weight", VOCAB, HIDDEN)
    is_moe = "num_experts" in text
    for index in range(text["num_hidden_layers"]):
        is_full = index % 4 == 3
        name = f"{prefix}layers.{index}."
        maker.layer(name, is_full=is_full, is_moe=is_moe, fused=fused)
    maker.add(prefix + "norm.weight", HIDDEN)
    if not text["tie_word_embeddings"]:
        maker.add(head, VOCAB, HIDDEN)
    if with_mtp:
        maker.add("mtp.fc.weight", HIDDEN, 2 * HIDDEN)
        maker.add("mtp.pre_fc_norm_embedding.weight", HIDDEN)
        maker.add("mtp.pre_fc_norm_hidden.weight", HIDDEN)
        maker.add("mtp.norm.weight", HIDDEN)
        maker.layer("mtp.layers.0.", is_full=True, is_moe=is_moe, fused=fused)
    if with_vision:
        maker.add("model.visual.patch_embed.proj.weight", 8, 3, 2, 4, 4)
        maker.add("visual.blocks.0.attn.qkv.bias", 24)
    return maker.tensors


def deinterleave(tensors: Tensors, prefix: str) -> Tensors:
    """Returns `tensors` with Next's fused delta inputs below `prefix` split."""
    split = dict(tensors)
    group = VALUE_HEADS // KEY_HEADS
    qkvz = split.pop(prefix + "in_proj_qkvz.weight").reshape(KEY_HEADS, -1, HIDDEN)
    ba = split.pop(prefix + "in_proj_ba.weight").reshape(KEY_HEADS, -1, HIDDEN)
    edges = np.cumsum([KEY_DIM, KEY_DIM, group * VALUE_DIM])
    query, key, value, gate = np.split(qkvz, edges, axis=1)
    parts = [part.reshape(-1, HIDDEN) for part in (query, key, value)]
    split[prefix + "in_proj_qkv.weight"] = np.concatenate(parts)
    split[prefix + "in_proj_z.weight"] = gate.reshape(-1, HIDDEN)
    split[prefix + "in_proj_b.weight"] = ba[:, :group].reshape(-1, HIDDEN)
    split[prefix + "in_proj_a.weight"] = ba[:, group:].reshape(-1, HIDDEN)
    return split


def stack_experts(tensors: Tensors, prefix: str) -> Tensors:
    """Returns `tensors` with the matrices of single experts below `prefix` stacked."""
    stacked = dict(tensors)

    def take(part: str) -> np.ndarray:
        names = [f"{prefix}{expert}.{part}_proj.weight" for expert in range(EXPERTS)]
        return np.stack([stacked.pop(name) for name in names])

    gate, up, down = take("gate"), take("up"), take("down")
    stacked[prefix + "gate_up_proj"] = np.concatenate([gate, up], axis=1)
    stacked[prefix + "down_proj"] = down
    return stacked


def expected_params(
    tensors: Tensors,
    raw: dict[str, Any],
    *,
    dtype: Any,
    prefix: str | None = None,
    head: str = "lm_head.weight",
    with_mtp: bool = False,
) -> ModelParams:
    """Returns what loading must give, as numpy arrays."""
    dtype = jnp.dtype(dtype)
    prefix = default_prefix(raw) if prefix is None else prefix
    for name in list(tensors):
        if name.endswith("in_proj_qkvz.weight"):
            tensors = deinterleave(tensors, name[: -len("in_proj_qkvz.weight")])
        if name.endswith("experts.0.gate_proj.weight"):
            tensors = stack_experts(tensors, name[: -len("0.gate_proj.weight")])

    def take(name: str) -> np.ndarray:
        return tensors[name].astype(np.float32).astype(dtype)

    def dense(name: str) -> DenseParams:
        parts = ("gate", "up", "down")
        return DenseParams(*(take(f"{name}{part}_proj.weight") for part in parts))

    def attention(name: str) -> AttentionParams:
        parts = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        return AttentionParams(*(take(f"{name}{part}.weight") for part in parts))

    def delta_net(name: str) -> DeltaNetParams:
        return DeltaNetParams(
            in_proj_qkv=take(name + "in_proj_qkv.weight"),
            in_proj_z=take(name + "in_proj_z.weight"),
            in_proj_b=take(name + "in_proj_b.weight"),
            in_proj_a=take(name + "in_proj_a.weight"),
            conv=take(name + "conv1d.weight")[:, 0],
            a_log=tensors[name + "A_log"].astype(np.float32),
            dt_bias=tensors[name + "dt_bias"].astype(np.float32),
            norm=take(name + "norm.weight"),
            out_proj=take(name + "out_proj.weight"),
        )

    def moe(name: str) -> MoEParams:
        return MoEParams(
            router=take(name + "gate.weight"),
            gate_up_proj=take(name + "experts.gate_up_proj"),
            down_proj=take(name + "experts.down_proj"),
            shared_expert=dense(name + "shared_expert."),
            shared_expert_gate=take(name + "shared_expert_gate.weight"),
        )

    def layer(name: str) -> LayerParams:
        is_full = name + "self_attn.q_proj.weight" in tensors
        is_moe = name + "mlp.gate.weight" in tensors
        return LayerParams(
            input_norm=take(name + "input_layernorm.weight"),
            mixer=attention(name + "self_attn.")
            if is_full
            else delta_net(name + "linear_attn."),
            post_norm=take(name + "post_attention_layernorm.weight"),
            mlp=moe(name + "mlp.") if is_moe else dense(name + "mlp."),
        )

    num_layers = text_of(raw)["num_hidden_layers"]
    mtp = (
        MtpParams(
            fc=take("mtp.fc.weight"),
            embedding_norm=take("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=take("mtp.pre_fc_norm_hidden.weight"),
            layers=(layer("mtp.layers.0."),),
            final_norm=take("mtp.norm.weight"),
        )
        if with_mtp
        else None
    )
    return ModelParams(
        embedding=take(prefix + "embed_tokens.weight"),
        layers=tuple(layer(f"{prefix}layers.{i}.") for i in range(num_layers)),
        final_norm=take(prefix + "norm.weight"),
        lm_head=None if text_of(raw)["tie_word_embeddings"] else take(head),
        mtp=mtp,
    )


def write_checkpoint(
    folder: pathlib.Path,
    tensors: Tensors,
    raw: Mapping[str, Any],
    *,
    num_files: int = 1,
    with_index: bool | None = None,
) -> pathlib.Path:
    """Writes config.json and the tensors, dealt out over `num_files` in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    names = list(tensors)
    files = {}
    for index in range(num_files):
        name = f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        name = "model.safetensors" if num_files == 1 else name
        files[name] = names[index::num_files]
    for name, held in files.items():
        write_tensors(folder / name, {tensor: tensors[tensor] for tensor in held})
    if num_files > 1 if with_index is None else with_index:
        weight_map = {tensor: name for name, held in files.items() for tensor in held}
        write_index(folder, weight_map)
    return folder


def write_tensors(path: pathlib.Path, tensors: Tensors) -> None:
    contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    safetensors.numpy.save_file(contiguous, path, metadata={"format": "pt"})


def write_index(folder: pathlib.Path, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def raw_file(header: Any, data: bytes = b"") -> bytes:
    """Returns a safetensors file with this header, which need not be a sound one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data
