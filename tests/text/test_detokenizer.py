"""Laws of the incremental detokenizer, for every kind of decoder."""

import itertools

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from metrale_jax.text import IncrementalDetokenizer, Tokenizer
from metrale_jax.text import detokenizer as detokenizer_lib
from text import text_tokenizers

_FAMILIES = list(text_tokenizers.FAMILIES)
_REPLACEMENT = "\ufffd"
_HARD_TEXTS = {
    "emoji": "a😀b",
    "cjk": "你好，世界",
    "zwj_sequence": "x👩‍👩‍👧y",
    "flag": "🇩🇪🇫🇷",
    "combining_marks": "e\u0301 q\u0323\u0307 ก\u0e34",
    "spaces": "  two  spaces \n\n\t tab",
    "leading_space": " lead",
    "nul": "a\x00b",
    "replacement_in_text": "a\ufffdb",
    "tags": "<think>\nhm\n</think>\n<tool_call>{}</tool_call>",
}


@st.composite
def _ids_in_blocks(draw: st.DrawFn, size: int) -> list[list[int]]:
    # Some ids past the end: the padding of a model's vocabulary has no token.
    block = st.lists(st.integers(0, size + 4), min_size=0, max_size=5)
    return draw(st.lists(block, max_size=12))


def _stream(detokenizer: IncrementalDetokenizer, blocks: list[list[int]]) -> list[str]:
    pieces = [detokenizer.feed(block) for block in blocks]
    return [*pieces, detokenizer.finish()]


def _blocks(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


@pytest.mark.parametrize("skip", [True, False], ids=["skip_special", "show_special"])
@pytest.mark.parametrize("family", _FAMILIES)
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_joined_pieces_equal_the_full_decode(
    family: str, skip: bool, data: st.DataObject
) -> None:
    tokenizer = text_tokenizers.tokenizer(family)
    blocks = data.draw(_ids_in_blocks(tokenizer.size))
    pieces = _stream(
        IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), blocks
    )
    ids = list(itertools.chain(*blocks))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", _FAMILIES)
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_skipped_and_byte_tokens_change_nothing(
    family: str, data: st.DataObject
) -> None:
    """The same law where it is hardest: few ids, most of them special or bytes."""
    tokenizer = text_tokenizers.tokenizer(family)
    names = ["<|im_end|>", "<think>", "▁", "▁the", "<0xE4>", "<0xBD>", "<0xA0>", "a"]
    names += ["ä", "½", "ł"]  # The bytes of 你 in a byte-level vocabulary.
    ids = [tokenizer.token_id(name) for name in names]
    some = [token_id for token_id in ids if token_id is not None]
    drawn = data.draw(st.lists(st.sampled_from(some), max_size=16))
    blocks = _blocks(drawn, data.draw(st.integers(1, 5)))
    pieces = _stream(IncrementalDetokenizer(tokenizer), blocks)
    assert "".join(pieces) == tokenizer.decode(drawn)


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", _HARD_TEXTS.values(), ids=_HARD_TEXTS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5])
def test_no_character_is_split(family: str, text: str, block_size: int) -> None:
    tokenizer = text_tokenizers.tokenizer(family)
    # One token a byte, so that every character is split at every point.
    ids = text_tokenizers.byte_ids(text.encode(), family)
    # The first block's length moves the borders through all places.
    for first in range(1, block_size + 1):
        blocks = [ids[:first], *_blocks(ids[first:], block_size)]
        pieces = _stream(IncrementalDetokenizer(tokenizer), blocks)
        if _REPLACEMENT not in text:
            assert not any(_REPLACEMENT in piece for piece in pieces)
        # SentencePiece drops one space that it had put in front itself.
        dropped = family == "byte_fallback" and text.startswith(" ")
        assert "".join(pieces) == text[dropped:]


@pytest.mark.parametrize("family", _FAMILIES)
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    block_size=st.integers(1, 5),
)
def test_encoded_text_streams_as_it_decodes(
    family: str, text: str, block_size: int
) -> None:
    tokenizer = text_tokenizers.tokenizer(family)
    ids = tokenizer.encode(text)
    pieces = _stream(IncrementalDetokenizer(tokenizer), _blocks(ids, block_size))
    assert "".join(pieces) == tokenizer.decode(ids)


# First bytes of each length, their limits, and what may or may not follow them.
_HARD_BYTES = bytes.fromhex("61 80 8f 90 9f a0 bf c1 c2 df e0 e1 ed ef f0 f1 f4 f5 ff")
_TAILS = [
    bytes(tail)
    for length in (1, 2, 3)
    for tail in itertools.product((0x80, 0x90, 0xA0), repeat=length)
]


