"""Lossless speculative decoding for hybrid language models, as pure JAX functions."""

from metrale_jax import checkpoint, config, drafters, text
from metrale_jax.drafters.confidence import DraftLimits
from metrale_jax.proposal import DenseProbs, Proposal, SparseProbs
from metrale_jax.sampling import SamplingOptions, make_sampling, request_key
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
    take_snapshot,
    verify_batched,
    verify_k4,
)
from metrale_jax.verdict import Emission, LogProbs, Verdict

__all__ = [
    "DenseProbs",
    "DraftLimits",
    "Emission",
    "LogProbs",
    "Proposal",
    "SamplingOptions",
    "SequenceState",
    "SlotRequest",
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
    "make_sampling",
    "prefill",
    "propose",
    "release",
    "request_key",
    "restore_snapshot",
    "summarize",
    "take_snapshot",
    "text",
    "verify_batched",
    "verify_k4",
]
