"""The gradient of the previous step, for the estimate of a single replica without accumulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adascale_worker.scaling.statistics.metric import EuclideanMetric
from adascale_worker.scaling.statistics.norms import inner_products, local_shard

Parameters = Sequence[Sequence[Tensor]]
"""Parameters by parameter group."""


@dataclass(frozen=True, slots=True)
class PreviousStep:
    """The numbers of the step that a previous gradient is from.

    Attributes:
        sqr_norms: of the gradient, per parameter group, in units of the loss scale squared: shape (groups,).
            Not finite if the gradient was not.
        scale: S of the step.
        loss_scale: at the step, shape (); NaN if it could not be determined.
    """

    sqr_norms: Tensor
    scale: float
    loss_scale: Tensor


class PreviousGradient:
    """A copy of the gradients of one step, divided as the metric requires.

    Args:
        metric: of the inner products.

    Attributes:
        step: the numbers of that step; None until they are complete, after its all-reduce.
    """

    def __init__(self, metric: EuclideanMetric) -> None:
        self._metric = metric
        self._gradients: list[list[Tensor | None]] | None = None
        self._free_memory: list[list[Tensor | None]] = []
        self._step_number = -1
        self._defined_groups: list[int] | None = None
        self.step: PreviousStep | None = None

    def preceding(self, step_number: int, parameters: Parameters) -> PreviousStep | None:
        """Return the numbers of the copied step if it is the step before `step_number`, else None.

        Also None if the parameter groups have changed since, or the groups with second moments.
        """
        if (
            self._gradients is None
            or self._step_number != step_number - 1
            or self._defined_groups != self._metric.defined_groups()
            or [len(group) for group in self._gradients] != [len(group) for group in parameters]
        ):
            return None
        return self.step

    def keep_memory(self, parameters: Parameters) -> None:
        """Copy the next gradients into the memory of the present ones, which are not used again.

        To map new memory takes several times as long as to copy into it.
        """
        self._free_memory = [
            [None if parameter.grad is None else local_shard(parameter.grad) for parameter in group]
            for group in parameters
        ]

    def release_memory(self) -> None:
        """Delete what `keep_memory` has kept."""
        self._free_memory = []

    def copy_from(self, parameters: Parameters, *, step_number: int) -> None:
        """Copy the gradients of `parameters`, into the memory of the previous copy where it fits."""
        old = self._gradients or self._free_memory
        gradients: list[list[Tensor | None]] = []
        for number, group in enumerate(parameters):
            copies: list[Tensor | None] = []
            for index, parameter in enumerate(group):
                if parameter.grad is None:
                    copies.append(None)
                    continue
                source = local_shard(parameter.grad)
                gradient = self._metric.divided(parameter, source)
                memory = old[number][index] if number < len(old) and index < len(old[number]) else None
                if memory is None or not _can_hold(memory, gradient, source):
                    memory = torch.empty_like(gradient)
                copies.append(memory.copy_(gradient))
            gradients.append(copies)
        self.release_memory()
        self._gradients, self._step_number, self.step = gradients, step_number, None
        self._defined_groups = self._metric.defined_groups()

    def is_from(self, step_number: int) -> bool:
        """Whether the copy is of the gradients of this step."""
        return self._gradients is not None and self._step_number == step_number

    def invalidate(self) -> None:
        """Do not use the copy again, but keep its memory for the next."""
        self._step_number, self.step = -1, None

    def clear(self) -> None:
        """Delete the copy."""
        self._gradients, self._step_number, self.step = None, -1, None

    def inner_products(self, parameters: Parameters, device: torch.device) -> Tensor:
        """Return the inner product of the copy with the current gradients, per group: shape (groups,).

        A parameter that has a gradient in only one of the two steps adds nothing.
        """
        previous: list[list[Tensor]] = []
        current: list[list[Tensor]] = []
        for copies, group in zip(self._gradients or [], parameters, strict=True):
            pairs = [
                (copied, self._metric.divided(parameter, local_shard(parameter.grad)))
                for copied, parameter in zip(copies, group, strict=True)
                if copied is not None and parameter.grad is not None
            ]
            previous.append([copied for copied, _ in pairs])
            current.append([gradient for _, gradient in pairs])
        return inner_products(previous, current, device)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the copy as numbers and tensors, which the next copy changes; None if it is incomplete."""
        if self._gradients is None or self.step is None:
            return None
        return {
            "gradients": [list(group) for group in self._gradients],
            "step_number": self._step_number,
            "defined_groups": self._defined_groups,
            "step": {
                "sqr_norms": self.step.sqr_norms.tolist(),
                "scale": self.step.scale,
                "loss_scale": self.step.loss_scale.item(),
            },
        }

    def load_state_dict(self, state: dict[str, Any] | None, parameters: Parameters) -> None:
        """Restore what `state_dict` returned, on the devices of `parameters`.

        Nothing is restored if the parameter groups have another number of parameters.
        """
        self.clear()
        if state is None or [len(g) for g in state["gradients"]] != [len(g) for g in parameters]:
            return
        self._gradients = [
            [None if g is None else g.to(p.device, copy=True) for g, p in zip(copies, group, strict=True)]
            for copies, group in zip(state["gradients"], parameters, strict=True)
        ]
        self._step_number = state["step_number"]
        self._defined_groups = state["defined_groups"]
        step = state["step"]
        self.step = PreviousStep(
            torch.tensor(step["sqr_norms"], dtype=torch.float64),
            step["scale"],
            torch.tensor(step["loss_scale"], dtype=torch.float64),
        )


def _can_hold(memory: Tensor, gradient: Tensor, source: Tensor) -> bool:
    """Whether `gradient`, which was made from `source`, can be copied into `memory` without a loss."""
    same_layout = memory.shape == gradient.shape and memory.stride() == gradient.stride()
    return (
        same_layout
        and memory.dtype == gradient.dtype
        and memory.device == gradient.device
        and not memory.is_set_to(source)
    )
