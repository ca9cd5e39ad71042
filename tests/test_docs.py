"""The paths, links and make targets in the documentation exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import adascale

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "bench" / "RESULTS.md"])
TRACKED = frozenset(
    subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
)

_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#]+)?(?:#([^)]+))?\)")
_FILE = re.compile(r"[\w./-]*[\w-]+\.(?:py|md|yaml|svg|lock|toml)\Z")
_MAKE = re.compile(r"\bmake ([a-z][a-z-]*)\b")


def names(document: Path) -> list[str]:
    """File names and directories in backticks."""
    spans = _CODE.findall(document.read_text())
    return [span for span in spans if _FILE.match(span) or re.fullmatch(r"[\w.-]+(/[\w.-]+)*/", span)]


def exists(name: str) -> bool:
    """Whether a file, a directory, or the end of the path of a tracked file has this name."""
    if name.endswith("/"):
        return any(file.startswith(name) or f"/{name}" in file for file in TRACKED)
    return any(file == name or file.endswith(f"/{name}") for file in TRACKED)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_file_that_a_document_names_exists(document: Path) -> None:
    users_own = {"mine.yaml", "train.py", "job.yaml"}
    missing = [name for name in names(document) if name not in users_own and not exists(name)]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_link_of_a_document_resolves(document: Path) -> None:
    for target, anchor in _LINK.findall(document.read_text()):
        if "://" in target:
            continue
        file = (document.parent / target).resolve() if target else document
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_make_target_of_a_document_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(
        [*_CODE.findall(document.read_text()), *re.findall(r"^    .*$", document.read_text(), re.MULTILINE)]
    )
    assert set(_MAKE.findall(code)) <= targets


def test_the_reference_is_that_of_the_docstrings() -> None:
    generated = subprocess.run(
        [sys.executable, "docs/reference.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    headings = set(re.findall(r"^##+ (.+)$", generated, re.MULTILINE))
    assert headings >= {*adascale._MODULE_OF, "ElasticTrainer.device", "ElasticTrainer.program_reentry"}
    assert all(f"| `{name}` |" in generated for name in adascale.errors.__all__)
    assert generated == (ROOT / "docs" / "reference.md").read_text(), "run `make reference`"


def test_the_reference_shows_the_code_of_a_docstring_as_code() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text()
    assert (
        "```python\n"
        "evaluation = trainer.evaluation(test_set, batch_size=256)\n"
        "for x, y in evaluation:\n"
        "    evaluation.add(correct=(model(x).argmax(1) == y).sum())\n"
    ) in reference
