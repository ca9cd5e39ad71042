"""Each code block of the documents runs, as a whole program."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from adascale_core import names
from support.fast_python import PYTHON
from support.snippets import DOCUMENTS, FRAMEWORK_PROGRAMS, PROGRAMS, Snippet, complete, snippets

SNIPPETS = [snippet for document in DOCUMENTS for snippet in snippets(document)]
PROGRAM_SNIPPETS = [snippet for snippet in SNIPPETS if snippet.name in PROGRAMS]
JOB = {
    names.ENV_BATCH_SIZE: "32",
    names.ENV_MAX_BATCH_SIZE: "512",
    names.ENV_LOCAL_BSZ_BOUNDS: "16,128",
}
OF_OTHER_TESTS = {
    "readme": "e2e/test_tutorial.py",
    "tutorial": "e2e/test_tutorial.py",
    **dict.fromkeys(FRAMEWORK_PROGRAMS, "frameworks/test_documented_programs.py"),
}
"""Snippets of other names, and the test that runs them."""


def test_each_code_block_names_its_program() -> None:
    unknown = [
        str(snippet)
        for snippet in SNIPPETS
        if snippet.language != "yaml" and snippet.name not in {*PROGRAMS, *OF_OTHER_TESTS}
    ]
    assert unknown == []


def test_each_program_is_that_of_a_code_block() -> None:
    assert {snippet.name for snippet in PROGRAM_SNIPPETS} == set(PROGRAMS)


@pytest.mark.parametrize("snippet", PROGRAM_SNIPPETS, ids=str)
def test_the_code_block_runs(snippet: Snippet, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(snippet.program)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ADASCALE_")}
    ended = subprocess.run(
        [*PYTHON, str(program)],
        cwd=tmp_path,
        env={**environ, **JOB},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stderr}\n{snippet.program}"


def test_a_program_needs_all_parts_of_a_snippet() -> None:
    with pytest.raises(ValueError, match="the snippet has 2 parts, and its program 1 places"):
        complete("PART 1\n", "first\n...\nsecond\n")
    assert complete("  PART 1\nx\nPART 2\n", "a\n...\n    b\n    c\n") == "  a\nx\nb\nc\n"
