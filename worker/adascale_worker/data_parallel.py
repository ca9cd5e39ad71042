"""Data parallelism in place: the program keeps its model, and the model's `forward` goes through DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.loop_checks import ForwardRecord
from adascale_worker.patching import MethodOverride
from adascale_worker.torch_private import rebuild_buckets


def parallelize(
    model: torch.nn.Module,
    device: torch.device,
    forward: ForwardRecord | None = None,
    *,
    find_unused_parameters: bool = False,
) -> DistributedDataParallel:
    """Make `model` data-parallel in place: in training mode, its forward goes through DDP.

    The program keeps its model, the names of its parameters and its training loop. In evaluation mode, and
    while gradients are disabled, the model's original forward runs, so one replica may evaluate by itself.

    Args:
        model: on `device` already.
        device: the replica's device.
        forward: records forward passes through DDP.
        find_unused_parameters: as DDP's argument of this name.

    Returns:
        The DDP module that wraps the model.
    """
    wrapped = _OriginalForward(model, reverse_parameters=not find_unused_parameters)
    ddp = DistributedDataParallel(
        wrapped,
        device_ids=[device] if device.type == "cuda" else None,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,
    )
    if not find_unused_parameters:
        rebuild_buckets(ddp)
    model.forward = _DataParallelForward(wrapped, ddp, forward or ForwardRecord())
    return ddp


def record_forward(model: torch.nn.Module, forward: ForwardRecord) -> None:
    """Record the forward passes of a model on one replica that would go through DDP on several."""
    model.forward = _RecordedForward(model, forward)


class _OriginalForward(torch.nn.Module):
    """The module that DDP wraps: calls the forward that the model had before it was overridden.

    Args:
        model: the program's model.
        reverse_parameters: list the parameters in reverse order, in which their gradients usually become
            ready, so that DDP exchanges the first buckets while the other gradients are computed.
    """

    def __init__(self, model: torch.nn.Module, *, reverse_parameters: bool) -> None:
        super().__init__()
        if reverse_parameters:
            self.reversed_parameters = torch.nn.ParameterList(reversed(list(model.parameters())))
        self.original_forward: Callable[..., Any] = model.forward
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original_forward(*args, **kwargs)


class _DataParallelForward(MethodOverride):
    """Replaces the forward of a data-parallel model."""

    def __init__(
        self, wrapped: _OriginalForward, ddp: DistributedDataParallel, record: ForwardRecord
    ) -> None:
        super().__init__(wrapped.original_forward)
        self._model = wrapped.model
        self._ddp = ddp
        self._record = record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self._model.training:
            self._record.called = True
            return self._ddp(*args, **kwargs)
        return self.original(*args, **kwargs)


class _RecordedForward(MethodOverride):
    """Replaces the forward of a model on one replica."""

    def __init__(self, model: torch.nn.Module, record: ForwardRecord) -> None:
        super().__init__(model.forward)
        self._model = model
        self._record = record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self._model.training:
            self._record.called = True
        return self.original(*args, **kwargs)
