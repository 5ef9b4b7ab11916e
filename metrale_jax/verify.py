"""Verify: one forward over K rows per slot, judged row by row. Changes no state."""

from typing import Literal

import jax
import jax.numpy as jnp

from metrale_jax import accept, logit_rules, picks
from metrale_jax import config as config_lib
from metrale_jax import proposal as proposal_lib
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
      ValueError: `drafts` or `num_drafts` is not int32 of B slots, or an option is
        unknown.
    """
    check_slots("drafts", drafts, state.num_slots, ndim=2)
    check_slots("num_drafts", num_drafts, state.num_slots, ndim=1)
    num_drafts = jnp.clip(num_drafts, 0, drafts.shape[1])
    # Padding may hold anything; the embedding is read for tokens only.
    is_offered = _columns(drafts) < num_drafts[:, None]
    inputs = jnp.where(is_offered, drafts, 0)
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

    Arguments and errors as for `verify`; `num_drafts` is in 0..J.
    """
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
        row_index = jnp.arange(logits.shape[1], dtype=jnp.int32)
        positions = history.length[:, None] + row_index[None, :]
        row_picks = picks.pick_tokens(ruled, positions, state.sampling)
        hits = drafts == row_picks[:, :-1]
        num_accepted = _num_leading(hits, num_drafts)
        bonus_token = _at_row(row_picks, num_accepted)
        if accept_rule != "match" and drafts.shape[1]:
            sampled = _judge_sampled(
                state, ruled, row_picks, drafts, num_drafts, draft_probs, accept_rule
            )
            is_greedy = picks.is_greedy(state.sampling)
            hits = jnp.where(is_greedy[:, None], hits, sampled[0])
            num_accepted = jnp.where(is_greedy, num_accepted, sampled[1])
            bonus_token = jnp.where(is_greedy, bonus_token, sampled[2])
        # Rows past the offered drafts hold padding and decide nothing.
        counts = row_index[None, :] <= num_drafts[:, None]
        is_good = jnp.all(jnp.isfinite(logits), axis=-1) | ~counts
        # Where nothing is picked any more, a mask may leave no token.
        is_reached = _is_reached(drafts, num_accepted, config.end_token_ids)
        is_good &= jnp.any(ruled > -jnp.inf, axis=-1) | ~is_reached
        log_probs = None
        if num_log_probs is not None:
            emitted = emitted_tokens(drafts, num_accepted, bonus_token)
            log_probs = compute_log_probs(logits, emitted, num_log_probs)
    return verdict_lib.Judgement(
        drafts=drafts,
        num_drafts=num_drafts,
        num_accepted=num_accepted,
        bonus_token=bonus_token,
        is_finite=jnp.all(is_good, axis=1),
        hits=hits & (_columns(drafts) < num_drafts[:, None]),
        log_probs=log_probs,
    )


def emitted_tokens(
    drafts: Int32[Array, "B J"],
    num_accepted: Int32[Array, " B"],
    bonus_token: Int32[Array, " B"],
) -> Int32[Array, "B K"]:
    """The accepted drafts, then the bonus token; stale beyond."""
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    is_bonus = _columns(padded) == num_accepted[:, None]
    return jnp.where(is_bonus, bonus_token[:, None], padded)


def compute_log_probs(
    logits: Float32[Array, "B K V"], emitted: Int32[Array, "B K"], num_top: int
) -> verdict_lib.LogProbs:
    """Log-probabilities of the emitted token and of the `num_top` likeliest."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, top_ids = jax.lax.top_k(logits, num_top)
    chosen = jnp.take_along_axis(logits, emitted[..., None], axis=-1)
    return verdict_lib.LogProbs(
        emitted=(chosen - total)[..., 0],
        top_ids=top_ids.astype(jnp.int32),
        top=top - total,
    )


def check_slots(name: str, array: Array, num_slots: int, *, ndim: int) -> None:
    """Raises ValueError unless the array is int32 with B slots in front."""
    fits = array.ndim == ndim and array.shape[0] == num_slots
    if not fits or array.dtype != jnp.int32:
        expected = f"int32[{num_slots}, J]" if ndim == 2 else f"int32[{num_slots}]"
        raise ValueError(
            f"`{name}` must be {expected} for a state of {num_slots} slots, got "
            f"{array.dtype}{list(array.shape)}."
        )


def _judge_sampled(
    state: state_lib.SequenceState,
    ruled: Float32[Array, "B K V"],
    row_picks: Int32[Array, "B K"],
    drafts: Int32[Array, "B J"],
    num_drafts: Int32[Array, " B"],
    draft_probs: proposal_lib.DraftProbs,
    accept_rule: AcceptRule,
) -> tuple[Bool[Array, "B J"], Int32[Array, " B"], Int32[Array, " B"]]:
    """Returns hits, num_accepted and bonus token by an accept test."""
    vocab_size = ruled.shape[-1]
    target_probs = jax.nn.softmax(picks.warp_logits(ruled, state.sampling), axis=-1)
    start = state.length + 1
    uniforms = picks.accept_uniforms(state.sampling.request_key, start, drafts.shape[1])
    match draft_probs:
        case None:
            dense = accept.one_hot_probs(drafts, vocab_size)
        case proposal_lib.SparseProbs(ids=ids, probs=probs):
            dense = accept.sparse_probs(ids, probs, vocab_size)
        case proposal_lib.DenseProbs(probs=dense):
            pass
        case _:
            raise TypeError(
                "`draft_probs` must be None, DenseProbs or SparseProbs, got "
                f"{type(draft_probs).__name__}."
            )
    acceptance = _RULES[accept_rule](target_probs, dense, drafts, num_drafts, uniforms)
    num_accepted = acceptance.num_accepted
    # Where every draft stands the row's own pick follows: with no drafts offered, the
    # token is the one that plain decoding picks.
    resampled = picks.draw_from_probs(acceptance.next_probs, start, state.sampling)
    bonus_token = jnp.where(
        num_accepted == num_drafts, _at_row(row_picks, num_accepted), resampled
    )
    hits = accept.passes(target_probs, dense, drafts, uniforms)
    return hits, num_accepted, bonus_token


def _columns(array: Array) -> Int32[Array, "1 J"]:
    return jnp.arange(array.shape[1], dtype=jnp.int32)[None, :]


def _num_leading(
    hits: Bool[Array, "B J"], num_drafts: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    offered = hits & (_columns(hits) < num_drafts[:, None])
    leading = jnp.cumprod(offered.astype(jnp.int32), axis=1)
    return jnp.sum(leading, axis=1, dtype=jnp.int32)


def _is_reached(
    drafts: Int32[Array, "B J"],
    num_accepted: Int32[Array, " B"],
    end_token_ids: tuple[int, ...],
) -> Bool[Array, "B K"]:
    """Rows that plain decoding comes to: behind accepted drafts, none an end token."""
    ids = jnp.array(end_token_ids, jnp.int32).reshape(1, 1, -1)
    ends = jnp.any(drafts[:, :, None] == ids, axis=-1)
    num_before = jnp.pad(jnp.cumsum(ends.astype(jnp.int32), axis=1), ((0, 0), (1, 0)))
    return (_columns(num_before) <= num_accepted[:, None]) & (num_before == 0)


def _at_row(values: Int32[Array, "B K"], row: Int32[Array, " B"]) -> Int32[Array, " B"]:
    return jnp.take_along_axis(values, row[:, None], axis=1)[:, 0]
