"""Whether the present step is discarded, so that its samples are delivered again.

The models, the backward passes and the optimizers report errors here. The program cannot do anything about a
lost peer or a batch that does not fit into memory, so it goes on up to `optimizer.step()`, which changes
nothing.

An error of the forward pass is raised inside of the program's loop, which only an exception could leave. If
the batch does not fit, the program gets an output of the same shapes instead, with a graph in which all
gradients are zero. Any other error, such as of the program's own loss function, ends the process.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from adascale_worker.membership.process_group import ReplicaGroup


class StepFailure:
    """The failure of the present step, until the trainer begins the step again."""

    def __init__(
        self,
        group: ReplicaGroup,
        repeats_in_smaller_batches: Callable[[BaseException], bool],
        on_discard: Callable[[], None],
    ) -> None:
        self._group = group
        self._repeats_in_smaller_batches = repeats_in_smaller_batches
        self._on_discard = on_discard
        self.is_discarded = False
        """Whether this step is discarded: its gradients are not averaged, or its batch does not fit."""
        self.lacks_memory = False
        """Whether the batch does not fit. Then the program makes no backward pass."""

    def discard(self) -> None:
        """Discard this step."""
        if not self.is_discarded:
            self.is_discarded = True
            self._on_discard()

    def clear(self) -> None:
        """Begin with a step that has not failed."""
        self.is_discarded = self.lacks_memory = False

    def peers_lost(self, error: BaseException) -> bool:
        """Discard this step if `error` means that peers are lost, and return whether it does."""
        is_lost = self._group.is_failure(error)
        if is_lost:
            self.discard()
        return is_lost

    def shortage(self, error: BaseException) -> bool:
        """Discard this step if `error` means that its batch does not fit, and return whether it does."""
        if not self._repeats_in_smaller_batches(error):
            return False
        self.lacks_memory = True
        self.discard()
        return True

    def handles(self, error: BaseException) -> bool:
        """Discard this step if `error` has one of the two causes, and return whether it has."""
        return self.peers_lost(error) or self.shortage(error)


_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "std::bad_alloc",
)
"""Parts of the messages of errors of other types than `torch.OutOfMemoryError`, in lower case."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that an allocation has failed, of the device's memory or of the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in message for part in _MESSAGES)


def kind_of(device: torch.device) -> str:
    """Return the kind of a device: a batch that fits on one of a kind should fit on the others."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def release_memory() -> None:
    """Release memory that is not used any more, and return what torch caches of it to the device."""
    gc.collect()
    _empty_cache()


def _empty_cache() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forward_without_activations(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: int,
    parameters: Iterable[Tensor],
) -> Any:
    """Return an output of the shapes that `forward(*args, **kwargs)` has, from as little memory as possible.

    If the batch does not fit without a graph either, the output of a part of it is repeated.
    """
    size = batch
    while True:
        _empty_cache()
        inputs = _part_of((args, kwargs), size, batch)
        try:
            with torch.no_grad():
                output = _repeated(forward(*inputs[0], **inputs[1]), size, batch)
                break
        except (RuntimeError, MemoryError) as error:
            # BatchNorm needs two samples.
            if size <= 2 or not is_out_of_memory(error):
                raise
            size = max(size // 2, 2)
        del inputs
    sources = [each for each in parameters if each.requires_grad]

    def collect(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            sources.append(value)
        return value

    mapped((args, kwargs), collect)
    if not sources:
        return output
    # A loop may register hooks on the output, or compute gradients of it by `torch.autograd.grad`.
    return mapped(
        output,
        lambda tensor: (
            _ZeroGradients.apply(tensor, *sources)
            if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())
            else tensor
        ),
    )


class _ZeroGradients(torch.autograd.Function):
    """Makes a tensor a function of others, of which all derivatives are zero."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, *sources: Tensor) -> Tensor:
        context.sources = [each.new_zeros(()).expand(each.shape) for each in sources]
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *_: Tensor) -> Any:
        return None, *context.sources


def _part_of(value: Any, size: int, batch: int) -> Any:
    """Return the first `size` samples of the tensors in `value` that have `batch` samples."""
    return mapped(value, lambda tensor: tensor[:size] if _samples(tensor) == batch else tensor)


def _repeated(value: Any, size: int, batch: int) -> Any:
    """Return `value` with the tensors that have `size` samples extended to `batch` samples."""
    if size == batch:
        return value
    return mapped(
        value,
        lambda tensor: (
            tensor[torch.arange(batch, device=tensor.device) % size] if _samples(tensor) == size else tensor
        ),
    )


def _samples(value: Any) -> int | None:
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else None


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to what the tuples, lists and dicts in it contain."""
    if isinstance(value, dict):
        # A subclass, such as that of a model's state_dict, keeps its type and its attributes.
        made = copy.copy(value)
        for key, member in value.items():
            made[key] = mapped(member, function)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(member, function) for member in value))
    if type(value) in (tuple, list):
        return type(value)(mapped(member, function) for member in value)
    return function(value)
