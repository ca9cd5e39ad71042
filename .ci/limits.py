"""Checks the size of the project against the table in `pyproject.toml`, and the length of its docstrings.

A commit that raises a limit says why. The docstring of what no user sees is one sentence, with the reason
where there is one. Sections of arguments, results and errors belong to what users see: what `adascale`
exports, errors, records on the wire, the job's schema, routes and commands.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("core", "client", "api", "controller", "worker")
WIDE = 8
"""Arguments of a constructor; one that takes more is wide."""
LONGEST = 4
"""Lines of the docstring of what no user sees."""
LONGEST_OF_MODULE = 12
PUBLIC = (
    "api/adascale_api/bodies.py",
    "api/adascale_api/routes/",
    "controller/adascale_controller/cli/",
    "controller/adascale_controller/schema.py",
    "core/adascale_core/batch/gain.py",
    "core/adascale_core/checkpoint_manifest.py",
    "core/adascale_core/messages/",
    "core/adascale_core/names.py",
    "core/adascale_core/performance/throughput.py",
    "core/adascale_core/views/",
    "worker/adascale/",
    "worker/adascale_worker/scaling/rules.py",
    "worker/adascale_worker/trainer.py",
    "worker/adascale_worker/adascale.py",
)
"""Beginnings of the paths of files that users see all of."""
PUBLIC_NAMES = {
    "ElasticAccelerator",
    "ElasticDataLoader",
    "ElasticStrategy",
    "Evaluation",
    "Observation",
    "SecondMomentOptimizer",
    "adam_hyperparameters",
    "elastic",
}

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_SECTION = re.compile(r"^ *(Args|Returns|Yields|Raises|Attributes):$", re.MULTILINE)


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the project whose paths have a pattern, without those that Git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for path in map(ROOT.joinpath, sorted({*listed.splitlines()})) if path.exists()]


def count_code(text: str, tree: ast.Module) -> int:
    """Return the number of lines without blank ones, comments and docstrings."""
    documentation: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node) is not None:
            documentation |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in documentation
        for number, line in enumerate(text.splitlines(), 1)
    )


def is_wide(node: ast.ClassDef) -> bool:
    """Whether a class has methods, and a constructor or fields with more than `WIDE` arguments."""
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    methods = [
        item
        for item in functions
        if not {"property", "cached_property", "classmethod", "staticmethod"}
        & {*map(ast.unparse, item.decorator_list)}
    ]
    constructor = next((item for item in methods if item.name == "__init__"), None)
    if constructor is not None:
        arguments = constructor.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
        return count > WIDE and len(methods) > 1
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return False
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    return len([item for item in fields if "init=False" not in ast.unparse(item)]) > WIDE and bool(methods)


def measure() -> dict[str, int]:
    """Return the numbers that the table limits."""
    numbers = dict.fromkeys(("files", "lines", "code", "classes", "wide-constructors"), 0)
    for part in PARTS:
        numbers[f"{part}-code"] = 0
        for path in tracked(f"{part}/*.py"):
            text = path.read_text()
            tree = ast.parse(text)
            classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
            code = count_code(text, tree)
            numbers["files"] += 1
            numbers["lines"] += len(text.splitlines())
            numbers["code"] += code
            numbers[f"{part}-code"] += code
            numbers["classes"] += len(classes)
            numbers["wide-constructors"] += sum(map(is_wide, classes))
    numbers["tests-lines"] = sum(len(path.read_text().splitlines()) for path in tracked("tests/*.py"))
    numbers["docs-words"] = sum(len(path.read_text().split()) for path in tracked("docs/*.md"))
    return numbers


def documented(tree: ast.Module) -> Iterator[tuple[str, Documented]]:
    """Yield the module and what it defines, with the name of the outermost definition."""
    yield "", tree
    for outer in tree.body:
        if isinstance(outer, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(outer):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield outer.name, node


def is_public(path: str, name: str) -> bool:
    """Whether users see what a file defines by this name."""
    return (
        path.startswith(PUBLIC)
        or Path(path).name == "errors.py"
        or name in PUBLIC_NAMES
        or name.endswith("Error")
    )


def long_docstrings() -> Iterator[str]:
    """Yield the docstrings that are longer than those of internal things may be."""
    for path in tracked(*(f"{part}/*.py" for part in PARTS)):
        file = str(path.relative_to(ROOT))
        for name, node in documented(ast.parse(path.read_text())):
            text = ast.get_docstring(node) or ""
            internal = node.name if not isinstance(node, ast.Module) else ""
            if is_public(file, name) and not (internal.startswith("_") and internal[:2] != "__"):
                continue
            longest = LONGEST_OF_MODULE if isinstance(node, ast.Module) else LONGEST
            where = f"{file}:{getattr(node, 'lineno', 1)}"
            if match := _SECTION.search(text):
                yield f"{where}: an internal docstring has a section {match[1]!r}. Say it in its sentence"
            elif (lines := len(text.splitlines())) > longest:
                yield f"{where}: an internal docstring has {lines} lines; {longest} are allowed"


def main() -> int:
    """Print the numbers beside their limits. Returns 1 if one is exceeded, or a docstring is too long."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["adascale"]["limits"]
    numbers = measure()
    problems = (
        [] if limits.keys() == numbers.keys() else [f"the limits are {[*limits]}, and not {[*numbers]}"]
    )
    for name, number in numbers.items():
        limit = limits.get(name, 0)
        print(f"{name:20} {number:8,} of {limit:,}")
        if number > limit:
            problems.append(
                f"{name} is {number:,}, and at most {limit:,} are allowed. Make it smaller, or raise the "
                "limit in pyproject.toml and say why in the commit"
            )
    problems += long_docstrings()
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
