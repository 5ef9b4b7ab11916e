"""Rules that change logits before a token is picked: penalties, biases, masks.

The order is repetition, presence and frequency penalties, DRY, bias, then everything
that removes tokens (a removed token is -inf, and stays so). `picks` warps what comes
out. Row i of a verify is judged as plain decoding would judge it after accepting the
drafts before it, so the rules that look at the text count these drafts.

Every rule runs only while a slot uses it, and leaves the other slots' logits as they
are, bit for bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from metrale_jax import indices
from metrale_jax import sampling as sampling_lib
from metrale_jax.axes import Array, Bool, Float32, Int32, UInt32

# The power in a DRY penalty grows up to this and no further: times any multiplier it is
# finite, and no logit comes back from there.
MAX_DRY_GROWTH = 1e9


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
    token is removed come back all -inf. NaN stays NaN, unless its token is removed.

    Args:
      logits: of the token after each row.
      history: the text so far.
      sampling: of the B slots.
      end_token_ids: ids that `min_new_tokens` holds back.
      row_masks: allowed tokens per row, as `Sampling.allowed_tokens` has them: the
        masks of a grammar, say; None allows all.
    """
    with jax.named_scope("logit_rules"):
        logits = _penalise_repetition(logits, history, sampling)
        logits = _penalise_output(logits, history, sampling)
        logits = _penalise_continuations(logits, history, sampling)
        logits = _add_bias(logits, sampling)
        all_ones = jnp.uint32(jnp.iinfo(jnp.uint32).max)
        logits = _where_used(
            jnp.any(sampling.allowed_tokens != all_ones, axis=-1),
            lambda: _keep_allowed(logits, sampling.allowed_tokens[:, None, :]),
            logits,
        )
        if row_masks is not None:
            logits = _keep_allowed(logits, row_masks)
        return _hold_back_end_tokens(logits, history, sampling, end_token_ids)


def _where_used(
    is_used: Bool[Array, " B"],
    rule: Callable[[], Array],
    logits: Float32[Array, "B K V"],
) -> Float32[Array, "B K V"]:
    """The rule's logits in the slots that use it; does not run it for none."""

    def select() -> Array:
        return jnp.where(is_used[:, None, None], rule(), logits)

    return jax.lax.cond(jnp.any(is_used), select, lambda: logits)


def _penalise_repetition(
    logits: Float32[Array, "B K V"], history: History, sampling: sampling_lib.Sampling
) -> Float32[Array, "B K V"]:
    penalty = sampling.repetition_penalty[:, None, None]

    def penalise() -> Array:
        counts = _count_tokens(
            history, jnp.zeros_like(history.length), logits.shape[-1]
        )
        penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(counts > 0, penalised, logits)

    return _where_used(sampling.repetition_penalty != 1, penalise, logits)


def _penalise_output(
    logits: Float32[Array, "B K V"], history: History, sampling: sampling_lib.Sampling
) -> Float32[Array, "B K V"]:
    """Presence and frequency penalties."""
    presence = sampling.presence_penalty[:, None, None]
    frequency = sampling.frequency_penalty[:, None, None]

    def penalise() -> Array:
        counts = _count_tokens(history, history.prompt_length, logits.shape[-1])
        penalty = frequency * counts.astype(jnp.float32) + presence
        return jnp.where(counts > 0, logits - penalty, logits)

    is_used = (sampling.presence_penalty != 0) | (sampling.frequency_penalty != 0)
    return _where_used(is_used, penalise, logits)


def _count_tokens(
    history: History, first: Int32[Array, " B"], vocab_size: int
) -> Int32[Array, "B K V"]:
    """How often each row's text holds each token, at positions from `first` on."""
    num_slots, capacity = history.tokens.shape
    num_drafts = history.drafts.shape[1]
    slot = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    position = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    is_text = (position >= first[:, None]) & (position < history.length[:, None])
    tokens = indices.inert_unless(is_text, history.tokens, vocab_size)
    before_row_0 = jnp.zeros((num_slots, vocab_size), jnp.int32)
    before_row_0 = before_row_0.at[slot, tokens].add(1, mode="drop")

    row = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None, :, None]
    column = jnp.arange(num_drafts, dtype=jnp.int32)[None, None, :]
    drafts = history.drafts[:, None, :]
    drafts = indices.inert_unless(column < row, drafts, vocab_size)
    drafted = jnp.zeros((num_slots, num_drafts + 1, vocab_size), jnp.int32)
    drafted = drafted.at[slot[:, :, None], row, drafts].add(1, mode="drop")
    return before_row_0[:, None, :] + drafted


