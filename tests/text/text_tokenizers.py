"""Small tokenizers of the kinds that checkpoints ship, built on the spot."""

import functools
import json
import pathlib
from typing import Any

import tokenizers
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from metrale_jax.text import Tokenizer
from metrale_jax.text import detokenizer as detokenizer_lib

# Special in the sense of the library: skipped in decoded text.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Added, but shown: what a caller parses in the output.
SHOWN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "｜é ▁｜")

# As published for Qwen3.5: contractions, words, single digits, punctuation, space.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog, and then the dog sleeps",
    "def add(first, second):\n    return first + second\n",
    "你好，世界。今天的天气很好。 naïve café übergröße",
    "<tool_call> a stop string ends the text; the stop string is not shown",
    "😀 👩‍👩‍👧 🇩🇪 numbers 0123456789 and more numbers 42",
)
_VOCAB_SIZE = 400


@functools.cache
def byte_level_json() -> str:
    """Byte-level BPE as Qwen has it, in the text of tokenizer.json."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return _with_added_tokens(backend)


@functools.cache
def metaspace_json(prepend_scheme: str = "always") -> str:
    """BPE over visible spaces; the first token drops its space unless told not to."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE, special_tokens=["<unk>"], show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return _with_added_tokens(backend)


@functools.cache
def byte_fallback_json() -> str:
    """SentencePiece style: visible spaces, and bytes for characters without a token."""
    content = json.loads(metaspace_json())
    # Few characters have a token of their own here, so most text needs bytes.
    kept = set("▁abcdefghijklmnopqrstuvwxyz<>_")
    vocab: dict[str, int] = {"<unk>": 0}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + [
        token for token in content["model"]["vocab"] if set(token) <= kept
    ]:
        vocab.setdefault(token, len(vocab))
    merges = [
        tuple(merge)
        for merge in content["model"]["merges"]
        if all(part in vocab for part in (*merge, "".join(merge)))
    ]
    model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_added_tokens(backend)


@functools.cache
def no_decoder_json() -> str:
    """A word-level vocabulary without a decoder: tokens are joined by spaces."""
    words = ("the", "quick", "▁fox", "<0x41>", "é", "")
    vocab = {word: index for index, word in enumerate(words)}
    return _with_added_tokens(tokenizers.Tokenizer(models.WordLevel(vocab, "the")))


FAMILIES = {
    "byte_level": byte_level_json,
    "metaspace": metaspace_json,
    "metaspace_never": functools.partial(metaspace_json, "never"),
    "byte_fallback": byte_fallback_json,
    "no_decoder": no_decoder_json,
}


@functools.cache
def tokenizer(family: str = "byte_level") -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(FAMILIES[family]())
    return Tokenizer(backend, named_tokens={"eos_token": "<|im_end|>"})


def byte_ids(data: bytes, family: str = "byte_level") -> list[int]:
    """Ids of bytes, one token each, where encoding would have merged them."""
    alphabet = detokenizer_lib.byte_level_alphabet()
    byte_level = {value: character for character, value in alphabet.items()}
    names = [
        f"<0x{value:02X}>" if family == "byte_fallback" else byte_level[value]
        for value in data
    ]
    ids = [tokenizer(family).token_id(name) for name in names]
    return [token_id for token_id in ids if token_id is not None]


def write_folder(
    folder: pathlib.Path,
    *,
    config: dict[str, Any] | None = None,
    tokenizer_json: str | None = None,
) -> pathlib.Path:
    """Writes a checkpoint's text files; `config` is tokenizer_config.json."""
    text = byte_level_json() if tokenizer_json is None else tokenizer_json
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _with_added_tokens(backend: tokenizers.Tokenizer) -> str:
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, special=True) for token in SPECIAL_TOKENS]
    )
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=False, normalized=False)
            for token in SHOWN_TOKENS
        ]
    )
    # What encoding adds around a text, so that `add_special_tokens` has an effect.
    end = "<|endoftext|>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, backend.token_to_id(end))]
    )
    return backend.to_str()
