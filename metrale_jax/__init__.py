"""Lossless speculative decoding for hybrid language models, as pure JAX functions."""

from metrale_jax import checkpoint, config, drafters, text
from metrale_jax.chunk import PrefillOutput
from metrale_jax.drafters.confidence import DraftLimits
from metrale_jax.proposal import DenseProbs, Proposal, SparseProbs
from metrale_jax.sampling import SamplingOptions, pack_mask, request_key
from metrale_jax.snapshot import Snapshot
from metrale_jax.state import (
    SequenceState,
    SlotRequest,
    describe_state,
    init_state,
    make_request,
)
from metrale_jax.statistics import Statistics, Summary, summarize
from metrale_jax.steps import (
    apply_verdict,
    decode_round,
    decode_rounds,
    insert,
    prefill,
    propose,
    release,
    restore_snapshot,
    separate_round,
    take_snapshot,
    verify_batched,
    verify_k4,
)
from metrale_jax.verdict import Emission, Judgement, LogProbs, Verdict
from metrale_jax.verify import AcceptRule

__all__ = [
    "AcceptRule",
    "DenseProbs",
    "DraftLimits",
    "Emission",
    "Judgement",
    "LogProbs",
    "PrefillOutput",
    "Proposal",
    "SamplingOptions",
    "SequenceState",
    "SlotRequest",
    "Snapshot",
    "SparseProbs",
    "Statistics",
    "Summary",
    "Verdict",
    "apply_verdict",
    "checkpoint",
    "config",
    "decode_round",
    "decode_rounds",
    "describe_state",
    "drafters",
    "init_state",
    "insert",
    "make_request",
    "pack_mask",
    "prefill",
    "propose",
    "release",
    "request_key",
    "restore_snapshot",
    "separate_round",
    "summarize",
    "take_snapshot",
    "text",
    "verify_batched",
    "verify_k4",
]