def _penalise_continuations(
    logits: Float32[Array, "B K V"], history: History, sampling: sampling_lib.Sampling
) -> Float32[Array, "B K V"]:
    """DRY: penalises tokens that would prolong a repetition.

    Where the n tokens up to an earlier position equal the last n of the text, the token
    after that position loses multiplier * base^(n - allowed), from n = allowed on. Of
    several such positions the longest match counts. No match holds a breaker, and a
    breaker is not penalised. https://github.com/oobabooga/text-generation-webui/pull/5677
    """

    def penalise() -> Array:
        text = _text_with_drafts(history)
        losses = _continuation_losses(text, history, sampling)
        slot = jnp.arange(text.shape[0], dtype=jnp.int32)[:, None, None]
        row = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :, None]
        tokens = _shift(text, -1)[:, None, :]
        tokens = indices.inert_unless(losses > 0, tokens, logits.shape[-1])
        penalty = jnp.zeros_like(logits)
        penalty = penalty.at[slot, row, tokens].max(losses, mode="drop")
        return jnp.where(penalty > 0, logits - penalty, logits)

    return _where_used(sampling.dry_multiplier > 0, penalise, logits)


def _text_with_drafts(history: History) -> Int32[Array, "B T"]:
    """The text with every draft behind it, T = S + J; stale beyond."""
    num_slots, num_drafts = history.drafts.shape
    slot = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    column = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
    text = jnp.pad(history.tokens, ((0, 0), (0, num_drafts)))
    place = history.length[:, None] + column
    return indices.write_rows(text, (slot, place), history.drafts)


def _continuation_losses(
    text: Int32[Array, "B T"], history: History, sampling: sampling_lib.Sampling
) -> Float32[Array, "B K T"]:
    """What the token after each position loses; 0 where the row's text ends before."""
    multiplier = sampling.dry_multiplier[:, None, None]
    base = sampling.dry_base[:, None, None]
    num_rows = history.drafts.shape[1] + 1
    position = jnp.arange(text.shape[1], dtype=jnp.int32)[None, None, :]
    row = jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]
    length = history.length[:, None, None] + row
    start = _range_start(length, sampling.dry_range[:, None, None])
    matches = _match_lengths(text, history, sampling)
    matches = jnp.minimum(matches, position - start + 1)
    # No match is as long as the array, so the minimum only keeps int32 from wrapping.
    allowed = jnp.minimum(sampling.dry_allowed_length, text.shape[1])
    excess = matches - allowed[:, None, None]
    growth = jnp.minimum(base ** excess.astype(jnp.float32), MAX_DRY_GROWTH)
    next_breaks = _is_breaker(_shift(text, -1), sampling.dry_breakers)
    loses = (excess >= 0) & (multiplier > 0) & ~next_breaks[:, None, :]
    loses &= position + 1 < length
    return jnp.where(loses, multiplier * growth, 0.0)


def _match_lengths(
    text: Int32[Array, "B T"], history: History, sampling: sampling_lib.Sampling
) -> Int32[Array, "B K T"]:
    """How many tokens up to each position equal the last ones of the row's text.

    Where a match leaves the row's range, or is longer than makes a difference, the
    number is some one beyond that; from the row's last token on it means nothing.
    """
    first = _match_row_0(text, history, sampling)

    def extend(matches: Array, draft: Array) -> tuple[Array, Array]:
        # The new last token ends a match where the text has it behind an old match.
        draft = draft[:, None]
        is_same = (text == draft) & ~_is_breaker(draft, sampling.dry_breakers)
        matches = jnp.where(is_same, _shift(matches, 1) + 1, 0)
        return matches, matches

    _, others = jax.lax.scan(extend, first, history.drafts.T)
    return jnp.concatenate([first[:, None], jnp.moveaxis(others, 0, 1)], axis=1)


