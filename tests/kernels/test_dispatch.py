"""Choice of an implementation: by name, by backend, and the refusals."""

import jax
import pytest

from pallas_kernels import dispatch


def xla() -> str:
    return "xla"


def gpu() -> str:
    return "pallas_gpu"


OFFERS = {"xla": xla, "pallas_gpu": gpu}


@pytest.mark.smoke
def test_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        dispatch.select("some_op", OFFERS, "cuda")
    assert str(error.value) == (
        "`implementation` must be None or one of ['xla', 'pallas_gpu'] for `some_op`, "
        "got 'cuda'."
    )


@pytest.mark.smoke
def test_known_name_that_the_op_lacks_is_refused() -> None:
    with pytest.raises(NotImplementedError) as error:
        dispatch.select("some_op", OFFERS, "pallas_tpu")
    assert str(error.value) == (
        "`some_op` has no implementation 'pallas_tpu'; it offers ['xla', 'pallas_gpu']."
    )


@pytest.mark.parametrize(
    ("backend", "chosen"), [("cpu", xla), ("gpu", gpu), ("tpu", xla)]
)
def test_none_takes_the_backends_kernel_or_xla(monkeypatch, backend, chosen) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert dispatch.select("some_op", OFFERS, None) is chosen


def test_a_name_is_taken_whatever_the_backend(monkeypatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert dispatch.select("some_op", OFFERS, "pallas_gpu") is gpu


def test_an_op_may_set_its_own_defaults(monkeypatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    function = dispatch.select(
        "some_op", OFFERS, None, backend_defaults={"tpu": "pallas_gpu"}
    )
    assert function is gpu
