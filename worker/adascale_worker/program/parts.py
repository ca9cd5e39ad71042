"""The models, optimizers and schedulers that a program passes to `program_reentry`, and checks of them.

They are checked when they are passed. Two mistakes are possible later, and found then: another optimizer that
steps in the data loop, and a wrapper around a model, which would average the gradients once more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from adascale_worker.errors import WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.user_code import OneTimeWarnings
from adascale_worker.program.optimizers import SchedulerSet
from adascale_worker.program.patching import Scheduler
from adascale_worker.program.program_loop import ProgramLoop
from adascale_worker.torch_private.distributed import is_fully_sharded

CHECKED_CALLS = 3
"""Calls of a model, while it trains, whose callers are searched for wrappers."""

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_MODULES = ("torch.nn.parallel.distributed", "torch.nn.parallel.data_parallel", _FSDP1)
"""Where the wrappers are defined. They are not imported for this: FSDP takes a third of a second."""

_REMEDY = (
    "program_reentry makes the model data-parallel itself, so use the model as it is. With Accelerate, leave "
    "it out of accelerator.prepare(), or call accelerator.prepare_model(model, evaluation_mode=True), which "
    "does not wrap it; in a framework's trainer, select training on one device"
)

_WHOLE = (
    "ElasticTrainer supports models that each replica has as a whole, in one process on one device, and "
    "those with fully_shard(model, mesh=trainer.mesh) over the processes of a replica, whose number is "
    "processesPerReplica in the job file: set it, or leave the sharding out, and use a smaller local batch "
    "(local_bsz_bounds) or activation checkpointing if the model does not fit"
)


def require_unwrapped(model: torch.nn.Module, *, allows_shards: bool = False) -> None:
    """Check that a model for `program_reentry` is not parallel already, and has no part that is."""
    for name, module in model.named_modules():
        if (is_fully_sharded(module) and not allows_shards) or type(module).__module__ == _FSDP1:
            raise WorkerError(
                f"program_reentry got a model with FSDP{f' on its part {name!r}' if name else ''}. {_WHOLE}"
            )
        if is_data_parallel(module):
            kind = type(module).__name__
            found = f"whose part {name!r} is of type {kind}" if name else f"of type {kind}"
            raise WorkerError(f"program_reentry got a model {found}: pass it before it is wrapped. {_REMEDY}")
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and not allows_shards:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is a DTensor, as of tensor "
                f"parallelism. {_WHOLE}"
            )


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a DTensor."""
    # By attribute and not by type, because importing DTensor takes a third of a second.
    return hasattr(parameter, "device_mesh")


def is_data_parallel(module: torch.nn.Module) -> bool:
    """Whether a module is a wrapper that makes another one data-parallel."""
    return any(
        kind.__module__ in _MODULES and issubclass(kind, torch.nn.Module) for kind in type(module).__mro__
    )


class OtherParallelism:
    """Refuses wrappers around the models of a program: when they are made, or when they call a model.

    Of a model that is sharded over several processes, no replica has all parameters.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        *,
        allows_shards: bool = False,
    ) -> None:
        self._models = models
        self._allows_shards = allows_shards
        self._parameters = {id(parameter) for model in models for parameter in model.parameters()}
        self._calls = 0
        self._handle: RemovableHandle | None = None

    def install(self) -> None:
        """Refuse wrappers that are made from now on."""
        self._handle = register_module_module_registration_hook(self._check_registration)

    def uninstall(self) -> None:
        """Refuse no more. May be called again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def check_call(self) -> None:
        """Check who calls a model, in its first calls."""
        if self._calls >= CHECKED_CALLS or torch.compiler.is_compiling():
            return
        self._calls += 1
        if not self._allows_shards and any(
            is_fully_sharded(module) for model in self._models for module in model.modules()
        ):
            raise WorkerError(
                f"fully_shard was applied to the model, or a part of it, after program_reentry. {_WHOLE}"
            )
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_globals.get("__name__") in _MODULES:
                caller = frame.f_locals.get("self")
                if isinstance(caller, torch.nn.Module) and self._concerns(caller):
                    raise WorkerError(
                        "the model that was passed to program_reentry was called by "
                        f"{type(caller).__name__}, which exchanges its gradients once more. {_REMEDY}"
                    )
            frame = frame.f_back

    def _check_registration(self, module: torch.nn.Module, _name: str, part: torch.nn.Module | None) -> None:
        if part is None or not is_data_parallel(module):
            return
        if self._concerns(part):
            raise WorkerError(
                f"the model that was passed to program_reentry, or a part of it, was wrapped in "
                f"{type(module).__name__}, which would exchange its gradients once more. {_REMEDY}"
            )

    def _concerns(self, module: torch.nn.Module) -> bool:
        """Whether a module contains a model of the program, or parameters of it that are trained."""
        return any(each is model for each in module.modules() for model in self._models) or any(
            parameter.requires_grad and id(parameter) in self._parameters for parameter in module.parameters()
        )


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
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise WorkerError(
                f"{name!r} of the model has no shape yet, as in LazyLinear: call the model once with a "
                "batch, before program_reentry"
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
    """Check the types of dicts of models, optimizers and schedulers, and that they belong together."""
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
        optimizers: Collection[torch.optim.Optimizer],
        group: ReplicaGroup,
        loop: ProgramLoop,
        has_stepped: Callable[[], bool],
    ) -> None:
        self._optimizers = optimizers
        self._group = group
        self._loop = loop
        self._has_stepped = has_stepped
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
        if not self._loop.has_batch or any(optimizer is own for own in self._optimizers):
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
        if self._group.replicas == 1:
            self._warnings.warn(
                "second optimizer",
                f"step() was called of a second optimizer ({type(optimizer).__name__}), whose gradients are "
                "not averaged over replicas. On 1 replica this has no effect; on 2 or more, training stops "
                f"if its parameters differ: {ALL_OPTIMIZERS}",
            )


@dataclass(frozen=True)
class ProgramParts:
    """The parts of a program."""

    model: torch.nn.Module  # several are its submodules
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
