"""The gradient of the previous step, for the estimate of a single replica without accumulation."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from adascale_worker.scaling.statistics.metric import Metric
from adascale_worker.scaling.statistics.norms import copied, inner_products, local_shard

Parameters = Sequence[Sequence[Tensor]]
"""Parameters by parameter group."""


@dataclass(frozen=True, slots=True)
class PreviousStep:
    """The numbers of the step that a previous gradient is from."""

    sqr_norms: list[float]  # of the gradient of each group, in units of the loss scale squared
    scale: float
    loss_scale: float  # NaN if it could not be determined


class PreviousGradient:
    """A copy of the gradients of one step, divided as the metric requires."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._gradients: list[list[Tensor | None]] | None = None
        self._step_number = -1
        self._defined_groups: list[int] | None = None
        self.step: PreviousStep | None = None  # None until its all-reduce is complete

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

    def copy_from(self, parameters: Parameters, *, step_number: int) -> None:
        """Copy the gradients of `parameters`, into the memory of the previous copy where it fits."""
        if self._metric.defined_groups() is not None:
            # Divided gradients have memory of their own, before which that of the old copy is free.
            self._gradients = None
        old = self._gradients or []
        gradients: list[list[Tensor | None]] = []
        for number, group in enumerate(parameters):
            shards = {
                index: local_shard(parameter.grad)
                for index, parameter in enumerate(group)
                if parameter.grad is not None
            }
            present, sources = list(shards), list(shards.values())
            divided = self._metric.divided(number, [group[index] for index in present], sources)
            memory = old[number] if number < len(old) else []
            old_copies = [memory[index] if index < len(memory) else None for index in present]
            copies = dict(zip(present, _copies(divided, sources, old_copies), strict=True))
            gradients.append([copies.get(index) for index in range(len(group))])
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
        for number, (copies, group) in enumerate(zip(self._gradients or [], parameters, strict=True)):
            compared = [
                (copied, parameter, local_shard(parameter.grad))
                for copied, parameter in zip(copies, group, strict=True)
                if copied is not None and parameter.grad is not None
            ]
            previous.append([copied for copied, *_ in compared])
            own = [parameter for _, parameter, _ in compared]
            current.append(self._metric.divided(number, own, [gradient for *_, gradient in compared]))
        return inner_products(previous, current, device)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the copy as numbers and tensors, which the next copy changes; None if it is incomplete."""
        if self._gradients is None or self.step is None:
            return None
        return {
            "gradients": [list(group) for group in self._gradients],
            "step_number": self._step_number,
            "defined_groups": self._defined_groups,
            "step": asdict(self.step),
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
        self.step = PreviousStep(**state["step"])


def _copies(
    gradients: Sequence[Tensor], sources: Sequence[Tensor], memory: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return copies of what is in `sources`, in `memory` where they fit, and the other gradients."""
    return [
        gradient
        if gradient is not source
        else copied(gradient, None if held is None or held.is_set_to(source) else held)
        for gradient, source, held in zip(gradients, sources, memory, strict=True)
    ]
