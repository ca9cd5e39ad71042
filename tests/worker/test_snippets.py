"""Each code block of the documents runs, as a whole program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adascale_core import names
from support.launch import run_program
from support.snippets import DOCUMENTS, FRAMEWORK_PROGRAMS, PROGRAMS, Snippet, complete, snippets

SNIPPETS = [snippet for document in DOCUMENTS for snippet in snippets(document)]
PROGRAM_SNIPPETS = [snippet for snippet in SNIPPETS if snippet.name in PROGRAMS]
FRAMEWORK_SNIPPETS = [snippet for snippet in SNIPPETS if snippet.name in FRAMEWORK_PROGRAMS]
SLOW = {*FRAMEWORK_PROGRAMS, "compile"}
JOB: dict[str, Any] = {
    names.ENV_BATCH_SIZE: "32",
    names.ENV_MAX_BATCH_SIZE: "512",
    names.ENV_LOCAL_BSZ_BOUNDS: "16,128",
}
OF_THE_TUTORIAL = ("readme", "tutorial")
"""Names of the snippets that `e2e/test_tutorial.py` runs."""


def test_each_code_block_names_its_program() -> None:
    unknown = [
        str(snippet)
        for snippet in SNIPPETS
        if snippet.language != "yaml"
        and snippet.name not in {*PROGRAMS, *FRAMEWORK_PROGRAMS, *OF_THE_TUTORIAL}
    ]
    assert unknown == []


def test_each_program_is_that_of_a_code_block() -> None:
    assert {snippet.name for snippet in PROGRAM_SNIPPETS} == set(PROGRAMS)
    assert {snippet.name for snippet in FRAMEWORK_SNIPPETS} == set(FRAMEWORK_PROGRAMS)


@pytest.mark.parametrize(
    "snippet",
    [
        pytest.param(each, id=str(each), marks=pytest.mark.slow if each.name in SLOW else ())
        for each in (*PROGRAM_SNIPPETS, *FRAMEWORK_SNIPPETS)
    ],
)
def test_the_code_block_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "train.py"
    program.write_text(snippet.program)
    ended = run_program(program, **JOB)
    assert ended.returncode == 0, f"{ended.stderr}\n{snippet.program}"


def test_a_program_needs_all_parts_of_a_snippet() -> None:
    with pytest.raises(ValueError, match="the snippet has 2 parts, and its program 1 places"):
        complete("PART 1\n", "first\n...\nsecond\n")
    assert complete("  PART 1\nx\nPART 2\n", "a\n...\n    b\n    c\n") == "  a\nx\nb\nc\n"
