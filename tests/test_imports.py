"""The house: one order of packages, no circle, and the line where torch begins."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "harness"

ORDER = [
    {"errors"},
    {"run"},
    {"compare", "rank"},
    {"training", "launchers"},
    {"verify", "report", "config"},
    {"entrypoints"},
    {"train", "doctor", "distributed", "export", "launch"},
]
"""From the bottom: a package imports from those below it, and from itself; inside functions and for types too."""

FACES = {"__init__", "compare.__main__"}
"""What only hands on the names of others, for a user's sake; nothing imports it."""

WITH_TORCH = {"training", "verify", "train", "rank.backend"}
"""What imports torch when it is imported; everything else does so inside functions, in ranks."""

PARENT_SIDE = [
    "harness",
    "harness.compare.correctness.verdict",
    "harness.compare.performance.verdict",
    "harness.config",
    "harness.distributed",
    "harness.doctor",
    "harness.entrypoints.hydra_jobs",
    "harness.launch",
    "harness.launchers.registry",
    "harness.report.terminal",
    "hydra_plugins.harness_launcher",
    "run",
]
NUMERIC = {"torch", "numpy", "matplotlib", "tensorboard", "lightning_utilities"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_parent_side_imports_no_torch():
    for module in PARENT_SIDE:
        assert run(f"import sys, {module}; print(*sorted({NUMERIC} & set(sys.modules)))") == "", module


def test_the_wrong_override_imports_no_torch(tmp_path):
    code = (
        "import sys, runpy\nsys.argv = ['run.py', 'nprocs=zero', 'launcher=launch']\n"
        "try:\n    runpy.run_path('run.py', run_name='__main__')\nexcept SystemExit as leaving:\n"
        "    print(leaving.code, 'torch' in sys.modules)"
    )
    assert run(code).splitlines()[-1] == "1 False"


@cache
def modules() -> dict[str, ast.Module]:
    """Return the modules of the package by name, without ``harness.``."""
    paths = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for name, path in paths.items()}


def imports_of(name: str, everywhere: bool = True) -> Iterator[str]:
    """Yield the dotted names that a module imports, inside functions too unless ``everywhere`` is False."""
    tree = modules()[name]
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def harness_modules_of(name: str) -> set[str]:
    """Return the modules of this package that a module imports, without ``harness.``."""
    names = (found.removeprefix("harness.") for found in imports_of(name) if found.startswith("harness."))
    return {found for found in names if found in modules() or f"{found}.__init__" in modules()}


def floor_of(name: str) -> int:
    top = name.partition(".")[0]
    return next(number for number, packages in enumerate(ORDER) if top in packages)


@pytest.mark.parametrize("name", sorted(set(modules()) - FACES))
def test_imports_follow_the_order_of_packages(name):
    for other in harness_modules_of(name):
        same = other.partition(".")[0] == name.partition(".")[0]
        assert same or floor_of(other) < floor_of(name), f"{name} imports {other}, which lies beside or above it"


def test_no_module_imports_itself_by_way_of_others():
    arrows = {name: harness_modules_of(name) - {name} for name in modules() if name not in FACES}
    rest = dict(arrows)
    while free := [name for name, others in rest.items() if not others & rest.keys()]:
        for name in free:
            del rest[name]
    assert not rest, f"a circle among {sorted(rest)}"


def test_the_house_has_few_rooms_and_each_says_what_it_is_for():
    packages = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert len(packages) <= 9
    assert len([path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]) <= 7
    for path in packages:
        text = ast.get_docstring(ast.parse((path / "__init__.py").read_text()))
        assert text is not None and "?" in text.splitlines()[0], path


@pytest.mark.parametrize("name", sorted(modules()))
def test_torch_begins_at_a_line_between_folders(name):
    below = any(name == folder or name.startswith(f"{folder}.") for folder in WITH_TORCH)
    heavy = {"torch", "numpy", "lightning_utilities"} & {
        found.partition(".")[0] for found in imports_of(name, everywhere=False)
    }
    from_below = {found for found in imports_at_the_top(name) if any(found.split(".")[0] == folder for folder in WITH_TORCH)}
    assert below or not (heavy or from_below), f"{name} imports {heavy or from_below}"


def imports_at_the_top(name: str) -> set[str]:
    found = (each.removeprefix("harness.") for each in imports_of(name, everywhere=False) if each.startswith("harness."))
    return {each for each in found if each in modules()}


def test_recipes_and_harness_do_not_know_each_other():
    for path in (ROOT / "recipes").rglob("*.py"):
        assert "import harness" not in path.read_text() and "from harness" not in path.read_text(), path
    for name in modules():
        assert not [found for found in imports_of(name) if found.partition(".")[0] == "recipes"], name


def test_only_launchers_start_processes():
    for name in modules():
        # Lifetime only puts multiprocessing's own sockets where the supervisor clears up.
        if name.startswith("launchers.") or name == "rank.lifetime":
            continue
        started = {found for found in imports_of(name) if found.split(".")[0] in ("multiprocessing", "subprocess")}
        assert not started, f"{name} imports {started}"
