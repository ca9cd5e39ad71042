"""Capture and restore the state of a process's random number generators.

The state consists of tensors, numbers, strings and lists, so it can be saved in a checkpoint.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy
import numpy.typing
import torch

_NumpyState = tuple[str, numpy.typing.NDArray[numpy.uint32], int, int, float]


def capture() -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy, torch on the CPU, and on the GPU if in use."""
    version, integers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(_NumpyState, numpy.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": [version, torch.tensor(integers, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(numpy.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore a state that `capture` returned."""
    version, integers, gauss = state["python"]
    random.setstate((version, tuple(integers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class DeferredRngState:
    """Restores a saved state at the last moment before the program draws random numbers again.

    What the program and the data loader draw while they start does not count then.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Any] | None = None

    def defer(self, state: dict[str, Any]) -> None:
        """Keep `state` until `apply` is called."""
        self._pending = state

    def apply(self) -> None:
        """Restore the pending state. Does nothing if there is none."""
        if self._pending is not None:
            restore(self._pending)
            self._pending = None

    def current(self) -> dict[str, Any]:
        """Return the state to save: the pending state, or else the state of the generators."""
        return self._pending or capture()