class _Search(NamedTuple):
    """Carry of the search for row 0's matches, from their ends backwards."""

    depth: Array  # i32[], tokens compared so far
    shifted: Array  # i32[B, T], at p the token of position p - depth
    goes_on: Array  # bool[B, T], all tokens compared so far are the same
    matches: Array  # i32[B, T]


def _match_row_0(
    text: Int32[Array, "B T"], history: History, sampling: sampling_lib.Sampling
) -> Int32[Array, "B T"]:
    """Compares all positions at once, a token deeper each time, while any matches."""
    last = history.length[:, None] - 1
    start = _range_start(history.length[:, None], sampling.dry_range[:, None])
    max_depth = _max_match(sampling, text.shape[1])[:, None]
    position = jnp.arange(text.shape[1], dtype=jnp.int32)[None, :]

    def compare(search: _Search) -> _Search:
        suffix_token = jnp.take_along_axis(
            text, jnp.clip(last - search.depth, 0, text.shape[1] - 1), axis=1
        )
        is_same = search.shifted == suffix_token
        is_same &= ~_is_breaker(suffix_token, sampling.dry_breakers)
        is_same &= position - search.depth >= start
        is_same &= search.depth < max_depth
        goes_on = search.goes_on & is_same
        return _Search(
            depth=search.depth + 1,
            shifted=_shift(search.shifted, 1),
            goes_on=goes_on,
            matches=search.matches + goes_on.astype(jnp.int32),
        )

    nothing = _Search(
        depth=jnp.int32(0),
        shifted=text,
        goes_on=position < last,
        matches=jnp.zeros_like(text),
    )
    found = jax.lax.while_loop(lambda search: jnp.any(search.goes_on), compare, nothing)
    return found.matches


def _max_match(sampling: sampling_lib.Sampling, capacity: int) -> Int32[Array, " B"]:
    """The longest match that costs more than a shorter one; 0 where DRY is off.

    It bounds the search in a text that repeats itself from end to end.
    """
    growing = jnp.log(MAX_DRY_GROWTH) / jnp.log(sampling.dry_base)
    growing = jnp.where(sampling.dry_base > 1, growing, 0.0)
    # One more, whichever way the logarithms were rounded.
    growing = jnp.minimum(growing, float(capacity)).astype(jnp.int32) + 1
    allowed = jnp.minimum(sampling.dry_allowed_length, capacity)
    return jnp.where(sampling.dry_multiplier > 0, allowed + growing, 0)


def _range_start(length: Array, dry_range: Array) -> Array:
    """The first position that DRY looks at."""
    return jnp.where(dry_range > 0, jnp.maximum(length - dry_range, 0), 0)


def _is_breaker(
    tokens: Int32[Array, "B N"], breakers: Int32[Array, "B breakers"]
) -> Bool[Array, "B N"]:
    return jnp.any(tokens[:, :, None] == breakers[:, None, :], axis=-1)


def _shift(values: Int32[Array, "B T"], by: int) -> Int32[Array, "B T"]:
    """values[:, p - by] at p, 0 where there is none; `by` is 1 or -1."""
    if by > 0:
        return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))


def _add_bias(
    logits: Float32[Array, "B K V"], sampling: sampling_lib.Sampling
) -> Float32[Array, "B K V"]:
    def add() -> Array:
        slot = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        bias = jnp.zeros((logits.shape[0], logits.shape[2]), jnp.float32)
        bias = bias.at[slot, sampling.bias_ids].add(sampling.bias_values)
        bias = bias[:, None, :]
        # -0.0 + 0.0 is another zero, and -inf plus infinity is NaN.
        is_kept = (bias == 0) | (logits == -jnp.inf)
        return jnp.where(is_kept, logits, logits + bias)

    return _where_used(jnp.any(sampling.bias_values != 0, axis=-1), add, logits)


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

    def remove() -> Array:
        row = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
        num_output = (history.length - history.prompt_length)[:, None] + row
        is_early = num_output < sampling.min_new_tokens[:, None]
        is_end = jnp.zeros(logits.shape[-1], bool)
        is_end = is_end.at[jnp.array(end_token_ids, jnp.int32)].set(True)
        removed = is_early[:, :, None] & is_end[None, None, :]
        return jnp.where(removed, -jnp.inf, logits)

    return _where_used(sampling.min_new_tokens > 0, remove, logits)
