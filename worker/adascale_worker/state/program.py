"""The state of the training program: model, optimizer, scheduler, and objects that it registers.

Attributes of modules with plain values that the program changes are a part of it. A module that has also
changed what is not, such as a table that it has made, keeps all of its attributes, so that they fit together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from adascale_worker.errors import FROM_SCRATCH, UnsupportedStateError, UnusableCheckpointError, WorkerError
from adascale_worker.program.hyperparameters import (
    CHOICES,
    Choice,
    Hyperparameters,
    continue_schedule,
)
from adascale_worker.program.parts import Optimizers, SchedulerSet
from adascale_worker.program.patching import LearningRates, Scheduler
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.state.tree import flatten
from adascale_worker.torch_private.autograd import version_of
from adascale_worker.torch_private.modules import COMPILED, EXTRA_STATE_SUFFIX, unsaved_buffers

_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch uses itself. One of them is `training`, which `train()` and `eval()` set."""


_Others = dict[str, tuple[object, int]]
"""Tensors and containers that are in no state, each with what shows whether it has changed in place."""


def _attributes_of(module: nn.Module) -> tuple[dict[str, Any], _Others]:
    found = {name: value for name, value in vars(module).items() if name not in _OWN}
    plain = {name: value for name, value in found.items() if name[0] != "_" and _is_plain(value)}
    others: _Others = {
        name: (value, _version(value))
        for name, value in {**found, **unsaved_buffers(module)}.items()
        if isinstance(value, Tensor) or (name[0] != "_" and isinstance(value, list | dict | set))
    }
    return plain, others


def _are_unchanged(others: _Others, initial: _Others) -> bool:
    return others.keys() == initial.keys() and all(
        value is initial[name][0] and version == initial[name][1] for name, (value, version) in others.items()
    )


class ModuleAttributes:
    """The attributes of a model's modules that have changed since it was made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._initial = {name: _attributes_of(module) for name, module in model.named_modules()}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the changed attributes of each module, by its name."""
        state = {}
        for name, module in self._model.named_modules():
            if name not in self._initial:
                continue
            before, others_before = self._initial[name]
            plain, others = _attributes_of(module)
            if before.keys() - plain.keys() or not _are_unchanged(others, others_before):
                continue
            changed = {
                key: value for key, value in plain.items() if key not in before or before[key] != value
            }
            if changed:
                state[name] = changed
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the attributes of a saved state."""
        modules = dict(self._model.named_modules())
        for name, attributes in state.items():
            if name in modules:
                modules[name].__dict__.update(attributes)


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _version(value: Any) -> int:
    if not isinstance(value, Tensor):
        return len(value)
    return 0 if value.is_inference() else version_of(value)


class Stateful(Protocol):
    """An object whose state is saved in the job's checkpoints."""

    def state_dict(self) -> Any:
        """Return the state, as tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Restore a saved state."""


