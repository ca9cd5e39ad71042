"""Checks of what the program passes to `program_reentry`, and of the optimizers that it steps afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from adascale_worker.errors import WorkerError
from adascale_worker.process.user_warnings import OneTimeWarnings
from adascale_worker.program.other_parallelism import require_unwrapped
from adascale_worker.program.patching import Scheduler

ALL_OPTIMIZERS = (
    "pass all models and optimizers by name, program_reentry({name: model, ...}, {name: optimizer, ...}) "
    "(docs/training.md shows it), or run this program with one replica (maxReplicas: 1)"
)
"""What to do with a program that has several optimizers."""

Models = Mapping[str, torch.nn.Module]
OptimizersByName = Mapping[str, torch.optim.Optimizer]
SchedulersByName = Mapping[str, Scheduler]


def require_program(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: Scheduler | None,
    *,
    allows_shards: bool = False,
) -> None:
    """Check the types of the program's objects, and that they belong together."""
    for name, value, kind in (
        ("model", model, torch.nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(value, kind):
            raise WorkerError(
                f"program_reentry got {name} of type {type(value).__name__}: call "
                "program_reentry(model, optimizer, lr_scheduler), with one torch.nn.Module and one "
                "torch.optim.Optimizer, or with dicts of several by name "
                "(program_reentry({name: model, ...}, {name: optimizer, ...}), see docs/training.md)"
            )
    require_unwrapped(model, allows_shards=allows_shards)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise WorkerError(
                f"the module {name!r} ({type(module).__name__}) of the model has sparse=True, and AdaScale "
                "needs dense gradients: make it with sparse=False"
            )
    if lr_scheduler is None:
        return
    methods = ("step_update", "state_dict", "load_state_dict")
    missing = [method for method in methods if not callable(getattr(lr_scheduler, method, None))]
    if missing and not isinstance(lr_scheduler, LRScheduler):
        raise WorkerError(
            f"program_reentry got a scheduler of type {type(lr_scheduler).__name__}: it must be an "
            "LRScheduler of torch, or have step_update(n), as those of timm do, state_dict and "
            f"load_state_dict, and it has no {' and no '.join(missing)}. For another one, pass "
            "int(trainer.progress) in place of its count of steps, and save it as register={name: object}"
        )
    scheduled = getattr(lr_scheduler, "optimizer", optimizer)
    if scheduled.param_groups is not optimizer.param_groups:
        raise WorkerError(
            f"the scheduler ({type(lr_scheduler).__name__}) belongs to another optimizer than the one passed "
            "to program_reentry, whose learning rate it would not change: make it from that one"
        )


def require_programs(models: object, optimizers: object, lr_schedulers: object) -> None:
    """Check the types of several models, optimizers and schedulers, and that they belong together."""
    for name, value, kind in (
        ("model", models, "torch.nn.Module"),
        ("optimizer", optimizers, "torch.optim.Optimizer"),
        ("lr_scheduler", lr_schedulers, "LRScheduler"),
    ):
        if not isinstance(value, Mapping) or (name != "lr_scheduler" and not value):
            raise WorkerError(
                f"program_reentry got {name} of type {type(value).__name__}: for several models or "
                f"optimizers, each of model, optimizer and lr_scheduler is a dict by name, here "
                f"{{name: {kind}, ...}}"
            )
        names = [each for each in value if not isinstance(each, str) or not each.isidentifier()]
        if names:
            raise WorkerError(
                f"program_reentry got the name {names[0]!r} in {name}: use names of letters, digits and _, "
                "such as 'generator'; checkpoints contain them"
            )
    assert isinstance(models, Mapping)
    assert isinstance(optimizers, Mapping)
    assert isinstance(lr_schedulers, Mapping)
    unknown = [name for name in lr_schedulers if name not in optimizers]
    if unknown:
        raise WorkerError(
            f"program_reentry got a scheduler {unknown[0]!r}, but no optimizer of this name: give a "
            f"scheduler the name of its optimizer ({', '.join(map(repr, optimizers))})"
        )
    for model in models.values():
        require_program(model, next(iter(optimizers.values())), None)
    owner: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        require_program(next(iter(models.values())), optimizer, lr_schedulers.get(name))
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            other = owner.setdefault(id(parameter), name)
            if other != name:
                raise WorkerError(
                    f"the optimizers {other!r} and {name!r} have a parameter of shape "
                    f"{tuple(parameter.shape)} in common: give each parameter to one optimizer"
                )


class OtherOptimizers:
    """Observes steps of other optimizers inside the data loop.

    One with parameters of the trainer's changes them in its place, and is refused. The gradients of one with
    other parameters are not averaged, so the replicas compare these parameters.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        inside_epoch: Callable[[], bool],
        has_stepped: Callable[[], bool],
        replicas: Callable[[], int],
    ) -> None:
        self._optimizers = optimizers
        self._inside_epoch = inside_epoch
        self._has_stepped = has_stepped
        self._replicas = replicas
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._own = {id(parameter) for group in groups for parameter in group["params"]}
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
        if not self._inside_epoch() or any(optimizer is own for own in self._optimizers):
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
                f"if its parameters differ: {ALL_OPTIMIZERS}",
            )
