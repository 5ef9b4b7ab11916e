"""What a verify returns (`Verdict`), and what applying it emits (`Emission`)."""

from typing import Any

from flax import struct

from metrale_jax.axes import Array
from pallas_kernels import gated_delta


@struct.dataclass
class KVRows:
    """Uncommitted keys and values of the K rows of one attention layer."""

    keys: Array  # [B, K, Hkv, D]
    values: Array  # [B, K, Hkv, D]


@struct.dataclass
class RecurrentRows:
    """One recurrent layer: the folded matrix, and the K rows not in it."""

    recurrent_state: Array  # f32[B, Hv, Dk, Dv], the pending rows folded in
    records: gated_delta.Records  # of [B, K, ...]
    conv_inputs: Array  # [B, K, C]


LayerRows = KVRows | RecurrentRows


@struct.dataclass
class LogProbs:
    """The target's own log-probabilities, before any rule, warp or mask.

    Attributes:
      emitted: f32[B, K], of the token that each row emits.
      top_ids: i32[B, K, N], the N likeliest tokens of each row, best first.
      top: f32[B, K, N], theirs.
    """

    emitted: Array
    top_ids: Array
    top: Array


@struct.dataclass
class Judgement:
    """How the target judged the drafts of one round.

    Attributes:
      drafts: i32[B, J], the drafts that were judged; padding past a slot's count.
      num_drafts: i32[B], how many of them were offered.
      num_accepted: i32[B], leading accepted drafts, 0..num_drafts.
      bonus_token: i32[B], the target's own token after the last accepted row. After a
        rejection under sampling, other engines call it the recovered token.
      is_valid: bool[B], every row that counts had finite logits and a token to pick.
      hits: bool[B, J], each draft right by itself, whatever came before it.
      log_probs: `LogProbs` of the rows if they were asked for, else None.
    """

    drafts: Array
    num_drafts: Array
    num_accepted: Array
    bonus_token: Array
    is_valid: Array
    hits: Array
    log_probs: Any


@struct.dataclass
class Verdict:
    """The result of one verify; nothing of it is in the state yet.

    Attributes:
      judgement: what becomes of the drafts.
      hidden: [B, K, M], final hidden of every row, after the last norm.
      taps: residual streams [B, K, M] after the layers that were asked for.
      layers: uncommitted rows per layer, in order.
      tap_layers: which layers these were.
    """

    judgement: Judgement
    hidden: Array
    taps: tuple[Array, ...]
    layers: tuple[LayerRows, ...]
    tap_layers: tuple[int, ...] = struct.field(pytree_node=False, default=())

    @property
    def num_accepted(self) -> Array:
        """i32[B], see `Judgement`."""
        return self.judgement.num_accepted

    @property
    def bonus_token(self) -> Array:
        """i32[B], see `Judgement`."""
        return self.judgement.bonus_token


@struct.dataclass
class Emission:
    """The tokens that one round gave each slot.

    Attributes:
      tokens: i32[B, K], valid up to `count`; 0 beyond.
      count: i32[B], 0 for a slot that is not active or failed.
      finished: bool[B], the slot ended in this round.
      reason: i32[B], `SequenceState.finish_reason` after it.
      log_probs: `LogProbs` of the tokens if they were asked for, else None.
    """

    tokens: Array
    count: Array
    finished: Array
    reason: Array
    log_probs: Any = None
