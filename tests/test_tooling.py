"""The tools that the other tests and every contributor lean on."""

import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import textwrap
import tomllib
import warnings

import jax
import jax.numpy as jnp
import pytest

import helpers
import type_checks
from metrale_jax import config as config_lib
from metrale_jax import indices
from metrale_jax import state as state_lib

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci/run"]

# What jax does is tested on its newest release too.
smoke = pytest.mark.smoke


# The settings of the tests.


@smoke
def test_dtypes_do_not_mix_silently() -> None:
    with pytest.raises(ValueError, match="implicit dtype promotion"):
        jnp.ones(2, jnp.int32) + jnp.ones(2, jnp.float32)


@smoke
def test_ranks_do_not_mix_silently() -> None:
    with pytest.raises(ValueError, match="jax_numpy_rank_promotion"):
        jnp.ones(2) + jnp.ones((2, 2))


@smoke
def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning, match="careful"):
        warnings.warn("careful", stacklevel=1)


@smoke
def test_functions_of_the_library_are_type_checked() -> None:
    with pytest.raises(Exception, match="'num_slots'"):
        config_lib.for_slots(2.0, 8)  # type: ignore[arg-type]
    index = jnp.zeros(3, jnp.float32)
    with pytest.raises(Exception, match="'index'"):
        indices.inert_unless(index > 0, index, 3)


@smoke
def test_pytrees_hold_what_stands_for_an_array() -> None:
    array = jnp.zeros(2)
    cache = state_lib.KVCache(keys=array, values=array)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: sharding, cache)
    assert jax.device_put(cache, shardings).keys.sharding == sharding
    axes = jax.tree.map(lambda _: 0, cache)
    assert jax.vmap(lambda c: c.keys * 2, in_axes=(axes,))(cache).shape == (2,)
    assert jax.eval_shape(lambda c: c, cache).keys.shape == (2,)
    assert jax.tree.map(lambda _: None, cache).keys is None


def test_hand_written_functions_keep_their_name_when_checked() -> None:
    checked = type_checks.check_functions(test_warnings_are_errors)
    assert checked.__name__ == "test_warnings_are_errors"


@smoke
def test_count_compilations_sees_one_trace_per_shape() -> None:
    def double_the_rows(x: jax.Array) -> jax.Array:
        return 2 * x

    step = jax.jit(double_the_rows)
    short, long = jnp.ones(4), jnp.ones(5)
    with helpers.count_compilations() as counter:
        step(short)
        step(short + short)
    assert counter.num_traces("double_the_rows") == 1
    before = counter.num_compilations
    assert before >= 1
    step(long)
    assert counter.num_compilations == before, "it counts on after its end"
    with helpers.count_compilations() as counter:
        step(short)
        step(long)
    assert (counter.num_traces("double_the_rows"), counter.num_compilations) == (0, 0)
    step.clear_cache()
    with helpers.count_compilations() as counter:
        step(short)
        step(long)
    assert counter.num_traces("double_the_rows") == 2
    assert counter.num_traces("another") == 0


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("", set()),
        ("gpu", {"gpu"}),
        ("slow and not gpu", {"slow"}),
        ("not (gpu or tpu)", set()),
        ("smoke or (tpu and slow)", {"smoke", "tpu", "slow"}),
    ],
)
def test_a_marker_behind_not_is_not_asked_for(expression: str, named: set[str]) -> None:
    assert helpers.named_markers(expression) == named


# pyproject.toml.


@pytest.fixture(name="project", scope="module")
def load_project() -> dict:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)


def test_extras_are_the_documented_ones(project: dict) -> None:
    extras = project["project"]["optional-dependencies"]
    assert set(extras) == {"cuda12", "tpu", "train", "test"}


def test_tools_are_pinned(project: dict) -> None:
    tools = project["project"]["optional-dependencies"]["test"]
    assert [tool for tool in tools if not re.fullmatch(r"[\w-]+==[\d.]+", tool)] == []


def test_licenses_are_the_named_ones(project: dict) -> None:
    assert project["project"]["license"] == "MIT OR Apache-2.0"
    for name in project["project"]["license-files"]:
        assert "metrale_jax contributors" in (ROOT / name).read_text()


# The scripts.


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_and_lint_free(script: pathlib.Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = pathlib.Path(sysconfig.get_path("scripts"), "shellcheck")
    subprocess.run([shellcheck, "-x", script], check=True, cwd=ROOT)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_name_no_host(script: pathlib.Path) -> None:
    assert not re.search(r"https?://|--(extra-)?index-url", script.read_text())


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.name != "venv.sh"])
def test_scripts_stop_at_the_first_error(script: pathlib.Path) -> None:
    assert os.access(script, os.X_OK)
    assert "\nset -euo pipefail\n" in script.read_text()


