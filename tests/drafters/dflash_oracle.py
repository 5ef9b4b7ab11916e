"""A DFlash drafter in torch: one dense forward over context and block, no cache.

Reads config.json and tensors as published. https://arxiv.org/abs/2602.06036
"""

from collections.abc import Mapping
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


def draft_logits(
    raw: Mapping[str, Any],
    tensors: Tensors,
    streams: torch.Tensor,
    last_token: int,
    num_drafts: int,
    *,
    embedding: torch.Tensor,
    head: torch.Tensor,
) -> torch.Tensor:
    """Logits [J, V] in float64, over the target's vocabulary.

    Args:
      raw: config.json.
      tensors: by published name.
      streams: [T, taps * M], the target's residual streams of the context.
      last_token: at position T.
      num_drafts: J.
      embedding: the target's, [V, M].
      head: the target's, [V, M].
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    embedding, head = embedding.double(), head.double()
    options = {**raw, **raw.get("dflash_config", {})}
    epsilon = options["rms_norm_eps"]
    num_context = streams.shape[0]
    num_rows = num_drafts + 1

    context = _rms_norm(
        streams.double() @ weights["fc.weight"].T,
        weights["hidden_norm.weight"],
        epsilon,
    )
    table = weights.get("embed_tokens.weight", embedding)
    mask = weights.get("mask_embedding", table[options["mask_token_id"]])
    x = torch.stack([table[last_token], *[mask] * num_drafts])
    x = x * options.get("input_embedding_scale", 1.0)
    positions = torch.arange(num_context + num_rows)
    for index, kind in enumerate(options["layer_types"]):
        layer = _below(weights, f"layers.{index}.")
        rows = _rms_norm(x, layer["input_layernorm.weight"], epsilon)
        visible = _visible(positions, num_context, kind, raw)
        x = x + _attention(layer, context, rows, positions, visible, options)
        rows = _rms_norm(x, layer["post_attention_layernorm.weight"], epsilon)
        gate = torch.nn.functional.silu(rows @ layer["mlp.gate_proj.weight"].T)
        up = rows @ layer["mlp.up_proj.weight"].T
        x = x + (gate * up) @ layer["mlp.down_proj.weight"].T
    x = _rms_norm(x, weights["norm.weight"], epsilon)[1:]
    return _over_target_ids(x, weights, options, head)


def _visible(
    positions: torch.Tensor, num_context: int, kind: str, raw: Mapping[str, Any]
) -> torch.Tensor:
    """bool[K, T + K], cell by cell: does the row at q see the key at k?"""
    slides = kind == "sliding_attention"
    causal = raw.get("is_causal")
    if causal is None:
        causal = raw.get("dflash_config", {}).get("causal")
    if causal is None:
        causal = slides
    cells = []
    for q in positions[num_context:].tolist():
        row = []
        for k in positions.tolist():
            sees = k < num_context or k <= q or not causal
            if slides:
                sees = sees and abs(q - k) < raw["sliding_window"]
            row.append(sees)
        cells.append(row)
    return torch.tensor(cells)


def _attention(layer, context, rows, positions, visible, options):
    num_context, num_rows = context.shape[0], rows.shape[0]
    head_dim, epsilon = options["head_dim"], options["rms_norm_eps"]
    both = torch.cat([context, rows])

    def heads(x, name):
        return (x @ layer[f"self_attn.{name}.weight"].T).reshape(
            x.shape[0], -1, head_dim
        )

    theta = options.get("rope_theta") or options["rope_parameters"]["rope_theta"]
    queries = _rms_norm(
        heads(rows, "q_proj"), layer["self_attn.q_norm.weight"], epsilon
    )
    queries = _rotate(queries, positions[num_context:], theta)
    keys = _rms_norm(heads(both, "k_proj"), layer["self_attn.k_norm.weight"], epsilon)
    keys = _rotate(keys, positions, theta)
    values = heads(both, "v_proj")
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("ihd,shd->his", queries, keys) * head_dim**-0.5
    scores = scores.masked_fill(~visible[None], -torch.inf)
    outputs = torch.einsum("his,shd->ihd", scores.softmax(-1), values)
    return outputs.reshape(num_rows, -1) @ layer["self_attn.o_proj.weight"].T


def _over_target_ids(x, weights, options, head):
    vocab_size = head.shape[0]
    if "lm_head.weight" in weights:
        head = weights["lm_head.weight"]
    elif "embed_tokens.weight" in weights and options.get("tie_word_embeddings"):
        head = weights["embed_tokens.weight"]
    logits = x @ head.T * options.get("output_multiplier", 1.0)
    cap = options.get("final_logit_softcapping")
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    targets = torch.arange(head.shape[0])
    if "d2t" in weights:
        targets = targets + weights["d2t"].long()
    result = torch.full((x.shape[0], vocab_size), -torch.inf, dtype=torch.float64)
    for row, target in enumerate(targets.tolist()):
        if target < vocab_size:
            result[:, target] = logits[:, row]
    return result


def _rms_norm(x, weight, epsilon):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def _rotate(heads, positions, theta):
    """Pairs (i, i + D/2) of every head, all of D."""
    half = heads.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None] * frequencies
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        dim=-1,
    )


def _below(weights: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }
