"""The calls of the program's models while they train, the errors of these, and the buffers that they change.

The program keeps its models, which run as they are: the gradients are averaged after they were computed
(`optimizer_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from adascale_worker.gradients.accumulation import Accumulation
from adascale_worker.gradients.step_failure import StepFailure, forward_without_activations
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.patching import MethodOverride, is_traced
from adascale_worker.torch_private.autograd import version_of
from adascale_worker.torch_private.modules import call_of, override_call


class ModelBuffers:
    """Puts the buffers of a model, such as BatchNorm's statistics, back if its step is discarded.

    Buffers are copied if their version has changed. The kernels of BatchNorm change `running_mean` and
    `running_var` without counting a version, so buffers with such names are always copied.
    """

    state = None
    """The other parts of the state change only in a step that succeeds."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._places: list[tuple[torch.nn.Module, str, Tensor]] = []
        """Module, name, buffer: a forward pass may assign another tensor to the name."""
        self._is_recorded = False

    def begin_step(self) -> None:
        """Let the next call of `record` copy the buffers."""
        self._is_recorded = False

    def record(self) -> None:
        """Copy the buffers, at the first forward pass of a step."""
        if self._is_recorded:
            return
        self._is_recorded = True
        copies = {}
        self._places = list(self._buffers())
        for _, name, buffer in self._places:
            version = _version(name, buffer)
            known = self._copies.get(id(buffer))
            if known is None or known[0] is not buffer:
                known = (buffer, buffer.detach().clone(), version)
            elif known[2] != version or version < 0:
                known = (buffer, known[1].copy_(buffer), version)
            copies[id(buffer)] = known
        self._copies = copies

    def revert_progress(self) -> None:
        """Do nothing: only a step that succeeds changes the progress."""

    def restore(self) -> None:
        """Put the buffers back that have changed since the first forward pass of this step."""
        if not self._is_recorded:
            return
        self._is_recorded = False
        with torch.no_grad():
            for buffer, copied, version in self._copies.values():
                if version < 0 or version_of(buffer) != version:
                    buffer.copy_(copied)
        for module, name, buffer in self._places:
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)
        self._copies.clear()
        self._places.clear()

    def _buffers(self) -> Iterator[tuple[torch.nn.Module, str, Tensor]]:
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                yield module, name, buffer


def _version(name: str, buffer: Tensor) -> int:
    """Return the version of a buffer; -1 if a change may not be counted."""
    return -1 if name.startswith("running_") else version_of(buffer)


class TrainedForward(MethodOverride):
    """Replaces the forward of a model while it trains."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: ReplicaGroup,
        failure: StepFailure,
        accumulation: Accumulation,
        buffers: ModelBuffers | None,  # None if what a step changes is copied at its beginning
    ) -> None:
        super().__init__(call_of(model))
        self._model = model
        self._group = group
        self._failure = failure
        self._accumulation = accumulation
        self._buffers = buffers
        override_call(model, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original, and prepare a step for its first call."""
        if torch.is_grad_enabled() and self._model.training and not is_traced():
            return self._forward(args, kwargs)
        return self.original(*args, **kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        failure, group = self._failure, self._group
        # A model that is sharded over the processes of a replica makes collective calls, which an error ends.
        if group.has_mesh or not (failure.is_discarded or group.has_failed):
            try:
                self._before_forward()
                return self.original(*args, **kwargs)
            except (RuntimeError, MemoryError, PeersLostError) as error:
                if group.has_mesh or not failure.handles(error):
                    raise
        # The step is discarded before an optimizer uses its gradients.
        failure.discard()
        self._before_forward()
        if failure.lacks_memory:
            # The error is deleted: its traceback has kept the activations.
            size, parameters = self._accumulation.local_bsz, self._model.parameters()
            return forward_without_activations(self.original, args, kwargs, size, parameters)
        return self.original(*args, **kwargs)

    def _before_forward(self) -> None:
        if not self._group.has_mesh:
            self._accumulation.note_trained()
        if self._buffers is not None and (self._group.is_elastic or self._group.replicas == 1):
            self._buffers.record()