@dataclass(frozen=True)
class ProgramState:
    """The objects of a training program that have state."""

    model: torch.nn.Module
    optimizer: Optimizers  # AdaScale around the program's optimizer, or around each of several
    scheduler: Scheduler | SchedulerSet | None  # None if the program has none
    registered: Mapping[str, Stateful]  # other objects to save and restore, by name
    rates: LearningRates
    trained: TrainedParameters
    # the values that the program made optimizer and scheduler with
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    # which hyperparameters are used after a checkpoint was restored, if they differ
    choice: Choice = "checkpoint"
    differences: list[str] = field(default_factory=list)
    """The hyperparameters that differ from the restored checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all objects."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scheduler_type": self._scheduler_type,
            "registered": self.registered_states(),
            "hyperparameters": self.hyperparameters.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, except the model's: `load_model` restores it before the model is wrapped."""
        saved_type = state["scheduler_type"]
        if saved_type != self._scheduler_type:
            raise UnusableCheckpointError(
                f"the checkpoint was saved with {_scheduler(saved_type)}, program_reentry got "
                f"{_scheduler(self._scheduler_type)}: pass the same type, or {FROM_SCRATCH}"
            )
        if set(self.registered) != set(state["registered"]):
            raise UnusableCheckpointError(
                f"the checkpoint has {sorted(state['registered']) or 'nothing'} registered, the program "
                f"registers {sorted(self.registered) or 'nothing'}: register the same names, or "
                f"{FROM_SCRATCH}"
            )
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise UnusableCheckpointError(
                f"the checkpoint was saved from another optimizer: {error}. Use the same optimizer and "
                f"parameter groups, or {FROM_SCRATCH}"
            ) from error
        saved = Hyperparameters(**state["hyperparameters"])
        self.differences[:] = self.hyperparameters.differences(saved)
        scheduler_state = state["scheduler"]
        if self.choice == "program":
            self.hyperparameters.replace_in_optimizer(self.optimizer, saved)
            if self.scheduler is not None:
                scheduler_state = self.hyperparameters.replace_in_scheduler(scheduler_state, saved)
        else:
            # The next checkpoint contains them again, so that a later run reports the same differences.
            self.hyperparameters.groups, self.hyperparameters.scheduler = saved.groups, saved.scheduler
        if self.scheduler is not None:
            try:
                self.scheduler.load_state_dict(scheduler_state)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                name = f"the scheduler {self._scheduler_type}"
                raise _refused_state(name, error, "Make the same scheduler") from error
            if self.choice == "program" and self.hyperparameters.schedule_differences(saved):
                for scheduler in self._torch_schedulers():
                    continue_schedule(scheduler)
        self.load_registered(state["registered"])
        self.rates.accept()

    def load_trained(self, state: Mapping[str, list[str]]) -> None:
        """Restore which parameters are trained."""
        self.differences.extend(self.trained.load_state_dict(state, self.choice))

    def parameter_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group, which the optimizer's state has by number."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [
            [names.get(parameter, "no parameter of the model") for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def require_parameters(self, saved: list[list[str]]) -> None:
        """Check that the optimizer has the parameters of a saved state in the same order."""
        for group, (before, now) in enumerate(zip(saved, self.parameter_names(), strict=False)):
            for number, (old, new) in enumerate(zip(before, now, strict=False)):
                if old != new:
                    raise UnusableCheckpointError(
                        f"the checkpoint was saved from another optimizer: parameter {number} of group "
                        f"{group} was {old}, and is {new} now. Give the optimizer the same parameters in the "
                        f"same order, or {FROM_SCRATCH}"
                    )

    def _torch_schedulers(self) -> list[LRScheduler]:
        several = self.scheduler.schedulers if isinstance(self.scheduler, SchedulerSet) else [self.scheduler]
        return [scheduler for scheduler in several if isinstance(scheduler, LRScheduler)]

    def registered_states(self) -> dict[str, dict[str, Any]]:
        """Return the states of the registered objects, by name."""
        states = {name: stateful.state_dict() for name, stateful in self.registered.items()}
        for name, state in states.items():
            if not isinstance(state, Mapping):
                raise WorkerError(
                    f"register[{name!r}].state_dict() returned {type(state).__name__}: it must return a dict"
                )
        return {name: dict(state) for name, state in states.items()}

    def load_registered(self, states: Mapping[str, Any]) -> None:
        """Restore the states of the registered objects."""
        for name, stateful in self.registered.items():
            try:
                stateful.load_state_dict(states[name])
            except Exception as error:
                described = f"the registered {name!r} ({type(stateful).__name__})"
                remedy = "Register the same object, made with the same arguments"
                raise _refused_state(described, error, remedy) from error

    def require_loadable(self) -> None:
        """Check before training that a checkpoint of this program can be loaded again."""
        model = self.model.state_dict()
        parts = {
            "the model": {
                name: value for name, value in model.items() if not isinstance(value, torch.Tensor)
            },
            "the scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            **{f"registered {name!r}": state for name, state in self.registered_states().items()},
        }
        for name, state in parts.items():
            try:
                flatten(state)
            except UnsupportedStateError as error:
                raise WorkerError(f"the state_dict of {name} cannot be saved: {error}") from error

    @property
    def _scheduler_type(self) -> str | None:
        if isinstance(self.scheduler, SchedulerSet):
            return self.scheduler.kind
        return type(self.scheduler).__name__ if self.scheduler is not None else None


def _refused_state(name: str, error: Exception, remedy: str) -> UnusableCheckpointError:
    return UnusableCheckpointError(
        f"{name} refuses the state of the checkpoint: {type(error).__name__}: {error}. {remedy}, or "
        f"{FROM_SCRATCH}"
    )


def _scheduler(scheduler_type: str | None) -> str:
    return "no scheduler" if scheduler_type is None else f"a {scheduler_type}"


def load_model(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Restore a model's state."""
    current = model.state_dict()
    differences = [f"{name} is missing" for name in current if name not in saved]
    differences += [f"{name} is not in the model" for name in saved if name not in current]
    differences += [
        f"{name} has shape {tuple(saved[name].shape)}, the model's has {tuple(value.shape)}"
        for name, value in current.items()
        # The shape of what a module returns from `get_extra_state` may change in training.
        if name in saved and isinstance(value, torch.Tensor) and not name.endswith(EXTRA_STATE_SUFFIX)
        if value.shape != saved[name].shape
    ]
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        remedy = "Use the model that it was saved from"
        if {name.replace(COMPILED, "") for name in current} == {name.replace(COMPILED, "") for name in saved}:
            remedy = (
                "torch.compile(model) has changed the names of one of the two: compile the model as before, "
                "and by model.compile(), which keeps the names, to be free to change it"
            )
        raise UnusableCheckpointError(
            f"the checkpoint was saved from another model: {'; '.join(differences[:5])}{more}. "
            f"{remedy}, or {FROM_SCRATCH}"
        )
    try:
        model.load_state_dict(saved)
    except Exception as error:
        raise _refused_state("the model", error, "Use the model that it was saved from") from error


def require_choice(choice: str) -> None:
    """Check the argument `hyperparameters` of `program_reentry`."""
    if choice not in CHOICES:
        allowed = " or ".join(map(repr, CHOICES))
        raise WorkerError(f"program_reentry got hyperparameters={choice!r}: it must be {allowed}")


def require_stateful(registered: Mapping[str, Any]) -> None:
    """Check that the state of registered objects can be saved and restored."""
    if not isinstance(registered, Mapping):
        raise WorkerError(
            f"program_reentry got register of type {type(registered).__name__}: it must be a dict of objects "
            "by name, register={name: object}"
        )
    for name, value in registered.items():
        methods = ("state_dict", "load_state_dict")
        missing = [method for method in methods if not callable(getattr(value, method, None))]
        if missing:
            raise WorkerError(
                f"register[{name!r}] is of type {type(value).__name__}, which has no "
                f"{' and no '.join(missing)}: register an object with both methods. Keep a number in a "
                f"buffer of the model, model.register_buffer({name!r}, torch.tensor(0.0)), which is saved "
                "with the model"
            )
