"""The page allocator's invariants, under any sequence of events."""

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from metrale_jax.engine import pages

NUM_PAGES = 12
PAGE_SIZE = 4
OWNERS = st.integers(0, 5)


class AllocatorMachine(stateful.RuleBasedStateMachine):
    """Compares the allocator with a plain dictionary of owned pages."""

    def __init__(self):
        super().__init__()
        self.allocator = pages.PageAllocator(NUM_PAGES, PAGE_SIZE)
        self.owned = {}

    @stateful.rule(owner=OWNERS, num_tokens=st.integers(0, 60))
    def grow(self, owner, num_tokens):
        before = self.owned.get(owner, ())
        needed = max(0, -(-num_tokens // PAGE_SIZE) - len(before))
        free = NUM_PAGES - sum(map(len, self.owned.values()))
        assert self.allocator.pages_needed(owner, num_tokens) == needed
        if needed > free:
            with pytest.raises(pages.PagesExhausted):
                self.allocator.grow(owner, num_tokens)
        else:
            after = self.allocator.grow(owner, num_tokens)
            # Pages in use stay where they are, in order.
            assert after[: len(before)] == before
            assert len(after) == len(before) + needed
            self.owned[owner] = after

    @stateful.rule(owner=OWNERS)
    def release(self, owner):
        if owner in self.owned:
            self.allocator.release(owner)
            del self.owned[owner]
        else:
            with pytest.raises(ValueError, match="holds no pages"):
                self.allocator.release(owner)

    @stateful.invariant()
    def no_page_is_lost_or_shared(self):
        held = [page for owned in self.owned.values() for page in owned]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(NUM_PAGES))
        assert self.allocator.num_free == NUM_PAGES - len(held)
        for owner, owned in self.owned.items():
            assert self.allocator.pages_of(owner) == owned


AllocatorMachine.TestCase.settings = hypothesis.settings(
    max_examples=60, stateful_step_count=60
)
TestAllocator = AllocatorMachine.TestCase


def test_lowest_free_pages_go_first():
    allocator = pages.PageAllocator(6, PAGE_SIZE)
    assert allocator.grow("a", 8) == (0, 1)
    assert allocator.grow("b", 4) == (2,)
    allocator.release("a")
    assert allocator.grow("c", 12) == (0, 1, 3)
    assert allocator.pages_of("nobody") == ()


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="num_pages"):
        pages.PageAllocator(0, 4)
    with pytest.raises(ValueError, match="page_size"):
        pages.PageAllocator(4, 0)
    with pytest.raises(ValueError, match="num_tokens"):
        pages.PageAllocator(4, 4).grow("a", -1)
