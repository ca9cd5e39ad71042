"""The hyperparameters of the program: which of them differ from the checkpoint, and which are used.

A checkpoint contains the values that the program made its optimizer and its scheduler with, beside the
current values, which a schedule changes. So a learning rate that a schedule has changed is not taken for one
that a person has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from adascale_worker.scaling.rules import UNIT
from adascale_worker.torch_private.modules import LAST_LR, lr_at_position, set_last_lr

Choice = Literal["checkpoint", "program"]
CHOICES: tuple[Choice, ...] = ("checkpoint", "program")

Values = dict[str, Any]

_IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", UNIT)
"""Entries of a parameter group that are not hyperparameters: they may depend on the device, or change."""
_FOLLOWS_FROM_THE_GROUPS = ("base_lrs", LAST_LR)
"""Attributes of a scheduler that it reads from the optimizer."""
MOST_DIFFERENCES = 6


class HasGroups(Protocol):
    """An optimizer, or several."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""


def difference(name: str, saved: object, current: object) -> str:
    """Return what the program has changed since the checkpoint, for a message."""
    return f"{name} is {_text(saved)} in the checkpoint, {_text(current)} in the program"


@dataclass
class Hyperparameters:
    """The values that a program made its optimizer and its scheduler with."""

    # For each parameter group, the values by name. The learning rate is that before a schedule changes it.
    groups: list[Values] = field(default_factory=list)
    # Attributes of the scheduler; those of the schedulers that it combines are in lists.
    scheduler: Values | None = None

    @classmethod
    def read(cls, optimizer: HasGroups, scheduler: Any) -> Hyperparameters:
        """Read the values, before a checkpoint is restored."""
        groups = [
            {
                name: _plain(value)
                for name, value in group.items()
                if name not in _IMPLEMENTATION and _is_plain(_plain(value))
            }
            for group in optimizer.param_groups
        ]
        for group in groups:
            group["lr"] = group.get("initial_lr", group.get("lr"))
        return cls(groups, _settings(scheduler.state_dict()) if scheduler is not None else None)

    def state_dict(self) -> dict[str, Any]:
        """Return the values as plain objects."""
        return {"groups": self.groups, "scheduler": self.scheduler}

    def differences(self, saved: Hyperparameters) -> list[str]:
        """Return what has changed since `saved` was read, for a message."""
        found = []
        for number, (old, new) in enumerate(zip(saved.groups, self.groups, strict=False)):
            where = f" of parameter group {number}" if len(self.groups) > 1 else ""
            found += [
                difference(f"{name}{where}", old.get(name), new.get(name))
                for name in _changed(old, new)
                if name != "initial_lr"
            ]
        return found + self.schedule_differences(saved)

    def schedule_differences(self, saved: Hyperparameters) -> list[str]:
        """Return the changed arguments of the scheduler, other than the learning rates it begins with."""
        changes = _changed_settings(saved.scheduler or {}, self.scheduler or {})
        return [
            difference(f"{path} of the scheduler", before, after)
            for path, before, after in changes
            if path.rpartition(".")[2] not in _FOLLOWS_FROM_THE_GROUPS
        ]

    def replace_in_optimizer(self, optimizer: HasGroups, saved: Hyperparameters) -> None:
        """Give the restored optimizer the values that have changed since `saved` was read.

        A learning rate that the schedule has changed is multiplied by the ratio of the new to the old value,
        so that the schedule continues from the new one.
        """
        for group, old, new in zip(optimizer.param_groups, saved.groups, self.groups, strict=False):
            for name in _changed(old, new):
                current, before, after = _plain(group.get(name)), old.get(name), new.get(name)
                if name == "lr" and before and current != before:
                    after = current * after / before
                _set(group, name, after)

    def replace_in_scheduler(self, state: Values, saved: Hyperparameters) -> Values:
        """Return the saved state of a scheduler with the attributes that have changed since `saved`."""
        return _with_changes(state, saved.scheduler or {}, self.scheduler or {})


def continue_schedule(scheduler: LRScheduler) -> None:
    """Set the learning rates as a changed schedule has them at its position.

    Most schedules compute the next learning rate from the last one, so a schedule that has ended at 0 would
    stay there, for example. A schedule that cannot tell its learning rates continues from the last ones.
    """
    rates = lr_at_position(scheduler)
    if rates is None:
        return
    for group, lr in zip(scheduler.optimizer.param_groups, rates, strict=True):
        _set(group, "lr", lr)
    set_last_lr(scheduler, rates)


def describe(differences: list[str], choice: Choice) -> str:
    """Return the message about hyperparameters that differ from the checkpoint."""
    more = len(differences) - MOST_DIFFERENCES
    listed = "; ".join(differences[:MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    other = CHOICES[1 - CHOICES.index(choice)]
    return (
        f"{listed}. Training continues with the values of the {choice}; to continue with those of the "
        f'{other}, pass program_reentry(..., hyperparameters="{other}")'
    )


def _set(group: Values, name: str, value: Any) -> None:
    """Set a hyperparameter of a group; tensors keep their place in memory, and tuples their type."""
    group[name] = _replaced(group.get(name), value)


def _replaced(current: Any, value: Any) -> Any:
    if isinstance(current, torch.Tensor):
        return current.fill_(value)
    if isinstance(current, tuple) and isinstance(value, list) and len(current) == len(value):
        return tuple(map(_replaced, current, value))
    return value


def _plain(value: Any) -> Any:
    """A tensor of one element as a number, sequences as lists, mappings as dicts."""
    if isinstance(value, torch.Tensor):
        return _shortest(value) if value.ndim == 0 and value.is_floating_point() else value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value


def _shortest(value: torch.Tensor) -> float:
    """Return the number with the fewest digits that is `value` in its type: 0.1 for float32(0.1)."""
    value = value.cpu()
    exact = float(value)
    for digits in range(1, 17):
        number = float(f"{exact:.{digits}g}")
        if torch.tensor(number, dtype=value.dtype) == value:
            return number
    return exact


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    return value is None or isinstance(value, (bool, int, float, str))


def _settings(state: Mapping[str, Any]) -> Values:
    return {name: value for name, value in ((n, _plain(v)) for n, v in state.items()) if _is_plain(value)}


def _changed(old: Values, new: Values) -> list[str]:
    return [name for name in new if name in old and old[name] != new[name]]


def _changed_settings(old: Values, new: Values, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    for name in _changed(old, new):
        before, after = old[name], new[name]
        if _are_nested(before, after):
            for number, (one, other) in enumerate(zip(before, after, strict=True)):
                yield from _changed_settings(one, other, f"{prefix}{name.lstrip('_')}[{number}].")
        else:
            yield f"{prefix}{name}", before, after


def _with_changes(state: Values, old: Values, new: Values) -> Values:
    changed = dict(state)
    for name in _changed(old, new):
        if name in state and _are_nested(old[name], new[name]) and len(state[name]) == len(new[name]):
            parts = zip(state[name], old[name], new[name], strict=True)
            changed[name] = [_with_changes(*part) for part in parts]
        elif name in state and name != LAST_LR:
            kind = type(state[name])
            changed[name] = kind(new[name]) if isinstance(state[name], (dict, tuple)) else new[name]
    return changed


def _are_nested(before: object, after: object) -> bool:
    """Whether both are the states of as many schedulers, which another scheduler contains."""
    return (
        isinstance(before, list)
        and isinstance(after, list)
        and len(before) == len(after)
        and all(isinstance(each, dict) for each in before + after)
    )


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
