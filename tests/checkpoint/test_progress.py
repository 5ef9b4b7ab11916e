"""Progress: a bar on a terminal, a few plain lines anywhere else."""

import os
from typing import TextIO

from metrale_jax import checkpoint


def run(stream: TextIO, num_steps: int = 1000) -> None:
    total = num_steps * 10**6
    with checkpoint.progress_bar("loading weights", stream=stream) as progress:
        for step in range(num_steps + 1):
            progress(step * 10**6, total, f"layer {step}")


def read_all(descriptor: int) -> str:
    """Reads what a terminal was sent; it hands out a page at a time."""
    parts = []
    try:
        while part := os.read(descriptor, 4096):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts).decode()


def test_log_gets_one_plain_line_per_tenth(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as stream:
        run(stream)
    lines = path.read_text().splitlines()
    assert lines[0] == "loading weights: 0% (0.0 of 1000.0 MB)"
    assert lines[-1] == "loading weights: 100% (1000.0 of 1000.0 MB)"
    assert len(lines) == 11


def test_terminal_gets_a_bar():
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:
        run(stream, num_steps=10)
        os.set_blocking(ours, False)
        text = read_all(ours)
    os.close(ours)
    assert "\x1b[" in text
    assert "10.0/10.0 MB" in text


def test_default_stream_is_standard_error(capsys):
    with checkpoint.progress_bar() as progress:
        progress(0, 0, "")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "loading: 0% (0.0 of 0.0 MB)\n")
