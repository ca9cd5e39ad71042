"""Attributes of the model's modules that the program changes after `program_reentry`, such as a temperature.

Those with plain values are a part of the state. A module that has also changed what is not, such as a table
that it has made and a flag that says so, keeps all of its attributes, so that they fit together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from adascale_worker.torch_private.autograd import version_of
from adascale_worker.torch_private.modules import unsaved_buffers

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
