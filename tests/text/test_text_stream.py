"""Laws of the text stream: the end doesn't depend on how tokens were grouped."""

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models

from metrale_jax.text import TextStream, Tokenizer
from text import text_tokenizers

_END = "<|im_end|>"


def _id(token: str) -> int:
    token_id = text_tokenizers.tokenizer().token_id(token)
    assert token_id is not None
    return token_id


def _ids(text: str) -> list[int]:
    return text_tokenizers.tokenizer().encode(text, add_special_tokens=False)


def _run(stream: TextStream, ids: list[int], block_size: int) -> str:
    """What an engine does: blocks until the stream ends, then the rest at the limit."""
    pieces = []
    for start in range(0, len(ids), block_size):
        pieces.append(stream.feed(ids[start : start + block_size]))
        if stream.is_finished:
            break
    pieces.append(stream.finish())
    return "".join(pieces)


def _outcome(stream: TextStream, ids: list[int], block_size: int) -> tuple:
    text = _run(stream, ids, block_size)
    return text, stream.num_tokens, stream.finish_reason, stream.stop_string


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    ids=st.lists(st.integers(0, text_tokenizers.tokenizer().size), max_size=20),
    stops=st.lists(st.sampled_from(["a", "the", "\ufffd", " d", "<think>", "e\ufffd"])),
    end=st.integers(0, text_tokenizers.tokenizer().size - 1),
    include=st.booleans(),
    skip=st.booleans(),
)
def test_blocks_end_where_single_tokens_do(
    ids: list[int], stops: list[str], end: int, include: bool, skip: bool
) -> None:
    def stream() -> TextStream:
        return TextStream(
            text_tokenizers.tokenizer(),
            end_token_ids=[end],
            stop_strings=stops,
            include_stop=include,
            skip_special_tokens=skip,
        )

    one_by_one = _outcome(stream(), ids, 1)
    for block_size in (2, 3, 16):
        assert _outcome(stream(), ids, block_size) == one_by_one


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    text=st.text("ab é😀.", max_size=40), stop=st.text("ab é.", min_size=1, max_size=4)
)
def test_kept_tokens_end_with_the_one_that_completes_the_stop(
    text: str, stop: str
) -> None:
    tokenizer = text_tokenizers.tokenizer()
    ids = _ids(text)
    stream = TextStream(tokenizer, stop_strings=[stop])
    shown = _run(stream, ids, 3)
    full = tokenizer.decode(ids)
    if stop not in full:
        assert (shown, stream.num_tokens) == (full, len(ids))
        assert stream.finish_reason == "length"
        return
    assert stream.finish_reason == "stop"
    assert shown == full[: full.index(stop)]
    assert stop in tokenizer.decode(ids[: stream.num_tokens])
    assert stop not in tokenizer.decode(ids[: stream.num_tokens - 1])


@pytest.mark.parametrize("place", [0, 1, 3, 4], ids=lambda place: f"at_{place}")
def test_end_id_inside_a_block_ends_the_text_there(place: int) -> None:
    """Everything behind the end id, accepted drafts too, is dropped."""
    words = _ids("the quick brown fox jumps")[:4]
    ids = [*words[:place], _id(_END), *_ids("over the lazy dog")]
    stream = TextStream(text_tokenizers.tokenizer(), end_token_ids=[_id(_END)])
    assert _run(stream, ids, 6) == text_tokenizers.tokenizer().decode(words[:place])
    assert stream.num_tokens == place + 1
    assert (stream.finish_reason, stream.end_token_id) == ("stop", _id(_END))


@pytest.mark.parametrize("skip", [True, False], ids=["skip_special", "show_special"])
@pytest.mark.parametrize("name", ["<|endoftext|>", "<|im_end|>"])
def test_any_of_several_end_ids_ends_without_being_shown(name: str, skip: bool) -> None:
    ends = [_id("<|endoftext|>"), _id("<|im_end|>")]
    stream = TextStream(
        text_tokenizers.tokenizer(), end_token_ids=ends, skip_special_tokens=skip
    )
    assert _run(stream, [*_ids("yes"), _id(name), *_ids("no")], 2) == "yes"
    assert stream.end_token_id == _id(name)


def test_without_end_ids_the_text_runs_on() -> None:
    stream = TextStream(text_tokenizers.tokenizer())
    assert _run(stream, [*_ids("a"), _id(_END), *_ids("b")], 2) == "ab"
    assert stream.finish_reason == "length"


