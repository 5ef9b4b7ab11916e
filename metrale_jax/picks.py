"""From logits to tokens: warping and sampling, one order for every path.

The order is temperature, top-k, top-p, min-p; each rule sees the renormalised result of
those before it. Random numbers are a function of (request key, absolute position,
purpose) alone, so a seeded request gives the same tokens in any slot, batch or round.
"""

import jax
import jax.numpy as jnp
from jax.extend import random as jax_random

from metrale_jax import state as state_lib
from metrale_jax.axes import Array, Bool, Float32, Int32, UInt32

# Below this a slot is greedy: dividing logits by less would overflow float32 long
# before the distribution stops being one-hot.
GREEDY_TEMPERATURE = 1e-5

# Purposes of random numbers; each (request, position, purpose) has its own stream.
PURPOSE_SAMPLE = 0


def pick_tokens(
    logits: Float32[Array, "B K V"],
    positions: Int32[Array, "B K"],
    sampling: state_lib.Sampling,
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


def is_greedy(sampling: state_lib.Sampling) -> Bool[Array, " B"]:
    return sampling.temperature < GREEDY_TEMPERATURE


def warp_logits(
    logits: Float32[Array, "B K V"], sampling: state_lib.Sampling
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
    scaled: Float32[Array, "B K V"], sampling: state_lib.Sampling
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


def request_key(seed: int) -> UInt32[Array, " 2"]:
    """Returns the request key of a seed in 0..2**64-1; distinct seeds, distinct keys.

    Raises:
      ValueError: the seed is outside that range.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"`seed` must be in 0..2**64-1, got {seed}.")
    return jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
