"""Lossless speculative decoding for hybrid language models, as pure JAX functions."""

from metrale_jax import checkpoint, config, text
from metrale_jax.picks import request_key
from metrale_jax.state import (
    Sampling,
    SequenceState,
    SlotRequest,
    describe_state,
    greedy_request,
    init_state,
)
from metrale_jax.steps import (
    apply_verdict,
    decode_round,
    decode_rounds,
    insert,
    prefill,
    release,
    verify_batched,
    verify_k4,
)
from metrale_jax.verdict import Emission, Verdict

__all__ = [
    "Emission",
    "Sampling",
    "SequenceState",
    "SlotRequest",
    "Verdict",
    "apply_verdict",
    "checkpoint",
    "config",
    "decode_round",
    "decode_rounds",
    "describe_state",
    "greedy_request",
    "init_state",
    "insert",
    "prefill",
    "release",
    "request_key",
    "text",
    "verify_batched",
    "verify_k4",
]
