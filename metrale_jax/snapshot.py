"""One slot's whole state on its own: to fork it, to go back to it, to save it.

A recurrent state has no length to cut, so there is no other way back to an earlier
position. Taking a snapshot between rounds is always safe: nothing that was rejected is
ever in the state.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from metrale_jax import indices
from metrale_jax import state as state_lib
from metrale_jax.axes import Array, Int32


@struct.dataclass
class Snapshot:
    """A slot's values, and the contents of its pages.

    Attributes:
      slot: a `SequenceState` without the leading B; in the place of each `KVCache`
        stand the slot's own pages, [pages per slot, page, Hkv, D]. It includes pending
        drafts, the drafter's state, counters and sampling options.
    """

    slot: state_lib.SequenceState


def take_snapshot(state: state_lib.SequenceState, slot: Int32[Array, ""]) -> Snapshot:
    """Copies a slot (i32[]) out of a batch. Donates nothing."""
    pages = state.page_table[slot]

    def take(node: Any) -> Any:
        if isinstance(node, state_lib.KVCache):
            return jax.tree.map(lambda leaf: leaf.at[pages].get(mode="clip"), node)
        return node[slot]

    return Snapshot(jax.tree.map(take, state, is_leaf=_is_cache))


def restore_snapshot(
    state: state_lib.SequenceState,
    slot: Int32[Array, ""],
    snapshot: Snapshot,
    pages: Int32[Array, " pages"] | None = None,
) -> state_lib.SequenceState:
    """Puts a snapshot into a slot, of the same batch or of another like it.

    Donates `state` when called as a step. What the slot held before is gone, as after
    `insert`. Continuing gives what continuing the original would have given; a fork
    that shall sample other tokens needs another `request_key`.

    Args:
      state: the batch to put it into.
      slot: where.
      snapshot: from `take_snapshot`.
      pages: pages that the slot may write from now on, as in `SlotRequest`: at least
        as many as hold the snapshot's tokens. None takes the slot's own run of pages,
        for batches in which every slot has one, as `config.for_slots` makes them. The
        slot's limit is lowered to what they hold; a
        slot without room for another token finishes with its next round.

    Raises:
      ValueError: the batch was made with other sizes, or for another drafter; or it
        has too few pages to give every slot its own.
    """
    _check_alike(state, snapshot)
    if pages is None:
        pages = state_lib.own_pages(state, slot)

    def put(node: Any, saved: Any) -> Any:
        if isinstance(node, state_lib.KVCache):
            # A page that is not there is one past the end: written nowhere.
            return jax.tree.map(
                lambda leaf, rows: indices.write_rows(leaf, (pages,), rows), node, saved
            )
        return indices.write_rows(node, (slot,), saved)

    restored = jax.tree.map(put, state, snapshot.slot, is_leaf=_is_cache)
    limit = jnp.minimum(
        snapshot.slot.length_limit, state_lib.page_capacity(state, pages)
    )
    return dataclasses.replace(
        restored,
        page_table=indices.write_rows(state.page_table, (slot,), pages),
        length_limit=indices.write_rows(state.length_limit, (slot,), limit),
    )


def _is_cache(node: Any) -> bool:
    return isinstance(node, state_lib.KVCache)


def _check_alike(state: state_lib.SequenceState, snapshot: Snapshot) -> None:
    expected = jax.eval_shape(take_snapshot, state, jnp.int32(0))
    found = jax.eval_shape(lambda: snapshot)
    if jax.tree.structure(found) != jax.tree.structure(expected):
        raise ValueError(
            "`snapshot` holds other fields than `state`; both need the same target and "
            "drafter."
        )
    for (path, one), other in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"`snapshot` has {one.dtype}{list(one.shape)} where `state` has "
                f"{other.dtype}{list(other.shape)} ({jax.tree_util.keystr(path)}); "
                "make both with the same config and DecodeConfig, but for slots and "
                "pages."
            )
