"""The models, optimizers and schedulers that a program passes to `program_reentry`: one or several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adascale_worker.errors import WorkerError
from adascale_worker.program.checks import (
    Models,
    OptimizersByName,
    SchedulersByName,
    require_program,
    require_programs,
)
from adascale_worker.program.optimizer_set import SchedulerSet
from adascale_worker.program.patching import Scheduler


@dataclass(frozen=True)
class ProgramParts:
    """The parts of a program."""

    model: torch.nn.Module  # the model; several are its submodules
    models: tuple[torch.nn.Module, ...]
    optimizers: Mapping[str, torch.optim.Optimizer]  # by name; one has the name ""
    schedulers: Mapping[str, Scheduler]  # by the names of their optimizers
    are_several: bool  # whether the program has passed dicts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @property
    def scheduler(self) -> Scheduler | SchedulerSet | None:
        """The scheduler of the program, or its schedulers."""
        if self.are_several:
            return SchedulerSet(self.schedulers) if self.schedulers else None
        return self.schedulers.get("")


def program_parts(
    model: torch.nn.Module | Models,
    optimizer: torch.optim.Optimizer | OptimizersByName,
    lr_scheduler: Scheduler | SchedulersByName | None,
    *,
    allows_shards: bool = False,
) -> ProgramParts:
    """Check what the program has passed, and return it."""
    if isinstance(model, Mapping) or isinstance(optimizer, Mapping):
        schedulers = {} if lr_scheduler is None else lr_scheduler
        require_programs(model, optimizer, schedulers)
        assert isinstance(model, Mapping)
        assert isinstance(optimizer, Mapping)
        assert isinstance(schedulers, Mapping)
        try:
            together: torch.nn.Module = torch.nn.ModuleDict(dict(model))
        except (KeyError, TypeError) as error:
            raise WorkerError(
                f"program_reentry got a model with a name that torch refuses: {error}"
            ) from error
        models = tuple(model.values())
        parts = ProgramParts(together, models, dict(optimizer), dict(schedulers), are_several=True)
    else:
        require_program(model, optimizer, lr_scheduler, allows_shards=allows_shards)  # type: ignore[arg-type]
        single = {} if lr_scheduler is None else {"": lr_scheduler}
        parts = ProgramParts(model, (model,), {"": optimizer}, single, are_several=False)  # type: ignore[arg-type]
    return parts
