"""Drafters: ways to guess the next tokens, behind one protocol (`protocol.Drafter`)."""

from metrale_jax.drafters.dflash import DFlashDrafter
from metrale_jax.drafters.dflash_config import DFlashConfig
from metrale_jax.drafters.dflash_params import DFlashParams
from metrale_jax.drafters.mtp import MtpDrafter, mtp_drafter
from metrale_jax.drafters.ngram import NGramDrafter
from metrale_jax.drafters.prompt_lookup import PromptLookupDrafter
from metrale_jax.drafters.self_speculation import (
    SelfSpeculationDrafter,
    attention_layers,
)

__all__ = [
    "DFlashConfig",
    "DFlashDrafter",
    "DFlashParams",
    "MtpDrafter",
    "NGramDrafter",
    "PromptLookupDrafter",
    "SelfSpeculationDrafter",
    "attention_layers",
    "mtp_drafter",
]
