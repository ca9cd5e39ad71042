"""Modules: their call, and the names of their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adascale_worker.torch_private.lookup import private_part

EXTRA_STATE_SUFFIX: str = private_part(
    torch.nn.modules.module, "_EXTRA_STATE_KEY_SUFFIX", "to restore the extra state of modules"
)
"""How the name of the state ends that `torch.nn.Module.get_extra_state` returns."""
_COMPILED_CALL = "_compiled_call_impl"


def call_of(model: torch.nn.Module) -> Callable[..., Any]:
    """Return what `model(...)` calls: `forward`, or its compiled form after `model.compile()`."""
    compiled: Callable[..., Any] | None = private_part(model, _COMPILED_CALL, "to run a compiled model")
    return model.forward if compiled is None else compiled


def override_call(model: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Let `model(...)` call `call`, in place of `call_of(model)`.

    A replaced `forward` of a model after `model.compile()` would be compiled together with what replaces it.
    """
    compiled = private_part(model, _COMPILED_CALL, "to run a compiled model")
    name = "forward" if compiled is None else _COMPILED_CALL
    setattr(model, name, call)
