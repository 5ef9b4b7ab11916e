"""Rules by which sampled drafts are accepted: pure functions of probabilities.

Both rules give tokens that follow the target's distribution exactly, whatever the
drafter's is, and both say how many drafts stand and from which distribution the one
token after them is drawn. Uniforms are in [0, 1), so a draft of probability 0 never
stands.

Rejection sampling is https://arxiv.org/abs/2211.17192 and
https://arxiv.org/abs/2302.01318; block verification https://arxiv.org/abs/2403.10444.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from metrale_jax.axes import Array, Bool, Float, Int32


class Acceptance(NamedTuple):
    """What a rule decides.

    Attributes:
      num_accepted: i32[B], leading drafts that stand.
      next_probs: [B, V], the distribution of the token after them; sums to 1.
    """

    num_accepted: Array
    next_probs: Array


def rejection_sampling(
    target_probs: Float[Array, "B K V"],
    draft_probs: Float[Array, "B J V"],
    drafts: Int32[Array, "B J"],
    num_drafts: Int32[Array, " B"],
    uniforms: Float[Array, "B J"],
) -> Acceptance:
    """Accepts draft d while u * q(d) < p(d); resamples from max(p - q, 0).

    Args:
      target_probs: p of every row, as plain sampling would draw from it.
      draft_probs: q, the distribution that each draft was really drawn from; one-hot
        for a drafter that draws nothing.
      drafts: J = K - 1 drafts, tokens of the vocabulary as far as they count.
      num_drafts: how many of them count.
      uniforms: one per draft.
    """
    stands = passes(target_probs, draft_probs, drafts, uniforms)
    stands &= _is_offered(drafts, num_drafts)
    leading = jnp.cumprod(stands.astype(jnp.int32), axis=1)
    num_accepted = jnp.sum(leading, axis=1, dtype=jnp.int32)
    target = _row(target_probs, num_accepted)
    draft = _draft_row(draft_probs, num_accepted, num_drafts)
    return Acceptance(num_accepted, _normalise(jnp.maximum(target - draft, 0), target))


def block_verification(
    target_probs: Float[Array, "B K V"],
    draft_probs: Float[Array, "B J V"],
    drafts: Int32[Array, "B J"],
    num_drafts: Int32[Array, " B"],
    uniforms: Float[Array, "B J"],
) -> Acceptance:
    """Accepts the longest prefix whose own test passes; never fewer in expectation.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(d_i) / q(d_i)), and r_i the mass of
    max(w_i p - q, 0) at the row after d_i, prefix i passes if u_i <= r_i / (r_i + 1 -
    w_i), the whole block if u <= w. The token after the longest passing prefix is drawn
    from max(w_i p - q, 0), or from p after the whole block. Arguments as for
    `rejection_sampling`.
    """
    num_columns = drafts.shape[1]
    ratios = _ratio(
        _probability_of(target_probs[:, :-1], drafts),
        _probability_of(draft_probs, drafts),
    )

    def advance(weight: Array, ratio: Array) -> tuple[Array, Array]:
        weight = jnp.minimum(1.0, weight * ratio)
        return weight, weight

    first = jnp.ones(drafts.shape[0], target_probs.dtype)
    _, weights = lax.scan(advance, first, ratios.T)
    weights = weights.T  # [B, J], of prefixes 1..J
    # The row after prefix i still has a draft to test, unless i is the whole block.
    draft_after = jnp.concatenate(
        [draft_probs[:, 1:], jnp.zeros_like(draft_probs[:, :1])], axis=1
    )
    residual = weights[..., None] * target_probs[:, 1:] - draft_after
    residual_mass = jnp.sum(jnp.maximum(residual, 0), axis=-1)
    inner = _ratio(residual_mass, residual_mass + 1.0 - weights)
    length = jnp.arange(1, num_columns + 1, dtype=jnp.int32)
    is_whole = length[None, :] == num_drafts[:, None]
    passes = uniforms < jnp.where(is_whole, weights, inner)
    passes &= _is_offered(drafts, num_drafts)
    num_accepted = jnp.max(jnp.where(passes, length[None, :], 0), axis=1, initial=0)

    weight = _row(jnp.concatenate([first[:, None], weights], axis=1), num_accepted)
    target = _row(target_probs, num_accepted)
    draft = _draft_row(draft_probs, num_accepted, num_drafts)
    # After the whole block nothing is left to subtract, and the weight cancels out.
    leftover = jnp.maximum(weight[:, None] * target - draft, 0)
    return Acceptance(num_accepted, _normalise(leftover, target))


def passes(
    target_probs: Float[Array, "B K V"],
    draft_probs: Float[Array, "B J V"],
    drafts: Int32[Array, "B J"],
    uniforms: Float[Array, "B J"],
) -> Bool[Array, "B J"]:
    """Whether each draft passes rejection sampling's own test, by itself."""
    target_of_draft = _probability_of(target_probs[:, :-1], drafts)
    return uniforms * _probability_of(draft_probs, drafts) < target_of_draft


def one_hot_probs(
    drafts: Int32[Array, "B J"], vocab_size: int
) -> Float[Array, "B J V"]:
    """q of a drafter that gives no distribution."""
    tokens = jnp.arange(vocab_size, dtype=jnp.int32)[None, None, :]
    return (drafts[..., None] == tokens).astype(jnp.float32)


def sparse_probs(
    ids: Int32[Array, "B J N"], probs: Float[Array, "B J N"], vocab_size: int
) -> Float[Array, "B J V"]:
    """q given as N distinct ids and their probabilities; 0 elsewhere."""
    tokens = jnp.arange(vocab_size, dtype=jnp.int32)[None, None, None, :]
    matches = ids[..., None] == tokens
    return jnp.sum(jnp.where(matches, probs[..., None], 0), axis=2)


def _probability_of(
    probs: Float[Array, "B J V"], tokens: Int32[Array, "B J"]
) -> Float[Array, "B J"]:
    return jnp.take_along_axis(probs, tokens[..., None], axis=2)[..., 0]


def _is_offered(
    drafts: Int32[Array, "B J"], num_drafts: Int32[Array, " B"]
) -> Bool[Array, "B J"]:
    column = jnp.arange(drafts.shape[1], dtype=jnp.int32)
    return column[None, :] < num_drafts[:, None]


def _row(values: Array, index: Int32[Array, " B"]) -> Array:
    """values[b, index[b]] for every b."""
    shaped = index.reshape((-1,) + (1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, shaped, axis=1)[:, 0]


def _draft_row(
    draft_probs: Float[Array, "B J V"],
    num_accepted: Int32[Array, " B"],
    num_drafts: Int32[Array, " B"],
) -> Float[Array, "B V"]:
    """q of the first draft that fell; 0 when all stood, and p is left as it is."""
    padded = jnp.concatenate([draft_probs, jnp.zeros_like(draft_probs[:, :1])], axis=1)
    fell = num_accepted < num_drafts
    return jnp.where(fell[:, None], _row(padded, num_accepted), 0)


def _ratio(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, 0 where both are 0."""
    is_zero = denominator == 0
    safe = jnp.where(is_zero, 1, denominator)
    return jnp.where(is_zero & (numerator == 0), 0, numerator / safe)


def _normalise(
    mass: Float[Array, "B V"], fallback: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    """mass / sum; the fallback where rounding left nothing of a residual."""
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1), fallback)
