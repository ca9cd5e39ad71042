"""Each code block of the documents that is for a framework runs, as a whole program."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from adascale_core import names
from support.fast_python import PYTHON
from support.snippets import DOCUMENTS, FRAMEWORK_PROGRAMS, Snippet, snippets

JOB = {names.ENV_BATCH_SIZE: "32", names.ENV_MAX_BATCH_SIZE: "512", names.ENV_LOCAL_BSZ_BOUNDS: "16,128"}
SNIPPETS = [each for document in DOCUMENTS for each in snippets(document) if each.name in FRAMEWORK_PROGRAMS]


def test_each_program_is_that_of_a_code_block() -> None:
    assert {snippet.name for snippet in SNIPPETS} == set(FRAMEWORK_PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.name)
def test_the_code_block_runs(snippet: Snippet, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(snippet.program)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ADASCALE_")}
    ended = subprocess.run(
        [*PYTHON, str(program)],
        cwd=tmp_path,
        env={**environ, **JOB, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stderr}\n{snippet.program}"
