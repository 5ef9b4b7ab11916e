"""Progress of loading: the callback's shape, and a bar for people or logs."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import rich.console
import rich.progress

_PERCENT_PER_LINE = 10
# Called as loading goes on: (done_bytes, total_bytes, name of the parameter just
# loaded, empty at the start).
Progress = Callable[[int, int, str], None]


@contextlib.contextmanager
def progress_bar(
    title: str = "loading", *, stream: TextIO | None = None
) -> Iterator[Progress]:
    """Yields a `Progress` that draws a bar, or prints a line per tenth to a log.

    Args:
      title: what is going on.
      stream: where to; None is standard error. A bar if it is a terminal, else lines.
    """
    output: TextIO = sys.stderr if stream is None else stream
    if not output.isatty():
        yield _Lines(title, output)
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    console = rich.console.Console(file=output, force_terminal=True)
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=None)

        def update(done_bytes: int, total_bytes: int, name: str) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield update


class _Lines:
    """One line whenever another tenth of the bytes is done."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title = title
        self._stream = stream
        self._last_percent: int | None = None

    def __call__(self, done_bytes: int, total_bytes: int, name: str) -> None:
        percent = 100 * done_bytes // max(total_bytes, 1)
        percent -= percent % _PERCENT_PER_LINE
        if percent == self._last_percent:
            return
        self._last_percent = percent
        done, total = done_bytes / 1e6, total_bytes / 1e6
        print(
            f"{self._title}: {percent}% ({done:.1f} of {total:.1f} MB)",
            file=self._stream,
            flush=True,
        )
