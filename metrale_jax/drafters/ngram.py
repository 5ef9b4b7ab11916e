"""The n-gram drafter: what followed the longest earlier match of the text's end."""

import jax.numpy as jnp
from flax import struct

from metrale_jax import config as config_lib
from metrale_jax import proposal as proposal_lib
from metrale_jax import state as state_lib
from metrale_jax.drafters import protocol, suffix
from metrale_jax.model import params as params_lib
from pallas_kernels import dispatch


@struct.dataclass
class NGramDrafter(protocol.DrafterBase):
    """Proposes the tokens after the longest match; the earliest of equal matches.

    The text that is searched is prompt and output, `last_token` included. Keeps no
    state of its own.

    Attributes:
      num_drafts: J, 1..15.
      min_match: tokens that must match, at least 1.
      max_match: longer matches count as this long.
    """

    num_drafts: int = struct.field(pytree_node=False, default=3)
    min_match: int = struct.field(pytree_node=False, default=2)
    max_match: int = struct.field(pytree_node=False, default=16)

    def __post_init__(self) -> None:
        protocol.check_num_drafts(self.num_drafts)
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                "`min_match` must be in 1..max_match "
                f"({self.max_match}), got {self.min_match}."
            )

    def propose(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> proposal_lib.Proposal:
        num_tokens = state.length + 1
        match = suffix.match_lengths(state.tokens, num_tokens, self.max_match)
        match_end = jnp.argmax(match, axis=1).astype(jnp.int32)
        is_found = jnp.max(match, axis=1) >= self.min_match
        drafts = suffix.continuation(
            state.tokens, num_tokens, match_end, self.num_drafts
        )
        return proposal_lib.Proposal(
            drafts=drafts,
            num_drafts=jnp.where(is_found, self.num_drafts, 0),
        )
