"""Self-speculation: the target itself, with layers left out, drafts for the target.

The idea is https://arxiv.org/abs/2309.08168. The layers that stay read the target's own
caches; nothing is stored, so there is no second cache and no copy of a recurrent state
to roll back: draft j + 1 comes from a forward over `last_token` and the j drafts before
it, from the committed state. Rows beside the first cost little where reading weights is
what takes the time.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from metrale_jax import config as config_lib
from metrale_jax import proposal as proposal_lib
from metrale_jax import state as state_lib
from metrale_jax.axes import Array
from metrale_jax.drafters import choice, protocol
from metrale_jax.model import params as params_lib
from metrale_jax.model import transformer
from pallas_kernels import dispatch


@struct.dataclass
class SelfSpeculationDrafter(choice.ChoosesFromLogits):
    """Drafts with some of the target's own layers; keeps no state.

    Attributes:
      layers: indices of the layers that stay, ascending; at least one.
      num_drafts: J, 1..15.
      draft_sampling: how drafts are chosen.
      num_candidates: likeliest tokens per draft to report; 0 for none.
    """

    layers: tuple[int, ...] = struct.field(pytree_node=False)
    num_drafts: int = struct.field(pytree_node=False, default=3)
    draft_sampling: choice.DraftSampling = struct.field(
        pytree_node=False, default="greedy"
    )
    num_candidates: int = struct.field(pytree_node=False, default=0)

    def __post_init__(self) -> None:
        protocol.check_num_drafts(self.num_drafts)
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(
                "`layers` must name layers of the target in ascending order, got "
                f"{self.layers}."
            )

    def describe_state(
        self,
        config: config_lib.ModelConfig,
        decode: config_lib.DecodeConfig,
        *,
        dtype: DTypeLike,
    ) -> None:
        self.check_layers(config)

    def propose(
        self,
        params: params_lib.ModelParams,
        state: state_lib.SequenceState,
        *,
        config: config_lib.ModelConfig,
        implementation: dispatch.Implementation | None,
    ) -> proposal_lib.Proposal:
        self.check_layers(config)
        thin_params = dataclasses.replace(
            params, layers=tuple(params.layers[index] for index in self.layers)
        )
        thin_state = dataclasses.replace(
            state, layers=tuple(state.layers[index] for index in self.layers)
        )
        thin_config = self._thin_config(config)
        num_slots, num_drafts = state.num_slots, self.num_drafts

        def add_draft(rows: Array, column: Array) -> tuple[Array, choice.Choice]:
            """Drafts from row `column`; later rows hold padding, which it can't see."""
            output = transformer.verify_rows(
                thin_params,
                thin_state,
                rows,
                config=thin_config,
                implementation=implementation,
            )
            hidden = jnp.take_along_axis(
                output.hidden, jnp.full((num_slots, 1, 1), column), axis=1
            )
            logits = transformer.project_logits(params, hidden)
            chosen = choice.choose_drafts(
                logits,
                state,
                self.draft_sampling,
                self.num_candidates,
                first_column=column,
            )
            chosen = jax.tree.map(lambda leaf: leaf[:, 0], chosen)
            # The last draft has no row of its own: its write is dropped.
            rows = rows.at[:, column + 1].set(chosen.drafts, mode="drop")
            return rows, chosen

        rows = jnp.pad(state.last_token[:, None], ((0, 0), (0, num_drafts - 1)))
        columns = jnp.arange(num_drafts, dtype=jnp.int32)
        _, chosen = jax.lax.scan(add_draft, rows, columns)
        chosen = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), chosen)
        return choice.as_proposal(chosen, jnp.full(num_slots, num_drafts, jnp.int32))

    def check_layers(self, config: config_lib.ModelConfig) -> None:
        """Raises ValueError unless the layers are the target's."""
        if self.layers[0] < 0 or self.layers[-1] >= config.num_layers:
            raise ValueError(
                f"`layers` must be in 0..{config.num_layers - 1}, the target's, got "
                f"{self.layers}."
            )

    def _thin_config(self, config: config_lib.ModelConfig) -> config_lib.ModelConfig:
        return dataclasses.replace(
            config,
            layers=tuple(config.layers[index] for index in self.layers),
            moe_layers=tuple(
                place
                for place, index in enumerate(self.layers)
                if index in config.moe_layers
            ),
        )


def attention_layers(config: config_lib.ModelConfig) -> tuple[int, ...]:
    """The target without its recurrent layers: a usual choice of what stays."""
    return tuple(
        index for index, kind in enumerate(config.layers) if kind == "full_attention"
    )
