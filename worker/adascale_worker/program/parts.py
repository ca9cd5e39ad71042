"""The models, optimizers and schedulers that a program passes to `program_reentry`, one or several.

They are checked when they are passed. Two mistakes are possible later, and found then: see
`refuse_other_training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from adascale_worker.adascale import AdaScale
from adascale_worker.errors import ReplicationError, WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.user_code import warn_once, warn_user
from adascale_worker.program.hyperparameters import HasGroups
from adascale_worker.program.patching import Scheduler
from adascale_worker.program.program_loop import ProgramLoop
from adascale_worker.torch_private.distributed import is_fully_sharded, sharded_parameter_groups
from adascale_worker.torch_private.modules import SCHEDULERS


class Optimizers:
    """The optimizers of a program by name, each with AdaScale around it; one alone has the name "".

    The first one leads: it makes a step for each batch, and exchanges the requests of the replicas.
    """

    def __init__(self, parts: Mapping[str, AdaScale]) -> None:
        self.parts = dict(parts)
        self.are_several = "" not in self.parts
        """Whether the program has passed a dict of optimizers."""

    # -- the gain of the job ------------------------------------------------------------------------------

    @property
    def slowest(self) -> AdaScale:
        """The optimizer with the lowest gain; the job uses its estimate.

        One that trains nothing now counts only if none trains anything.
        """
        parts = list(self.parts.values())
        if len(parts) == 1:
            return parts[0]
        # At each scale above 1, the gain rises with the ratio of variance to squared gradient, so the
        # optimizer with the lowest gain at one such scale has it at all of them.
        trained = [part for part in parts if part.statistics.parameters.has_trained]
        return min(trained or parts, key=lambda part: part.predict_gain(2.0))

    # -- as one optimizer ---------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """What the inner optimizers keep for each parameter."""
        return {parameter: state for part in self.parts.values() for parameter, state in part.state.items()}

    @property
    def gradients_are_finite(self) -> bool | None:
        """Whether the gradients of the last steps were finite; None if none of these steps was measured."""
        found = [part.statistics.gradients_are_finite() for part in self.parts.values()]
        known = [finite for finite in found if finite is not None]
        return all(known) if known else None

    @property
    def awaits_comparison(self) -> bool:
        """Whether the state contains the gradient of the last step, which the next step no longer needs.

        Only with one replica and no accumulation. After the next step the state is smaller.
        """
        return any(part.statistics.awaits_comparison for part in self.parts.values())

    def discard_comparison(self) -> None:
        """Delete the gradients of the last step, because the next is not made by one replica alone."""
        for part in self.parts.values():
            part.statistics.discard_comparison()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the only optimizer, or of each by its name."""
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return states if self.are_several else states[""]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        states: Mapping[str, Any] = state if self.are_several else {"": state}
        if set(states) != set(self.parts):
            raise ValueError(f"it has the optimizers {sorted(states)}, the program has {sorted(self.parts)}")
        for name, part in self.parts.items():
            part.load_state_dict(dict(states[name]))


class SchedulerSet:
    """Several schedulers of a program, with the interface of one."""

    def __init__(self, schedulers: Mapping[str, Scheduler]) -> None:
        self._schedulers = dict(schedulers)

    @property
    def kind(self) -> str:
        """Names and types."""
        named = (f"{name}: {type(each).__name__}" for name, each in self._schedulers.items())
        return f"set of schedulers ({', '.join(named)})"

    @property
    def schedulers(self) -> list[Scheduler]:
        """The schedulers."""
        return list(self._schedulers.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the states, in the form in which torch's schedulers have those of others."""
        return {SCHEDULERS: [scheduler.state_dict() for scheduler in self._schedulers.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for scheduler, saved in zip(self._schedulers.values(), state[SCHEDULERS], strict=True):
            scheduler.load_state_dict(saved)


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


def require_sharded(model: torch.nn.Module, group: ReplicaGroup) -> None:
    """Check that `fully_shard` was applied to a model over the processes of the replica, to all of it."""
    if not any(is_fully_sharded(module) for module in model.modules()):
        raise WorkerError(
            f"program_reentry got a model that is not sharded, but a replica has {group.processes} "
            "processes (processesPerReplica): call fully_shard(model, mesh=trainer.mesh) before the "
            "optimizer is made, or leave out processesPerReplica"
        )
    groups = sharded_parameter_groups(model)
    for each in groups:
        if each.gradient_divisor not in (None, group.processes):
            raise WorkerError(
                f"program_reentry got a model with set_gradient_divide_factor({each.gradient_divisor:g}), "
                f"but the trainer needs the mean gradient of the {group.processes} processes of a replica: "
                f"call set_gradient_divide_factor({group.processes}) of each FSDPModule after what has set "
                "it, and use the mean loss of the samples of a process"
            )
    alone = {id(p) for each in groups for p in each.sharded_by_fsdp_alone}
    ranks = list(range(group.processes))
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is not sharded, so its gradients "
                "would not be averaged over the processes of a replica: apply fully_shard to the root module "
                "too, without ignored_params, and before program_reentry"
            )
        if id(parameter) not in alone:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is a DTensor with placements "
                f"{tuple(getattr(parameter, 'placements', ()))}, which fully_shard alone has not made: "
                "tensor parallelism inside a replica is not supported, only fully_shard(model, "
                "mesh=trainer.mesh)"
            )
        if mesh.mesh.flatten().tolist() != ranks:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is sharded over a mesh of the "
                f"processes {mesh.mesh.tolist()}, but a replica has {group.processes} processes: pass "
                "mesh=trainer.mesh to fully_shard, or a mesh of all of these processes in two dimensions. "
                "The trainer averages over the replicas itself"
            )
        if parameter.device.type != group.device.type:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is on {parameter.device}, and not on "
                f"{group.device}: offload_policy of fully_shard is not supported"
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


