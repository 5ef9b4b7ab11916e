"""The shape of the code: who may import whom, and what no module may contain.

Everything is read from the source by `ast`; nothing is imported. A new module of
`metrale_jax` needs a place in `LAYERS` or `SIDE_PACKAGES`.
"""

import ast
import graphlib
import importlib.metadata
import pathlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# From bottom to top. A module or package imports from the rows below its own and from
# its neighbours in the row, never in a circle. The most specific name counts.
LAYERS = (
    ("axes", "config", "indices", "drafters.dflash_config"),
    (
        "model.params",
        "sampling",
        "proposal",
        "statistics",
        "state",
        "verdict",
        "drafters.dflash_params",
    ),
    ("model", "snapshot", "drafters.protocol", "drafters.confidence"),
    ("logit_rules", "picks", "accept", "chunk", "verify", "fold"),
    ("drafters", "drafting"),
    ("steps",),
    ("engine", "training"),
)

# Packages beside the layers: all that each may import of the package besides itself.
# Of the layers, only the top row may import them.
SIDE_PACKAGES = {
    "checkpoint": (
        "axes",
        "config",
        "model.params",
        "drafters.dflash_config",
        "drafters.dflash_params",
    ),
    "text": (),
}

# Pairs of neighbours that must not know each other.
STRANGERS = (("engine", "training"),)

# What a package may import beyond `dependencies` of pyproject.toml: one extra's.
EXTRA_OF = {"training": "train"}

FORBIDDEN_IMPORTS = {
    "torch": "an oracle of the tests; the library runs without it",
    "transformers": "an oracle of the tests; the library runs without it",
    "absl": "flags belong to scripts/; the library takes arguments",
    "pickle": "loading a pickle executes code",
    "cloudpickle": "loading a pickle executes code",
    "dill": "loading a pickle executes code",
    "marshal": "loading marshalled data executes code",
    "shelve": "a shelf is a pickle",
}

FORBIDDEN_FILE_NAMES = {"util", "utils", "common", "misc", "manager", "helpers"}

MAX_FILE_LINES = 1000
MAX_FUNCTION_LINES = 100
MAX_KERNEL_LINES = 120


class Module:
    """One source file of a package, parsed."""

    def __init__(self, path: pathlib.Path, root: pathlib.Path) -> None:
        self.path = path.relative_to(root)
        self.source = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.source, filename=str(path))
        parts = self.path.with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yields each imported dotted name and its line, wherever the import stands.

        `from a import b` yields `a.b`: whether b is a module, the caller knows.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    yield f"{base}.{alias.name}", node.lineno

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.name.split(".")
        keep = len(package) - node.level + self.is_package
        return ".".join([*package[:keep], *([node.module] if node.module else [])])


def parse_package(name: str, root: pathlib.Path = ROOT) -> list[Module]:
    return [Module(path, root) for path in sorted((root / name).rglob("*.py"))]


LIBRARY = parse_package("metrale_jax")
KERNELS = parse_package("pallas_kernels")


def layer_faults(modules: list[Module]) -> list[str]:
    """Returns what is wrong with the imports inside `metrale_jax`, one line a fault."""
    names = {module.name for module in modules}
    faults = []
    graph: dict[str, set[str]] = {}
    for module in modules:
        if module.name == "metrale_jax":
            continue  # The public names: it may import all, and none may import it.
        for imported, line in module.imports():
            if imported.split(".")[0] != "metrale_jax":
                continue
            target = _module_of(imported, names)
            if target == "metrale_jax":
                faults.append(
                    f"{module.path}:{line} imports `{imported}` from the public "
                    "names; import the module that defines it."
                )
                continue
            graph.setdefault(module.name, set()).add(target)
            fault = _fault_between(_unit_of(module.name), _unit_of(target))
            if fault:
                faults.append(f"{module.path}:{line} imports `{target}`: {fault}")
    faults += [
        f"{module.path} has no place: add {module.name.split('.')[1]!r} to LAYERS or "
        f"SIDE_PACKAGES in {pathlib.Path(__file__).name}, as low as its imports allow."
        for module in modules
        if module.name != "metrale_jax" and _unit_of(module.name) is None
    ]
    return faults + _circles(graph)


def _module_of(imported: str, names: set[str]) -> str:
    """Returns the module that an imported dotted name is, or is defined in."""
    while imported not in names and "." in imported:
        imported = imported.rpartition(".")[0]
    return imported


