"""Checks of what the program passes to `program_reentry`, and of the optimizers that it steps afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from adascale_worker.errors import WorkerError
from adascale_worker.statistics.user_warnings import OneTimeWarnings, warn_user
from adascale_worker.torch_private import has_scheduler

ONE_OPTIMIZER = (
    "make the models submodules of one, with one optimizer (docs/training.md shows it), or run this program "
    "with one replica (maxReplicas: 1)"
)
"""What to do with a program that has several optimizers."""


def require_program(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, lr_scheduler: LRScheduler | None
) -> None:
    """Check the types of the program's objects, and that they belong together.

    Raises:
        WorkerError: an object has the wrong type, the model is data-parallel already, or the scheduler
            belongs to another optimizer.
    """
    for name, value, kind in (
        ("model", model, torch.nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(value, kind):
            raise WorkerError(
                f"program_reentry got {name} of type {type(value).__name__}: call "
                "program_reentry(model, optimizer, lr_scheduler), with one torch.nn.Module and one "
                "torch.optim.Optimizer"
            )
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise WorkerError(
            f"program_reentry got a model of type {type(model).__name__}, but it makes the model "
            "data-parallel itself: pass the model before it is wrapped"
        )
    scheduled = getattr(lr_scheduler, "optimizer", optimizer)
    if lr_scheduler is not None and scheduled.param_groups is not optimizer.param_groups:
        raise WorkerError(
            f"the scheduler ({type(lr_scheduler).__name__}) belongs to another optimizer than the one passed "
            "to program_reentry, whose learning rate it would not change: make it from that one"
        )


def warn_of_unknown_scheduler(
    optimizer: torch.optim.Optimizer, lr_scheduler: LRScheduler | None, registered: Iterable[object]
) -> None:
    """Warn if the optimizer has a scheduler that was not passed to `program_reentry`."""
    is_known = lr_scheduler is not None or any(isinstance(each, LRScheduler) for each in registered)
    if not is_known and has_scheduler(optimizer):
        warn_user(
            "the optimizer has a learning-rate scheduler that was not passed to program_reentry, so it does "
            "not follow progress, and is not saved: call program_reentry(model, optimizer, scheduler)"
        )


class OtherOptimizers:
    """Observes steps of other optimizers inside the data loop.

    One with parameters of the trainer's changes them in its place, and is refused. The gradients of one with
    other parameters are not averaged, so the replicas compare these parameters.

    Args:
        optimizer: the one that was passed to `program_reentry`.
        inside_epoch: returns whether the program is in the trainer's data loop.
        has_stepped: returns whether the trainer's optimizer has made the step of the present batch.
        replicas: returns the number of replicas.

    Attributes:
        parameters: of optimizers with other parameters that have made a step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        inside_epoch: Callable[[], bool],
        has_stepped: Callable[[], bool],
        replicas: Callable[[], int],
    ) -> None:
        self._optimizer = optimizer
        self._inside_epoch = inside_epoch
        self._has_stepped = has_stepped
        self._replicas = replicas
        self._own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.parameters: list[torch.Tensor] = []
        self._seen: list[torch.optim.Optimizer] = []
        self._handle: RemovableHandle | None = None
        self._warnings = OneTimeWarnings()

    def install(self) -> None:
        """Observe the steps of all optimizers."""
        self._handle = register_optimizer_step_post_hook(self._check)

    def uninstall(self) -> None:
        """Observe no more steps. May be called again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _check(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer is self._optimizer or not self._inside_epoch():
            return
        if any(optimizer is seen for seen in self._seen):
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) in self._own for parameter in parameters):
            # A wrapper, such as one that averages weights, has the same parameters and calls the trainer's.
            if self._has_stepped():
                return
            raise WorkerError(
                f"step() was called of an optimizer ({type(optimizer).__name__}) that has parameters of the "
                "one passed to program_reentry, but is another object, whose steps the trainer does "
                "not count. Make the optimizer once, pass it to program_reentry, and call its step()"
            )
        self._seen.append(optimizer)
        self.parameters += parameters
        if self._replicas() == 1:
            self._warnings.warn(
                "second optimizer",
                f"step() was called of a second optimizer ({type(optimizer).__name__}), whose gradients are "
                "not averaged over replicas. On 1 replica this has no effect; on 2 or more, training stops "
                f"if its parameters differ: {ONE_OPTIMIZER}",
            )
