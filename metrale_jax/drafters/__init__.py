"""Drafters: ways to guess the next tokens, behind one protocol (`protocol.Drafter`)."""

from metrale_jax.drafters.ngram import NGramDrafter
from metrale_jax.drafters.prompt_lookup import PromptLookupDrafter
from metrale_jax.drafters.self_speculation import (
    SelfSpeculationDrafter,
    attention_layers,
)

__all__ = [
    "NGramDrafter",
    "PromptLookupDrafter",
    "SelfSpeculationDrafter",
    "attention_layers",
]
