"""Looks up a private part of torch, and names it in the error if the installed torch does not have it."""

from __future__ import annotations

from typing import Any

import torch

from adascale_worker.errors import UnsupportedTorchError

TESTED_VERSIONS = ("2.9.0", "2.15.0")


def private_part(owner: Any, name: str, purpose: str) -> Any:
    """Return `owner.name`."""
    try:
        return getattr(owner, name)
    except AttributeError:
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no `{owner_name}.{name}`, which AdaScale needs {purpose}; "
            f"install a version that AdaScale is tested with: {', '.join(TESTED_VERSIONS)}"
        ) from None
