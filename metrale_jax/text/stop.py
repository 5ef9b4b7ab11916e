"""Stop strings over streamed text.

One automaton (Aho-Corasick) follows all stop strings at once, so a character costs the
same however many there are. Its depth is the length of the longest suffix of the text
that may still become a stop string: exactly what has to be held back.
"""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The stop string that is *completed* first wins; of several completed by the same
    character, the longest. Both depend on the text alone, never on how it was cut into
    pieces, and generation ends as early as it can.

    Attributes:
      matched: the stop string that was found; None until then.
    """

    def __init__(
        self, stop_strings: Sequence[str], *, include_stop: bool = False
    ) -> None:
        """Builds the matcher.

        Args:
          stop_strings: strings that end the text; may be none.
          include_stop: end the released text with the stop string, or before it.

        Raises:
          ValueError: `stop_strings` is a bare string, or one is empty or no string.
        """
        self._automaton = _Automaton(check_stop_strings(stop_strings))
        self._include_stop = include_stop
        self._node = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Takes the next piece of text and returns what can be released by now.

        Once a stop string was found, everything after it is dropped.
        """
        if self.matched is not None:
            return ""
        text = self._held + piece
        for index, character in enumerate(piece, start=len(self._held)):
            self._node = self._automaton.advance(self._node, character)
            stop = self._automaton.stop_at(self._node)
            if stop is not None:
                self.matched = stop
                self._held = ""
                end = index + 1
                return text[: end if self._include_stop else end - len(stop)]
        # A stop string that is shown anyway needs no holding back.
        num_held = 0 if self._include_stop else self._automaton.depth(self._node)
        border = len(text) - num_held
        self._held = text[border:]
        return text[:border]

    def finish(self) -> str:
        """Returns the held text: no more comes, so it can't become a stop string."""
        held, self._held = self._held, ""
        self._node = 0
        return held


def check_stop_strings(stop_strings: Sequence[object]) -> tuple[str, ...]:
    """Returns the stop strings as a tuple.

    Raises:
      ValueError: `stop_strings` is a bare string, or one of them is empty or no string.
    """
    if isinstance(stop_strings, str):
        raise ValueError(
            "`stop_strings` must be a sequence of strings, got the string "
            f"{stop_strings!r}; write [{stop_strings!r}]."
        )
    checked = []
    for index, stop in enumerate(stop_strings):
        if not isinstance(stop, str) or not stop:
            raise ValueError(
                f"`stop_strings`[{index}] must be a string of at least one character, "
                f"got {stop!r}; leave it out."
            )
        checked.append(stop)
    return tuple(checked)


class _Automaton:
    """A trie of the stop strings with, per node, where to go on after a mismatch."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop: list[str | None] = [None]
        for stop in stop_strings:
            self._insert(stop)
        self._fallback = [0] * len(self._children)
        self._link()

    def advance(self, node: int, character: str) -> int:
        """The node of the longest suffix of the text that begins a stop string."""
        while node and character not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(character, 0)

    def depth(self, node: int) -> int:
        return self._depth[node]

    def stop_at(self, node: int) -> str | None:
        """The longest stop string that ends here."""
        return self._stop[node]

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            if character not in self._children[node]:
                self._children[node][character] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._stop.append(None)
            node = self._children[node][character]
        self._stop[node] = stop

    def _link(self) -> None:
        # Breadth first, so that the shorter suffixes a node falls back to are ready.
        queue = list(self._children[0].values())
        for node in queue:
            for character, child in self._children[node].items():
                queue.append(child)
                self._fallback[child] = self.advance(self._fallback[node], character)
            if self._stop[node] is None:
                self._stop[node] = self._stop[self._fallback[node]]
