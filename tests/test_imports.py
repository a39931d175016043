"""The torch line, and the order of the layers: what may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PARENT_SIDE = [
    "harness",
    "harness.compare.correctness",
    "harness.compare.performance",
    "harness.config",
    "harness.distributed",
    "harness.doctor",
    "harness.hydra_jobs",
    "harness.launch",
    "harness.launchers.pool",
    "harness.report.terminal",
    "harness.sweep",
    "hydra_plugins.harness_launcher",
    "run",
]

BELOW_THE_TORCH_LINE = {
    *(
        "activations",
        "audit",
        "backend",
        "batchnorm",
        "capture",
        "checkpoint",
        "digest",
        "draws",
        "evaluate",
        "exchange",
        "gradients",
        "group",
        "loader",
        "narrowing",
        "parallel",
        "partition",
        "profiling",
        "recipe",
    ),
    *("replay", "rounding", "seeds", "sparse", "state", "train", "trainer", "verify", "whole", "worlds"),
    *(f"faults.{path.stem}" for path in (ROOT / "harness" / "faults").glob("*.py") if path.stem not in ("__init__", "table")),
}
"""Modules that import torch when they are imported; only these, and rank programs inside functions, import them."""

LAYERS = [
    {"errors"},
    {"rundir"},
    {"record", "faults.table"},
    {"plan"},
    {"environ", "lifetime"},
]
"""The foundation, from the bottom: a module imports from its own layer's lower ones only."""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", PARENT_SIDE)
def test_the_parent_side_imports_no_torch(module):
    heavy = run(f"import sys, {module}; print(*sorted({{'torch', 'numpy', 'matplotlib', 'tensorboard'}} & set(sys.modules)))")
    assert heavy == ""


def test_the_wrong_override_imports_no_torch(tmp_path):
    code = (
        "import sys, runpy\nsys.argv = ['run.py', 'nprocs=zero', 'launcher=launch']\n"
        "try:\n    runpy.run_path('run.py', run_name='__main__')\nexcept SystemExit as leaving:\n"
        "    print(leaving.code, 'torch' in sys.modules)"
    )
    assert run(code).splitlines()[-1] == "1 False"


def imports_of(path: Path) -> set[str]:
    """Return the names of harness's modules that a file imports when it is imported itself."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "harness":
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "harness"}
    return {name.removeprefix("harness.") for name in found}


def modules() -> dict[str, Path]:
    """Return the modules of the package by name, without ``harness.``."""
    package = ROOT / "harness"
    return {
        ".".join(path.relative_to(package).with_suffix("").parts): path
        for path in package.rglob("*.py")
        if path.name != "__init__.py"
    }


@pytest.mark.parametrize("name", sorted(set(modules()) - BELOW_THE_TORCH_LINE))
def test_nothing_above_the_torch_line_imports_from_below_it(name):
    assert imports_of(modules()[name]) & BELOW_THE_TORCH_LINE == set()


@pytest.mark.parametrize("name", sorted(BELOW_THE_TORCH_LINE & set(modules())))
def test_ranks_know_nothing_of_launchers_and_reports(name):
    assert not {
        found for found in imports_of(modules()[name]) if found.startswith(("launchers", "report", "sweep", "hydra_jobs"))
    }


def test_the_foundation_is_layered():
    below: set[str] = set()
    for layer in LAYERS:
        for name in layer:
            known = {found for found in imports_of(modules()[name]) if found in modules()}
            assert known <= below, f"{name} imports {known - below} from beside or above"
        below |= layer


def test_recipes_and_harness_do_not_know_each_other():
    for path in (ROOT / "recipes").rglob("*.py"):
        assert "harness" not in path.read_text().split("import", 1)[-1] or not imports_of(path)
    for path in modules().values():
        assert "import recipes" not in path.read_text() and "from recipes" not in path.read_text()


def test_only_launchers_start_processes():
    for name, path in modules().items():
        # Lifetime only puts multiprocessing's own sockets where the supervisor clears up.
        if name.startswith("launchers.") or name == "lifetime":
            continue
        tree = ast.parse(path.read_text())
        started = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name.split(".")[0] in ("multiprocessing", "subprocess")
        } | {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("multiprocessing", "subprocess")
        }
        assert not started, f"{name} imports {started}"
