"""The metric of Muon, whose step is the polar factor of its momentum M: (M Mᵀ)^(-1/2) M.

Gradients g of a matrix are measured as Muon uses them, multiplied by the inverse root of a second moment:

    |g|² = tr(gᵀ (C + c)⁻¹ g) = |L⁻¹ g|²,   C = E[g gᵀ],   c = FLOOR * tr(C) / rows,   L Lᵀ = C + c

This is the metric of Adam with matrices in place of numbers. C is the mean over the steps before, so a
gradient is not in its own C, and the estimates stay unbiased. It is kept here, because Muon has none, and on
the smaller side of each matrix.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adascale_worker.scaling.rules import ScalingRule
from adascale_worker.scaling.statistics.metric import FLOOR, MIN_EPS, Metric
from adascale_worker.scaling.statistics.norms import (
    HALF_PRECISION,
    accumulation_dtype,
    norms,
    sum_of_squares,
)

WINDOW = 20
"""The number of steps that C covers: as many as the momentum of Muon covers by default."""

Moment = tuple[Tensor, int]
"""C, and the number of steps in it."""


class MatrixMetric(Metric):
    """The norm of matrices multiplied by L⁻¹. A matrix without a C yet counts as zero."""

    def __init__(self, rule: ScalingRule) -> None:
        super().__init__()
        self._optimizer = rule.optimizer
        self._moments: dict[Tensor, Moment] = {}
        self._roots: dict[Tensor, Tensor] = {}
        """L, where this step has needed it."""

    def begin_step(self) -> None:
        """Use the current second moments from now on."""
        self._roots.clear()

    def defined_groups(self) -> list[int]:
        """Return the numbers of the groups that have second moments."""
        groups = enumerate(self._optimizer.param_groups)
        return [number for number, group in groups if any(p in self._moments for p in group["params"])]

    def norm(self, group: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the norm of the gradient of one parameter of a group: shape ()."""
        return norms(self.divided(group, [parameter], [gradient]))[0]

    def sqr_norm(
        self, group: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor], device: torch.device
    ) -> Tensor:
        """Return the squared norm of the gradients of parameters of a group: shape (), on `device`."""
        return sum_of_squares(norms(self.divided(group, parameters, gradients)), device)

    def divided(
        self,
        group: int,  # noqa: ARG002
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return matrices whose Euclidean norms are the norms of the gradients."""
        return [self._divided(*pair) for pair in zip(parameters, gradients, strict=True)]

    def _divided(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        wide = _wide(gradient)
        if parameter not in self._moments:
            return wide * 0.0  # NaN if it is not finite, which has to be noticed
        if parameter not in self._roots:
            moment = self._moments[parameter][0].clone()
            diagonal = moment.diagonal()
            diagonal += diagonal.mean() * FLOOR + MIN_EPS**2
            exact = moment.to(accumulation_dtype(moment.device))
            self._roots[parameter] = torch.linalg.cholesky_ex(exact).L.to(moment.dtype)
        divided: Tensor = torch.linalg.solve_triangular(self._roots[parameter], wide, upper=False)
        return divided

    def end_step(self) -> None:
        """Add the gradients that the optimizer has used to the second moments."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    wide = _wide(parameter.grad)
                    square = wide @ wide.T
                    moment, steps = self._moments.get(parameter, (square, 0))
                    weight = 1.0 / min(steps + 1, WINDOW)
                    self._moments[parameter] = moment.lerp(square, weight), min(steps + 1, WINDOW)

    def state_dict(self) -> list[list[list[Any]]]:
        """Return the second moments by group and parameter; empty for none."""
        groups = self._optimizer.param_groups
        return [[list(self._moments.get(parameter, ())) for parameter in group["params"]] for group in groups]

    def load_state_dict(self, state: Sequence[Sequence[Any]] | None) -> None:
        """Restore what `state_dict` returned; None for no second moments."""
        groups = self._optimizer.param_groups
        self._moments = {
            parameter: (moment[0].to(parameter.device, copy=True), moment[1])
            for group, moments in zip(groups, state or [], strict=False)
            for parameter, moment in zip(group["params"], moments, strict=False)
            if moment
        }


def _wide(gradient: Tensor) -> Tensor:
    """Return a gradient with its smaller side first, of at least 32 bits."""
    matrix = gradient.detach()
    matrix = matrix.float() if matrix.dtype in HALF_PRECISION else matrix
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
