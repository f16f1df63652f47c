"""Imports go one way: what a module needs is below it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import lohan_fx
import lohan_fx.compiled

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


def test_the_modules_of_compiled_are_in_order() -> None:
    """Each imports those above it only: so its docstring says."""
    package = lohan_fx.compiled.__name__
    assert lohan_fx.compiled.__doc__ is not None
    _, table, _ = lohan_fx.compiled.__doc__.split("\n\n")
    order = [name for line in table.splitlines() for name in line.split("  ")[0].split(", ")]
    inside = [module for module in MODULES if module.startswith(f"{package}.")]
    assert sorted(order) == sorted(module.removeprefix(f"{package}.") for module in inside)
    for i, name in enumerate(order):
        others = {m.removeprefix(f"{package}.") for m in imported(f"{package}.{name}") & {*inside}}
        assert others <= set(order[:i]), name
