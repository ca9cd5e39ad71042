"""The programs that the README and the tutorial make elastic, and their job files, as readers write them."""

from __future__ import annotations

import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from e2e.local_run import ROOT, adascale
from support.launch import run_python
from support.snippets import PROBLEM, Snippet, after, snippets

pytestmark = pytest.mark.slow


def named(document: str, name: str) -> list[Snippet]:
    return [snippet for snippet in snippets(ROOT / document) if snippet.name == name]


def code(blocks: list[Snippet], language: str) -> list[str]:
    return [block.code for block in blocks if block.language == language]


def before(diff: str) -> str:
    """Return the program that a diff changes."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in " -")


def apply(diff: str, program: str) -> str:
    """Return a program that a diff has changed, whose lines it must have once."""
    assert program.count(before(diff)) == 1, before(diff)
    return program.replace(before(diff), after(diff))


def run(program: Path) -> str:
    with chdir(program.parent):
        return run_python(program, timeout=280)


def test_the_program_of_the_readme_trains_before_and_after_its_change(tmp_path: Path) -> None:
    blocks = named("README.md", "readme")
    (diff,), (job,) = code(blocks, "diff"), code(blocks, "yaml")
    check = "assert cross_entropy(model(inputs), dataset.tensors[1]) < 0.9\n"
    program = tmp_path / "train.py"
    program.write_text(PROBLEM.read_text() + before(diff) + check)
    run(program)
    program.write_text(PROBLEM.read_text() + after(diff) + check)
    (tmp_path / "mine.yaml").write_text(job)
    trained = adascale("run", "mine.yaml", "--port", 0, cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout
    assert "Finished" in trained.stdout


def test_the_tutorial_makes_its_program_elastic(tmp_path: Path) -> None:
    blocks = named("docs/tutorial.md", "tutorial")
    (plain,), (job,) = code(blocks, "python"), code(blocks, "yaml")
    program = tmp_path / "train.py"
    program.write_text(plain)
    printed = re.search(r"best accuracy ([\d.]+)%", run(program))
    assert printed
    assert float(printed[1]) > 90
    elastic = plain
    for diff in code(blocks, "diff"):
        elastic = apply(diff, elastic)
    program.write_text(elastic)
    run(program)
    (tmp_path / "mine.yaml").write_text(job)
    trained = adascale("run", "mine.yaml", "--port", 0, cwd=tmp_path, timeout=120)
    assert trained.returncode == 0, trained.stdout
    assert list((tmp_path / "tensorboard").rglob("events.out.tfevents.*")), trained.stdout
    exported = adascale("export", "mine", "best.safetensors", "--best", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    made: dict[str, Any] = {}
    exec(plain.split("optimizer = ")[0], made)
    model = made["model"].eval()
    model.load_state_dict(load_file(tmp_path / "best.safetensors"))
    images, labels = made["test_set"].tensors
    with torch.no_grad():
        assert (model(images.to(made["device"])).argmax(1).cpu() == labels).float().mean() > 0.9
