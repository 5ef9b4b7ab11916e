"""Host-side allocation of KV pages to slots."""

import dataclasses
from collections.abc import Hashable

from metrale_jax import config as config_lib


class PagesExhausted(RuntimeError):
    """There are fewer free pages than were asked for; nothing was allocated."""


@dataclasses.dataclass
class PageAllocator:
    """Hands out pages 0..num_pages-1; each page has at most one owner.

    Lowest free pages go first, so that the same requests get the same pages.
    """

    num_pages: int
    page_size: int

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}."
                )
        # Kept in descending order: the lowest page is popped first.
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._owned: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_of(self, owner: Hashable) -> tuple[int, ...]:
        """The owner's pages in order of position; empty for an unknown owner."""
        return tuple(self._owned.get(owner, ()))

    def pages_needed(self, owner: Hashable, num_tokens: int) -> int:
        """Pages to add before the owner can hold `num_tokens` tokens."""
        needed = config_lib.pages_for(num_tokens, self.page_size)
        return max(0, needed - len(self._owned.get(owner, ())))

    def grow(self, owner: Hashable, num_tokens: int) -> tuple[int, ...]:
        """Gives the owner pages for `num_tokens` tokens in all; returns all its pages.

        Raises:
          PagesExhausted: not enough free pages; the owner keeps what it had.
        """
        needed = self.pages_needed(owner, num_tokens)
        if needed > len(self._free):
            raise PagesExhausted(
                f"{needed} pages of {self.page_size} tokens are needed for {owner!r}, "
                f"{len(self._free)} of {self.num_pages} are free; release an owner."
            )
        pages = self._owned.setdefault(owner, [])
        pages.extend(self._free.pop() for _ in range(needed))
        return tuple(pages)

    def release(self, owner: Hashable) -> None:
        """Takes all pages back.

        Raises:
          ValueError: the owner holds none (a double release).
        """
        if owner not in self._owned:
            raise ValueError(
                f"`owner` {owner!r} holds no pages; was it released before?"
            )
        self._free.extend(self._owned.pop(owner))
        self._free.sort(reverse=True)
