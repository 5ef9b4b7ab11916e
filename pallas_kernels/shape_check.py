"""Trace-time checks of shapes and dtypes, by axis letters."""

from typing import Any

import jax.numpy as jnp


class Axes:
    """Sizes of axis letters, each bound by the first array that names it."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    def __getitem__(self, letter: str) -> int:
        return self._sizes[letter]

    def check(self, name: str, array: Any, axes: str, dtype: Any) -> None:
        """Checks one array against its axes, binding the letters not seen before.

        Args:
          name: the argument's name, for messages.
          array: anything with a shape and a dtype.
          axes: axis letters separated by blanks, e.g. "B K Hk Dk".
          dtype: required dtype, or a kind of them such as `jnp.floating`.

        Raises:
          ValueError: the rank, a size or the dtype differs.
        """
        letters = axes.split()
        shape = tuple(array.shape)
        expected = tuple(self._sizes.get(letter) for letter in letters)
        fits = len(shape) == len(letters) and all(
            want in (None, size) for want, size in zip(expected, shape, strict=True)
        )
        if not fits:
            sizes = ", ".join(
                letter if size is None else f"{letter}={size}"
                for letter, size in zip(letters, expected, strict=True)
            )
            raise ValueError(f"`{name}` must have shape [{sizes}], got {list(shape)}.")
        if not jnp.issubdtype(array.dtype, dtype):
            raise ValueError(
                f"`{name}` must be {dtype.__name__}, got {array.dtype}; cast it first."
            )
        self._sizes.update(zip(letters, shape, strict=True))

    def check_multiple(self, letter: str, unit: str) -> None:
        """Checks that one axis is a multiple of another.

        Raises:
          ValueError: it is not.
        """
        size, unit_size = self._sizes[letter], self._sizes[unit]
        if unit_size == 0 or size % unit_size:
            raise ValueError(
                f"axis {letter} must be a multiple of axis {unit} ({unit_size}), "
                f"got {size}."
            )