@hypothesis.given(st.lists(st.sampled_from(_HARD_BYTES), max_size=8).map(bytes))
@hypothesis.example(b"\xf4\xed\xa0")
@hypothesis.example(b"\xe0\x9f")
@hypothesis.example(b"\xf4\x90")
def test_bytes_come_out_as_soon_as_nothing_can_complete_them(data: bytes) -> None:
    tokenizer = text_tokenizers.tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids: list[int] = []
    shown = ""
    for value in data:
        ids += text_tokenizers.byte_ids(bytes([value]))
        shown += detokenizer.feed(ids[-1:])
        text = tokenizer.decode(ids)
        if shown == text:
            continue
        # Held is one unfinished character, and bytes exist that finish it.
        assert text == shown + _REPLACEMENT
        assert any(_finishes(tokenizer, ids, shown, tail) for tail in _TAILS)


def _finishes(tokenizer: Tokenizer, ids: list[int], shown: str, tail: bytes) -> bool:
    text = tokenizer.decode(ids + text_tokenizers.byte_ids(tail))
    return len(text) == len(shown) + 1 and not text.endswith(_REPLACEMENT)


def test_broken_byte_run_comes_out_before_its_end() -> None:
    tokenizer = text_tokenizers.tokenizer("byte_fallback")
    run = text_tokenizers.byte_ids(b"\xe4\xbd\xa0\xff\x41", "byte_fallback")
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.feed([token_id]) for token_id in run]
    # Good so far, so the first three bytes wait; the fourth spoils the whole run.
    assert pieces == ["", "", "", _REPLACEMENT * 4, _REPLACEMENT]
    assert detokenizer.finish() == ""
    assert tokenizer.decode(run) == _REPLACEMENT * 5


def test_unfinished_bytes_come_out_at_the_end() -> None:
    for family in ("byte_level", "byte_fallback"):
        tokenizer = text_tokenizers.tokenizer(family)
        ids = text_tokenizers.byte_ids("😀".encode()[:3], family)
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert detokenizer.feed(ids) == ""
        assert detokenizer.finish() == tokenizer.decode(ids)


class _CountingTokenizer(Tokenizer):
    """Counts how often a token is looked up."""

    num_lookups = 0

    def token(self, token_id: int) -> str | None:
        self.num_lookups += 1
        return super().token(token_id)

    def decode(self, *args: object, **options: object) -> str:
        raise AssertionError("a stream must not decode earlier tokens again")


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_each_token_is_looked_at_once(family: str) -> None:
    """Also behind bytes that never become a character."""
    backend = tokenizers.Tokenizer.from_str(text_tokenizers.FAMILIES[family]())
    tokenizer = _CountingTokenizer(backend)
    bad = text_tokenizers.byte_ids(b"\x80", family)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.feed(bad) for _ in range(2000)]
    assert tokenizer.num_lookups == 2000
    assert "".join(pieces) == _REPLACEMENT * 2000


def test_byte_level_alphabet_is_the_librarys() -> None:
    alphabet = detokenizer_lib.byte_level_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    for character, value in alphabet.items():
        expected = bytes([value]).decode("utf-8", "replace")
        assert decoders.ByteLevel().decode([character]) == expected
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in range(0x20, 0x800):
        [(written, _)] = pre_tokenizer.pre_tokenize_str(chr(code))
        assert bytes(alphabet[character] for character in written).decode() == chr(code)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Strip(" ", 0, 1),
    ],
    ids=["ctc", "wordpiece", "replace_after_bytes", "strip_end", "strip_ends"],
)
def test_unsupported_decoder_is_refused(decoder: decoders.Decoder) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoder
    with pytest.raises(NotImplementedError, match="supported"):
        IncrementalDetokenizer(Tokenizer(backend))


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Strip("_", 1, 0), decoders.Fuse()]),
        decoders.Sequence(
            [decoders.Replace(tokenizers.Regex("[ab]+"), "x"), decoders.Metaspace()]
        ),
        decoders.Sequence(
            [decoders.Fuse(), decoders.Fuse(), decoders.Strip("_", 3, 0)]
        ),
        decoders.Sequence(
            [decoders.Sequence([decoders.Replace("_", " ")]), decoders.ByteLevel()]
        ),
    ],
    ids=["strip_tokens", "regex_metaspace", "strip_three", "nested_bytes"],
)
@hypothesis.settings(max_examples=40)
@hypothesis.given(ids=st.lists(st.integers(0, 5), max_size=10))
def test_other_chains_equal_the_full_decode(
    decoder: decoders.Decoder, ids: list[int]
) -> None:
    vocab = {"_": 0, "__a": 1, "▁b_": 2, "ab▁": 3, "Ġ": 4, "_b": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    pieces = _stream(IncrementalDetokenizer(tokenizer), _blocks(ids, 1))
    assert "".join(pieces) == tokenizer.decode(ids)


def test_use_after_the_end_and_negative_ids_are_refused() -> None:
    detokenizer = IncrementalDetokenizer(text_tokenizers.tokenizer())
    with pytest.raises(ValueError, match="got -1"):
        detokenizer.feed([-1])
    detokenizer.finish()
    with pytest.raises(ValueError, match="must not follow `finish`"):
        detokenizer.feed([0])
