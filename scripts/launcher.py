"""What the launchers share: how they parse flags, how they refuse, what they cache."""

import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
from absl import app, flags

_COMPILATION_CACHE = flags.DEFINE_string(
    "compilation_cache",
    None,
    "Folder for compiled programs; by default one in the user's cache, readable by "
    "nobody else. Empty switches it off.",
)

_HELP_FLAGS = ("help", "helpshort", "helpfull", "helpxml", "?")


class UsageError(Exception):
    """The request can't be run; the message is one line for the user."""


def exit_with_line(program: str, message: str) -> NoReturn:
    """Ends the launcher with exit code 1 and one line on stderr."""
    name = pathlib.Path(program).name
    print(f"{name}: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(1)


def run_main(argv: Sequence[str], body: Callable[[], None], *, way_out: str) -> None:
    """Runs a launcher that takes flags alone; what can't be run ends with one line.

    Args:
      argv: the program's name; anything more is refused.
      body: the work, after the compilation cache is set.
      way_out: what to lower where the device's memory is too small.
    """
    try:
        if len(argv) > 1:
            raise UsageError(
                f"Unexpected arguments {argv[1:]}; a prompt is given as --prompt=TEXT."
            )
        use_compilation_cache()
        body()
    # What the library raises for a bad request; anything else is our bug and is shown
    # as such.
    except (UsageError, ValueError, NotImplementedError, OSError) as error:
        exit_with_line(argv[0], str(error))
    except jax.errors.JaxRuntimeError as error:
        exit_with_line(argv[0], memory_line(error, way_out))
    except KeyboardInterrupt:
        sys.exit(130)


def parse_flags(argv: list[str]) -> list[str]:
    """Like absl's own parser, with one line and exit code 1 for a bad flag."""
    try:
        return (
            app.parse_flags_with_usage(argv) if _asks_help(argv) else flags.FLAGS(argv)
        )
    except flags.Error as error:
        exit_with_line(argv[0], f"{error} See --help.")


def check_writable(flag: str, path: str | None) -> None:
    """Refuses an impossible path before the work rather than after it.

    Raises:
      UsageError: the path is not a file in a folder that exists.
    """
    if path is None:
        return
    if pathlib.Path(path).is_dir() or not pathlib.Path(path).absolute().parent.is_dir():
        raise UsageError(f"--{flag}={path} must be a file in a folder that exists.")


def use_compilation_cache() -> None:
    """Applies --compilation_cache. Compiled programs are code: the default is private.

    Raises:
      UsageError: the default folder can't be made.
    """
    folder = _COMPILATION_CACHE.value
    if folder == "":
        return
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        folder = str(pathlib.Path(base) / "metrale_jax" / "compiled")
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"The cache of compiled programs can't be made: {error}. Give "
                "--compilation_cache=FOLDER, or an empty one for none."
            ) from None
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def memory_line(error: Exception, way_out: str) -> str:
    """Returns a line for jax's error that says the device's memory is too small.

    Raises:
      Exception: `error` itself, if it is any other.
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    first = str(error).splitlines()[0]
    return f"The device's memory is too small: {first} {way_out}"


def _asks_help(argv: list[str]) -> bool:
    return any(
        argument.startswith("-") and argument.strip("-") in _HELP_FLAGS
        for argument in argv[1:]
    )
