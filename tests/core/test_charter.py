"""The core keeps its charter: the standard library only, and of that nothing that touches the world."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import adascale_core

ROOT = Path(__file__).parents[2]
MODULES = sorted(Path(adascale_core.__path__[0]).glob("**/*.py"))
PURE = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "itertools",
    "math",
    "re",
    "types",
    "typing",
}
"""What the core imports; one that is added here must read no clock, file, socket or environment."""
WORLDLY = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint", "exit", "quit"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            yield node.module or ""


def test_there_is_a_core() -> None:
    assert {"batch", "decision", "gain", "messages", "names", "rendezvous"} <= {path.stem for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_of_the_core_imports_nothing_that_touches_the_world(path: Path) -> None:
    packages = {name.partition(".")[0] for name in imported(ast.parse(path.read_text()))}
    assert packages <= PURE | {"adascale_core"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_of_the_core_calls_nothing_that_touches_the_world(path: Path) -> None:
    names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    assert not names & WORLDLY


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_of_the_core_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_core_can_be_imported_where_nothing_else_is_installed() -> None:
    names = ["adascale_core"] + [f"adascale_core.{path.stem}" for path in MODULES if path.stem != "__init__"]
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'core')!r}); import {', '.join(names)}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_parts_import_the_core_and_never_each_other() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
