"""An error at one field of a document, and the path of that field."""

from __future__ import annotations

from dataclasses import dataclass

FieldPath = tuple[str | int, ...]
"""Field names and list indices from the root of a document; empty for the document itself."""


def format_path(path: FieldPath) -> str:
    """Return a path as Kubernetes writes it: `spec.containers[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


@dataclass(frozen=True)
class FieldError:
    """An error at one field.

    Args:
        path: the field; empty for the document itself.
        message: the value found and the values allowed.
        line: its line in the file, from 1; None if unknown.
    """

    path: FieldPath
    message: str
    line: int | None = None

    @property
    def field(self) -> str:
        """The path as text, as in `spec.maxBatchSize`; empty for the document itself."""
        return format_path(self.path)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.path else self.message
