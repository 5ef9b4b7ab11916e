"""config.json of published models, field for field.

Layer kinds are spelled out by an expression where the files list them.
"""

import copy
from typing import Any


def layer_types(num_layers: int) -> list[str]:
    return (["linear_attention"] * 3 + ["full_attention"]) * (num_layers // 4)


_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}


def _vision(depth: int, hidden_size: int, out_hidden_size: int) -> dict[str, Any]:
    return {
        "deepstack_visual_indexes": [],
        "depth": depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": hidden_size,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4 * hidden_size if hidden_size == 768 else 4304,
        "num_heads": 12 if hidden_size == 768 else 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": out_hidden_size,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _nested(
    architecture: str, model_type: str, text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "image_token_id": 248056,
        "model_type": model_type,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "layer_types": layer_types(text["num_hidden_layers"]),
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "mamba_ssm_dtype": "float32",
            "model_type": f"{model_type}_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rms_norm_eps": 1e-06,
            "rope_parameters": copy.deepcopy(_ROPE),
            "use_cache": True,
            "vocab_size": 248320,
            **text,
        },
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_config": vision | {"model_type": model_type},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


def qwen3_5_0_8b() -> dict[str, Any]:
    text = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_num_value_heads": 16,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    vision = _vision(depth=12, hidden_size=768, out_hidden_size=1024)
    return _nested("Qwen3_5ForConditionalGeneration", "qwen3_5", text, vision)


def qwen3_5_27b() -> dict[str, Any]:
    """The text model of Qwen3.5-27B, Qwen3.6-27B and Qwen3.8-27B."""
    text = {
        "bos_token_id": 248044,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    }
    vision = _vision(depth=27, hidden_size=1152, out_hidden_size=5120)
    return _nested("Qwen3_5ForConditionalGeneration", "qwen3_5", text, vision)


def qwen3_5_35b_a3b() -> dict[str, Any]:
    text = {
        "hidden_size": 2048,
        "linear_num_value_heads": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
    }
    vision = _vision(depth=27, hidden_size=1152, out_hidden_size=2048)
    return _nested("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", text, vision)


def qwen3_next_80b_a3b() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
