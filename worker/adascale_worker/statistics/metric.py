"""The metric that gradients are measured in.

For SGD it is the Euclidean norm. An optimizer that divides each gradient by sqrt(v) + eps, with v the second
moment of the gradients, steps in another metric: there, |g|^2 is the sum of (g / (sqrt(v) + eps))^2. In the
Euclidean norm a few coordinates with large gradients would decide the gain, although the optimizer gives all
coordinates steps of about the same size. (AdaptDL measures the gradients of Adam in the same metric.)

v is from the steps before, so it does not depend on the gradients that are measured, and the estimates stay
unbiased. All norms of a step use the same v.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from adascale_worker.scaling_rules import ScalingRule, SecondMoment
from adascale_worker.statistics.norms import (
    HALF_PRECISION,
    accumulation_dtype,
    norm,
    sqr_norm,
    sum_of_squares,
)
from adascale_worker.torch_private import divide_each, flatten_together, l1_norms, l2_norms

FLOOR = 1e-3
"""The lowest second moment that counts, relative to the mean of the group. A coordinate whose gradient was
almost always zero, such as the embedding of a rare word, would otherwise outweigh all others."""

MIN_EPS = 1e-12

MAX_ELEMENTS_TO_KEEP = 1 << 14
"""Up to this size, divisors on the CPU are computed together and kept for all norms of a step."""

CHUNK = {"cpu": 1 << 17}
"""Elements that are divided at once. On the CPU, as many as fit into its cache."""

DEFAULT_CHUNK = 1 << 25


class EuclideanMetric:
    """The plain norm."""

    def begin_step(self) -> None:
        """Use the current second moments from now on."""

    def defined_groups(self) -> list[int] | None:
        """Return the numbers of the groups that have second moments; None if the metric needs none."""
        return None

    def norm(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the norm of the gradient of one parameter: shape ()."""
        del parameter
        return norm(gradient)

    def sqr_norm(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], device: torch.device
    ) -> Tensor:
        """Return the squared norm of the gradients of parameters of one group: shape (), on `device`."""
        del parameters
        return sqr_norm(gradients, device)

    def divided(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the vector whose Euclidean norm is the norm of `gradient`; perhaps `gradient` itself."""
        del parameter
        return gradient


class SecondMomentMetric(EuclideanMetric):
    """The norm of gradients divided by the root of their second moment.

    Before a group has second moments, its norm is the plain norm.

    Args:
        rule: of the optimizer, which has the second moments.
        optimizer: with the groups.
    """

    def __init__(self, rule: ScalingRule, optimizer: torch.optim.Optimizer) -> None:
        self._rule = rule
        self._optimizer = optimizer
        self._divisors: dict[int, _GroupDivisor] | None = None
        self._group_of: dict[int, int] = {}

    def begin_step(self) -> None:
        """Use the current second moments from now on."""
        self._divisors = None

    def defined_groups(self) -> list[int]:
        """Return the numbers of the groups that have second moments."""
        return list(self._current_divisors())

    def norm(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the norm of the gradient of one parameter: shape ()."""
        divisor = self._divisor_of(parameter)
        if divisor is None:
            return norm(gradient)
        if gradient.numel() <= MAX_ELEMENTS_TO_KEEP:
            return norm(divisor.divide(parameter, gradient.reshape(-1)))
        norms = divisor.norms([parameter], [gradient])
        return norms[0] if len(norms) == 1 else sum_of_squares(norms, gradient.device).sqrt()

    def sqr_norm(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], device: torch.device
    ) -> Tensor:
        """Return the squared norm of the gradients of parameters of one group: shape (), on `device`."""
        divisor = self._divisor_of(parameters[0]) if parameters else None
        if divisor is None:
            return sqr_norm(gradients, device)
        return sum_of_squares(divisor.norms(parameters, gradients), device)

    def divided(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient, divided."""
        divisor = self._divisor_of(parameter)
        if divisor is None:
            return gradient
        return divisor.divide(parameter, gradient.reshape(-1)).view(gradient.shape)

    def _divisor_of(self, parameter: Tensor) -> "_GroupDivisor | None":
        divisors = self._current_divisors()
        return divisors.get(self._group_of[id(parameter)])

    def _current_divisors(self) -> dict[int, "_GroupDivisor"]:
        if self._divisors is not None:
            return self._divisors
        self._divisors, self._group_of = {}, {}
        for number, group in enumerate(self._optimizer.param_groups):
            moments = {}
            for parameter in group["params"]:
                self._group_of[id(parameter)] = number
                moment = self._rule.second_moment(number, parameter)
                if moment is not None:
                    moments[id(parameter)] = moment
            if moments:
                self._divisors[number] = _GroupDivisor(moments, max(self._rule.eps(number), MIN_EPS))
        return self._divisors


class _GroupDivisor:
    """Divides the gradients of one group by sqrt(v) + eps, where v is at least a part of its mean.

    Args:
        moments: by the id of the parameter. A parameter without one has the mean of the group.
        eps: positive.
    """

    def __init__(self, moments: dict[int, SecondMoment], eps: float) -> None:
        self._moments = moments
        self._eps = eps
        self._small_parts: dict[tuple[int, ...], Tensor] = {}
        small = {number: moment for number, moment in moments.items() if _is_small(moment.value)}
        factors = {moment.factor for moment in small.values()}
        if len(factors) != 1 or any(isinstance(factor, Tensor) for factor in factors):
            small = {}
        values = [moment for number, moment in moments.items() if number not in small]
        # v is not negative, so its sum is its L1 norm.
        sums = l1_norms([_real(moment.value) for moment in values]) if values else []
        terms = [each * moment.factor for each, moment in zip(sums, values, strict=True)]
        whole = None
        if small:
            whole = flatten_together([moment.value for moment in small.values()]) * factors.pop()
            terms.append(whole.sum())
        device = terms[0].device
        total = torch.stack([term.to(device, accumulation_dtype(device)) for term in terms]).sum()
        mean = total / sum(_real(moment.value).numel() for moment in moments.values())
        # A number on the CPU, because an operation with a number costs less.
        self._mean: float | Tensor = mean.item() if mean.device.type == "cpu" else mean
        # The divisors of small parameters, together and each by itself.
        self._small_divisors: dict[int, Tensor] = {}
        if whole is not None:
            divisors = torch.as_tensor(self._divisor(SecondMoment(whole)))
            parts = divisors.split([moment.value.numel() for moment in small.values()])
            self._small_divisors = dict(zip(small, parts, strict=True))
            self._small_parts[tuple(small)] = divisors

    def norms(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return norms whose squares add up to the squared norm of the gradients."""
        small: list[tuple[Tensor, Tensor]] = []
        large: list[tuple[Tensor, Tensor]] = []
        for pair in zip(parameters, gradients, strict=True):
            is_small = id(pair[0]) in self._small_divisors and pair[1].dtype is torch.float32
            (small if is_small else large).append(pair)
        found: list[Tensor] = []
        if small:
            flat = flatten_together([gradient for _, gradient in small])
            flat = flat.div_(self._small_divisor([parameter for parameter, _ in small]))
            found.append(torch.dot(flat, flat).sqrt())
        for pieces in self._pieces(large):
            found += l2_norms(divide_each([g for g, _ in pieces], [self._divisor(m) for _, m in pieces]))
        return found

    def divide(self, parameter: Tensor, flat: Tensor) -> Tensor:
        """Return a gradient in one dimension, divided."""
        divisor = self._small_divisors.get(id(parameter))
        if divisor is not None and flat.dtype is torch.float32:
            return flat / divisor
        moment = self._moments.get(id(parameter))
        is_complex = flat.is_complex()
        gradient = _real(flat)
        if gradient.dtype in HALF_PRECISION:
            gradient = gradient.float()
        divided = gradient / self._divisor(None if moment is None else _flat(moment))
        return torch.view_as_complex(divided.view(-1, 2)) if is_complex else divided

    def _pieces(
        self, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> Iterator[list[tuple[Tensor, SecondMoment | None]]]:
        """Return gradients and second moments in one dimension, in lists of at most so many elements."""
        pieces: list[tuple[Tensor, SecondMoment | None]] = []
        size = 0
        for parameter, gradient in pairs:
            limit = CHUNK.get(gradient.device.type, DEFAULT_CHUNK)
            moment = self._moments.get(id(parameter))
            gradient = _real(gradient.reshape(-1))
            flat = None if moment is None else _flat(moment)
            for start in range(0, gradient.numel(), limit):
                piece = gradient[start : start + limit]
                if piece.dtype in HALF_PRECISION:
                    piece = piece.float()
                if size + piece.numel() > limit and pieces:
                    yield pieces
                    pieces, size = [], 0
                part = None if flat is None else SecondMoment(flat.value[start : start + limit], flat.factor)
                pieces.append((piece, part))
                size += piece.numel()
        if pieces:
            yield pieces

    def _divisor(self, moment: SecondMoment | None) -> Tensor | float:
        """Return sqrt(v) + eps for second moments of any shape, of at least 32 bits."""
        if moment is None:
            return self._mean**0.5 + self._eps
        value = moment.value.float() if moment.value.dtype in HALF_PRECISION else moment.value
        floor = self._mean * FLOOR
        if isinstance(floor, Tensor):
            floor = floor.to(value.device, value.dtype)
        return (value * moment.factor).clamp_(min=floor).sqrt_().add_(self._eps)

    def _small_divisor(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the divisors of small parameters in one dimension; put together once for each step."""
        key = tuple(map(id, parameters))
        if key not in self._small_parts:
            self._small_parts[key] = torch.cat([self._small_divisors[number] for number in key])
        return self._small_parts[key]


def _is_small(value: Tensor) -> bool:
    return value.is_cpu and value.dtype is torch.float32 and value.numel() <= MAX_ELEMENTS_TO_KEEP


def _flat(moment: SecondMoment) -> SecondMoment:
    """The same with the value in one dimension."""
    return SecondMoment(_real(moment.value.reshape(-1)), moment.factor)


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers: Adam has a second moment for each part of a complex number."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
