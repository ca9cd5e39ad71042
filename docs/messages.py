"""Writes the table of the messages between agent and trainer in `docs/design.md`, from their docstrings."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

from adascale_core.messages.channel import AgentMessage, TrainerMessage, name_of

DESIGN = Path(__file__).with_name("design.md")
_PLACE = re.compile(r"(<!-- messages: .* -->\n).*?(<!-- end -->)", re.DOTALL)


def document(text: str) -> str:
    """Return a document with the present table."""
    table = "\n".join(_table())
    return _PLACE.sub(lambda place: f"{place[1]}{table}\n{place[2]}", text)


def _table() -> Iterator[str]:
    yield from ("", "| from | message | |", "| --- | --- | --- |")
    for sender, kinds in (("trainer", TrainerMessage), ("agent", AgentMessage)):
        for kind in get_args(kinds):
            names = ", ".join(f"`{name}`" for name in (name_of(kind), *(each.name for each in fields(kind))))
            summary = inspect.cleandoc(kind.__doc__).partition("\n\n")[0]
            yield f"| {sender} | {names} | {' '.join(summary.split())} |"
    yield ""


if __name__ == "__main__":
    current = document(DESIGN.read_text())
    if sys.argv[1:] == ["--check"]:
        sys.exit(current != DESIGN.read_text())
    DESIGN.write_text(current)