ALL_OPTIMIZERS = (
    "pass all models and optimizers by name, program_reentry({name: model, ...}, {name: optimizer, ...}) "
    "(docs/training.md shows it), or run this program with one replica (maxReplicas: 1)"
)
"""What to do with a program that has several optimizers."""

Models = Mapping[str, torch.nn.Module]
OptimizersByName = Mapping[str, torch.optim.Optimizer]
SchedulersByName = Mapping[str, Scheduler]


def _require_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise WorkerError(
            f"program_reentry got {name} of type {type(value).__name__}: call "
            "program_reentry(model, optimizer, lr_scheduler), with one torch.nn.Module and one "
            "torch.optim.Optimizer, or with dicts of several by name "
            "(program_reentry({name: model, ...}, {name: optimizer, ...}), see docs/training.md)"
        )


def _by_name(name: str, value: object, kind: str) -> dict[str, Any]:
    """Return one of the dicts that a program with several models or optimizers passes."""
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
    return dict(value)


def _require_scheduler(scheduler: Scheduler, optimizer: torch.optim.Optimizer) -> None:
    """Check that a scheduler can follow progress, and is that of its optimizer."""
    methods = ("step_update", "state_dict", "load_state_dict")
    missing = [method for method in methods if not callable(getattr(scheduler, method, None))]
    if missing and not isinstance(scheduler, LRScheduler):
        raise WorkerError(
            f"program_reentry got a scheduler of type {type(scheduler).__name__}: it must be an "
            "LRScheduler of torch, or have step_update(n), as those of timm do, state_dict and "
            f"load_state_dict, and it has no {' and no '.join(missing)}. For another one, pass "
            "int(trainer.progress) in place of its count of steps, and save it as register={name: object}"
        )
    scheduled = getattr(scheduler, "optimizer", optimizer)
    if scheduled.param_groups is not optimizer.param_groups:
        raise WorkerError(
            f"the scheduler ({type(scheduler).__name__}) belongs to another optimizer than the one passed "
            "to program_reentry, whose learning rate it would not change: make it from that one"
        )


