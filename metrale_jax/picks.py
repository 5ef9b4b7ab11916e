"""From logits to tokens: warping and sampling, one order for every path.

The order is temperature, top-k, top-p, min-p; each rule sees the renormalised result of
those before it. `logit_rules` come before all of them. Random numbers are a function of
(request key, absolute position, purpose) alone, so a seeded request gives the same
tokens in any slot, batch or round.
"""

import jax
import jax.numpy as jnp
from jax.extend import random as jax_random

from metrale_jax import sampling as sampling_lib
from metrale_jax.axes import Array, Bool, Float32, Int32, UInt32

# Below this a slot is greedy: dividing logits by less would overflow float32 long
# before the distribution stops being one-hot.
GREEDY_TEMPERATURE = 1e-5

# Purposes of random numbers; each (request, position, purpose) has its own stream.
# A token that the target picks on its own takes the stream of its own position. What a
# round draws about its drafts takes streams of the round's first position: a position
# that was drafted, not reached, and drafted again must not see the same numbers, since
# how far a block was accepted may depend on them.
PURPOSE_SAMPLE = 0
PURPOSE_DRAFT = 1
PURPOSE_ACCEPT = 2
PURPOSE_RESAMPLE = 3


def pick_tokens(
    logits: Float32[Array, "B K V"],
    positions: Int32[Array, "B K"],
    sampling: sampling_lib.Sampling,
) -> Int32[Array, "B K"]:
    """Picks one token per row: argmax where greedy (lowest id on ties), else a sample.

    Args:
      logits: of the token at each position.
      positions: absolute positions of the tokens that are picked.
      sampling: of the B slots.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_sampled = ~is_greedy(sampling)

    def sample() -> Int32[Array, "B K"]:
        warped = warp_logits(logits, sampling)
        noise = _gumbel_noise(sampling.request_key, positions, logits.shape[-1])
        sampled = jnp.argmax(warped + noise, axis=-1).astype(jnp.int32)
        return jnp.where(is_sampled[:, None], sampled, greedy)

    return jax.lax.cond(jnp.any(is_sampled), sample, lambda: greedy)


def draw_drafts(
    logits: Float32[Array, "B J V"],
    start: Int32[Array, " B"],
    sampling: sampling_lib.Sampling,
    *,
    first_column: Int32[Array, ""] | int = 0,
) -> tuple[Int32[Array, "B J"], Float32[Array, "B J V"]]:
    """Draws drafts from the drafter's own logits, warped as the slot's tokens are.

    Args:
      logits: of each draft.
      start: position of the round's first draft.
      sampling: of the B slots; a greedy slot takes the argmax.
      first_column: column of `logits[:, 0]` within the round, for drafters that draw
        one draft after the other.

    Returns:
      The drafts, and the distribution they were drawn from; one-hot for greedy slots.
    """
    vocab_size = logits.shape[-1]
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    greedy_probs = jax.nn.one_hot(greedy, vocab_size, dtype=jnp.float32)
    greedy_slot = is_greedy(sampling)

    def draw() -> tuple[Array, Array]:
        warped = warp_logits(logits, sampling)
        columns = first_column + jnp.arange(logits.shape[1], dtype=jnp.int32)

        def row_noise(key: Array, position: Array, column: Array) -> Array:
            round_key = random_key(key, position, PURPOSE_DRAFT)
            column_key = jax.random.fold_in(round_key, column)
            return jax.random.gumbel(column_key, (vocab_size,), jnp.float32)

        over_columns = jax.vmap(row_noise, in_axes=(None, None, 0))
        noise = jax.vmap(over_columns, in_axes=(0, 0, None))(
            sampling.request_key, start, columns
        )
        drawn = jnp.argmax(warped + noise, axis=-1).astype(jnp.int32)
        probs = jax.nn.softmax(warped, axis=-1)
        return (
            jnp.where(greedy_slot[:, None], greedy, drawn),
            jnp.where(greedy_slot[:, None, None], greedy_probs, probs),
        )

    return jax.lax.cond(jnp.all(greedy_slot), lambda: (greedy, greedy_probs), draw)


def draw_from_probs(
    probs: Float32[Array, "B V"],
    positions: Int32[Array, " B"],
    sampling: sampling_lib.Sampling,
) -> Int32[Array, " B"]:
    """Draws one token per slot from the residual that a rejected draft left."""

    def noise(key: Array, position: Array) -> Array:
        key = random_key(key, position, PURPOSE_RESAMPLE)
        return jax.random.gumbel(key, probs.shape[-1:], jnp.float32)

    gumbel = jax.vmap(noise)(sampling.request_key, positions)
    return jnp.argmax(jnp.log(probs) + gumbel, axis=-1).astype(jnp.int32)


def accept_uniforms(
    request_key: UInt32[Array, "B 2"], start: Int32[Array, " B"], num_drafts: int
) -> Float32[Array, "B J"]:
    """Uniforms in [0, 1) for the accept tests of a round whose first draft is there."""

    def draw(key: Array, position: Array) -> Array:
        key = random_key(key, position, PURPOSE_ACCEPT)
        return jax.random.uniform(key, (num_drafts,), jnp.float32)

    return jax.vmap(draw)(request_key, start)


def is_greedy(sampling: sampling_lib.Sampling) -> Bool[Array, " B"]:
    return sampling.temperature < GREEDY_TEMPERATURE


def warp_logits(
    logits: Float32[Array, "B K V"], sampling: sampling_lib.Sampling
) -> Float32[Array, "B K V"]:
    """Applies temperature, top-k, top-p and min-p; removed tokens become -inf.

    Rows of greedy slots pass through the same formulas at temperature 1; their result
    is finite and not used.
    """
    temperature = jnp.where(is_greedy(sampling), 1.0, sampling.temperature)
    # The shift keeps the quotient finite for the best token at any temperature.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = shifted / temperature[:, None, None]
    needs_ranks = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1.0))
    kept = jax.lax.cond(
        needs_ranks,
        lambda: _keep_top_k_top_p(scaled, sampling),
        lambda: jnp.ones(scaled.shape, bool),
    )
    # The best token scales to 0, so its probability relative to itself is exp(scaled).
    kept &= jnp.exp(scaled) >= sampling.min_p[:, None, None]
    return jnp.where(kept, scaled, -jnp.inf)


def _keep_top_k_top_p(
    scaled: Float32[Array, "B K V"], sampling: sampling_lib.Sampling
) -> Bool[Array, "B K V"]:
    """The tokens that top-k, then top-p keep; ties go to the lower id."""
    vocab_size = scaled.shape[-1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranks = jnp.arange(vocab_size)[None, None, :]
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab_size)
    in_top_k = ranks < top_k[:, None, None]
    descending = jnp.take_along_axis(scaled, order, axis=-1)
    probs = jax.nn.softmax(jnp.where(in_top_k, descending, -jnp.inf), axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    top_p = sampling.top_p[:, None, None]
    # Off means off: rounding of the sum must not drop what a neighbour's rule sorted.
    in_top_p = (mass_before < top_p) | (top_p >= 1.0)
    # The best token always stays, whatever rounding or a top_p of 0 says.
    kept = (in_top_k & in_top_p) | (ranks == 0)
    rank_of_token = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(kept, rank_of_token, axis=-1)


def random_key(
    request_key: UInt32[Array, " 2"], position: Int32[Array, ""], purpose: int
) -> Array:
    """The key of one use of randomness: of a request, at a position, for a purpose.

    One hash of (position, purpose) under the request key: a bijection for each request,
    so no two uses share a key.
    """
    use = jnp.stack([position.astype(jnp.uint32), jnp.uint32(purpose)])
    key_data = jax_random.threefry_2x32(request_key, use)
    return jax.random.wrap_key_data(key_data, impl="threefry2x32")


def _gumbel_noise(
    request_key: UInt32[Array, "B 2"], positions: Int32[Array, "B K"], vocab_size: int
) -> Float32[Array, "B K V"]:
    def row(key: Array, position: Array) -> Array:
        return jax.random.gumbel(
            random_key(key, position, PURPOSE_SAMPLE), (vocab_size,), jnp.float32
        )

    return jax.vmap(jax.vmap(row, in_axes=(None, 0)))(request_key, positions)
