"""What a checkpoint's folder says about text: its tokenizer and chat template files.

Only reads and checks; nothing in the files is executed.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES_FOLDER = "additional_chat_templates"
# Older formats of the same content, which name a tokenizer's parts incompletely.
_OTHER_FORMATS = ("vocab.json", "merges.txt", "tokenizer.model", "vocab.txt")
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
DEFAULT_TEMPLATE = "default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token beside the model's vocabulary, as tokenizer_config.json has it."""

    token_id: int
    content: str
    flags: Mapping[str, bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The checked content of a folder.

    Attributes:
      tokenizer_json: text of tokenizer.json.
      added_tokens: `added_tokens_decoder` of tokenizer_config.json, by rising id.
      named_tokens: text of those of `bos_token`, `eos_token`, `pad_token` and
        `unk_token` that are set.
      extra_tokens: further special tokens that tokenizer_config.json lists.
      chat_templates: source of each chat template, by name.
    """

    tokenizer_json: str
    added_tokens: tuple[AddedToken, ...] = ()
    named_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra_tokens: tuple[str, ...] = ()
    chat_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_tokenizer_files(folder: str | os.PathLike[str]) -> TokenizerFiles:
    """Reads tokenizer.json, tokenizer_config.json and the chat templates of a folder.

    Only tokenizer.json must be there.

    Raises:
      FileNotFoundError: there is no such folder, or it holds no tokenizer at all.
      NotImplementedError: the tokenizer is there in another format only.
      ValueError: a file is malformed; the message names file and field.
    """
    folder = pathlib.Path(folder)
    path = folder / _TOKENIZER_FILE
    if not path.is_file():
        _raise_without_tokenizer(folder)
    text = _read_text(path)
    _parse_object(text, path)
    config_path = folder / _CONFIG_FILE
    config: dict[str, Any] = {}
    if config_path.is_file():
        config = _parse_object(_read_text(config_path), config_path)
    return TokenizerFiles(
        tokenizer_json=text,
        added_tokens=_added_tokens(config),
        named_tokens=_named_tokens(config),
        extra_tokens=_extra_tokens(config),
        chat_templates=_chat_templates(folder, config),
    )


def _raise_without_tokenizer(folder: pathlib.Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"`folder` must be a folder, got {str(folder)!r}.")
    others = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
    if not others:
        raise FileNotFoundError(
            f"`folder` must hold {_TOKENIZER_FILE}, but {str(folder)!r} does not; copy "
            "it from the checkpoint that the weights come from."
        )
    # How text is split before merging is written in none of these files, and a wrong
    # split gives other tokens without any error.
    raise NotImplementedError(
        f"{', '.join(others)} alone don't describe a tokenizer completely; supported "
        f"is {_TOKENIZER_FILE}. Write it once with Hugging Face transformers: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
    )


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} must be UTF-8 text: {error}.") from None


def _parse_object(text: str, path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} must be JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path.name} must hold a JSON object, got {type(value).__name__}."
        )
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} appears twice in one object")
            seen.add(key)
    return values


def _added_tokens(config: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise ValueError(_rule("added_tokens_decoder", "an object", entries))
    tokens = []
    for key, entry in entries.items():
        name = f"added_tokens_decoder.{key}"
        if not (key.isascii() and key.isdigit()):
            raise ValueError(_rule(name, "keyed by a token id", key))
        if not isinstance(entry, dict):
            raise ValueError(_rule(name, "an object", entry))
        flags = {flag: value for flag, value in entry.items() if flag in _FLAGS}
        for flag, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(_rule(f"{name}.{flag}", "true or false", value))
        content = _token_text(name, entry)
        tokens.append(AddedToken(token_id=int(key), content=content, flags=flags))
    return tuple(sorted(tokens, key=lambda token: token.token_id))


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: _token_text(name, config[name])
        for name in _NAMED_TOKENS
        if config.get(name) is not None
    }


def _extra_tokens(config: Mapping[str, Any]) -> tuple[str, ...]:
    tokens: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        entries = config.get(name) or []
        if isinstance(entries, dict):
            entries = list(entries.values())
        if not isinstance(entries, list):
            raise ValueError(_rule(name, "a list or an object", entries))
        tokens.extend(
            _token_text(f"{name}[{index}]", entry)
            for index, entry in enumerate(entries)
        )
    return tuple(tokens)


def _token_text(name: str, value: object) -> str:
    """A token is written as its text, or as an object whose `content` is the text."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise ValueError(_rule(name, "a token's text or {'content': text}", value))
    return content


def _chat_templates(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates of their own files; without any, those of tokenizer_config.json."""
    templates = {}
    if (folder / _TEMPLATE_FILE).is_file():
        templates[DEFAULT_TEMPLATE] = _read_text(folder / _TEMPLATE_FILE)
    for path in sorted((folder / _MORE_TEMPLATES_FOLDER).glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    if templates:
        return templates
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if not isinstance(value, list):
        raise ValueError(_rule("chat_template", "a string or a list", value))
    for index, entry in enumerate(value):
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("name", "template")
        ):
            rule = "an object with the strings `name` and `template`"
            raise ValueError(_rule(f"chat_template[{index}]", rule, entry))
        if entry["name"] in templates:
            raise ValueError(
                _rule(f"chat_template[{index}].name", "unique", entry["name"])
            )
        templates[entry["name"]] = entry["template"]
    return templates


def _rule(name: str, rule: str, value: object) -> str:
    return f"`{name}` of {_CONFIG_FILE} must be {rule}, got {value!r}."
