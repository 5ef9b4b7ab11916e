"""The run-time type checker that pytest applies to every function of the library.

`pyproject.toml` names it in `--jaxtyping-packages`; users of the library never load it.
"""

from collections.abc import Callable

import beartype


def check_functions(function: Callable) -> Callable:
    """Wraps `function` with beartype; leaves constructors alone.

    jax rebuilds a pytree by calling its class, so a checked constructor would refuse
    what `jax.tree.map`, `jax.vmap(in_axes=...)` and sharding trees legitimately put in
    the place of arrays: None, an integer, a sharding. The functions that take such a
    pytree are checked all the same.
    """
    if function.__name__ == "__init__":
        return function
    return beartype.beartype(function)