def _require_apart(optimizers: OptimizersByName) -> None:
    """Check that no parameter belongs to two optimizers."""
    owner: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            other = owner.setdefault(id(parameter), name)
            if other != name:
                raise WorkerError(
                    f"the optimizers {other!r} and {name!r} have a parameter of shape "
                    f"{tuple(parameter.shape)} in common: give each parameter to one optimizer"
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


def refuse_other_training(
    parts: ProgramParts, group: ReplicaGroup, loop: ProgramLoop, has_stepped: Callable[[], bool]
) -> Callable[[], None]:
    """Refuse what would train the program's models beside the trainer, and return what ends that.

    A wrapper around a model would exchange its gradients once more. Another optimizer with the parameters of
    the trainer's changes them in its place. The gradients of any other one are not averaged.
    """
    own_optimizers = list(parts.optimizers.values())
    trained = {id(parameter) for model in parts.models for parameter in model.parameters()}
    optimized = {id(parameter) for each in parts.param_groups for parameter in each["params"]}
    warned: set[str] = set()

    def check_wrapper(module: torch.nn.Module, _name: str, part: torch.nn.Module | None) -> None:
        if part is None or not is_data_parallel(module):
            return
        has_model = any(each is model for each in part.modules() for model in parts.models)
        if has_model or any(p.requires_grad and id(p) in trained for p in part.parameters()):
            raise WorkerError(
                f"the model that was passed to program_reentry, or a part of it, was wrapped in "
                f"{type(module).__name__}, which would exchange its gradients once more. {_REMEDY}"
            )

    def check_optimizer(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not loop.has_batch or any(optimizer is own for own in own_optimizers):
            return
        called = f"step() was called of {{}} optimizer ({type(optimizer).__name__})"
        if any(id(p) in optimized for each in optimizer.param_groups for p in each["params"]):
            # A wrapper, such as one that averages weights, has the same parameters and calls the trainer's.
            if not has_stepped():
                raise WorkerError(
                    f"{called.format('an')} that has parameters of the one passed to program_reentry, but is "
                    "another object, whose steps the trainer does not count. Make the optimizer once, pass "
                    "it to program_reentry, and call its step()"
                )
            return
        found = f"{called.format('a second')}, whose gradients are not averaged over replicas"
        if group.replicas > 1:
            raise ReplicationError(f"{found}: {ALL_OPTIMIZERS}")
        warn_once(
            warned,
            "second optimizer",
            f"{found}. On 1 replica this has no effect; on 2 or more, training stops: {ALL_OPTIMIZERS}",
        )

    handles = (
        register_module_module_registration_hook(check_wrapper),
        register_optimizer_step_post_hook(check_optimizer),
    )

    def allow() -> None:
        for handle in handles:
            handle.remove()

    return allow


def program_parts(
    model: torch.nn.Module | Models,
    optimizer: torch.optim.Optimizer | OptimizersByName,
    lr_scheduler: Scheduler | SchedulersByName | None,
    *,
    allows_shards: bool = False,
) -> ProgramParts:
    """Check what the program has passed, and return it."""
    are_several = isinstance(model, Mapping) or isinstance(optimizer, Mapping)
    models: dict[str, Any] = {"": model}
    optimizers: dict[str, Any] = {"": optimizer}
    schedulers: dict[str, Any] = {} if lr_scheduler is None else {"": lr_scheduler}
    if are_several:
        models = _by_name("model", model, "torch.nn.Module")
        optimizers = _by_name("optimizer", optimizer, "torch.optim.Optimizer")
        schedulers = _by_name("lr_scheduler", {} if lr_scheduler is None else lr_scheduler, "LRScheduler")
    for each in models.values():
        _require_kind("model", each, torch.nn.Module)
        require_unwrapped(each, allows_shards=allows_shards)
    for each in optimizers.values():
        _require_kind("optimizer", each, torch.optim.Optimizer)
    _require_apart(optimizers)
    for name, each in schedulers.items():
        if name not in optimizers:
            raise WorkerError(
                f"program_reentry got a scheduler {name!r}, but no optimizer of this name: give a "
                f"scheduler the name of its optimizer ({', '.join(map(repr, optimizers))})"
            )
        _require_scheduler(each, optimizers[name])
    together = torch.nn.ModuleDict(models) if are_several else models[""]
    return ProgramParts(together, tuple(models.values()), optimizers, schedulers, are_several)


def check_optimizer_parameters(model: torch.nn.Module, optimizer: HasGroups, replicas: int) -> None:
    """Check that the optimizer has parameters of the model, and no others.

    The state that replicas exchange has no others. On one replica the program is warned, where it works.
    """
    own = {id(parameter) for parameter in model.parameters()}
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if own and not own & optimized:
        raise WorkerError(
            "the optimizer has no parameter of the model, so training would not change the model: make the "
            "optimizer from model.parameters(), after the last statement that replaces the model"
        )
    shapes = [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and id(parameter) not in own
    ]
    if not shapes:
        return
    found = (
        f"the optimizer has {len(shapes)} parameters that are not in the model (the first has shape "
        f"{shapes[0]})"
    )
    remedy = "Make them parameters of the model, for example with a module that contains both"
    if replicas > 1:
        raise ReplicationError(f"{found}, so a replica that joins would not get them. {remedy}")
    warn_user(f"{found}. On 2 or more replicas, this stops training with an error. {remedy}")
