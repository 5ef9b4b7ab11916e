"""Verify: one forward over K rows per slot, judged row by row. Changes no state."""

import jax
import jax.numpy as jnp

from metrale_jax import config as config_lib
from metrale_jax import picks
from metrale_jax import state as state_lib
from metrale_jax import verdict as verdict_lib
from metrale_jax.axes import Array, Int32
from metrale_jax.model import params as params_lib
from metrale_jax.model import transformer
from pallas_kernels import dispatch


def verify(
    params: params_lib.ModelParams,
    state: state_lib.SequenceState,
    drafts: Int32[Array, "B J"],
    num_drafts: Int32[Array, " B"],
    *,
    config: config_lib.ModelConfig,
    taps: tuple[int, ...] = (),
    implementation: dispatch.Implementation | None = None,
) -> verdict_lib.Verdict:
    """Runs `[last_token, d1..dJ]` of every slot and accepts the leading right drafts.

    Donates and changes nothing; `apply_verdict` applies the result. Counts of drafts
    may differ per slot and be 0 (plain decoding); a slot that is not active is inert.

    Row j's pick is the token after row j's input; draft j + 1 is right while it equals
    that pick and all drafts before it were right. The bonus token is the pick of the
    last accepted row. Drafts past a slot's `num_drafts` are never accepted.

    Raises:
      ValueError: `drafts` or `num_drafts` is not int32 of B slots.
    """
    check_slots("drafts", drafts, state.num_slots, ndim=2)
    check_slots("num_drafts", num_drafts, state.num_slots, ndim=1)
    num_drafts = jnp.clip(num_drafts, 0, drafts.shape[1])
    tokens = jnp.concatenate([state.last_token[:, None], drafts], axis=1)
    output = transformer.verify_rows(
        params, state, tokens, config=config, taps=taps, implementation=implementation
    )
    logits = transformer.project_logits(params, output.hidden)
    num_rows = tokens.shape[1]
    row_index = jnp.arange(num_rows, dtype=jnp.int32)
    positions = state.length[:, None] + 1 + row_index[None, :]
    with jax.named_scope("picks"):
        row_picks = picks.pick_tokens(logits, positions, state.sampling)
    is_right = drafts == row_picks[:, :-1]
    is_offered = row_index[None, :-1] < num_drafts[:, None]
    leading = jnp.cumprod((is_right & is_offered).astype(jnp.int32), axis=1)
    num_accepted = jnp.sum(leading, axis=1)
    bonus_token = jnp.take_along_axis(row_picks, num_accepted[:, None], axis=1)[:, 0]
    # Rows past the offered drafts hold padding and decide nothing.
    counts = row_index[None, :] <= num_drafts[:, None]
    row_is_finite = jnp.all(jnp.isfinite(logits), axis=-1)
    return verdict_lib.Verdict(
        drafts=drafts,
        num_accepted=num_accepted,
        bonus_token=bonus_token,
        is_finite=jnp.all(row_is_finite | ~counts, axis=1),
        hidden=output.hidden,
        taps=output.taps,
        layers=output.layers,
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
