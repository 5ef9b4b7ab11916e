"""What a verify returns (`Verdict`), and what applying it emits (`Emission`)."""

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
class Verdict:
    """The result of one verify; nothing of it is in the state yet.

    Attributes:
      drafts: i32[B, J], the drafts that were judged; padding past a slot's count.
      num_accepted: i32[B], accepted drafts, 0..J.
      bonus_token: i32[B], the target's own token after the last accepted row. After a
        rejection under sampling, other engines call it the recovered token.
      is_finite: bool[B], the slot's logits were finite in every row that counts.
      hidden: [B, K, M], final hidden of every row, after the last norm.
      taps: residual streams [B, K, M] after the layers that were asked for.
      layers: uncommitted rows per layer, in order.
    """

    drafts: Array
    num_accepted: Array
    bonus_token: Array
    is_finite: Array
    hidden: Array
    taps: tuple[Array, ...]
    layers: tuple[LayerRows, ...]


@struct.dataclass
class Emission:
    """The tokens that one round gave each slot.

    Attributes:
      tokens: i32[B, K], valid up to `count`; 0 beyond.
      count: i32[B], 0 for a slot that is not active or failed.
      finished: bool[B], the slot ended in this round.
      reason: i32[B], `SequenceState.finish_reason` after it.
    """

    tokens: Array
    count: Array
    finished: Array
    reason: Array
