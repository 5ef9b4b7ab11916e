"""From a drafter's logits to drafts: what drafters with a distribution share."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from metrale_jax import config as config_lib
from metrale_jax import picks
from metrale_jax import proposal as proposal_lib
from metrale_jax import state as state_lib
from metrale_jax.axes import Array, Float32, Int32
from metrale_jax.drafters import protocol

# "greedy" takes each draft's likeliest token; "sampled" draws it as the slot's own
# tokens are warped and drawn, and hands on the distribution, for the accept rules that
# compare it with the target's.
DraftSampling = Literal["greedy", "sampled"]


class Choice(NamedTuple):
    """Drafts of some columns of a round, as in `Proposal`.

    Attributes:
      drafts: i32[B, J].
      log_probs: f32[B, J], before any warping.
      probs: f32[B, J, V], what sampled drafts were drawn from; else None.
      candidates: i32[B, J, N], likeliest tokens, best first; None for N = 0.
    """

    drafts: Array
    log_probs: Array
    probs: Array | None
    candidates: Array | None


def check_options(draft_sampling: str, num_candidates: int, num_tokens: int) -> None:
    """Raises ValueError for an option out of its range.

    Args:
      draft_sampling: how drafts are chosen.
      num_candidates: likeliest tokens to report.
      num_tokens: tokens that the drafter tells apart.
    """
    if draft_sampling not in get_args(DraftSampling):
        raise ValueError(
            f"`draft_sampling` must be greedy or sampled, got {draft_sampling!r}."
        )
    if not 0 <= num_candidates <= num_tokens:
        raise ValueError(
            f"`num_candidates` must be in 0..{num_tokens}, the tokens that the drafter "
            f"tells apart, got {num_candidates}."
        )


class ChoosesFromLogits(protocol.DrafterBase):
    """A drafter with the fields `draft_sampling` and `num_candidates`."""

    draft_sampling: DraftSampling
    num_candidates: int

    def describe_probs(
        self, config: config_lib.ModelConfig, decode: config_lib.DecodeConfig
    ) -> tuple[Any, Any]:
        def per_draft(dtype: Any, size: int) -> Any:
            shape = (decode.num_slots, decode.max_drafts, size)
            return jax.ShapeDtypeStruct(shape, dtype)

        probs = candidates = None
        if self.draft_sampling == "sampled":
            probs = proposal_lib.DenseProbs(per_draft(jnp.float32, config.vocab_size))
        if self.num_candidates:
            candidates = per_draft(jnp.int32, self.num_candidates)
        return probs, candidates


def choose_drafts(
    logits: Float32[Array, "B J V"],
    state: state_lib.SequenceState,
    draft_sampling: DraftSampling,
    num_candidates: int,
    *,
    first_column: Int32[Array, ""] | int = 0,
) -> Choice:
    """Chooses the drafts of J columns, from column `first_column` of the round on."""
    probs = candidates = None
    if draft_sampling == "sampled":
        drafts, probs = picks.draw_drafts(
            logits, state.length + 1, state.sampling, first_column=first_column
        )
    else:
        drafts = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if num_candidates:
        candidates = jax.lax.top_k(logits, num_candidates)[1].astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, drafts[..., None], axis=-1)[..., 0]
    log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return Choice(drafts, log_probs, probs, candidates)


def as_proposal(
    choice: Choice, num_drafts: Int32[Array, " B"]
) -> proposal_lib.Proposal:
    """The drafts of a whole round as a Proposal."""
    probs = None if choice.probs is None else proposal_lib.DenseProbs(choice.probs)
    return proposal_lib.Proposal(
        drafts=choice.drafts,
        num_drafts=num_drafts,
        log_probs=choice.log_probs,
        probs=probs,
        candidates=choice.candidates,
    )
