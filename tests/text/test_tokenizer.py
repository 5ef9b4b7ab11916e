"""Loading a checkpoint's tokenizer, and its two directions."""

import json
import pathlib
import unicodedata
from typing import Any

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st

from metrale_jax.text import Tokenizer
from text import text_tokenizers

_UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def _load(folder: pathlib.Path, **options: Any) -> Tokenizer:
    return Tokenizer.from_folder(text_tokenizers.write_folder(folder, **options))


@hypothesis.given(_UNICODE)
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = text_tokenizers.tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    # The tokenizer composes characters first, as Qwen's does.
    expected = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_special_tokens_in_text_become_their_ids() -> None:
    tokenizer = text_tokenizers.tokenizer()
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False)
    assert ids[0] == tokenizer.token_id("<|im_start|>")
    assert ids[-1] == tokenizer.token_id("<|im_end|>")
    assert tokenizer.decode(ids) == "user\nhi"
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "<|im_start|>user\nhi<|im_end|>"


def test_added_special_tokens_are_an_option() -> None:
    tokenizer = text_tokenizers.tokenizer()
    end = tokenizer.token_id("<|endoftext|>")
    bare = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog") == [*bare, end]


@pytest.mark.parametrize("text", ["", "\x00", "a\x00b", "\u202e", "\U0010ffff"])
def test_odd_characters_are_text(text: str) -> None:
    tokenizer = text_tokenizers.tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match="lone surrogate .* at position 2"):
        text_tokenizers.tokenizer().encode("ab\ud800c")


def test_long_text_is_not_shortened(tmp_path: pathlib.Path) -> None:
    content = json.loads(text_tokenizers.byte_level_json())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    tokenizer = _load(tmp_path, tokenizer_json=json.dumps(content))
    for text in ("a", "the lazy dog " * 1000, "x" * 5000):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_padded_vocabulary_has_no_text() -> None:
    tokenizer = text_tokenizers.tokenizer()
    ids = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.token(tokenizer.size) is None
    assert tokenizer.decode([tokenizer.size, *ids, 2**32 - 1]) == "a"


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_impossible_ids_are_refused(bad: int) -> None:
    tokenizer = text_tokenizers.tokenizer()
    with pytest.raises(ValueError, match=rf"got {bad}\b"):
        tokenizer.decode([0, bad])
    with pytest.raises(ValueError, match=rf"got {bad}\b"):
        tokenizer.token(bad)


def test_arrays_of_ids_are_decoded() -> None:
    tokenizer = text_tokenizers.tokenizer()
    ids = np.array(tokenizer.encode("the dog"), np.int32)
    assert tokenizer.decode(ids) == "the dog"


def test_vocabulary_may_be_padded_but_not_cut() -> None:
    tokenizer = text_tokenizers.tokenizer()
    tokenizer.check_vocab_size(tokenizer.size)
    tokenizer.check_vocab_size(tokenizer.size + 100)
    with pytest.raises(ValueError, match="`vocab_size` must cover"):
        tokenizer.check_vocab_size(tokenizer.size - 1)


def test_size_counts_ids_not_tokens() -> None:
    """A vocabulary with a hole still needs a row for its highest id."""
    model = tokenizers.models.WordLevel({"a": 0, "b": 7}, "a")
    assert Tokenizer(tokenizers.Tokenizer(model)).size == 8


def test_named_tokens_are_read(tmp_path: pathlib.Path) -> None:
    tokenizer = _load(
        tmp_path,
        config={
            "bos_token": None,
            "eos_token": {"content": "<|im_end|>", "lstrip": False},
            "pad_token": "<|endoftext|>",
        },
    )
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_id == tokenizer.token_id("<|im_end|>")
    assert tokenizer.named_tokens == {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }


def test_tokens_only_in_the_config_are_added(tmp_path: pathlib.Path) -> None:
    size = text_tokenizers.tokenizer().size
    entries = {
        str(size + 1): {"content": "<|later|>", "special": True},
        str(size): {"content": "<plain>", "special": False},
    }
    tokenizer = _load(tmp_path, config={"added_tokens_decoder": entries})
    ids = tokenizer.encode("<plain><|later|>", add_special_tokens=False)
    assert ids == [size, size + 1]
    assert tokenizer.decode(ids) == "<plain>"
    assert tokenizer.size == size + 2


