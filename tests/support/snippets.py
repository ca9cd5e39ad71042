"""The code blocks of the documents.

A block has a comment above it that names its program: `<!-- snippet: batch -->` is `tests/snippets/batch.py`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROBLEM = ROOT / "tests" / "snippets" / "problem.py"
"""What all programs import."""
_BLOCK = re.compile(
    r"(?:^ *<!-- snippet: (?P<name>[\w-]+) -->\n)?"
    r"^ *```(?P<language>python|diff|yaml)\n(?P<code>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    """A code block of a document."""

    document: Path
    line: int
    """The number of its first line."""
    name: str
    """That of its program; empty if the document gives none."""
    language: str
    """`python`, `diff` or `yaml`."""
    code: str
    """Without the indentation of the block."""

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def snippets(document: Path) -> Iterator[Snippet]:
    """Yield the code blocks of a document."""
    text = document.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        code = textwrap.dedent(match["code"])
        yield Snippet(document, line, match["name"] or "", match["language"], code)


def after(diff: str) -> str:
    """Return the program that a diff makes."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in " +")
