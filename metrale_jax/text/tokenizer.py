"""The tokenizer: text to ids, ids to text, and chats to ids."""

import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import tokenizers

from metrale_jax.text import chat_template as chat_template_lib
from metrale_jax.text import tokenizer_files


class Tokenizer:
    """A checkpoint's tokenizer, with its special tokens and chat templates.

    Never shortens or pads a text, whatever the checkpoint's files ask for. Immutable,
    so any number of sequences and threads can share one.

    Attributes:
      special_tokens: texts of the tokens that `skip_special_tokens` leaves out.
      named_tokens: those of `bos_token`, `eos_token`, `pad_token` and `unk_token` that
        the checkpoint sets.
      chat_templates: source of each chat template, by name.
      decoder_description: the decoder as tokenizer.json writes it; None without one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Wraps a tokenizer of the `tokenizers` library, which it takes over.

        Raises:
          ValueError: a beginning or end token isn't in the vocabulary.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.named_tokens = dict(named_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.special_tokens = frozenset(
            token.content
            for token in backend.get_added_tokens_decoder().values()
            if token.special
        )
        self.decoder_description = _describe_decoder(backend)
        self._size = (
            max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        for name in ("bos_token", "eos_token"):
            token = self.named_tokens.get(name)
            if token is not None and self.token_id(token) is None:
                raise ValueError(
                    f"`{name}` must be in the vocabulary, got {token!r}; correct "
                    "tokenizer_config.json, or take the tokenizer.json belonging to it."
                )

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> "Tokenizer":
        """Loads the tokenizer of a checkpoint's folder.

        Raises:
          FileNotFoundError: the folder or its tokenizer.json isn't there.
          NotImplementedError: the tokenizer is there in another format only.
          ValueError: a file is malformed, or two of them contradict each other.
        """
        files = tokenizer_files.read_tokenizer_files(folder)
        backend = _load_backend(files.tokenizer_json)
        _add_tokens(backend, files.added_tokens)
        for token in files.extra_tokens:
            if backend.token_to_id(token) is None:
                raise ValueError(
                    f"tokenizer_config.json lists the special token {token!r}, which "
                    "tokenizer.json lacks; take both from the same checkpoint."
                )
        return cls(
            backend,
            named_tokens=files.named_tokens,
            chat_templates=files.chat_templates,
        )

    @property
    def size(self) -> int:
        """One more than the highest id of a token."""
        return self._size

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text; None without one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that the tokenizer calls its end; None without one.

        A model may end on further ids: its configuration lists them.
        """
        return self._named_id("eos_token")

    def token(self, token_id: SupportsIndex) -> str | None:
        """The vocabulary's entry of an id, undecoded; None for an id without a token.

        Raises:
          ValueError: the id is negative.
        """
        return self._backend.id_to_token(_checked_id(token_id))

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary's entry; None if there is no such token."""
        return self._backend.token_to_id(token)

    def check_vocab_size(self, vocab_size: int) -> None:
        """Checks that the model has a row for every token.

        A model may have more rows: vocabularies are padded, and those ids have no text.

        Raises:
          ValueError: a token's id is outside of the model's vocabulary.
        """
        if self._size > vocab_size:
            raise ValueError(
                f"`vocab_size` must cover the tokenizer's {self._size} ids, got "
                f"{vocab_size}; tokenizer and weights are of different checkpoints."
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text.

        Special tokens written in the text become their ids: rendered chats rely on it.

        Args:
          text: any text, empty and NUL included.
          add_special_tokens: add what tokenizer.json puts around a text, such as a
            beginning token.

        Raises:
          ValueError: `text` holds a lone surrogate, which is no text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"`text` must be Unicode text, got the lone surrogate "
                f"{text[error.start]!r} at position {error.start}; remove it, or "
                "decode what it comes from with errors='replace'."
            ) from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, token_ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = True
    ) -> str:
        """Returns the text of ids; bytes that are no character become U+FFFD.

        Ids without a token (the padding of a vocabulary) have no text.

        Raises:
          ValueError: an id is negative.
        """
        ids = [_checked_id(token_id) for token_id in token_ids]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def chat_template(
        self, name: str | None = None, *, has_tools: bool = False
    ) -> chat_template_lib.ChatTemplate:
        """Returns one of the checkpoint's chat templates; see `select_template`.

        Raises:
          ValueError: there is no chat template, or none of that name.
        """
        source = chat_template_lib.select_template(
            self.chat_templates, name, has_tools=has_tools
        )
        return chat_template_lib.ChatTemplate(
            source=source, special_tokens=self.named_tokens
        )

    def encode_chat(
        self,
        messages: Sequence[chat_template_lib.Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the ids of a conversation in the checkpoint's own chat template.

        `ChatTemplate.render_many` describes the arguments; for everything beyond them,
        take the template itself from `chat_template`.

        Raises:
          ChatTemplateError: the template refused the messages or ran into a limit.
          ValueError: there is no chat template, or a message is malformed.
        """
        template = self.chat_template(has_tools=tools is not None)
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            variables=variables,
        )
        # The template has written every special token itself.
        return self.encode(text, add_special_tokens=False)

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.token_id(token)


def _checked_id(token_id: SupportsIndex) -> int:
    value = operator.index(token_id)
    if not 0 <= value < 1 << 32:
        raise ValueError(f"a token id must be in 0..2**32 - 1, got {value}.")
    return value


def _load_backend(tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        # `from_str` reports the same faults as bare Exceptions.
        return tokenizers.Tokenizer.from_buffer(tokenizer_json.encode())
    except ValueError as error:
        raise ValueError(
            "tokenizer.json must be a tokenizer that `tokenizers` "
            f"{tokenizers.__version__} can read: {error}."
        ) from error


def _add_tokens(
    backend: tokenizers.Tokenizer, added_tokens: Sequence[tokenizer_files.AddedToken]
) -> None:
    """Adds the tokens that tokenizer.json lacks or describes by other flags.

    Raises:
      ValueError: a token can't have the id that it is listed with.
    """
    known = backend.get_added_tokens_decoder()
    for entry in added_tokens:
        token = tokenizers.AddedToken(entry.content, **entry.flags)
        if repr(known.get(entry.token_id)) != repr(token):
            backend.add_tokens([token])
        token_id = backend.token_to_id(entry.content)
        if token_id != entry.token_id:
            raise ValueError(
                f"`added_tokens_decoder` of tokenizer_config.json gives "
                f"{entry.content!r} the id {entry.token_id}, but with tokenizer.json "
                f"it has {token_id}; take both from the same checkpoint."
            )


def _describe_decoder(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    if backend.decoder is None:
        return None
    return json.loads(backend.decoder.__getstate__())
