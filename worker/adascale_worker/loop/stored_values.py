"""Values of the program as texts, which the store of a generation takes."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch

PART_LENGTH = 2**22
"""Characters of a value in the store, which takes at most 8 MiB."""


def encoded(value: Any) -> str:
    """Return tensors, numbers, strings and None, in lists, tuples and dicts, as a text."""
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getbuffer()).decode()


def decoded(text: str) -> Any:
    """Return the value that `encoded` has returned as a text."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


def parts_of(text: str) -> list[str]:
    """Return parts of a text, each of which the store takes as a value."""
    return [text[start : start + PART_LENGTH] for start in range(0, len(text), PART_LENGTH)]
