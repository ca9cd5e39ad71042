"""The metric that gradients are measured in.

For SGD it is the Euclidean norm. An optimizer that divides each gradient by sqrt(v) + eps, with v the second
moment of the gradients, steps in another metric: there, |g|^2 is the sum of g^2 / (v + c). In the Euclidean
norm a few coordinates with large gradients would decide the gain, although the optimizer gives all
coordinates steps of about the same size. (AdaptDL measures the gradients of Adam in such a metric too.)

c = eps^2 + FLOOR * (the mean of v in the group). sqrt(v + eps^2) differs from sqrt(v) + eps only where v is
about as small as eps^2, by 41% at most, and needs no root, which would cost as much as all else.

v is from the steps before, so it does not depend on the gradients that are measured, and the estimates stay
unbiased. All norms of a step use the same v.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from adascale_worker.scaling.rules import ScalingRule, SecondMoment
from adascale_worker.scaling.statistics.norms import (
    HALF_PRECISION,
    MAX_ELEMENTS_TOGETHER,
    are_read_together,
    batches,
    divided_like,
    flattened,
    is_first_copy,
    norm,
    sqr_norm,
    stacked,
)

FLOOR = 1e-3
"""What is added to each second moment, relative to the mean of the group. A coordinate whose gradient was
almost always zero, such as the embedding of a rare word, would otherwise outweigh all others."""

MIN_EPS = 1e-12

MAX_ELEMENTS_TO_KEEP = 1 << 14
"""Up to this size, divisors on the CPU are computed together and kept for all norms of a step."""

CHUNK = 1 << 18
"""Elements that are divided at once on the CPU: as many as fit into its cache."""


class Metric:
    """The norm of gradients divided by the root of their second moment, for an optimizer that has those.

    The plain norm for others, and for a group that has no second moments yet.
    """

    def __init__(
        self,
        rule: ScalingRule | None = None,  # None for the plain norm
        add_shards: Callable[[Tensor], object] | None = None,  # a collective call
    ) -> None:
        self._rule = rule if rule is not None and rule.has_second_moments else None
        self._add_shards = add_shards
        self._divisors: dict[int, _GroupDivisor] | None = None
        self._group_of: dict[int, int] = {}

    def begin_step(self) -> None:
        """Use the current second moments from now on."""
        self._divisors = None

    def defined_groups(self) -> list[int] | None:
        """Return the numbers of the groups that have second moments; None if the metric needs none."""
        return None if self._rule is None else list(self._current_divisors(self._rule))

    def norm(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the norm of the gradient of one parameter: shape ()."""
        divisor = self._divisor_of([parameter])
        if divisor is None:
            return norm(gradient)
        sqr_norms = divisor.sqr_norms([parameter], [gradient])
        total = sqr_norms[0] if len(sqr_norms) == 1 else stacked(sqr_norms, gradient.device).sum()
        return total.sqrt()

    def sqr_norm(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], device: torch.device
    ) -> Tensor:
        """Return the squared norm of the gradients of parameters of one group: shape (), on `device`."""
        divisor = self._divisor_of(parameters)
        if divisor is None:
            return sqr_norm(gradients, device)
        return stacked(divisor.sqr_norms(parameters, gradients), device).sum()

    def divided(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return vectors whose Euclidean norms are the norms of the gradients; perhaps these themselves."""
        divisor = self._divisor_of(parameters)
        return list(gradients) if divisor is None else divisor.divided(parameters, gradients)

    def _divisor_of(self, parameters: Sequence[Tensor]) -> "_GroupDivisor | None":
        """Return the divisor of parameters of one group. With shards, a collective call also for none."""
        if self._rule is None:
            return None
        divisors = self._current_divisors(self._rule)
        return divisors.get(self._group_of[id(parameters[0])]) if parameters else None

    def _current_divisors(self, rule: ScalingRule) -> dict[int, "_GroupDivisor"]:
        if self._divisors is not None:
            return self._divisors
        self._divisors, self._group_of = {}, {}
        for number, group in enumerate(rule.optimizer.param_groups):
            self._group_of.update((id(parameter), number) for parameter in group["params"])
            moments = rule.second_moments(number)
            if moments:
                eps = max(rule.eps(number), MIN_EPS)
                counted = [p for p in group["params"] if self._add_shards is None or is_first_copy(p)]
                counted_ids = set(map(id, counted))
                self._divisors[number] = _GroupDivisor(moments, counted_ids, eps, self._add_shards)
        return self._divisors


class _GroupDivisor:
    """Divides the squares of the gradients of one group by v + c.

    What is on a GPU, and what is small on the CPU, is copied together, which costs less than a call for each.
    Large gradients on the CPU are divided in pieces.
    """

    def __init__(
        self,
        moments: dict[int, SecondMoment],
        counted: set[int],  # the ids of the parameters whose mean is that of the group
        eps: float,
        add_shards: Callable[[Tensor], object] | None,
    ) -> None:
        self._moments = moments  # by the id of the parameter; one without it gets the mean of the group
        values = [value for value, *_ in moments.values()]
        self._are_on_gpu = are_read_together(values)
        numbers = [n for n, (value, *_) in moments.items() if self._are_on_gpu or _is_small(value)]
        self._elements = {n: _real(moments[n].value).numel() for n in numbers}
        apart = [each for n, each in moments.items() if n not in self._elements and n in counted]
        sums = [_real(each.value).sum(dtype=_sum_dtype(each.value)) * each.factor for each in apart]
        wholes: list[Tensor] = []
        keeps = sum(self._elements.values()) <= MAX_ELEMENTS_TOGETHER
        together = [moments[n].value for n in numbers]
        kinds = [(_kind(moments[n]), n in counted) for n in numbers]
        for batch in batches([value.numel() for value in together], kinds):
            whole = self._second_moments([numbers[n] for n in batch])
            if numbers[batch[0]] in counted:
                sums.append(whole.sum())
            if keeps:
                wholes.append(whole)
        count = sum(_real(moment.value).numel() for n, moment in moments.items() if n in counted)
        mean = stacked(sums, values[0].device).sum()
        self._mean: float = _mean(mean, count, add_shards).item()
        self._added = self._mean * FLOOR + eps**2
        self._kept: dict[tuple[int, ...], Tensor] = {}
        """1 / (v + c) of parameters that are divided together, by their numbers."""
        if len(wholes) == 1:  # All have the same kind.
            self._kept[tuple(numbers)] = wholes[0].add_(self._added).reciprocal_()

    def sqr_norms(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return numbers that add up to the squared norm of the gradients."""
        together, apart = self._placed(parameters, gradients)
        found: list[Tensor] = []
        for batch, flat, weights in self._batches(parameters, gradients, together):
            # Several gradients were copied.
            found.append(torch.dot(flat.square_() if len(batch) > 1 else flat.square(), weights))
        for n in apart:
            moment, whole = self._moments.get(id(parameters[n])), _real(gradients[n].reshape(-1))
            for start in range(0, whole.numel(), CHUNK):
                piece = _widened(whole[start : start + CHUNK])
                quotient = piece / self._divisor(moment, start, piece.numel())
                found.append(torch.dot(quotient.to(piece.dtype), piece))
        return found

    def divided(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients, divided."""
        together, apart = self._placed(parameters, gradients)
        found = {n: self._divide(parameters[n], gradients[n]) for n in apart}
        for batch, flat, weights in self._batches(parameters, gradients, together):
            whole = flat * weights.sqrt()
            if gradients[batch[0]].is_complex():
                whole = torch.view_as_complex(whole.view(-1, 2))
            found.update(zip(batch, divided_like(whole, [gradients[n] for n in batch]), strict=True))
        return [found[n] for n in range(len(gradients))]

    def _placed(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the positions of the gradients that are divided together, and of the others."""
        if self._are_on_gpu:
            return range(len(gradients)), ()
        together: list[int] = []
        apart: list[int] = []
        for position, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            is_small = gradient.dtype is torch.float32 and id(parameter) in self._elements
            (together if is_small else apart).append(position)
        return together, apart

    # -- together -----------------------------------------------------------------------------------------

    def _batches(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], positions: Sequence[int]
    ) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Return the positions of gradients, all their numbers in one dimension, and 1 / (v + c) of each."""
        moments = [self._moments.get(id(parameters[n])) for n in positions]
        kinds = [
            (gradients[n].dtype, gradients[n].device, moment and _kind(moment))
            for n, moment in zip(positions, moments, strict=True)
        ]
        for batch in batches([gradients[n].numel() for n in positions], kinds):
            own = [positions[place] for place in batch]
            flat = flattened([gradients[n] for n in own])
            if id(parameters[own[0]]) not in self._moments:
                yield own, flat, torch.full_like(flat, 1.0 / (self._mean + self._added))
            else:
                yield own, flat, self._weights(tuple([id(parameters[n]) for n in own])).to(flat.dtype)

    def _weights(self, numbers: tuple[int, ...]) -> Tensor:
        if numbers in self._kept:
            return self._kept[numbers]
        if not self._kept:
            return self._second_moments(numbers).add_(self._added).reciprocal_()
        self._kept[numbers] = torch.cat([self._kept_parts[number] for number in numbers])
        return self._kept[numbers]

    @cached_property
    def _kept_parts(self) -> dict[int, Tensor]:
        """What is kept of each parameter."""
        parts = self._kept[tuple(self._elements)].split(list(self._elements.values()))
        return dict(zip(self._elements, parts, strict=True))

    def _second_moments(self, numbers: Sequence[int]) -> Tensor:
        """Return v of parameters of one kind, in one dimension."""
        moments = [self._moments[number] for number in numbers]
        flat, factor = flattened([moment.value for moment in moments]), moments[0].factor
        return flat.mul_(factor) if len(moments) > 1 else flat * factor  # Several were copied.

    # -- in pieces ----------------------------------------------------------------------------------------

    def _divide(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        flat = _widened(_real(gradient.reshape(-1)))
        divided = flat / self._divisor(self._moments.get(id(parameter)), 0, flat.numel()).sqrt()
        return (torch.view_as_complex(divided.view(-1, 2)) if gradient.is_complex() else divided).view(
            gradient.shape
        )

    def _divisor(self, moment: SecondMoment | None, start: int, size: int) -> Tensor:
        """Return v + c for a part of a parameter, of at least 32 bits."""
        if moment is None:
            return torch.tensor(self._mean + self._added)
        value = _widened(_real(moment.value.reshape(-1))[start : start + size])
        return (value * moment.factor).add_(self._added)


def _kind(moment: SecondMoment) -> object:
    return moment.value.dtype, moment.value.device, moment.factor


def _is_small(value: Tensor) -> bool:
    return value.dtype is torch.float32 and value.is_cpu and value.numel() <= MAX_ELEMENTS_TO_KEEP


def _mean(total: Tensor, count: int, add_shards: Callable[[Tensor], object] | None) -> Tensor:
    """Return the mean of second moments: shape (). A collective call with shards."""
    if add_shards is None:
        return total / count
    both = torch.stack([total, total.new_tensor(float(count))])
    add_shards(both)
    return both[0] / both[1]


def _sum_dtype(value: Tensor) -> torch.dtype | None:
    return torch.float32 if value.dtype in HALF_PRECISION else None


def _widened(tensor: Tensor) -> Tensor:
    """Return a tensor of at least 32 bits."""
    return tensor.float() if tensor.dtype in HALF_PRECISION else tensor


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers: Adam has a second moment for each part of a complex number."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
