"""Verify: one forward over K rows per slot, judged row by row. Changes no state."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from metrale_jax import accept, logit_rules, picks
from metrale_jax import config as config_lib
from metrale_jax import proposal as proposal_lib
from metrale_jax import sampling as sampling_lib
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax.axes import Array, Bool, Float32, Int32, UInt32
from metrale_jax.model import params as params_lib
from metrale_jax.model import transformer
from pallas_kernels import dispatch

# "match" accepts a draft that equals the token which plain decoding would have picked,
# so it emits plain decoding's very tokens, sampled ones too. The other two accept more
# of the drafts that were drawn from a distribution; their tokens follow the target's
# distribution, but are not those of a plain run. Greedy slots match under every rule.
AcceptRule = Literal["match", "rejection", "block"]
ACCEPT_RULES: tuple[AcceptRule, ...] = ("match", "rejection", "block")

_RULES = {"rejection": accept.rejection_sampling, "block": accept.block_verification}


def verify(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    drafts: Int32[Array, "B J"],
    num_drafts: Int32[Array, " B"],
    *,
    config: config_lib.ModelConfig,
    draft_probs: proposal_lib.DraftProbs = None,
    row_masks: UInt32[Array, "B K words"] | None = None,
    accept_rule: AcceptRule = "match",
    num_log_probs: int | None = None,
    taps: tuple[int, ...] = (),
    implementation: dispatch.Implementation | None = None,
) -> verdict_lib.Verdict:
    """Runs `[last_token, d1..dJ]` of every slot and accepts the leading right drafts.

    Donates and changes nothing; `apply_verdict` applies the result. Counts of drafts
    may differ per slot and be 0 (plain decoding); a slot that is not active is inert.

    Row j's pick is the token after row j's input; draft j + 1 is right while it equals
    that pick, or passes the accept test against that row, and all drafts before it were
    right. The bonus token is the target's own after the last accepted row. Drafts past
    a slot's `num_drafts` are never accepted.

    Args:
      params: of the target.
      state: B slots.
      drafts: J = K - 1 per slot.
      num_drafts: how many of them are offered.
      config: of the target.
      draft_probs: what sampled drafts were drawn from; None where they were chosen.
        The rule "match" has no use for it.
      row_masks: allowed tokens per row, the bonus row included: a grammar's, say.
      accept_rule: how sampled slots judge drafts.
      num_log_probs: None for none; N for those of the emitted and the N likeliest
        tokens of each row.
      taps: layers whose residual stream to return.
      implementation: of the kernels.

    Raises:
      ValueError: an array has not the shape or dtype above, or an option is unknown.
    """
    _check_arrays(state, drafts, num_drafts)
    num_drafts = _usable_drafts(state, drafts, num_drafts, config)
    # Padding repeats the slot's own token, which adds no value of its own.
    is_offered = _columns(drafts) < num_drafts[:, None]
    inputs = jnp.where(is_offered, drafts, state.last_token[:, None])
    tokens = jnp.concatenate([state.last_token[:, None], inputs], axis=1)
    output = transformer.verify_rows(
        params, state, tokens, config=config, taps=taps, implementation=implementation
    )
    logits = transformer.project_logits(params, output.hidden)
    judgement = judge(
        state,
        logits,
        inputs,
        num_drafts,
        config=config,
        draft_probs=draft_probs,
        row_masks=row_masks,
        accept_rule=accept_rule,
        num_log_probs=num_log_probs,
    )
    return verdict_lib.Verdict(
        judgement=judgement,
        hidden=output.hidden,
        taps=output.taps,
        layers=output.layers,
        tap_layers=taps,
    )


def judge(
    state: state_lib.SequenceState,
    logits: Float32[Array, "B K V"],
    drafts: Int32[Array, "B J"],
    num_drafts: Int32[Array, " B"],
    *,
    config: config_lib.ModelConfig,
    draft_probs: proposal_lib.DraftProbs = None,
    row_masks: UInt32[Array, "B K words"] | None = None,
    accept_rule: AcceptRule = "match",
    num_log_probs: int | None = None,
) -> verdict_lib.Judgement:
    """Judges drafts by the logits of their rows, wherever these come from.

    Arguments and errors as for `verify`.
    """
    _check_arrays(state, drafts, num_drafts)
    _check_options(logits, row_masks, draft_probs, num_log_probs)
    num_drafts = _usable_drafts(state, drafts, num_drafts, config)
    if accept_rule not in ACCEPT_RULES:
        raise ValueError(
            f"`accept_rule` must be one of {', '.join(ACCEPT_RULES)}, got "
            f"{accept_rule!r}."
        )
    with jax.named_scope("judge"):
        history = logit_rules.History(
            tokens=state.tokens,
            length=state.length + 1,
            prompt_length=state.prompt_length,
            drafts=drafts,
        )
        ruled = logit_rules.apply_rules(
            logits,
            history,
            state.sampling,
            end_token_ids=config.end_token_ids,
            row_masks=row_masks,
        )
        outcome = _accept(state, ruled, drafts, num_drafts, draft_probs, accept_rule)
        is_offered = _columns(drafts) < num_drafts[:, None]
        log_probs = None
        if num_log_probs is not None:
            emitted = emitted_tokens(drafts, outcome.num_accepted, outcome.bonus_token)
            log_probs = _log_probs(logits, emitted, num_log_probs)
    return verdict_lib.Judgement(
        drafts=drafts,
        num_drafts=num_drafts,
        num_accepted=outcome.num_accepted,
        bonus_token=outcome.bonus_token,
        is_valid=_is_valid(logits, ruled, drafts, outcome, config),
        hits=outcome.hits & is_offered,
        log_probs=log_probs,
    )


def is_end_token(
    tokens: Int32[Array, "B K"], config: config_lib.ModelConfig
) -> Bool[Array, "B K"]:
    ids = jnp.array(config.end_token_ids, jnp.int32).reshape(1, 1, -1)
    return jnp.any(tokens[:, :, None] == ids, axis=-1)


def emitted_tokens(
    drafts: Int32[Array, "B J"],
    num_accepted: Int32[Array, " B"],
    bonus_token: Int32[Array, " B"],
) -> Int32[Array, "B K"]:
    """The accepted drafts, then the bonus token; stale beyond."""
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    is_bonus = _columns(padded) == num_accepted[:, None]
    return jnp.where(is_bonus, bonus_token[:, None], padded)


def _log_probs(
    logits: Float32[Array, "B K V"], emitted: Int32[Array, "B K"], num_top: int
) -> verdict_lib.LogProbs:
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, top_ids = jax.lax.top_k(logits, num_top)
    chosen = jnp.take_along_axis(logits, emitted[..., None], axis=-1)
    return verdict_lib.LogProbs(
        emitted=(chosen - total)[..., 0],
        top_ids=top_ids.astype(jnp.int32),
        top=top - total,
    )


def _usable_drafts(
    state: state_lib.SequenceState,
    drafts: Int32[Array, "B J"],
    num_drafts: Int32[Array, " B"],
    config: config_lib.ModelConfig,
) -> Int32[Array, " B"]:
    """Drafts that can count: leading tokens of the target, within the slot's room.

    Behind an end token nothing follows, so no row there may say anything: not a mask
    that leaves no token, and not block verification about the drafts before it.
    """
    is_token = (drafts >= 0) & (drafts < config.vocab_size)
    num_tokens = _num_leading(is_token, num_drafts)
    is_end = is_end_token(drafts, config)
    num_before_end = _num_leading(~is_end, num_tokens)
    num_usable = jnp.minimum(num_tokens, num_before_end + 1)
    # The bonus token takes one place of the room.
    room = state.length_limit - (state.length + 1)
    return jnp.clip(num_usable, 0, jnp.maximum(room - 1, 0))


def _check_arrays(
    state: state_lib.SequenceState, drafts: Array, num_drafts: Array
) -> None:
    num_slots = state.num_slots
    for name, array, ndim in (("drafts", drafts, 2), ("num_drafts", num_drafts, 1)):
        fits = array.ndim == ndim and array.shape[0] == num_slots
        if not fits or array.dtype != jnp.int32:
            expected = f"int32[{num_slots}, J]" if ndim == 2 else f"int32[{num_slots}]"
            raise ValueError(
                f"`{name}` must be {expected} for a state of {num_slots} slots, got "
                f"{array.dtype}{list(array.shape)}."
            )


def _check_options(
    logits: Array,
    row_masks: Array | None,
    draft_probs: proposal_lib.DraftProbs,
    num_log_probs: int | None,
) -> None:
    num_slots, num_rows, vocab_size = logits.shape
    if row_masks is not None:
        shape = (num_slots, num_rows, sampling_lib.num_mask_words(vocab_size))
        if row_masks.shape != shape or row_masks.dtype != jnp.uint32:
            raise ValueError(
                f"`row_masks` must be uint32{list(shape)}, a bit per token as "
                f"`pack_mask` makes it, got {row_masks.dtype}{list(row_masks.shape)}."
            )
    if num_log_probs is not None and not 0 <= num_log_probs <= vocab_size:
        raise ValueError(
            f"`num_log_probs` must be None or in 0..{vocab_size}, got {num_log_probs}."
        )
    per_draft = (num_slots, num_rows - 1)
    match draft_probs:
        case None:
            return
        case proposal_lib.SparseProbs(ids=ids, probs=probs):
            fits = ids.shape[:2] == per_draft and ids.shape == probs.shape
            expected = f"[{num_slots}, {num_rows - 1}, N]"
        case proposal_lib.DenseProbs(probs=probs):
            fits = probs.shape == (*per_draft, vocab_size)
            expected = f"[{num_slots}, {num_rows - 1}, {vocab_size}]"
        case _:
            raise TypeError(
                "`draft_probs` must be None, DenseProbs or SparseProbs, got "
                f"{type(draft_probs).__name__}."
            )
    if not fits:
        raise ValueError(
            f"`draft_probs` must be {expected} for these rows, got {list(probs.shape)}."
        )


class _Outcome(NamedTuple):
    """What becomes of the drafts; fields as in `Judgement`."""

    hits: Array
    num_accepted: Array
    bonus_token: Array


def _accept(
    state: state_lib.SequenceState,
    ruled: Float32[Array, "B K V"],
    drafts: Int32[Array, "B J"],
    num_drafts: Int32[Array, " B"],
    draft_probs: proposal_lib.DraftProbs,
    accept_rule: AcceptRule,
) -> _Outcome:
    positions = state.length[:, None] + 1 + _columns(ruled)
    row_picks = picks.pick_tokens(ruled, positions, state.sampling)
    hits = drafts == row_picks[:, :-1]
    num_accepted = _num_leading(hits, num_drafts)
    matched = _Outcome(hits, num_accepted, _at_row(row_picks, num_accepted))
    if accept_rule == "match" or not drafts.shape[1]:
        return matched
    tested = _accept_by_test(
        state, ruled, row_picks, drafts, num_drafts, draft_probs, accept_rule
    )
    is_greedy = picks.is_greedy(state.sampling)
    return _Outcome(
        hits=jnp.where(is_greedy[:, None], matched.hits, tested.hits),
        num_accepted=jnp.where(is_greedy, num_accepted, tested.num_accepted),
        bonus_token=jnp.where(is_greedy, matched.bonus_token, tested.bonus_token),
    )


def _accept_by_test(
    state: state_lib.SequenceState,
    ruled: Float32[Array, "B K V"],
    row_picks: Int32[Array, "B K"],
    drafts: Int32[Array, "B J"],
    num_drafts: Int32[Array, " B"],
    draft_probs: proposal_lib.DraftProbs,
    accept_rule: AcceptRule,
) -> _Outcome:
    """Rejection sampling or block verification, with what it draws."""
    vocab_size = ruled.shape[-1]
    target_probs = jax.nn.softmax(picks.warp_logits(ruled, state.sampling), axis=-1)
    # A row to which a mask left no token has no distribution: nothing passes there.
    has_token = jnp.any(ruled > -jnp.inf, axis=-1, keepdims=True)
    target_probs = jnp.where(has_token, target_probs, 0)
    start = state.length + 1
    uniforms = picks.accept_uniforms(state.sampling.request_key, start, drafts.shape[1])
    match draft_probs:
        case None:
            dense = accept.one_hot_probs(drafts, vocab_size)
        case proposal_lib.SparseProbs(ids=ids, probs=probs):
            dense = accept.sparse_probs(ids, probs, vocab_size)
        case proposal_lib.DenseProbs(probs=dense):
            pass
    acceptance = _RULES[accept_rule](target_probs, dense, drafts, num_drafts, uniforms)
    num_accepted = acceptance.num_accepted
    # Where every draft stands the row's own pick follows: with no drafts offered, the
    # token is the one that plain decoding picks.
    resampled = picks.draw_from_probs(acceptance.next_probs, start, state.sampling)
    bonus_token = jnp.where(
        num_accepted == num_drafts, _at_row(row_picks, num_accepted), resampled
    )
    hits = accept.passes(target_probs, dense, drafts, uniforms)
    return _Outcome(hits, num_accepted, bonus_token)


def _is_valid(
    logits: Float32[Array, "B K V"],
    ruled: Float32[Array, "B K V"],
    drafts: Int32[Array, "B J"],
    outcome: _Outcome,
    config: config_lib.ModelConfig,
) -> Bool[Array, " B"]:
    """Rows that plain decoding comes to have finite logits, and a token left to pick.

    It comes to those behind accepted drafts; behind an end token it picks no more.
    """
    is_good = jnp.all(jnp.isfinite(logits), axis=-1) & jnp.any(
        ruled > -jnp.inf, axis=-1
    )
    ends = jnp.pad(is_end_token(drafts, config), ((0, 0), (1, 0)))
    is_reached = (_columns(ends) <= outcome.num_accepted[:, None]) & ~ends
    return jnp.all(is_good | ~is_reached, axis=1)


def _columns(array: Array) -> Int32[Array, "1 J"]:
    return jnp.arange(array.shape[1], dtype=jnp.int32)[None, :]


def _num_leading(
    hits: Bool[Array, "B J"], num_drafts: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    offered = hits & (_columns(hits) < num_drafts[:, None])
    leading = jnp.cumprod(offered.astype(jnp.int32), axis=1)
    return jnp.sum(leading, axis=1, dtype=jnp.int32)


def _at_row(values: Int32[Array, "B K"], row: Int32[Array, " B"]) -> Int32[Array, " B"]:
    return jnp.take_along_axis(values, row[:, None], axis=1)[:, 0]
