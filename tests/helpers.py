"""What the tests share."""

import collections
import contextlib
import re
from collections.abc import Iterator

import jax

# Events of `jax.monitoring`; test_tooling.py fails should jax rename them.
_TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts what jax traced and compiled while `count_compilations` was open."""

    def __init__(self) -> None:
        self._traces: collections.Counter[str] = collections.Counter()
        self._num_compilations = 0

    def record(self, event: str, duration_seconds: float, **details: str | int) -> None:
        """Listens to `jax.monitoring`."""
        del duration_seconds
        if event == _TRACE_EVENT:
            self._traces[str(details["fun_name"])] += 1
        elif event == _COMPILE_EVENT:
            self._num_compilations += 1

    @property
    def num_compilations(self) -> int:
        """Programs compiled, single operations outside of `jax.jit` included."""
        return self._num_compilations

    def num_traces(self, function_name: str) -> int:
        """Returns how often the jitted function of that `__name__` was traced.

        A function jitted inside another counts only when jax traces it anew.
        """
        return self._traces[function_name]

    def __repr__(self) -> str:
        return f"CompilationCounter({self._num_compilations}, {dict(self._traces)})"


@contextlib.contextmanager
def count_compilations() -> Iterator[CompilationCounter]:
    """Counts traces and compilations: one trace per shape is a law of every step.

        with helpers.count_compilations() as counter:
            step(state)
            step(state)
        assert counter.num_traces("step") == 1

    What an earlier test compiled is not compiled again: assert `<= 1`, or first clear
    the step's cache with `step.clear_cache()`.
    """
    counter = CompilationCounter()
    jax.monitoring.register_event_duration_secs_listener(counter.record)
    try:
        yield counter
    finally:
        jax.monitoring.unregister_event_duration_listener(counter.record)


def named_markers(mark_expression: str) -> set[str]:
    """Returns the markers that `-m` asks for; one behind `not` isn't asked for."""
    wanted = re.sub(r"\bnot\s+(\w+|\([^()]*\))", "", mark_expression)
    return set(re.findall(r"\w+", wanted)) - {"and", "or", "not"}
