"""The package `adascale`: what a program imports."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import adascale
from adascale import errors
from adascale_core.errors import AdaScaleError, MissingExtraError, requires_extra

ROOT = Path(__file__).parents[1]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "statement", ["import adascale", "import adascale.errors", "from adascale import errors"]
)
def test_an_import_does_not_import_torch(statement: str) -> None:
    loaded = run(f"{statement}; import sys; print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert loaded.stdout.split() == ["False", "False"], loaded.stderr


def test_each_public_name_exists_and_is_listed() -> None:
    assert {*dir(adascale)} >= {*adascale.__all__}
    for name in adascale.__all__:
        assert getattr(adascale, name).__name__.split(".")[-1] == name


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'adascale' has no attribute 'ElasticTrianer'"):
        _ = adascale.ElasticTrianer


def test_each_error_that_a_docstring_of_a_public_class_names_is_public() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text()
    raised = set(re.findall(r"^- `(\w+Error)`: ", reference, re.MULTILINE)) - {*dir(builtins)}
    assert len(raised) >= 8
    assert raised <= {*errors.__all__}


def test_all_errors_are_an_adascale_error_and_the_module_shows_each_of_them() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), AdaScaleError)
        assert re.search(rf"\b{name}\b", errors.__doc__ or "")


@pytest.mark.slow
def test_mypy_sees_the_types_of_the_names(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from adascale import ElasticTrainer\n"
        "from adascale.errors import WorkerError\n"
        "reveal_type(ElasticTrainer(8).replicas)\n"
        "reveal_type(WorkerError.exit_code)\n"
    )
    # Not --strict, which needs the types of all that these import.
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        f"--config-file={config}",
        f"--cache-dir={tmp_path}",
        str(program),
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert re.findall(r'Revealed type is "(.*)"', ended.stdout) in (["int"] * 2, ["builtins.int"] * 2), (
        ended.stdout
    )


def test_a_missing_extra_is_named_with_what_to_install() -> None:
    with pytest.raises(MissingExtraError) as raised, requires_extra("adascale operator", "kubernetes"):
        raise ModuleNotFoundError("No module named 'kopf'", name="kopf")
    assert raised.value.exit_code == 2
    assert str(raised.value) == (
        "adascale operator needs the extra 'kubernetes', which is not installed (No module named 'kopf'): "
        "run `pip install 'adascale-operator[kubernetes]'`"
    )


def test_a_missing_module_of_the_package_itself_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError), requires_extra("adascale operator", "kubernetes"):
        raise ModuleNotFoundError(
            "No module named 'adascale_controller.other'", name="adascale_controller.other"
        )


def test_each_package_of_the_wheel_is_typed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert "worker/adascale" in packages
    assert [package for package in packages if not (ROOT / package / "py.typed").is_file()] == []
