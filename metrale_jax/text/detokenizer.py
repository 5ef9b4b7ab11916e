"""Incremental detokenization: the text of a growing list of tokens, piece by piece.

A tokenizer's decoder is a chain of steps over a list of strings. Each step is kept here
as a stage that holds its own small state, so a token costs the same however long the
text is, and the pieces joined are exactly what decoding all tokens at once gives.
Decoding a window over the last few tokens does not reach that: it loses the leading
space after a token without text, and waits for ever behind bytes that are no character.
"""

import abc
import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import tokenizers
from tokenizers import decoders

from metrale_jax.text import tokenizer as tokenizer_lib

_SUPPORTED_DECODERS = (
    "ByteLevel",
    "Metaspace",
    "Replace",
    "ByteFallback",
    "Strip",
    "Fuse",
    "Sequence",
)
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class IncrementalDetokenizer:
    """Turns blocks of token ids into pieces of text.

    A piece never ends inside a character. Bytes that belong to no character come out as
    U+FFFD as soon as no further byte can complete them. With a byte-fallback decoder
    (SentencePiece style) a run of byte tokens waits for its end, because one bad byte
    turns the whole run into U+FFFD.
    """

    def __init__(
        self, tokenizer: tokenizer_lib.Tokenizer, *, skip_special_tokens: bool = True
    ) -> None:
        """Starts an empty text.

        Args:
          tokenizer: names the tokens and describes the decoder.
          skip_special_tokens: leave special tokens out, or show them as text.

        Raises:
          NotImplementedError: the tokenizer's decoder has a step that isn't supported.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stages = _build_stages(tokenizer.decoder_description)
        self._finished = False

    def feed(self, token_ids: Iterable[SupportsIndex]) -> str:
        """Takes the next tokens, 0 or more, and returns the text that they complete.

        Ids without a token (the padding of a vocabulary) have no text.

        Raises:
          ValueError: an id is negative, or the text was finished.
        """
        if self._finished:
            raise ValueError(
                "`feed` must not follow `finish`; start a new detokenizer."
            )
        return self._pass_on(self._shown_tokens(token_ids))

    def finish(self) -> str:
        """Ends the text and returns what was waiting for a further token."""
        self._finished = True
        tokens: list[str] = []
        for stage in self._stages:
            tokens = [out for token in tokens for out in stage.feed(token)]
            tokens.extend(stage.finish())
        return "".join(tokens)

    def _shown_tokens(self, token_ids: Iterable[SupportsIndex]) -> list[str]:
        special = self._tokenizer.special_tokens if self._skip_special_tokens else ()
        tokens = []
        for token_id in token_ids:
            token = self._tokenizer.token(token_id)
            if token is not None and token not in special:
                tokens.append(token)
        return tokens

    def _pass_on(self, tokens: list[str]) -> str:
        for stage in self._stages:
            tokens = [out for token in tokens for out in stage.feed(token)]
        return "".join(tokens)


class _Stage(abc.ABC):
    """One step of a decoder. After a fusing step, a "token" is a chunk of the text."""

    @abc.abstractmethod
    def feed(self, token: str) -> Sequence[str]:
        """Takes a token and returns the tokens that the next step gets."""

    def finish(self) -> Sequence[str]:
        """Returns the tokens that were waiting for a further one."""
        return ()


def _build_stages(description: Mapping[str, Any] | None) -> list[_Stage]:
    if description is None:
        return [_JoinWithSpaces()]
    stages: list[_Stage] = []
    is_fused = False
    for step in _flatten(description):
        kind = step["type"]
        if kind == "Fuse":
            is_fused = True
        elif is_fused:
            stages.append(_fused_stage(step))
        else:
            stages.append(_token_stage(step))
            is_fused = kind == "ByteLevel"
    return stages


def _flatten(description: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if description["type"] != "Sequence":
        return [description]
    return [step for part in description["decoders"] for step in _flatten(part)]


def _token_stage(step: Mapping[str, Any]) -> _Stage:
    match step["type"]:
        case "ByteLevel":
            return _ByteLevel()
        case "Metaspace":
            return _Metaspace(step["replacement"], step["prepend_scheme"] != "never")
        case "ByteFallback":
            return _ByteFallback()
        case "Replace":
            return _PerToken(decoders.Replace(_pattern(step), step["content"]))
        # With `stop` the library panics on tokens of nothing but that character.
        case "Strip" if step["stop"] == 0:
            return _PerToken(decoders.Strip(step["content"], step["start"], 0))
        case _:
            raise NotImplementedError(
                f"decoder step {dict(step)} can't be streamed; supported are "
                f"{', '.join(_SUPPORTED_DECODERS)} (Strip with `stop` 0)."
            )


def _fused_stage(step: Mapping[str, Any]) -> _Stage:
    if step["type"] == "Strip" and step["stop"] == 0:
        return _StripStart(step["content"], step["start"])
    raise NotImplementedError(
        f"decoder step {dict(step)} can't be streamed behind a step that fuses the "
        "tokens; supported there are Fuse and Strip with `stop` 0."
    )


def _pattern(step: Mapping[str, Any]) -> str | tokenizers.Regex:
    pattern = step["pattern"]
    if "String" in pattern:
        return pattern["String"]
    return tokenizers.Regex(pattern["Regex"])


class _PerToken(_Stage):
    """A step of the tokenizers library that treats each token by itself."""

    def __init__(self, decoder: decoders.Decoder) -> None:
        self._decoder = decoder

    def feed(self, token: str) -> Sequence[str]:
        return (self._decoder.decode([token]),)


class _JoinWithSpaces(_Stage):
    """What a tokenizer without a decoder does."""

    def __init__(self) -> None:
        self._is_first = True

    def feed(self, token: str) -> Sequence[str]:
        is_first, self._is_first = self._is_first, False
        return (token if is_first else f" {token}",)


class _Metaspace(_Stage):
    """Spaces are written as a visible character; the first token may drop its own."""

    def __init__(self, space: str, drops_first_space: bool) -> None:
        self._space = space
        self._drop = drops_first_space

    def feed(self, token: str) -> Sequence[str]:
        drop, self._drop = self._drop, False
        return (token.replace(self._space, "" if drop else " "),)


class _StripStart(_Stage):
    """Drops up to `count` copies of a character from the start of the fused text."""

    def __init__(self, character: str, count: int) -> None:
        self._character = character
        self._count = count

    def feed(self, token: str) -> Sequence[str]:
        while self._count and token:
            if token[0] != self._character:
                self._count = 0
                break
            token = token[1:]
            self._count -= 1
        return (token,)


class _ByteLevel(_Stage):
    """Every character of a token stands for a byte of UTF-8; fuses the tokens."""

    def __init__(self) -> None:
        self._byte_of = byte_level_alphabet()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: str) -> Sequence[str]:
        values = [self._byte_of.get(character) for character in token]
        # An added token may hold characters outside of the alphabet: it is plain text.
        data = (
            token.encode()
            if None in values
            else bytes(v for v in values if v is not None)
        )
        return (_decode_next(self._decoder, data),)

    def finish(self) -> Sequence[str]:
        return (self._decoder.decode(b"", final=True),)


class _ByteFallback(_Stage):
    """A run of `<0xNN>` tokens is text if all of it is UTF-8, else one U+FFFD each."""

    def __init__(self) -> None:
        self._start_run()

    def feed(self, token: str) -> Sequence[str]:
        match = _BYTE_TOKEN.fullmatch(token)
        if match is None:
            return (*self.finish(), token)
        if self._is_broken:
            return (_REPLACEMENT,)
        self._num_bytes += 1
        try:
            self._text += _decode_next(self._decoder, bytes.fromhex(match[1]))
        except UnicodeDecodeError:
            self._is_broken = True
            return (_REPLACEMENT,) * self._num_bytes
        return ()

    def finish(self) -> Sequence[str]:
        text, num_bytes, is_broken = self._text, self._num_bytes, self._is_broken
        is_complete = not is_broken and self._decoder.getstate()[0] == b""
        self._start_run()
        if is_broken or num_bytes == 0:
            return ()
        return (text,) if is_complete else (_REPLACEMENT,) * num_bytes

    def _start_run(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self._text = ""
        self._num_bytes = 0
        self._is_broken = False


def _decode_next(decoder: codecs.IncrementalDecoder, data: bytes) -> str:
    text = decoder.decode(data)
    pending, _ = decoder.getstate()
    # Python waits for the end of a surrogate, which is no character in UTF-8.
    if pending[:1] == b"\xed" and pending[1:] >= b"\xa0":
        text += decoder.decode(b"", final=True)
    return text


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    GPT-2's table: printable Latin-1 characters stand for themselves, and those from
    U+0100 on for the other bytes in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
