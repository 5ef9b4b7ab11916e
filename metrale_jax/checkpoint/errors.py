"""The one error of checkpoints: what is wrong, where, and what would be right."""

import os

_LONGEST_NAME = 200
_LONGEST_PATH = 1000


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit its config; the message is one line.

    Attributes:
      file: the file or folder at fault, when one is.
      tensor: the stored tensor at fault, when one is.
      expected: what would have been right.
      found: what came.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        self.file = None if file is None else os.fspath(file)
        self.tensor = tensor
        self.expected = expected
        self.found = found
        place = [] if self.file is None else [shown(self.file, _LONGEST_PATH)]
        place += [] if tensor is None else [f"`{shown(tensor)}`"]
        outcome = "" if expected is None else f"; expected {shown(expected)}"
        outcome += "" if found is None else f"; found {shown(found)}"
        super().__init__(": ".join([*place, problem]) + outcome)


def shown(value: object, limit: int = _LONGEST_NAME) -> str:
    """Returns text that is safe in a one-line message: escaped, and cut if very long.

    Names come from files: they may hold line breaks, terminal codes, a megabyte.
    """
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    if len(text) > limit:
        text = text[:limit] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def listed(names: list[str], limit: int = 5) -> str:
    """Returns up to `limit` names and how many more there are."""
    rest = len(names) - limit
    text = ", ".join(f"`{shown(name)}`" for name in names[:limit])
    return f"{text} and {rest} more" if rest > 0 else text
