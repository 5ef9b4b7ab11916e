"""Search for the end of a text earlier in the same text, batched, on the device."""

import jax
import jax.numpy as jnp

from metrale_jax.axes import Array, Int32

# No token: compared with tokens, never an index.
_BEFORE_TEXT = -1


def match_lengths(
    tokens: Int32[Array, "B S"], num_tokens: Int32[Array, " B"], max_match: int
) -> Int32[Array, "B S"]:
    """Returns how many tokens up to each position equal the text's last tokens.

    match[b, i] is the largest n <= max_match with tokens[i - n + 1 .. i] equal to the
    last n of the first `num_tokens` tokens; 0 at the text's end itself and beyond, so
    that every match has a token after it.
    """
    num_positions = tokens.shape[1]
    position = jnp.arange(num_positions, dtype=jnp.int32)[None, :]
    back = jnp.arange(max_match, dtype=jnp.int32)[None, :]
    last = num_tokens[:, None] - 1
    ending = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
    # Before the text there is nothing: no place of the padding equals any other.
    ending = jnp.where(last >= back, ending, _BEFORE_TEXT)
    widths = ((0, 0), (max_match - 1, 0))
    padded = jnp.pad(tokens, widths, constant_values=_BEFORE_TEXT - 1)
    equal = position < last
    length = jnp.zeros(tokens.shape, jnp.int32)
    for step in range(max_match):
        first = max_match - 1 - step
        earlier = padded[:, first : first + num_positions]
        equal &= earlier == ending[:, step : step + 1]
        length += equal.astype(jnp.int32)
    return length


def continuation(
    tokens: Int32[Array, "B S"],
    num_tokens: Int32[Array, " B"],
    match_end: Int32[Array, " B"],
    num_drafts: int,
) -> Int32[Array, "B J"]:
    """Returns the tokens after position `match_end`, going round from the text's end.

    Where fewer than J tokens follow, the text repeats itself with the period from the
    match to the end, and so does what is returned.
    """
    period = jnp.maximum(num_tokens - 1 - match_end, 1)[:, None]
    step = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
    index = match_end[:, None] + 1 + step % period
    with jax.named_scope("continuation"):
        return jnp.take_along_axis(
            tokens, jnp.clip(index, 0, tokens.shape[1] - 1), axis=1
        )
