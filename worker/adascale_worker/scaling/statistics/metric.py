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

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from adascale_worker.scaling.rules import ScalingRule, SecondMoment
from adascale_worker.scaling.statistics.norms import (
    MAX_ELEMENTS_TO_COPY,
    are_read_together,
    batches,
    divided_like,
    flattened,
    is_first_copy,
    local_shard,
    norm,
    norms,
    sqr_norm,
    stacked,
)

FLOOR = 1e-3
"""What is added to each second moment, relative to the mean of the group. A coordinate whose gradient was
almost always zero, such as the embedding of a rare word, would otherwise outweigh all others."""

MIN_EPS = 1e-12

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

    def begin_step(self) -> None:
        """Use the current second moments from now on."""
        self._divisors = None

    def end_step(self) -> None:
        """Use the gradients that the optimizer has used for the next steps."""

    def state_dict(self) -> Any:
        """Return what the metric keeps itself, as tensors and numbers; None for nothing."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned."""

    def defined_groups(self) -> list[int] | None:
        """Return the numbers of the groups that have second moments; None if the metric needs none."""
        return None if self._rule is None else list(self._current_divisors(self._rule))

    def norm(self, group: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the norm of the gradient of one parameter of a group: shape ()."""
        divisor = self._divisor_of(group)
        if divisor is None:
            return norm(gradient)
        sqr_norms = divisor.sqr_norms([parameter], [gradient])
        total = sqr_norms[0] if len(sqr_norms) == 1 else stacked(sqr_norms, gradient.device).sum()
        return total.sqrt()

    def sqr_norm(
        self, group: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor], device: torch.device
    ) -> Tensor:
        """Return the squared norm of the gradients of parameters of a group: shape (), on `device`."""
        divisor = self._divisor_of(group)
        if divisor is None:
            return sqr_norm(gradients, device)
        return stacked(divisor.sqr_norms(parameters, gradients), device).sum()

    def divided(self, group: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return vectors whose Euclidean norms are the norms of the gradients; perhaps these themselves."""
        divisor = self._divisor_of(group)
        return list(gradients) if divisor is None else divisor.divided(parameters, gradients)

    def _divisor_of(self, group: int) -> "_GroupDivisor | None":
        """Return the divisor of a group. With shards, a collective call."""
        return None if self._rule is None else self._current_divisors(self._rule).get(group)

    def _current_divisors(self, rule: ScalingRule) -> dict[int, "_GroupDivisor"]:
        if self._divisors is not None:
            return self._divisors
        self._divisors = {}
        for number, group in enumerate(rule.optimizer.param_groups):
            moments = rule.second_moments(number)
            if moments:
                copies = {id(p) for p in group["params"] if self._add_shards and not is_first_copy(p)}
                eps = max(rule.eps(number), MIN_EPS)
                self._divisors[number] = _GroupDivisor(moments, copies, eps, self._add_shards)
        return self._divisors


class _GroupDivisor:
    """Divides the squares of the gradients of one group by v + c.

    What is on a GPU, and what is small on the CPU, is copied together, which costs less than a call for each.
    Large gradients on the CPU are divided in pieces.
    """

    def __init__(
        self,
        moments: Mapping[int, SecondMoment],  # by the id of the parameter
        copies: set[int],  # the ids of parameters that another process counts in the mean of the group
        eps: float,
        add_shards: Callable[[Tensor], object] | None,
    ) -> None:
        self._blocks: list[_Block] = []
        self._places: dict[int, tuple[int, int]] = {}
        """The block of a parameter, and its place there, by its id."""
        kinds: dict[object, list[int]] = {}
        for number, (value, factor) in moments.items():
            alone = number if _is_large(value) else None
            of_kind = kinds.setdefault((value.dtype, value.device, factor, number in copies, alone), [])
            of_kind.append(number)
        for kind, numbers in kinds.items():
            sizes = [moments[number].value.numel() for number in numbers]
            for batch in batches(sizes, [kind] * len(sizes)):
                self._add_block([numbers[n] for n in batch], [moments[numbers[n]] for n in batch])
        counted = {self._places[number][0] for number in moments if number not in copies}
        device = next(iter(moments.values())).value.device
        total = stacked([self._blocks[n].sum() for n in counted], device).sum()
        count = sum(self._blocks[n].starts[-1] for n in counted)
        both = torch.stack([total, total.new_tensor(float(count))])
        if add_shards is not None:
            add_shards(both)
        self._mean = (both[0] / both[1]).item()
        self._added = self._mean * FLOOR + eps**2
        for block in self._blocks:
            block.add(self._added)

    def sqr_norms(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return numbers that add up to the squared norm of the gradients."""
        found: list[Tensor] = []
        for positions, block, first in self._runs(parameters, gradients):
            whole = flattened([gradients[n] for n in positions])
            size = CHUNK if block.is_large else max(whole.numel(), 1)
            for start in range(0, whole.numel(), size):
                piece = whole[start : start + size]
                squares = piece.square_() if len(positions) > 1 else piece.square()  # Several were copied.
                factors = block.reciprocals(first, len(positions), slice(start, start + size))
                found.append(torch.dot(squares, factors.to(piece.dtype)))
        return found

    def divided(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients, divided."""
        found: dict[int, Tensor] = {}
        for positions, block, first in self._runs(parameters, gradients):
            own = [gradients[n] for n in positions]
            divided = flattened(own) * block.reciprocals(first, len(own)).sqrt()
            if own[0].is_complex():
                divided = torch.view_as_complex(divided.view(-1, 2))
            found.update(zip(positions, divided_like(divided, own), strict=True))
        return [found[n] for n in range(len(gradients))]

    def _runs(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> Iterator[tuple[list[int], "_Block", int]]:
        """Yield the positions of gradients of one type that follow each other in a block, and their place."""
        places = [self._places.get(id(each)) or self._place_without_moment(each) for each in parameters]
        order = sorted(range(len(places)), key=places.__getitem__)
        kinds = [(places[n][0], places[n][1] - rank, gradients[n].dtype) for rank, n in enumerate(order)]
        for _, run in groupby(range(len(order)), key=kinds.__getitem__):
            positions = [order[rank] for rank in run]
            block, first = places[positions[0]]
            yield positions, self._blocks[block], first

    def _place_without_moment(self, parameter: Tensor) -> tuple[int, int]:
        """Let a parameter without a second moment have the mean of the group."""
        value = torch.full_like(_real(local_shard(parameter)), self._mean, dtype=torch.float32)
        self._add_block([id(parameter)], [SecondMoment(value)])
        self._blocks[-1].add(self._added)
        return self._places[id(parameter)]

    def _add_block(self, numbers: Sequence[int], moments: Sequence[SecondMoment]) -> None:
        self._places.update((number, (len(self._blocks), place)) for place, number in enumerate(numbers))
        self._blocks.append(_Block(moments))


class _Block:
    """Second moments of one kind, which are one vector in their order."""

    def __init__(self, moments: Sequence[SecondMoment]) -> None:
        self._values = [_real(moment.value) for moment in moments]
        self._factor = moments[0].factor
        self._added = 0.0
        self.is_large = _is_large(moments[0].value)
        self.starts = list(accumulate((value.numel() for value in self._values), initial=0))
        self._kept: Tensor | None = None
        """The vector, which is read several times, if it is small."""
        if not self.is_large and self.starts[-1] <= MAX_ELEMENTS_TO_KEEP:
            self._kept = flattened(self._values) * self._factor

    def sum(self) -> Tensor:
        """Return the sum of v, before `add`."""
        if self._kept is not None:
            return self._kept.sum()
        # No value is negative, so the sums are L1 norms.
        return stacked(norms(self._values, order=1), self._values[0].device).sum() * self._factor

    def add(self, added: float) -> None:
        """Set c."""
        self._added = added
        if self._kept is not None:
            self._kept.add_(added).reciprocal_()

    def reciprocals(self, first: int, count: int, part: slice = slice(None)) -> Tensor:
        """Return 1 / (v + c) of consecutive parameters, or of a part of their elements."""
        if self._kept is not None:
            return self._kept[self.starts[first] : self.starts[first + count]][part]
        values = flattened(self._values[first : first + count])[part]
        return (values * self._factor).add_(self._added).reciprocal_()


def _is_large(value: Tensor) -> bool:
    """Whether a second moment is read alone, in pieces."""
    return value.numel() > MAX_ELEMENTS_TO_COPY and not are_read_together([value])


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers: Adam has a second moment for each part of a complex number."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
