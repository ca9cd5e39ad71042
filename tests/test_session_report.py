"""The end of a run of tests names what failed, the assertion, and the example with which it fails again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
PROGRAM = """
from hypothesis import given, strategies as st

@given(st.integers())
def test_numbers_are_small(number):
    assert number < 1000

def test_holds():
    pass
"""


def test_a_failure_is_reported_with_its_assertion_and_example(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_numbers.py").write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": str(TESTS), "ADASCALE_TEST_REPORT": str(tmp_path / "report")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    printed = subprocess.run(
        [sys.executable, "-m", "support.session_report", tmp_path / "report"],
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "failed: test_numbers.py::test_numbers_are_small" in printed
    assert "assert 1000 < 1000" in printed
    assert "@reproduce_failure(" in printed
    assert "test_holds" not in printed