@pytest.mark.parametrize("bad", [100_000, -1])
def test_end_id_without_a_token_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=str(bad)):
        TextStream(text_tokenizers.tokenizer(), end_token_ids=[_id(_END), bad])


def test_stop_string_of_three_tokens_completed_inside_a_block() -> None:
    stop = "stop string ends"
    ids = _ids("a stop string ends the text")
    tokenizer = text_tokenizers.tokenizer()
    num_kept = next(
        count
        for count in range(len(ids))
        if tokenizer.decode(ids[:count]).endswith(stop)
    )
    stream = TextStream(tokenizer, stop_strings=[stop])
    # The block with the last token of the stop string goes on behind it.
    assert stream.feed(ids[: num_kept - 2]) == "a "
    assert stream.feed(ids[num_kept - 2 :]) == ""
    assert stream.num_tokens == num_kept
    assert stream.stop_string == stop


def test_short_stop_string_early_in_a_long_block() -> None:
    ids = _ids("x\n\nthe quick brown fox jumps over the lazy dog")
    stream = TextStream(text_tokenizers.tokenizer(), stop_strings=["\n\n"])
    assert stream.feed(ids[:16]) == "x"
    assert stream.is_finished
    assert text_tokenizers.tokenizer().decode(ids[: stream.num_tokens]).endswith("\n\n")


@pytest.mark.parametrize("block_size", [1, 2, 3, 7])
def test_held_text_comes_out_when_the_stop_fails(block_size: int) -> None:
    text = "a stop string that is not the end"
    stream = TextStream(text_tokenizers.tokenizer(), stop_strings=["stop string!"])
    assert _run(stream, _ids(text), block_size) == text


def test_held_text_comes_out_at_the_limit() -> None:
    stream = TextStream(text_tokenizers.tokenizer(), stop_strings=["dog!"])
    shown = stream.feed(_ids("the dog"))
    assert shown == "the "
    assert stream.finish() == "dog"
    assert stream.finish() == ""


def test_held_text_comes_out_at_an_end_id() -> None:
    stream = TextStream(
        text_tokenizers.tokenizer(), stop_strings=["dog!"], end_token_ids=[_id(_END)]
    )
    assert stream.feed([*_ids("the dog"), _id(_END)]) == "the dog"
    assert stream.stop_string is None


def test_unfinished_bytes_at_the_end_may_complete_a_stop_string() -> None:
    ids = text_tokenizers.byte_ids("a😀".encode()[:2])
    stream = TextStream(text_tokenizers.tokenizer(), stop_strings=["a\ufffd"])
    assert stream.feed(ids) == ""
    assert stream.finish() == ""
    assert (stream.finish_reason, stream.stop_string) == ("stop", "a\ufffd")


@pytest.mark.parametrize("include", [False, True], ids=["exclude_stop", "include_stop"])
@pytest.mark.parametrize("skip", [True, False], ids=["skip_special", "show_special"])
def test_stop_string_that_is_a_special_token_ends_at_it(
    skip: bool, include: bool
) -> None:
    """Shown or not: callers pass the chat's end as a stop string."""
    stream = TextStream(
        text_tokenizers.tokenizer(),
        stop_strings=[_END],
        skip_special_tokens=skip,
        include_stop=include,
    )
    shown = _run(stream, [*_ids("yes"), _id(_END), *_ids("no")], 8)
    assert shown == ("yes" + _END if include else "yes")
    assert (stream.num_tokens, stream.stop_string) == (len(_ids("yes")) + 1, _END)


@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_tags_that_callers_parse_are_shown(block_size: int) -> None:
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f"}\n</tool_call>'
    stream = TextStream(text_tokenizers.tokenizer(), end_token_ids=[_id(_END)])
    assert _run(stream, [*_ids(text), _id(_END)], block_size) == text


def test_feeding_a_finished_stream_is_refused() -> None:
    stream = TextStream(text_tokenizers.tokenizer(), end_token_ids=[_id(_END)])
    stream.feed([_id(_END)])
    with pytest.raises(ValueError, match="must not follow the end"):
        stream.feed(_ids("more"))


def test_arrays_of_ids_are_taken() -> None:
    stream = TextStream(
        text_tokenizers.tokenizer(), end_token_ids=np.array([_id(_END)]).tolist()
    )
    block = np.array([*_ids("yes"), _id(_END)], np.int32)
    assert stream.feed(block) == "yes"
    assert stream.is_finished


def test_unsupported_tokenizer_is_refused_at_the_start() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.CTC()
    with pytest.raises(NotImplementedError, match="CTC"):
        TextStream(Tokenizer(backend))
