"""Each code block of the documents runs, as a part of a program of `tests/snippets`.

In the program, a line `# PART 1` stands for the block, or for its part up to the first line `...`, and
`# PART 2` for the part after it.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from adascale_core import names
from support.launch import run_program
from support.snippets import PROBLEM, ROOT, Snippet, after, snippets

GENERATED = ROOT / "docs" / "reference.md"
DOCUMENTS = sorted({ROOT / "README.md", ROOT / "DESCRIPTION.md", *(ROOT / "docs").glob("*.md")} - {GENERATED})
SNIPPETS = [snippet for document in DOCUMENTS for snippet in snippets(document)]
PROGRAMS = {path.stem: path for path in PROBLEM.parent.glob("*.py") if path != PROBLEM}
WITH_FRAMEWORK = {"huggingface", "accelerate", "lightning", "adascale-lightning", "adascale-accelerate"}
SLOW = {*WITH_FRAMEWORK, "compile"}
JOB: dict[str, Any] = {
    names.ENV_BATCH_SIZE: "32",
    names.ENV_MAX_BATCH_SIZE: "512",
    names.ENV_LOCAL_BSZ_BOUNDS: "16,128",
}
OF_THE_TUTORIAL = ("readme", "tutorial")
"""Names of the snippets that `e2e/test_tutorial.py` runs."""


def complete(program: str, code: str) -> str:
    """Return a program with the parts of a snippet in place of its lines `# PART 1`, `# PART 2`.

    Raises:
        ValueError: they have not the same number of parts.
    """
    parts = [textwrap.dedent(part) for part in re.split(r"^\.\.\.\n", code, flags=re.MULTILINE)]
    places = re.findall(r"^ *# PART \d+$", program, re.MULTILINE)
    if len(places) != len(parts):
        raise ValueError(f"the snippet has {len(parts)} parts, and its program {len(places)} places for them")
    for place, part in zip(places, parts, strict=True):
        indentation = place.partition("#")[0]
        program = program.replace(place, textwrap.indent(part.rstrip(), indentation))
    return program


def test_each_code_block_names_its_program_and_each_program_is_that_of_a_code_block() -> None:
    code = [snippet for snippet in SNIPPETS if snippet.language != "yaml"]
    known = {*PROGRAMS, *OF_THE_TUTORIAL}
    assert [str(snippet) for snippet in code if snippet.name not in known] == []
    assert {snippet.name for snippet in code} == known


@pytest.mark.parametrize(
    "snippet",
    [
        pytest.param(each, id=str(each), marks=pytest.mark.slow if each.name in SLOW else ())
        for each in SNIPPETS
        if each.name in PROGRAMS
    ],
)
def test_the_code_block_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "train.py"
    code = after(snippet.code) if snippet.language == "diff" else snippet.code
    program.write_text(complete(PROGRAMS[snippet.name].read_text(), code))
    ended = run_program(program, **JOB)
    assert ended.returncode == 0, f"{ended.stderr}\n{program.read_text()}"


def test_a_program_needs_all_parts_of_a_snippet() -> None:
    with pytest.raises(ValueError, match="the snippet has 2 parts, and its program 1 places"):
        complete("# PART 1\n", "first\n...\nsecond\n")
    assert complete("  # PART 1\nx\n# PART 2\n", "a\n...\n    b\n    c\n") == "  a\nx\nb\nc\n"
