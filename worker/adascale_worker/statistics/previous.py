"""The gradient of the step before, for the estimate of a single replica without accumulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adascale_worker.statistics.norms import inner_products, local

Parameters = Sequence[Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Label:
    """What is known of a held gradient.

    Attributes:
        sqr: squared norms, per parameter group, in units of the loss scale squared: shape (groups,); not
            finite where the gradients were not.
        scale: of that step.
        loss_scale: in force then, of no dimension; NaN if it could not be told.
    """

    sqr: Tensor
    scale: float
    loss_scale: Tensor


class PreviousGradient:
    """A copy of one step's gradients.

    Attributes:
        label: what is known of it; None until the step that it was made in is over.
    """

    def __init__(self) -> None:
        self._gradients: list[list[Tensor | None]] | None = None
        self._step = -1
        self.label: Label | None = None

    def fits(self, step: int, parameters: Parameters) -> bool:
        """Whether it is of the step before `step`, and of the same parameter groups."""
        return (
            self._gradients is not None
            and self.label is not None
            and self._step == step - 1
            and [len(group) for group in self._gradients] == [len(group) for group in parameters]
        )

    def hold(self, parameters: Parameters, *, step: int) -> None:
        """Copy the gradients of `parameters`, into the old copy where it fits."""
        old = self._gradients or []
        gradients: list[list[Tensor | None]] = []
        for number, group in enumerate(parameters):
            kept: list[Tensor | None] = []
            for index, parameter in enumerate(group):
                if parameter.grad is None:
                    kept.append(None)
                    continue
                gradient = local(parameter.grad)
                space = old[number][index] if number < len(old) and index < len(old[number]) else None
                if space is None or space.shape != gradient.shape or space.stride() != gradient.stride():
                    space = torch.empty_like(gradient)
                kept.append(space.copy_(gradient))
            gradients.append(kept)
        self._gradients, self._step, self.label = gradients, step, None

    def drop(self) -> None:
        """Forget it, and free its memory."""
        self._gradients, self._step, self.label = None, -1, None

    def inner_products(self, parameters: Parameters, device: torch.device) -> Tensor:
        """Return its inner product with the current gradients, per group: shape (groups,).

        A parameter that has a gradient only now, or had one only then, adds nothing.
        """
        before: list[list[Tensor]] = []
        now: list[list[Tensor]] = []
        for kept, group in zip(self._gradients or [], parameters, strict=True):
            pairs = [
                (old, local(parameter.grad))
                for old, parameter in zip(kept, group, strict=True)
                if old is not None and parameter.grad is not None
            ]
            before.append([old for old, _ in pairs])
            now.append([new for _, new in pairs])
        return inner_products(before, now, device)

    def state_dict(self) -> dict[str, Any] | None:
        """Return it as numbers and tensors; None where none is held."""
        if self._gradients is None or self.label is None:
            return None
        return {
            "gradients": [[None if g is None else g.clone() for g in group] for group in self._gradients],
            "step": self._step,
            "label": {
                "sqr": self.label.sqr.tolist(),
                "scale": self.label.scale,
                "loss_scale": self.label.loss_scale.item(),
            },
        }

    def load_state_dict(self, state: dict[str, Any] | None, parameters: Parameters) -> None:
        """Take up what `state_dict` returned, on the devices of `parameters`."""
        self.drop()
        if state is None or [len(g) for g in state["gradients"]] != [len(g) for g in parameters]:
            return
        self._gradients = [
            [None if g is None else g.to(p.device, copy=True) for g, p in zip(group, own, strict=True)]
            for group, own in zip(state["gradients"], parameters, strict=True)
        ]
        label = state["label"]
        self._step = state["step"]
        sqr, loss_scale = (torch.tensor(label[key], dtype=torch.float64) for key in ("sqr", "loss_scale"))
        self.label = Label(sqr, label["scale"], loss_scale)
