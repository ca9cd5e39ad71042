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

import torch
from torch import Tensor

from adascale_worker.scaling.rules import ScalingRule, SecondMoment
from adascale_worker.scaling.statistics.norms import (
    are_read_together,
    batches,
    divided_like,
    flattened,
    is_first_copy,
    norm,
    norms,
    sqr_norm,
    stacked,
)

FLOOR = 1e-3
"""What is added to each second moment, relative to the mean of the group. A coordinate whose gradient was
almost always zero, such as the embedding of a rare word, would otherwise outweigh all others."""

MIN_EPS = 1e-12

MAX_ELEMENTS_TO_COPY = 1 << 14
"""Gradients on the CPU up to this size are divided together."""

MAX_ELEMENTS_TO_KEEP = 1 << 22
"""What many gradients are divided by is kept for all norms of a step, up to this size."""

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
        first = next(iter(moments.values()))
        self._are_on_gpu = are_read_together([first.value])
        self._kept: dict[tuple[int, ...], Tensor] = {}
        """1 / (v + c) of parameters that are divided together, by their numbers, if they are small."""
        alike = [n for n, each in moments.items() if n in counted and _is_small(each, first.factor)]
        whole = torch.cat([moments[n].value.reshape(-1) for n in alike]) if alike else torch.empty(0)
        whole.mul_(first.factor)
        self._small: dict[int, Tensor] = dict(
            zip(alike, whole.split([moments[n].value.numel() for n in alike]), strict=True)
        )
        """v of what is small on the CPU, later 1 / (v + c), which costs less than a call for each."""
        own = [each for n, each in moments.items() if n in counted and n not in self._small]
        # No value is negative, so the sums are L1 norms.
        sums = stacked(norms([_real(moment.value) for moment in own], order=1), first.value.device)
        count = sum(_real(moment.value).numel() for moment in own) + whole.numel()
        total = (sums * sums.new_tensor([moment.factor for moment in own] or [0.0])).sum()
        total += whole.sum().to(total)
        both = torch.stack([total, total.new_tensor(float(count))])
        if add_shards is not None:
            add_shards(both)
        self._mean = (both[0] / both[1]).item()
        self._added = self._mean * FLOOR + eps**2
        whole.add_(self._added).reciprocal_()
        self._kept[tuple(alike)] = whole

    def sqr_norms(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return numbers that add up to the squared norm of the gradients."""
        found: list[Tensor] = []
        for batch, whole in self._batches(parameters, gradients):
            own = [parameters[n] for n in batch]
            if self._are_on_gpu or whole.numel() <= MAX_ELEMENTS_TO_COPY or len(batch) > 1:
                squares = whole.square_() if len(batch) > 1 else whole.square()  # Several were copied.
                found.append(torch.dot(squares, self._factors(own).to(whole.dtype)))
                continue
            for start in range(0, whole.numel(), CHUNK):
                piece = whole[start : start + CHUNK]
                quotient = piece / self._divisor(own, slice(start, start + CHUNK))
                found.append(torch.dot(quotient.to(piece.dtype), piece))
        return found

    def divided(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients, divided."""
        found: dict[int, Tensor] = {}
        for batch, whole in self._batches(parameters, gradients):
            divided = whole / self._divisor([parameters[n] for n in batch]).sqrt()
            if gradients[batch[0]].is_complex():
                divided = torch.view_as_complex(divided.view(-1, 2))
            found.update(zip(batch, divided_like(divided, [gradients[n] for n in batch]), strict=True))
        return [found[n] for n in range(len(gradients))]

    def _batches(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Return the positions of gradients of one kind, and all their numbers in one dimension."""
        kinds: list[object] = []
        for position, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if id(parameter) in self._small and gradient.dtype is torch.float32:
                kinds.append(None)
                continue
            moment = self._moments.get(id(parameter))
            kind = moment and (moment.value.dtype, moment.value.device, moment.factor)
            is_alone = not self._are_on_gpu and gradient.numel() > MAX_ELEMENTS_TO_COPY
            kinds.append((gradient.dtype, gradient.device, kind, position if is_alone else None))
        for batch in batches([each.numel() for each in gradients], kinds):
            yield batch, flattened([gradients[n] for n in batch])

    def _factors(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return 1 / (v + c) of parameters of one kind, in one dimension."""
        numbers = tuple(map(id, parameters))
        if len(numbers) == 1 and numbers[0] in self._small:
            return self._small[numbers[0]]
        if numbers not in self._kept:
            factors = self._divisor(parameters).reciprocal_()
            if factors.numel() > MAX_ELEMENTS_TO_KEEP:
                return factors
            self._kept[numbers] = factors
        return self._kept[numbers]

    def _divisor(self, parameters: Sequence[Tensor], part: slice = slice(None)) -> Tensor:
        """Return v + c of parameters of one kind, or of a part of them, in one dimension."""
        moments = [self._moments[id(each)] for each in parameters if id(each) in self._moments]
        if not moments:
            size = sum(each.numel() * (1 + each.is_complex()) for each in parameters)
            device = parameters[0].device
            return torch.full((len(range(size)[part]),), self._mean + self._added, device=device)
        values = flattened([moment.value for moment in moments])[part]
        return (values * moments[0].factor).add_(self._added)


def _is_small(moment: SecondMoment, factor: float) -> bool:
    """Whether a second moment is read together with the others of this factor."""
    value = moment.value
    is_alike = value.is_cpu and value.dtype is torch.float32 and moment.factor == factor
    return is_alike and value.numel() <= MAX_ELEMENTS_TO_COPY


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers: Adam has a second moment for each part of a complex number."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
