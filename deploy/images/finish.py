"""Finishes the environment of an image: see the Dockerfile.

    finish.py trim [PATTERN...]           remove what no program imports, and compile most of the packages
    finish.py compile PACKAGE... --without MODULE...
                                          import all modules of packages, which compiles what they import

A container runs on a read-only file system. It could not write bytecode, and would compile what it imports at
each start. But the bytecode of everything is half of an image, and most of it is never read.
"""

from __future__ import annotations

import compileall
import importlib
import pkgutil
import re
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

PACKAGES = Path(sysconfig.get_path("purelib"))
UNUSED = (
    "numpy/**/tests",
    "kubernetes/**/*_test.py",
    # The synchronous client's generated calls, which are imported when they are used.
    "kubernetes/client/api",
)
OF_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
"""A program that uses one of these brings it."""
RARELY_IMPORTED = re.compile(r"/(kubernetes|sympy|networkx|pip|pygments|setuptools)/")
"""Large packages of which a program imports a small part: `compile` compiles that part."""


def trim(patterns: list[str]) -> None:
    """Remove what no program imports, and compile what many do.

    Args:
        patterns: what the programs of this image do not import, besides what is not imported in any.
    """
    for pattern in (*UNUSED, *patterns):
        for path in sorted(PACKAGES.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    compileall.compile_dir(PACKAGES, quiet=2, rx=RARELY_IMPORTED, workers=0)


def compile_imported(names: list[str], absent: list[str]) -> None:
    """Import packages with all their modules, so that Python writes the bytecode of what they import.

    Args:
        names: the packages.
        absent: modules that an image must not have.
    """
    found = [name for name in absent if find_spec(name)]
    if found:
        sys.exit(f"the image has {', '.join(found)}, which its part does not need: see pyproject.toml")
    for name in names:
        package = importlib.import_module(name)
        if name.startswith("adascale_"):  # the modules of `adascale` may need an extra
            for module in pkgutil.walk_packages(package.__path__, f"{name}.", onerror=_is_expected):
                if not module.name.endswith("__main__"):
                    try:
                        importlib.import_module(module.name)
                    except ModuleNotFoundError:
                        _is_expected(module.name)


def _is_expected(name: str) -> None:
    """Raise the error of a module that can't be imported, unless it is for a framework."""
    error = sys.exc_info()[1]
    if (
        not isinstance(error, ModuleNotFoundError)
        or (error.name or "").partition(".")[0] not in OF_FRAMEWORKS
    ):
        raise ImportError(f"{name} can't be imported") from error
    print(f"not compiled: {name}, without {error.name}")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "trim":
        trim(arguments)
    else:
        divided = arguments.index("--without")
        compile_imported(arguments[:divided], arguments[divided + 1 :])