def _unit_of(module: str) -> str | None:
    """Returns the most specific entry of the tables that covers a module."""
    units = {unit for row in LAYERS for unit in row} | set(SIDE_PACKAGES)
    name = module.partition(".")[2]
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name or None


def _fault_between(importer: str | None, target: str | None) -> str | None:
    """Returns why `importer` may not import `target`, or None if it may."""
    if importer is None or target is None or importer == target:
        return None
    if importer in SIDE_PACKAGES:
        allowed = SIDE_PACKAGES[importer]
        if target in allowed:
            return None
        return f"{importer} may import {', '.join(allowed) or 'nothing'} besides itself"
    if target in SIDE_PACKAGES:
        if importer in LAYERS[-1]:
            return None
        return f"only {', '.join(LAYERS[-1])} and scripts may import {target}"
    if _height(target) > _height(importer):
        return f"{target} is in a row of LAYERS above that of {importer}"
    if {importer, target} in [set(pair) for pair in STRANGERS]:
        return f"{importer} and {target} must not know each other (STRANGERS)"
    return None


def _height(unit: str) -> int:
    return next(height for height, row in enumerate(LAYERS) if unit in row)


def _circles(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"imports in a circle: {' <- '.join(error.args[1])}"]
    return []


def test_imports_point_downwards() -> None:
    assert layer_faults(LIBRARY) == []


@pytest.mark.parametrize(
    ("importer", "statement", "fault"),
    [
        ("verify.py", "from metrale_jax import steps", "row of LAYERS above"),
        ("model/params.py", "from metrale_jax.model import norm", "LAYERS above"),
        ("text/chat.py", "from metrale_jax import config", "may import nothing"),
        ("checkpoint/load.py", "import metrale_jax.state", "may import axes, config"),
        ("steps.py", "from metrale_jax.text import chat", "only engine, training"),
        ("engine/loop.py", "from metrale_jax import training", "not know each other"),
        ("engine/loop.py", "from metrale_jax import verify_k4", "public names"),
        ("steps.py", "def f():\n    from ..metrale_jax import engine", "LAYERS above"),
        ("fold.py", "from metrale_jax import verify", "in a circle"),
        ("novel.py", "", "no place: add 'novel' to LAYERS"),
    ],
)
def test_layer_check_finds_each_kind_of_fault(
    tmp_path: pathlib.Path, importer: str, statement: str, fault: str
) -> None:
    legal = {
        "__init__.py": "from metrale_jax.steps import verify_k4",
        "config.py": "",
        "state.py": "from metrale_jax.config import ModelConfig",
        "model/__init__.py": "",
        "model/params.py": "from metrale_jax import config as config_lib",
        "model/norm.py": "from metrale_jax.model import params",
        "fold.py": "",
        "verify.py": "from metrale_jax import fold, state\nfrom .model import norm",
        "steps.py": "from metrale_jax import verify as verify_lib",
        "text/__init__.py": "",
        "text/chat.py": "from metrale_jax import text",
        "checkpoint/load.py": "from metrale_jax.model import params",
        "training/__init__.py": "from metrale_jax import checkpoint, steps",
        "checkpoint/__init__.py": "",
        "engine/__init__.py": "",
        "engine/loop.py": "from metrale_jax.text.chat import render",
    }
    assert _faults_of(tmp_path / "legal", legal) == []
    legal[importer] = f"{legal.get(importer, '')}\n{statement}"
    faults = _faults_of(tmp_path / "faulty", legal)
    assert len(faults) >= 1
    assert fault in faults[0]


def _faults_of(root: pathlib.Path, sources: dict[str, str]) -> list[str]:
    for name, source in sources.items():
        path = root / "metrale_jax" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return layer_faults(parse_package("metrale_jax", root))


def test_kernels_stand_alone() -> None:
    allowed = {"pallas_kernels", "jax", "numpy"} | sys.stdlib_module_names
    assert [
        f"{module.path}:{line} imports {imported}"
        for module in KERNELS
        for imported, line in module.imports()
        if imported.split(".")[0] not in allowed
    ] == []


def test_every_import_is_a_declared_dependency() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    distributions = importlib.metadata.packages_distributions()
    faults = []
    for module in LIBRARY:
        part = (*module.name.split("."), "")[1]
        extra = project["optional-dependencies"].get(EXTRA_OF.get(part, ""), [])
        declared = {_distribution(line) for line in project["dependencies"] + extra}
        for imported, line in module.imports():
            top = imported.split(".")[0]
            known = sys.stdlib_module_names | {"metrale_jax", "pallas_kernels"}
            providers = {_distribution(name) for name in distributions.get(top, [])}
            if top not in known and not providers & declared:
                faults.append(f"{module.path}:{line} imports {imported}")
    assert faults == []


