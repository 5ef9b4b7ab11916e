"""One sequence's text as its tokens arrive: detokenizer, stop strings, end ids."""

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from metrale_jax.text import detokenizer as detokenizer_lib
from metrale_jax.text import stop as stop_lib
from metrale_jax.text import tokenizer as tokenizer_lib


class TextStream:
    """Turns the blocks of tokens that rounds emit into text, and says when it ends.

    A sequence ends with the token that is an end id, or with the token whose text
    completes a stop string; later tokens, of the same block too, don't count. Text and
    number of tokens are therefore those of plain decoding, however tokens were grouped.

    Attributes:
      num_tokens: tokens that count so far, the ending one included.
      finish_reason: None while running; then "stop", or the reason given to `finish`.
      stop_string: the stop string that ended the text; None without one.
      end_token_id: the end id that ended the text; None without one.
    """

    def __init__(
        self,
        tokenizer: tokenizer_lib.Tokenizer,
        *,
        end_token_ids: Sequence[SupportsIndex] = (),
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """Starts an empty text.

        Args:
          tokenizer: of the sequence's checkpoint.
          end_token_ids: ids that end the sequence; their own text isn't shown.
          stop_strings: strings that end the sequence. One that is the text of a special
            token which isn't shown ends it at that token, as if it were shown.
          include_stop: end the text with the stop string, or before it.
          skip_special_tokens: leave special tokens out, or show them as text.

        Raises:
          ValueError: an end id has no token, or a stop string is empty.
          NotImplementedError: the tokenizer's decoder can't be streamed.
        """
        for token_id in end_token_ids:
            if tokenizer.token(token_id) is None:
                raise ValueError(
                    "`end_token_ids` must be ids of the tokenizer, below "
                    f"{tokenizer.size}, got {token_id}; correct generation_config.json."
                )
        self._end_token_ids = frozenset(map(operator.index, end_token_ids))
        self._hidden_stops = _hidden_stops(tokenizer, stop_strings, skip_special_tokens)
        self._detokenizer = detokenizer_lib.IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens
        )
        self._matcher = stop_lib.StopMatcher(stop_strings, include_stop=include_stop)
        self._include_stop = include_stop
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self.end_token_id: int | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def feed(self, token_ids: Iterable[SupportsIndex]) -> str:
        """Takes the tokens of a round and returns the text that can be shown by now.

        Raises:
          ValueError: the stream is finished, or an id is negative.
        """
        if self.is_finished:
            raise ValueError(
                f"`feed` must not follow the end ({self.finish_reason!r}); start a new "
                "stream."
            )
        pieces = []
        for token_id in token_ids:
            pieces.append(self._feed_token(operator.index(token_id)))
            if self.is_finished:
                break
        return "".join(pieces)

    def finish(self, reason: str = "length") -> str:
        """Ends the text from outside, at a limit say, and returns what was held back.

        Does nothing if the sequence has ended by itself. Should the held bytes, which
        can now only be shown as U+FFFD, complete a stop string, the reason is "stop".
        """
        if self.is_finished:
            return ""
        return self._end(reason)

    def _feed_token(self, token_id: int) -> str:
        self.num_tokens += 1
        if token_id in self._end_token_ids:
            self.end_token_id = token_id
            return self._end("stop")
        if token_id in self._hidden_stops:
            text = self._end("stop")
            if self.stop_string is None:
                self.stop_string = self._hidden_stops[token_id]
                text += self.stop_string if self._include_stop else ""
            return text
        piece = self._matcher.feed(self._detokenizer.feed([token_id]))
        self._note_match()
        return piece

    def _end(self, reason: str) -> str:
        self.finish_reason = reason
        text = self._matcher.feed(self._detokenizer.finish()) + self._matcher.finish()
        self._note_match()
        return text

    def _note_match(self) -> None:
        if self._matcher.matched is not None:
            self.stop_string = self._matcher.matched
            self.finish_reason = "stop"


def _hidden_stops(
    tokenizer: tokenizer_lib.Tokenizer,
    stop_strings: Sequence[str],
    skip_special_tokens: bool,
) -> dict[int, str]:
    """Ids of special tokens that are stop strings but whose text isn't shown."""
    if not skip_special_tokens:
        return {}
    ids = {
        stop: tokenizer.token_id(stop)
        for stop in stop_lib.check_stop_strings(stop_strings)
    }
    return {
        token_id: stop
        for stop, token_id in ids.items()
        if token_id is not None and stop in tokenizer.special_tokens
    }
