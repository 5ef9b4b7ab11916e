"""The multi-token-prediction head in torch, float64, recomputed without a cache."""

from typing import NamedTuple

import numpy as np
import torch

from metrale_jax import config as config_lib
from metrale_jax.model import params as params_lib


class Recomputed(NamedTuple):
    """What the head makes of a sequence and the drafts after it.

    Attributes:
      logits: [J, V], of each draft, given those before it.
      keys: [length, Hkv, D], rotated, of the rows made of the target's hiddens.
      values: [length, Hkv, D].
    """

    logits: np.ndarray
    keys: np.ndarray
    values: np.ndarray


def recompute(
    params: params_lib.ModelParams,
    config: config_lib.ModelConfig,
    tokens: list[int],
    hidden: np.ndarray,
    drafts: list[int],
) -> Recomputed:
    """Runs the head on `tokens`, whose last is not in the target's caches yet.

    Args:
      params: of the target, with its head.
      config: of the target.
      tokens: ids at positions 0..length.
      hidden: [length, M], the target's, after its last norm.
      drafts: what was drafted after `tokens`.
    """
    head = params.mtp
    assert head is not None and len(tokens) == len(hidden) + 1
    hiddens = list(_tensor(hidden))
    ids = list(tokens)
    logits = []
    keys = values = torch.empty(0)
    for draft in drafts:
        output, keys, values = _forward(params, head, config, ids[1:], hiddens)
        logits.append(output[-1] @ _tensor(params.output_head).T)
        # The next step takes the head's own output for the hidden it does not have.
        ids.append(draft)
        hiddens.append(output[-1])
    length = len(hidden)
    return Recomputed(
        logits=torch.stack(logits).numpy(),
        keys=keys[:length].numpy(),
        values=values[:length].numpy(),
    )


def _forward(params, head, config, next_tokens, hiddens):
    embedded = _tensor(params.embedding)[torch.tensor(next_tokens)]
    embedded = _norm(embedded, head.embedding_norm, config)
    hidden = _norm(torch.stack(hiddens), head.hidden_norm, config)
    x = torch.cat([embedded, hidden], dim=-1) @ _tensor(head.fc).T
    (layer,) = head.layers
    mixed, keys, values = _attention(
        layer.mixer, config, _norm(x, layer.input_norm, config)
    )
    x = x + mixed
    x = x + _mlp(layer.mlp, config, _norm(x, layer.post_norm, config))
    return _norm(x, head.final_norm, config), keys, values


def _attention(params, config, x):
    attention = config.attention
    num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
    head_dim, num_rows = attention.head_dim, len(x)
    both = (x @ _tensor(params.q_proj).T).view(num_rows, num_heads, 2, head_dim)
    queries = _rotate(_norm(both[:, :, 0], params.q_norm, config), attention)
    gates = torch.sigmoid(both[:, :, 1])
    keys = (x @ _tensor(params.k_proj).T).view(num_rows, num_kv_heads, head_dim)
    keys = _rotate(_norm(keys, params.k_norm, config), attention)
    values = (x @ _tensor(params.v_proj).T).view(num_rows, num_kv_heads, head_dim)
    group_size = num_heads // num_kv_heads
    outputs = []
    for index in range(num_heads):
        scores = queries[:, index] @ keys[:, index // group_size].T
        scores = scores / head_dim**0.5
        future = torch.ones(num_rows, num_rows).triu(1).bool()
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        outputs.append(weights @ values[:, index // group_size])
    gated = (torch.stack(outputs, dim=1) * gates).reshape(num_rows, -1)
    return gated @ _tensor(params.o_proj).T, keys, values


def _rotate(heads, attention):
    """Row p turns by position p, each pair (i, i + half) as one complex number."""
    half = attention.rotary_dim // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    positions = torch.arange(len(heads), dtype=torch.float64)
    angles = torch.outer(positions, attention.rope_theta**-exponents)[:, None]
    pairs = torch.complex(heads[..., :half], heads[..., half : 2 * half])
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag, heads[..., 2 * half :]], dim=-1)


def _mlp(params, config, x):
    if isinstance(params, params_lib.DenseParams):
        return _swiglu(x, params.gate_proj, params.up_proj, params.down_proj)
    moe = config.moe
    probs = (x @ _tensor(params.router).T).softmax(dim=-1)
    shared = params.shared_expert
    rows = []
    for row, prob in zip(x, probs, strict=True):
        weights, chosen = prob.topk(moe.num_experts_per_token)
        if moe.normalize_top_k:
            weights = weights / weights.sum()
        gate = torch.sigmoid(row @ _tensor(params.shared_expert_gate)[0])
        output = gate * _swiglu(row, shared.gate_proj, shared.up_proj, shared.down_proj)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate_proj, up_proj = np.split(np.asarray(params.gate_up_proj[expert]), 2)
            down_proj = params.down_proj[expert]
            output = output + weight * _swiglu(row, gate_proj, up_proj, down_proj)
        rows.append(output)
    return torch.stack(rows)


def _swiglu(x, gate_proj, up_proj, down_proj):
    gate = torch.nn.functional.silu(x @ _tensor(gate_proj).T)
    return (gate * (x @ _tensor(up_proj).T)) @ _tensor(down_proj).T


def _norm(x, weight, config):
    mean_square = x.pow(2).mean(dim=-1, keepdim=True)
    return x / (mean_square + config.rms_norm_eps).sqrt() * (1 + _tensor(weight))


def _tensor(array):
    return torch.from_numpy(np.asarray(array, np.float64))
