"""Propose: asks a drafter for the next round's drafts, and cuts what can't pay."""

import dataclasses

import jax
import jax.numpy as jnp

from metrale_jax import config as config_lib
from metrale_jax import proposal as proposal_lib
from metrale_jax import state as state_lib
from metrale_jax.axes import Array, Int32
from metrale_jax.drafters import confidence, protocol
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch


def propose(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    drafter: protocol.Drafter,
    max_num_drafts: Int32[Array, " B"] | None = None,
    *,
    config: config_lib.ModelConfig,
    limits: confidence.DraftLimits = confidence.NO_LIMITS,
    implementation: dispatch.Implementation | None = None,
) -> state_lib.SequenceState:
    """Puts drafts for the positions after `last_token` into `state.proposal`.

    Donates `state` when called as a step. A pure function of what is committed, so that
    proposing twice gives the same drafts. Slots that are not active get none, and no
    slot gets more than its `length_limit` leaves room for.

    Args:
      params: of the target.
      state: B slots.
      drafter: the drafter.
      max_num_drafts: most drafts per slot in this round; None for the drafter's most.
      config: of the target.
      limits: rules that drop drafts of little promise.
      implementation: of the kernels.

    Raises:
      ValueError: the state was made without this drafter, or with less room; or
        `limits` prunes drafts that were drawn.
    """
    protocol.check_state(drafter, state, config)
    if limits.prune_ratio is not None and state.proposal.probs is not None:
        raise ValueError(
            "`limits.prune_ratio` would bias which drawn drafts are offered; choose "
            "drafts greedily, or use `confidence_stop`."
        )
    if max_num_drafts is not None and max_num_drafts.shape != (state.num_slots,):
        raise ValueError(
            f"`max_num_drafts` must be int32[{state.num_slots}], got shape "
            f"{max_num_drafts.shape}."
        )
    if drafter.max_drafts > state.max_drafts:
        raise ValueError(
            f"`state` holds {state.max_drafts} drafts a slot, but `drafter` proposes "
            f"{drafter.max_drafts}; make the state with that `max_drafts`."
        )
    with jax.named_scope("propose"):
        proposal = drafter.propose(
            params, state, config=config, implementation=implementation
        )
        if proposal.log_probs is None:
            no_confidence = jnp.zeros(proposal.drafts.shape, jnp.float32)
            proposal = dataclasses.replace(proposal, log_probs=no_confidence)
        # The bonus token takes one place of the room.
        room = state.length_limit - (state.length + 1) - 1
        num_drafts = jnp.minimum(proposal.num_drafts, room)
        if max_num_drafts is not None:
            num_drafts = jnp.minimum(num_drafts, max_num_drafts)
        num_drafts = jnp.where(state.active, jnp.maximum(num_drafts, 0), 0)
        num_drafts = confidence.limit_drafts(num_drafts, proposal.log_probs, limits)
        proposal = dataclasses.replace(proposal, num_drafts=num_drafts)
    return dataclasses.replace(state, proposal=_fit(proposal, state.proposal))


def _fit(
    proposal: proposal_lib.Proposal, pending: proposal_lib.Proposal
) -> proposal_lib.Proposal:
    """Pads a drafter's columns to those of the state."""
    if jax.tree.structure(proposal) != jax.tree.structure(pending):
        raise ValueError(
            f"`drafter` proposes {_fields(proposal)}, but `state` has room for "
            f"{_fields(pending)}; make the state with this `drafter`, and let its "
            "`describe_probs` say what it proposes."
        )

    def pad(new: Array, old: Array) -> Array:
        widths = [(0, 0)] * new.ndim
        if new.ndim > 1:
            widths[1] = (0, old.shape[1] - new.shape[1])
        return jnp.pad(new, widths).astype(old.dtype)

    return jax.tree.map(pad, proposal, pending)


def _fields(proposal: proposal_lib.Proposal) -> str:
    """Names of the fields that are there."""
    names = [field.name for field in dataclasses.fields(proposal)]
    return ", ".join(name for name in names if getattr(proposal, name) is not None)
