"""The module that is made data-parallel: its forward pass is `training_step` of the program's module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class TrainingStep(torch.nn.Module):
    """Calls `training_step` of a LightningModule, and has its parameters, buffers and state, by its names.

    The module itself stays as it is: what the program calls in `training_step`, `self(x)` above all, is not
    made data-parallel again.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = (module,)  # not a submodule, whose names would have a prefix
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `training_step` returns."""
        return self._module[0].training_step(*args, **kwargs)  # type: ignore[operator]

    @property
    def training(self) -> bool:
        """Whether the program's module is in training mode."""
        return self._module[0].training

    @training.setter
    def training(self, mode: bool) -> None:
        del mode

    def train(self, mode: bool = True) -> TrainingStep:
        """Set the mode of the program's module."""
        self._module[0].train(mode)
        return self

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the submodules of the program's module."""
        return self._module[0].named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the program's module and its submodules."""
        modules: Iterator[tuple[str, torch.nn.Module]] = self._module[0].named_modules(*args, **kwargs)
        return modules

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return a submodule of the program's module, or that module if `target` is empty."""
        return self._module[0].get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the program's module."""
        return self._module[0].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the state of the program's module."""
        return self._module[0].load_state_dict(*args, **kwargs)
