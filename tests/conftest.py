"""Settings of every test: strict jax, on the CPU unless `-m` names a device.

The same tests run everywhere. The environment may choose the platform
(`JAX_PLATFORMS`) and the number of CPU devices (`JAX_NUM_CPU_DEVICES`); it changes no
tolerance and skips nothing.
"""

import os

import hypothesis
import jax
import pytest

import helpers

# Markers of tests that run only when `-m` names them, and the jax backend they need.
_OPT_IN = {"gpu": "gpu", "tpu": "tpu", "slow": None}

# Enough for a mesh of 2 x 2 x 2. Results on one of them are those of a lone device.
_NUM_CPU_DEVICES = 8

_COMPILED_MAX_BYTES = 512 * 2**20


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    wants_device = {"gpu", "tpu"} & helpers.named_markers(config.option.markexpr)
    if "JAX_PLATFORMS" not in os.environ and not wants_device:
        jax.config.update("jax_platforms", "cpu")
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", _NUM_CPU_DEVICES)
    _keep_compiled_programs(config)
    _load_hypothesis_profile()


def pytest_runtest_setup(item: pytest.Item) -> None:
    named = helpers.named_markers(item.config.option.markexpr)
    for marker, backend in _OPT_IN.items():
        if item.get_closest_marker(marker) is None:
            continue
        if marker not in named:
            pytest.skip(f"marked `{marker}`: runs with `-m {marker}`")
        if backend is not None and jax.default_backend() != backend:
            pytest.fail(
                f"`-m {marker}` needs the jax backend {backend!r}, but jax found "
                f"{jax.default_backend()!r}; install the extra for that device.",
                pytrace=False,
            )


def _keep_compiled_programs(config: pytest.Config) -> None:
    """Lets jax reuse what an earlier run of the tests on this machine compiled.

    A round of a tiny model costs 50 processor seconds to compile and 11 with this. The
    key is the program with all that compiled it, so the cache can change no result;
    still CI compiles everything. `--cache-clear` empties it.
    """
    if os.environ.get("CI") or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    if not hasattr(config, "cache"):
        return  # Pytest's own cache is turned off.
    folder = config.cache.mkdir("compiled")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _COMPILED_MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _load_hypothesis_profile() -> None:
    # The first call of a case may compile, so time says nothing about the code.
    hypothesis.settings.register_profile("local", deadline=None)
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