def _distribution(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_every_folder_with_code_is_a_package() -> None:
    # Without __init__.py, setuptools would leave the folder out of the wheel.
    folders = {module.path.parent for module in LIBRARY + KERNELS}
    assert [f for f in sorted(folders) if not (ROOT / f / "__init__.py").exists()] == []


def test_no_file_has_a_name_that_says_nothing() -> None:
    parts = {(part, m.path) for m in LIBRARY + KERNELS for part in m.name.split(".")}
    assert [path for part, path in parts if part in FORBIDDEN_FILE_NAMES] == []


def import_faults(module: Module) -> Iterator[str]:
    """Names imports that no module of the packages may have."""
    for imported, line in module.imports():
        reason = FORBIDDEN_IMPORTS.get(imported.split(".")[0])
        if reason:
            yield f"{module.path}:{line} imports {imported}: {reason}"


def environment_faults(module: Module) -> Iterator[str]:
    """Names reads of the environment: choices come in as arguments."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield f"{module.path}:{node.lineno} uses `{ast.unparse(node)}`"
    for imported, line in module.imports():
        if imported.startswith("os.") and imported.split(".")[1] in names:
            yield f"{module.path}:{line} imports `{imported}`"


def except_faults(module: Module) -> Iterator[str]:
    """Names handlers that catch everything."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = ast.walk(node.type) if node.type else []
            caught = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
            if node.type is None or caught & {"Exception", "BaseException"}:
                yield f"{module.path}:{node.lineno} catches everything"


def code_loading_faults(module: Module) -> Iterator[str]:
    """Names calls that execute what they read."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
                yield f"{module.path}:{node.lineno} calls {node.func.id}"
            for keyword in node.keywords:
                is_off = (
                    isinstance(keyword.value, ast.Constant) and not keyword.value.value
                )
                if keyword.arg in {"allow_pickle", "trust_remote_code"} and not is_off:
                    yield f"{module.path}:{node.lineno} passes {keyword.arg}"


def size_faults(module: Module) -> Iterator[str]:
    """Names files and functions past the limits; docstrings are free."""
    num_lines = module.source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{module.path} has {num_lines} lines, more than {MAX_FILE_LINES}"
    for function in module.functions():
        is_kernel = module.name.startswith("pallas_kernels") and (
            function.name.endswith("kernel")
        )
        limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
        num_lines = _num_code_lines(function)
        if num_lines > limit:
            yield (
                f"{module.path}:{function.lineno} {function.name} has {num_lines} "
                f"lines, more than {limit}; split it by phase"
            )


def _num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    num_lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        num_lines -= docstring.end_lineno - docstring.lineno + 1
    return num_lines


_CHECKS = (
    import_faults,
    environment_faults,
    except_faults,
    code_loading_faults,
    size_faults,
)


@pytest.mark.parametrize("check", _CHECKS, ids=lambda check: check.__name__)
def test_packages_are_free_of(check: Callable[[Module], Iterator[str]]) -> None:
    assert [fault for module in LIBRARY + KERNELS for fault in check(module)] == []


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (import_faults, "import torch.nn"),
        (import_faults, "def f():\n    from absl import flags"),
        (import_faults, "from pickle import loads"),
        (environment_faults, "import os\nos.environ['A']"),
        (environment_faults, "from os import getenv"),
        (except_faults, "try:\n    f()\nexcept:\n    pass"),
        (
            except_faults,
            "try:\n    f()\nexcept (ValueError, Exception) as e:\n    pass",
        ),
        (code_loading_faults, "numpy.load(path, allow_pickle=True)"),
        (code_loading_faults, "exec(text)"),
        (size_faults, "\n" * (MAX_FILE_LINES + 1)),
        (size_faults, "def f():\n" + "    g()\n" * MAX_FUNCTION_LINES),
    ],
)
def test_checks_find_what_they_forbid(
    tmp_path: pathlib.Path, check: Callable[[Module], Iterator[str]], source: str
) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert len(list(check(Module(path, tmp_path)))) == 1


def test_docstrings_do_not_count_as_function_lines(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "module.py"
    docstring = '    """A.\n' + "    line\n" * MAX_FUNCTION_LINES + '    """\n'
    path.write_text(f"def f():\n{docstring}    return 1\n")
    assert list(size_faults(Module(path, tmp_path))) == []
