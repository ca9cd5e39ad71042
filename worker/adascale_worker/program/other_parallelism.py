"""Finds other parallelism of a model that the trainer makes data-parallel.

A wrapper would average the gradients too, so they would be divided by the number of replicas twice. It is
found when it is made around the model, or when it calls the model, if it was made before. And of a model that
is sharded over several processes, no replica has all parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from adascale_worker.errors import WorkerError
from adascale_worker.torch_private.fsdp import is_fully_sharded

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
    """Refuses wrappers around the models of a program."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        own: type[torch.nn.Module] | None = None,
        *,
        allows_shards: bool = False,
    ) -> None:
        self._models = models
        self._allows_shards = allows_shards
        self._own = own
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
        if (self._own is None or not isinstance(part, self._own)) and self._concerns(part):
            raise WorkerError(
                f"the model that was passed to program_reentry, or a part of it, was wrapped in "
                f"{type(module).__name__}, which would exchange its gradients once more. {_REMEDY}"
            )

    def _concerns(self, module: torch.nn.Module) -> bool:
        """Whether a module contains a model of the program, or parameters of it that are trained."""
        return any(each is model for each in module.modules() for model in self._models) or any(
            parameter.requires_grad and id(parameter) in self._parameters for parameter in module.parameters()
        )
