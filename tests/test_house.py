"""The house is kept small: no long file, class or function, and nothing reaches into another module's private names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "harness").rglob("*.py"), *(ROOT / "hydra_plugins").glob("*.py"), *(ROOT / "recipes").rglob("*.py")])
MOST_LINES = {ast.Module: 350, ast.ClassDef: 200, ast.FunctionDef: 50}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def too_long(path: Path) -> Iterator[str]:
    text = path.read_text()
    if len(text.splitlines()) > MOST_LINES[ast.Module]:
        yield f"{name_of(path)}: {len(text.splitlines())} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MOST_LINES[type(node)]:
                yield f"{name_of(path)}: {node.name} has {length} lines"


def test_nothing_is_long():
    assert [line for path in FILES for line in too_long(path)] == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names_of(tree: ast.Module) -> set[str]:
    """Return the private names that a file defines: functions, classes, variables and attributes of its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and rooted_in_self(node):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def rooted_in_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


TREES = {path: ast.parse(path.read_text()) for path in FILES}
PRIVATE = {path: private_names_of(tree) for path, tree in TREES.items()}
OURS = set().union(*PRIVATE.values())


def foreign_modules(tree: ast.Module) -> set[str]:
    """Return the names by which a file knows modules that are not ours."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    names = (alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names)
    return {name for name in names if name != "harness"}


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def reached(path: Path) -> Iterator[str]:
    """Yield where a file uses a private name that another file of ours defines and it does not."""
    foreign, of_others = foreign_modules(TREES[path]), OURS - PRIVATE[path]
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("harness"):
            yield from (f"line {node.lineno}: imports {alias.name}" for alias in node.names if is_private(alias.name))
        if (
            isinstance(node, ast.Attribute)
            and node.attr in of_others
            and not rooted_in_self(node)
            and root_of(node) not in foreign
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_reaches_into_private_names_of_another_module(path):
    assert list(reached(path)) == []
