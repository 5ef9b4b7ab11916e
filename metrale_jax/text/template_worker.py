"""Renders chat templates: the one place that runs minijinja.

Imported, it offers `render_contexts`. Run as a program it does the same under limits on
memory and processor time, from a JSON request on standard input to a JSON reply on
standard output. It is run by its path, so it imports nothing of the package.
"""

import datetime
import json
import sys
from collections.abc import Sequence
from typing import Any, Literal

import minijinja

# Longest message of a template that is passed on.
_MAX_MESSAGE_CHARACTERS = 2000

Failure = Literal["refused", "steps", "memory", "template"]


class RenderError(Exception):
    """A template could not be rendered.

    Attributes:
      failure: "refused" by the template itself, out of "steps" or "memory", or an error
        in the "template".
      message: the engine's or the template's own words.
    """

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(failure, message)
        self.failure: Failure = failure
        self.message = message[:_MAX_MESSAGE_CHARACTERS]


def render_contexts(
    source: str, contexts: Sequence[str], *, max_steps: int, now: str
) -> list[str]:
    """Renders a template once per context.

    Args:
      source: the template.
      contexts: JSON objects of the template's variables. JSON, so that the template
        meets plain values only, and may do with them as it likes.
      max_steps: bound on the work of one rendering, in minijinja's units of fuel (an
        instruction, or a few bytes of text built).
      now: ISO 8601 time that `strftime_now` formats.

    Raises:
      RenderError: see there.
    """
    environment = _environment(max_steps, datetime.datetime.fromisoformat(now))
    return [_render(environment, source, json.loads(context)) for context in contexts]


class _RefusedError(ValueError):
    """A template called `raise_exception`."""


def _environment(max_steps: int, now: datetime.datetime) -> minijinja.Environment:
    """What Hugging Face transformers offers to a template, in minijinja."""
    # Without `debug`, error messages hold none of the template's variables.
    environment = minijinja.Environment(
        debug=False, fuel=max_steps, trim_blocks=True, lstrip_blocks=True
    )
    environment.add_filter("tojson", _tojson)
    environment.add_global("raise_exception", _raise_exception)
    environment.add_global("strftime_now", now.strftime)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _render(
    environment: minijinja.Environment, source: str, variables: dict[str, Any]
) -> str:
    try:
        return environment.render_str(source, **variables)
    except minijinja.TemplateError as error:
        is_out_of_fuel = error.kind == "OutOfFuel"
        failure = "steps" if is_out_of_fuel else "template"
        raise RenderError(failure, error.message) from error
    except _RefusedError as error:
        raise RenderError("refused", str(error)) from error
    except MemoryError as error:
        raise RenderError("memory", str(error)) from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # Of the functions above, called with values that they can't take.
        raise RenderError("template", f"{type(error).__name__}: {error}") from error


def _limit_process(memory_bytes: int, seconds: int) -> None:
    import resource  # Not on every platform, so the importing process must not need it.

    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: memory_bytes,
        # For a parent that has died: a living one ends this process by its own clock.
        resource.RLIMIT_CPU: seconds,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        # A limit that is lower already can't be raised.
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    try:
        texts = render_contexts(
            request["source"],
            request["contexts"],
            max_steps=request["max_steps"],
            now=request["now"],
        )
    except RenderError as error:
        return {"failure": error.failure, "message": error.message}
    return {"texts": texts}


def main() -> None:
    """Answers one request."""
    request = json.load(sys.stdin.buffer)
    _limit_process(request["memory_bytes"], request["seconds"])
    sys.stdout.write(json.dumps(_reply(request)))


if __name__ == "__main__":
    main()
