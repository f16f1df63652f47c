"""Imports go one way: what a module needs is below it."""

from __future__ import annotations

import ast
import graphlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import lohan_fx

ROOT = Path(lohan_fx.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


def imported(module: str) -> set[str]:
    """Modules of the package that importing one imports, too, by its statements."""
    found: set[str] = set()
    for node in statements(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found & MODULES.keys()


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Those that run on import, other than under ``if TYPE_CHECKING``."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node


def test_no_import_cycles() -> None:
    graph = {module: imported(module) for module in MODULES}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(MODULES)


@pytest.mark.parametrize("package", ["compiled", "runtime", "runtime.ssd", "simulate"])
def test_the_modules_of_a_package_are_in_order(package: str) -> None:
    """Each imports those above it only: so the package's docstring says."""
    package = f"lohan_fx.{package}"
    doc = importlib.import_module(package).__doc__
    assert doc is not None
    table = doc.split("\n\n")[1]
    order = [name for line in table.splitlines() for name in line.split("  ")[0].split(", ")]
    inside = {module: child for module in MODULES if (child := child_of(package, module))}
    assert sorted(order) == sorted(set(inside.values()))
    for i, name in enumerate(order):
        own = [module for module, child in inside.items() if child == name]
        others = {inside[m] for module in own for m in imported(module) & inside.keys()}
        assert others <= {*order[: i + 1]}, name


def child_of(package: str, module: str) -> str:
    """The module or package directly in a package that has this one; "" if none has."""
    below = module.removeprefix(f"{package}.")
    return below.partition(".")[0] if below != module else ""
