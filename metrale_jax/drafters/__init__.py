"""Drafters: ways to guess the next tokens, behind one protocol (`protocol.Drafter`)."""

from metrale_jax.drafters.dflash import DFlashDrafter
from metrale_jax.drafters.dflash_config import DFlashConfig
from metrale_jax.drafters.dflash_params import DFlashParams, init_dflash_params
from metrale_jax.drafters.mtp import MtpDrafter, mtp_drafter
from metrale_jax.drafters.ngram import NGramDrafter
from metrale_jax.drafters.prompt_lookup import PromptLookupDrafter
from metrale_jax.drafters.protocol import (
    CommittedChunk,
    CommittedRows,
    Drafter,
    DrafterBase,
)
from metrale_jax.drafters.self_speculation import (
    SelfSpeculationDrafter,
    attention_layers,
)

__all__ = [
    "CommittedChunk",
    "CommittedRows",
    "DFlashConfig",
    "DFlashDrafter",
    "DFlashParams",
    "Drafter",
    "DrafterBase",
    "MtpDrafter",
    "NGramDrafter",
    "PromptLookupDrafter",
    "SelfSpeculationDrafter",
    "attention_layers",
    "init_dflash_params",
    "mtp_drafter",
]
