"""Choice of an op's implementation: by name, or by backend, decided before tracing."""

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, get_args

import jax

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]

_BACKEND_KERNELS: Mapping[str, str] = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}

_Function = TypeVar("_Function", bound=Callable)


def select(
    op: str,
    offers: Mapping[str, _Function],
    implementation: str | None,
    *,
    backend_defaults: Mapping[str, str] = _BACKEND_KERNELS,
) -> _Function:
    """Returns the implementation of `op` to run.

    Args:
      op: the op's name, for messages.
      offers: the op's implementations by name; "xla" is always among them.
      implementation: a name, or None for the backend's default.
      backend_defaults: name to take on a backend when `implementation` is None; where
        the op doesn't offer it, or for other backends, "xla" is taken.

    Raises:
      ValueError: no op has an implementation of that name.
      NotImplementedError: this op has none.
    """
    if implementation is None:
        name = backend_defaults.get(jax.default_backend(), "xla")
        return offers[name if name in offers else "xla"]
    if implementation in offers:
        return offers[implementation]
    known = get_args(Implementation)
    if implementation in known:
        raise NotImplementedError(
            f"`{op}` has no implementation {implementation!r}; "
            f"it offers {list(offers)}."
        )
    raise ValueError(
        f"`implementation` must be None or one of {list(offers)} for `{op}`, "
        f"got {implementation!r}."
    )
