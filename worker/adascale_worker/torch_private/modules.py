"""Modules and `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.torch_private import private_part


def communication_hooks(ddp: DistributedDataParallel) -> list[Callable[..., Any]]:
    """Return the functions that were registered by `ddp.register_comm_hook`."""
    hooks = private_part(
        ddp, "_comm_hooks", "to detect whether gradients are compressed before they are averaged"
    )
    return [hook for hook, _ in hooks]


COMPILED = "_orig_mod."
"""The part of a name in a model's state that `torch.compile(model)` adds."""
EXTRA_STATE_SUFFIX: str = private_part(
    torch.nn.modules.module, "_EXTRA_STATE_KEY_SUFFIX", "to restore the extra state of modules"
)
"""How the name of the state ends that `torch.nn.Module.get_extra_state` returns."""


def unsaved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module itself that its state does not contain."""
    names = private_part(module, "_non_persistent_buffers_set", "to find what a module has changed")
    buffers = dict(module.named_buffers(recurse=False))
    return {name: buffers[name] for name in names if name in buffers}


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
