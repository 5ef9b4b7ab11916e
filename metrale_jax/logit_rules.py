"""Rules that change logits before a token is picked: penalties, biases, masks.

The order is repetition, presence and frequency penalties, DRY, bias, then everything
that removes tokens (a removed token is -inf, and stays so). `picks` warps what comes
out. Row i of a verify is judged as plain decoding would judge it after accepting the
drafts before it, so the rules that look at the text count these drafts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from metrale_jax import sampling as sampling_lib
from metrale_jax.axes import Array, Float32, UInt32


class History(NamedTuple):
    """The text that row i's rules see: `length` tokens, then the first i drafts.

    Attributes:
      tokens: i32[B, S], stale past `length`.
      length: i32[B], tokens that count before row 0: the position of row 0's pick.
      prompt_length: i32[B], leading tokens that are the prompt; the rest is output.
      drafts: i32[B, J], J = K - 1; row i counts the first i.
    """

    tokens: Array
    length: Array
    prompt_length: Array
    drafts: Array


def apply_rules(
    logits: Float32[Array, "B K V"],
    history: History,
    sampling: sampling_lib.Sampling,
    *,
    end_token_ids: tuple[int, ...],
    row_masks: UInt32[Array, "B K words"] | None = None,
) -> Float32[Array, "B K V"]:
    """Returns the logits that tokens are picked from.

    A slot whose options are off keeps its logits, bit for bit. Rows in which every
    token is removed come back all -inf.

    Args:
      logits: of the token after each row.
      history: the text so far.
      sampling: of the B slots.
      end_token_ids: ids that `min_new_tokens` holds back.
      row_masks: allowed tokens per row, as `Sampling.allowed_tokens` has them: the
        masks of a grammar, say; None allows all.
    """
    with jax.named_scope("logit_rules"):
        logits = jax.lax.cond(
            jnp.any(sampling.bias_values != 0),
            lambda: _add_bias(logits, sampling),
            lambda: logits,
        )
        all_ones = jnp.uint32(jnp.iinfo(jnp.uint32).max)
        logits = jax.lax.cond(
            jnp.any(sampling.allowed_tokens != all_ones),
            lambda: _keep_allowed(logits, sampling.allowed_tokens[:, None, :]),
            lambda: logits,
        )
        if row_masks is not None:
            logits = _keep_allowed(logits, row_masks)
        return _hold_back_end_tokens(logits, history, sampling, end_token_ids)


def _add_bias(
    logits: Float32[Array, "B K V"], sampling: sampling_lib.Sampling
) -> Float32[Array, "B K V"]:
    slot = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    bias = jnp.zeros((logits.shape[0], logits.shape[2]), jnp.float32)
    bias = bias.at[slot, sampling.bias_ids].add(sampling.bias_values)
    return logits + bias[:, None, :]


def _keep_allowed(
    logits: Float32[Array, "B K V"], words: UInt32[Array, "B rows words"]
) -> Float32[Array, "B K V"]:
    allowed = sampling_lib.unpack_mask(words, logits.shape[-1])
    return jnp.where(allowed, logits, -jnp.inf)


def _hold_back_end_tokens(
    logits: Float32[Array, "B K V"],
    history: History,
    sampling: sampling_lib.Sampling,
    end_token_ids: tuple[int, ...],
) -> Float32[Array, "B K V"]:
    if not end_token_ids:
        return logits
    row = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    num_output = (history.length - history.prompt_length)[:, None] + row
    is_early = num_output < sampling.min_new_tokens[:, None]
    is_end = jnp.zeros(logits.shape[-1], bool)
    is_end = is_end.at[jnp.array(end_token_ids, jnp.int32)].set(True)
    removed = is_early[:, :, None] & is_end[None, None, :]
    return jnp.where(removed, -jnp.inf, logits)