class Checkout:
    """A copy of the scripts in a folder of its own, with stand-ins for real programs.

    The stand-in python makes an environment whose python is the stand-in again; it
    writes each of its calls to `log`, and fails the call that `fail` names.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.root = folder / "a checkout with spaces"
        self.log = folder / "log"
        self.bin = folder / "bin"
        for path in [ROOT / "pyproject.toml", *SCRIPTS]:
            copy = self.root / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
        self.bin.mkdir()
        # Only what the scripts may use; no python of the machine.
        for tool in ("bash", "cat", "cmp", "cp", "dirname", "flock", "mkdir", "rm"):
            real = shutil.which(tool)
            if real is not None:
                (self.bin / tool).symlink_to(real)
        self.log.touch()

    def add_program(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text("#!/usr/bin/env bash\n" + textwrap.dedent(script))
        path.chmod(0o755)

    def add_python(self, name: str = "python3.11") -> None:
        path = self.bin / name
        self.add_program(
            name,
            f"""\
            set -eu
            case "$*" in
              "- "*) cat >/dev/null; echo "{path}"; exit ;;
              "-c import pip") exit ;;
            esac
            echo "$@" >>"{self.log}"
            if [[ -n ${{FAIL:-}} && "$*" == *"$FAIL"* ]]; then exit 3; fi
            if [[ $1 == -m && $2 == venv ]]; then
              mkdir -p "$3/bin"
              cp "{path}" "$3/bin/python"
            fi
            """,
        )

    def run(
        self, script: str, *args: str, fail: str = "", cwd: pathlib.Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        return subprocess.run(
            ["bash", str(self.root / script), *args],
            env={"PATH": f"{self.bin}", "FAIL": fail},
            cwd=cwd or self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture(name="checkout")
def make_checkout(tmp_path: pathlib.Path) -> Checkout:
    return Checkout(tmp_path)


_INSTALL_TESTS = "--editable .[test,train]"


def test_first_call_installs_and_second_goes_straight_to_pytest(
    checkout: Checkout, tmp_path: pathlib.Path
) -> None:
    checkout.add_python()
    first = checkout.run("scripts/test.sh", "-k", "two words", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout == ""
    make, install, test = checkout.calls()
    assert make == "-m venv .venv"
    assert install.endswith(_INSTALL_TESTS)
    assert test == "-m pytest -k two words"
    second = checkout.run("scripts/test.sh", cwd=tmp_path)
    assert second.returncode == 0
    assert checkout.calls() == ["-m pytest"]


def test_changed_pyproject_is_installed_into_the_same_environment(
    checkout: Checkout,
) -> None:
    checkout.add_python()
    checkout.run("scripts/test.sh")
    with open(checkout.root / "pyproject.toml", "a") as file:
        file.write("# A change.\n")
    checkout.run("scripts/test.sh")
    install, _ = checkout.calls()
    assert install.endswith(_INSTALL_TESTS)


@pytest.mark.parametrize("step", ["-m venv", "-m pip"])
def test_half_made_environment_is_made_anew(checkout: Checkout, step: str) -> None:
    checkout.add_python()
    broken = checkout.run("scripts/test.sh", fail=step)
    assert broken.returncode != 0
    assert not any("-m pytest" in call for call in checkout.calls())
    assert checkout.run("scripts/test.sh").returncode == 0
    assert [call.split()[1] for call in checkout.calls()] == ["venv", "pip", "pytest"]


def test_failed_update_is_not_taken_for_done(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.run("scripts/test.sh")
    original = (checkout.root / "pyproject.toml").read_text()
    (checkout.root / "pyproject.toml").write_text(original + "# A change.\n")
    assert checkout.run("scripts/test.sh", fail="-m pip").returncode != 0
    (checkout.root / "pyproject.toml").write_text(original)
    checkout.run("scripts/test.sh")
    assert checkout.calls()[0].endswith(_INSTALL_TESTS)


def test_environment_whose_python_is_gone_is_made_anew(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.run("scripts/test.sh")
    (checkout.root / ".venv/bin/python").unlink()
    checkout.run("scripts/test.sh")
    assert checkout.calls()[0] == "-m venv .venv"


def test_moved_checkout_gets_an_environment_of_its_own(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.run("scripts/test.sh")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.run("scripts/test.sh")
    assert checkout.calls()[0] == "-m venv .venv"


def test_missing_python_is_one_clear_message(checkout: Checkout) -> None:
    checkout.add_program("python3", "exit 1\n")
    result = checkout.run("scripts/test.sh")
    assert result.returncode != 0
    assert result.stderr.count("\n") == 1
    assert "Install Python 3.11 or newer" in result.stderr


def test_python_3_11_is_preferred(checkout: Checkout) -> None:
    checkout.add_python("python3")
    checkout.run("scripts/test.sh")
    assert checkout.calls()[0] == "-m venv .venv"
    checkout.add_program("python3.11", "exit 1\n")
    assert checkout.run("scripts/test.sh").returncode == 0
    checkout.add_python("python3.11")
    source = f". scripts/venv.sh && supported_python >'{checkout.log}'"
    env = {"PATH": str(checkout.bin)}
    subprocess.run(["bash", "-c", source], cwd=checkout.root, env=env, check=True)
    assert checkout.calls() == [str(checkout.bin / "python3.11")]


def test_failing_tests_fail_the_script(checkout: Checkout) -> None:
    checkout.add_python()
    assert checkout.run("scripts/test.sh", fail="-m pytest").returncode == 3


def test_demo_of_a_folder_without_checkpoint_names_the_way_out(
    checkout: Checkout,
) -> None:
    checkout.add_python()
    result = checkout.run("scripts/demo.sh", "nowhere")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "bash scripts/demo.sh FOLDER" in result.stderr
    assert checkout.calls() == []


def test_demo_without_embedded_checkpoint_times_decoding(checkout: Checkout) -> None:
    checkout.add_python()
    result = checkout.run("scripts/demo.sh", "--passes=3")
    assert result.returncode == 0, result.stderr
    assert "No trained checkpoint" in result.stderr
    assert "bash scripts/demo.sh FOLDER" in result.stderr
    launcher = checkout.root / "scripts/bench_decode.py"
    assert checkout.calls()[-1] == f"{launcher} --passes=3"


@pytest.mark.parametrize(
    ("driver", "requirement"),
    [
        (None, "--editable ."),
        ("exit 9\n", "--editable ."),
        ("", "--editable .[cuda12]"),
    ],
    ids=["no driver", "dead driver", "driver"],
)
def test_demo_takes_the_gpu_where_a_driver_answers(
    checkout: Checkout, driver: str | None, requirement: str
) -> None:
    checkout.add_python()
    if driver is not None:
        checkout.add_program("nvidia-smi", driver)
    embedded = checkout.root / "metrale_jax/assets/demo"
    embedded.mkdir(parents=True)
    (embedded / "config.json").touch()
    result = checkout.run("scripts/demo.sh", "--prompt=x", "--seed=8")
    assert result.returncode == 0, result.stderr
    _, install, generate = checkout.calls()
    assert install.endswith(requirement)
    launcher = checkout.root / "scripts/generate.py"
    assert generate == f"{launcher} --checkpoint {embedded} --prompt=x --seed=8"


def test_demo_takes_a_folder_relative_to_the_caller(
    checkout: Checkout, tmp_path: pathlib.Path
) -> None:
    checkout.add_python()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").touch()
    result = checkout.run("scripts/demo.sh", "mine", "--seed=1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    generate = checkout.calls()[-1].partition("generate.py ")[2]
    assert generate == "--checkpoint mine --seed=1 --prompt def fibonacci(n):"


def test_demo_and_tests_share_one_environment(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.run("scripts/test.sh")
    (checkout.root / "config.json").touch()
    checkout.run("scripts/demo.sh", ".")
    assert len(checkout.calls()) == 1, "the demo needs no more than the tests"


@pytest.mark.parametrize("fail", ["", "-m ruff check", "-m pyright", "-m pytest"])
def test_ci_runs_every_step_and_fails_with_any(checkout: Checkout, fail: str) -> None:
    checkout.add_python()
    result = checkout.run(".ci/run", fail=fail)
    assert (result.returncode == 0) == (fail == ""), result.stderr
    steps = [
        call for call in checkout.calls() if call.split()[1] not in ("venv", "pip")
    ]
    assert steps == [
        "-m ruff check .",
        "-m ruff format --check .",
        "-m pyright",
        "-m pytest -n 2 --dist loadfile",
    ]
    assert "Skipped: no Python 3.12" in result.stderr
    assert ("Failed: " in result.stderr) == (fail != "")
