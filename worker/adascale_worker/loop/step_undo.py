"""Puts the state of training back, for programs with several optimizers, such as a GAN.

Each optimizer changes its parameters at once, so that the loss of the second sees what the first has changed.
If the step fails after that, because members are lost or a batch does not fit, the state from its beginning
is put back, and the same samples are delivered again.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy
import torch
from torch import Tensor

from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.state.program import ProgramState, load_model
from adascale_worker.state.tree import Tree


class StepUndo:
    """Puts the state of training back if a step fails after one of several optimizers has made its part.

    It copies the state before each step, on the devices of its tensors. The memory of one copy is used for
    the next, so the state needs twice its memory.
    """

    def __init__(self, program: ProgramState, progress: TrainingProgress) -> None:
        self._program = program
        self._progress = progress
        self._memory: list[Tensor] = []
        self.state: Tree | None = None  # None between two steps

    def record(self) -> None:
        """Copy the state, at the beginning of a step."""
        copier = _Copier(self._memory)
        self.state = copier.copied(
            {
                "program": self._program.state_dict(),
                "progress": self._progress.state_dict(),
                "trained": self._program.trained.state_dict(),
            }
        )
        self._memory = copier.used

    def forget(self) -> None:
        """Keep the changes, because the step is complete."""
        self.state = None

    def revert_progress(self) -> None:
        """Put the progress back, which the program can read; `restore` puts the rest back later."""
        if self.state is not None:
            self._progress.load_state_dict(self.state["progress"])

    def restore(self) -> None:
        """Put the state back, if it was copied."""
        if self.state is not None:
            # The optimizer uses the tensors of the copy from now on.
            self._memory = []
            load_model(self._program.model, self.state["program"]["model"])
            self._program.load_state_dict(self.state["program"])
            self._progress.load_state_dict(self.state["progress"])
            self._program.trained.undo(self.state["trained"])
            # Only now, so that it can be put back again after an error, such as a lack of memory.
            self.state = None


class _Copier:
    """Copies a tree of dicts, lists and values. Tensors are copied into memory that fits."""

    def __init__(self, memory: list[Tensor]) -> None:
        self._memory = memory
        self.used: list[Tensor] = []

    def copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value.detach())
        if isinstance(value, dict):
            # A subclass, such as that of a model's state_dict, keeps its type and its attributes.
            made = copy.copy(value)
            for key, member in value.items():
                made[key] = self.copied(member)
            return made
        if type(value) in (list, tuple):
            return type(value)(self.copied(member) for member in value)
        if isinstance(value, numpy.ndarray | set | bytearray) or hasattr(value, "maxlen"):
            return copy.copy(value)
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        number = len(self.used)
        memory = self._memory[number] if number < len(self._memory) else None
        fits = (
            memory is not None
            and memory.shape == tensor.shape
            and memory.dtype == tensor.dtype
            and memory.device == tensor.device
            and memory.stride() == tensor.stride()
        )
        if memory is None or not fits:
            memory = torch.empty_like(tensor)
        self.used.append(memory.copy_(tensor))
        return memory
