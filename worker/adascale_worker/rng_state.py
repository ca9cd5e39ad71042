"""The random state of a process, saved and restored.

Held in tensors, numbers and lists only, so that it loads with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy
import numpy.typing
import torch

_NumpyState = tuple[str, numpy.typing.NDArray[numpy.uint32], int, int, float]


def capture() -> dict[str, Any]:
    """The state of the generators of Python, NumPy, and torch on the CPU and, if it is used, the GPU."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(_NumpyState, numpy.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(numpy.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put the generators back to a captured state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