def test_flags_of_the_config_win(tmp_path: pathlib.Path) -> None:
    shown = text_tokenizers.tokenizer().token_id("<think>")
    entry = {"content": "<think>", "special": True, "normalized": False}
    tokenizer = _load(tmp_path, config={"added_tokens_decoder": {str(shown): entry}})
    assert tokenizer.decode([shown]) == ""
    assert tokenizer.decode([shown], skip_special_tokens=False) == "<think>"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": {"9999": {"content": "<new>"}}}, "the id 9999"),
        ({"added_tokens_decoder": {"0": {"content": "<think>"}}}, "gives '<think>'"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "keyed by a token id"),
        ({"added_tokens_decoder": {"1": {"content": ""}}}, "a token's text"),
        ({"added_tokens_decoder": {"1": "a"}}, "must be an object"),
        (
            {"added_tokens_decoder": {"1": {"content": "a", "special": 1}}},
            "true or false",
        ),
        ({"added_tokens_decoder": []}, None),
        ({"added_tokens_decoder": [1]}, "must be an object"),
        ({"eos_token": "<missing>"}, "`eos_token` must be in the vocabulary"),
        ({"bos_token": 5}, "`bos_token` of tokenizer_config.json"),
        ({"extra_special_tokens": ["<missing>"]}, "lists the special token"),
        ({"extra_special_tokens": {"image_token": "<missing>"}}, "lists the special"),
        ({"additional_special_tokens": "x"}, "a list or an object"),
        ({"chat_template": 3}, "a string or a list"),
        ({"chat_template": [{"name": "default"}]}, "`name` and `template`"),
        ({"chat_template": [{"name": "a", "template": "x"}] * 2}, "unique"),
    ],
)
def test_contradictions_and_wrong_types_are_refused(
    tmp_path: pathlib.Path, config: dict[str, Any], message: str | None
) -> None:
    if message is None:
        _load(tmp_path, config=config)
        return
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, config=config)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "tokenizer.json",
            b'{"version": "1.0", "version": "1.0"}',
            "'version' .*twice",
        ),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0, "a": 1}}}', "'a' .*twice"),
        ("tokenizer.json", b"{", "tokenizer.json must be JSON"),
        ("tokenizer.json", b"[1]", "must hold a JSON object"),
        ("tokenizer.json", b'{"version": "1.0"}', "that `tokenizers` .* can read"),
        ("tokenizer.json", b"\xff\xfe{}", "must be UTF-8"),
        ("tokenizer.json", b'{"a":' * 100_000, "tokenizer.json must be JSON"),
        ("tokenizer_config.json", b'{"eos_token": "a", "eos_token": "b"}', "twice"),
        ("tokenizer_config.json", b"null", "must hold a JSON object, got NoneType"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja must be UTF-8"),
    ],
)
def test_malformed_files_are_refused(
    tmp_path: pathlib.Path, name: str, content: bytes, message: str
) -> None:
    text_tokenizers.write_folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_missing_tokenizer_says_what_is_needed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="must be a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="must hold tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "names", [("vocab.json", "merges.txt"), ("tokenizer.model",), ("vocab.txt",)]
)
def test_other_formats_name_the_way_out(
    tmp_path: pathlib.Path, names: tuple[str, ...]
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(NotImplementedError, match="save_pretrained") as caught:
        Tokenizer.from_folder(tmp_path)
    assert all(name in str(caught.value) for name in names)


_LATER = text_tokenizers.tokenizer().size
_ORACLE_CONFIGS = {
    "bare": {},
    "borders_off": {"add_bos_token": False, "eos_token": "<|im_end|>"},
    "bos_on": {"add_bos_token": True, "bos_token": "<|im_start|>"},
    "bos_on_without_bos": {"add_bos_token": True},
    "both_on": {
        "add_bos_token": True,
        "add_eos_token": True,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    },
    "added": {
        "added_tokens_decoder": {
            str(_LATER): {
                "content": "<|later|>",
                "lstrip": True,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
                "special": True,
            },
        },
    },
}


@pytest.mark.parametrize("config", _ORACLE_CONFIGS.values(), ids=_ORACLE_CONFIGS)
def test_ids_and_text_are_those_of_transformers(
    tmp_path: pathlib.Path, config: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = _load(tmp_path, config=config)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in (
        "",
        " the quick <|later|> brown fox",
        "<|im_start|>user\n你好 😀 1234<|im_end|>\n<think>",
        "Naïve e\u0301 't's \r\n\r\n  x",
    ):
        for add in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=add)
            assert ids == oracle.encode(text, add_special_tokens=add)
            for skip in (False, True):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == (
                    oracle.decode(ids, skip_special_tokens=skip)
                )
