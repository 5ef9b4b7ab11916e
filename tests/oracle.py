"""Tiny random transformers models, saved as checkpoints: the oracle of the forward."""

import pathlib

import torch
from transformers.models import qwen3_5, qwen3_5_moe, qwen3_next

VOCAB_SIZE = 160

# Key and value heads and head dims differ, and only a part of a head rotates.
_COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=12,
    max_position_embeddings=512,
)
_MOE = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=48,
)


def _next(**options):
    config = qwen3_next.Qwen3NextConfig(**_COMMON, **_MOE, **options)
    return qwen3_next.Qwen3NextForCausalLM(config)


def _dense(**options):
    config = qwen3_5.Qwen3_5TextConfig(**_COMMON, intermediate_size=96, **options)
    return qwen3_5.Qwen3_5ForCausalLM(config)


def _moe(**options):
    config = qwen3_5_moe.Qwen3_5MoeTextConfig(**_COMMON, **_MOE, **options)
    return qwen3_5_moe.Qwen3_5MoeForCausalLM(config)


MAKERS = {
    "qwen3_next": _next,
    "qwen3_next dense layer": lambda: _next(
        mlp_only_layers=[1], intermediate_size=96, norm_topk_prob=False
    ),
    "qwen3_5 dense": _dense,
    "qwen3_5 tied": lambda: _dense(tie_word_embeddings=True),
    "qwen3_5 moe": _moe,
}


def make_model(kind: str, dtype: torch.dtype = torch.float32):
    """A random model whose every parameter is away from its initial value."""
    model = MAKERS[kind]().to(torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                # Decays around 0.9 a token. Initial values forget within a token, and
                # a head's output is then one product q.k times v, normalised: where
                # that product happens to be near 0, its rounding is blown up, in
                # transformers as here, and says nothing about the code.
                parameter.copy_(-2.0 + 0.7 * noise)
            elif parameter.ndim == 1 or "conv1d" in name:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def save(model, folder: pathlib.Path) -> pathlib.Path:
    model.save_pretrained(folder)
    return folder


def logits(model, tokens: list[int]):
    """[T, V] in float32."""
    with torch.no_grad():
        output = model(torch.tensor([tokens]))
    return output.logits[0].float().numpy()


def residual_streams(model, tokens: list[int]):
    """The input of the first layer and what follows each layer, [T, M] each."""
    streams = []

    def keep_output(module, arguments, output):
        del module, arguments
        streams.append(output[0] if isinstance(output, tuple) else output)

    hooks = [model.model.embed_tokens.register_forward_hook(keep_output)]
    hooks += [layer.register_forward_hook(keep_output) for layer in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return [stream.reshape(len(tokens), -1).float().numpy() for stream in streams]
