"""The local gradients of a step that the caller passes, in place of gradients that hooks read."""

from collections.abc import Mapping

import torch
from torch import Tensor

from adascale_worker.scaling.statistics.metric import EuclideanMetric
from adascale_worker.scaling.statistics.parameters import OptimizerParameters

LocalGradients = Mapping[Tensor, Tensor]
"""The gradient of each parameter that has one."""


class GivenGradients:
    """The squared norms of the micro-gradients of this rank."""

    def __init__(self, parameters: OptimizerParameters, metric: EuclideanMetric) -> None:
        self._parameters = parameters
        self._metric = metric
        self._earlier: Tensor | None = None
        self._last: LocalGradients | None = None
        self._last_weight = 1.0
        self._last_norms: Tensor | None = None
        self.count = 0

    def clear(self) -> None:
        """Discard what was read."""
        self._earlier = self._last = self._last_norms = None
        self.count = 0

    @property
    def has_last(self) -> bool:
        """Whether the micro-gradient that completes the step was given."""
        return self._last is not None

    def add(self, gradients: LocalGradients, weight: float) -> None:
        """Read a micro-gradient that does not complete the step, times its weight."""
        norms = self._sqr_norms(gradients, weight)
        self._earlier = norms if self._earlier is None else self._earlier + norms
        self.count += 1

    def set_last(self, gradients: LocalGradients | None, weight: float = 1.0) -> None:
        """Use the micro-gradient that completes the step, in place of the one before; None deletes it."""
        self._last, self._last_weight, self._last_norms = gradients, weight, None

    def read_last(self, gradients: LocalGradients, weight: float) -> None:
        """Read the micro-gradient that completes the step now, because it is averaged in place next."""
        self.set_last({})
        self._last_norms = self._sqr_norms(gradients, weight)

    def sum_of_sqr_norms(self) -> Tensor:
        """Return the sum of the squared norms, each divided by its weight: shape (groups,)."""
        if self._last is None:
            zeros = torch.zeros(len(self._parameters.groups()), **self._parameters.statistics_options)
            return zeros if self._earlier is None else self._earlier
        last = self._last_norms
        if last is None:
            last = self._sqr_norms(self._last, self._last_weight)
        return last if self._earlier is None else self._earlier + last

    def _sqr_norms(self, gradients: LocalGradients, weight: float) -> Tensor:
        device = self._parameters.device
        present = [[p for p in group if p in gradients] for group in self._parameters.groups()]
        norms = torch.stack(
            [self._metric.sqr_norm(group, [gradients[p] for p in group], device) for group in present]
        )
        if weight == 1.0:
            return norms
        return norms / weight if weight > 0.0 else torch.zeros_like(norms)
