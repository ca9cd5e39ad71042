"""Modules, optimizers, schedulers, the clipping of gradients, and worker processes of DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR
from torch.utils.data import _utils, get_worker_info

from adascale_worker.torch_private import private_part


def communication_hooks(ddp: DistributedDataParallel) -> list[Callable[..., Any]]:
    """Return the functions that were registered by `ddp.register_comm_hook`."""
    hooks = private_part(ddp, "_comm_hooks")
    return [hook for hook, _ in hooks]


COMPILED = "_orig_mod."
"""The part of a name in a model's state that `torch.compile(model)` adds."""
EXTRA_STATE_SUFFIX: str = private_part(torch.nn.modules.module, "_EXTRA_STATE_KEY_SUFFIX")
"""How the name of the state ends that `torch.nn.Module.get_extra_state` returns."""


def unsaved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module itself that its state does not contain."""
    names = private_part(module, "_non_persistent_buffers_set")
    buffers = dict(module.named_buffers(recurse=False))
    return {name: buffers[name] for name in names if name in buffers}


Buffer = tuple[torch.nn.Module, str, Tensor]
"""Its module, its name and itself."""


def buffers_of(model: torch.nn.Module) -> Iterator[Buffer]:
    """Yield the buffers of all modules.

    It is called in each step, of which `named_buffers` of each module took 3%, with small layers.
    """
    for module in model.modules():
        for name, buffer in private_part(module, "_buffers").items():
            if buffer is not None:
                yield module, name, buffer


COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a model in which `model.compile()` keeps what `model(...)` calls."""


def call_of(model: torch.nn.Module) -> Callable[..., Any]:
    """Return what `model(...)` calls: `forward`, or its compiled form after `model.compile()`."""
    compiled: Callable[..., Any] | None = private_part(model, COMPILED_CALL)
    return model.forward if compiled is None else compiled


def override_call(model: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Let `model(...)` call `call`, in place of `call_of(model)`.

    A replaced `forward` of a model after `model.compile()` would be compiled together with what replaces it.
    """
    compiled = private_part(model, COMPILED_CALL)
    name = "forward" if compiled is None else COMPILED_CALL
    setattr(model, name, call)


def let_clipping_find_no_gradients() -> Callable[[], None]:
    """Let `clip_grad_value_` do nothing without gradients, as `clip_grad_norm_`; torch raises an error."""
    module, name = torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype"
    original: Callable[[Sequence[Sequence[Tensor]]], dict[Any, Any]] | None = getattr(module, name, None)
    if original is None:
        return lambda: None

    def group(tensors: Sequence[Sequence[Tensor]]) -> dict[Any, Any]:
        return original(tensors) if tensors[0] else {}

    setattr(module, name, group)
    return lambda: setattr(module, name, original)


@contextmanager
def skipping_outside_kernel(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a GradScaler decide itself whether a fused optimizer makes a step, instead of its kernel."""
    mark = "_step_supports_amp_scaling"
    fused = vars(optimizer).pop(mark, None)
    try:
        yield
    finally:
        if fused is not None:
            setattr(optimizer, mark, fused)


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an `LRScheduler` was made for an optimizer; torch marks its `step`."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def lr_at_position(scheduler: LRScheduler) -> list[float] | None:
    """Return the learning rates of a schedule at its position, from its arguments alone.

    The public interface gives those that follow from the learning rates of the last step, which may be 0.
    """
    closed_form = getattr(scheduler, "_get_closed_form_lr", None)
    return None if closed_form is None else [float(lr) for lr in closed_form()]


LAST_LR = "_last_lr"
"""The name, in the state of a scheduler, of the learning rates that it has set last."""
SCHEDULERS = "_schedulers"
"""The name, in the state of a scheduler that consists of others, of their states."""


def set_last_lr(scheduler: LRScheduler, rates: Sequence[float]) -> None:
    """Let `scheduler.get_last_lr()` return `rates`: one learning rate for each parameter group."""
    private_part(scheduler, LAST_LR)
    setattr(scheduler, LAST_LR, list(rates))


def schedulers_in(scheduler: ChainedScheduler | SequentialLR) -> list[LRScheduler]:
    """Return the schedulers that a scheduler consists of."""
    return list(private_part(scheduler, SCHEDULERS))


def last_milestone(scheduler: SequentialLR) -> int:
    """Return the number of the step from which a scheduler uses the last of its schedulers."""
    return int(private_part(scheduler, "_milestones")[-1])


@contextmanager
def hidden_worker_info() -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` return None, as in the main process.

    Uses `torch.utils.data._utils.worker._worker_info`.
    """
    info = get_worker_info()
    if info is None:
        yield
        return
    worker = private_part(_utils, "worker")
    private_part(worker, "_worker_info")
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info
