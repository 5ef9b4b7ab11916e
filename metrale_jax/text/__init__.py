"""Text on the host: tokenizer, chat templates, streamed text and stop strings."""

from metrale_jax.text.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    Message,
    RenderLimits,
    select_template,
)
from metrale_jax.text.detokenizer import IncrementalDetokenizer
from metrale_jax.text.stop import StopMatcher
from metrale_jax.text.stream import TextStream
from metrale_jax.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "IncrementalDetokenizer",
    "Message",
    "RenderLimits",
    "StopMatcher",
    "TextStream",
    "Tokenizer",
    "select_template",
]
