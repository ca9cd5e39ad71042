"""The parts of tensors that the processes of a replica have, if its model is sharded.

A checkpoint of a sharded model has a file for each process, in which `KEY` of the state describes its parts.
So any number of processes can put the tensors together, or divide them among themselves again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from adascale_worker.state.tree import InvalidSpecError, Tree

KEY: Final = "shards"
"""Key of the description in a state."""
_MODEL: Final = ("program", "model")
_OPTIMIZER: Final = ("program", "optimizer", "state")
PREVIOUS_GRADIENT: Final = ("program", "optimizer", "adascale", "statistics", "previous_gradient")
"""Where a state has the shards of the last gradient. It is not kept for another number of processes."""

Extent = tuple[int, int]
"""The first index along a dimension, and the one after the last."""


@dataclass(frozen=True)
class Division:
    """How a tensor is divided: along one dimension, in pieces of equal size; the last may be smaller."""

    dimension: int
    shape: tuple[int, ...]
    copies: int = 1  # of each piece: the first processes have the first copy, and so on

    def to_state(self) -> list[Any]:
        """Return the description, for a state."""
        return [self.dimension, list(self.shape), self.copies]

    @property
    def whole(self) -> Extent:
        """The extent of the whole tensor."""
        return 0, self.shape[self.dimension]

    def is_along(self, other: Division) -> bool:
        """Whether pieces of both are of the same tensor and dimension."""
        return (self.dimension, self.shape) == (other.dimension, other.shape)

    def pieces(self, count: int) -> int:
        """Return the number of pieces that `count` processes have."""
        return max(count // self.copies, 1)

    def extent(self, process: int, count: int) -> Extent:
        """Return which part one of `count` processes has."""
        length, pieces = self.shape[self.dimension], self.pieces(count)
        piece, number = -(-length // pieces), process % pieces
        return min(number * piece, length), min((number + 1) * piece, length)

    def part_shape(self, extent: Extent) -> tuple[int, ...]:
        """Return the shape of a part."""
        start, stop = extent
        return (*self.shape[: self.dimension], stop - start, *self.shape[self.dimension + 1 :])

    def ranges(self, source: Extent, target: Extent, itemsize: int) -> Iterator[tuple[int, int, int]]:
        """Yield the ranges of bytes that two contiguous parts share: position in each, and length."""
        start, stop = max(source[0], target[0]), min(source[1], target[1])
        inner = math.prod(self.shape[self.dimension + 1 :]) * itemsize
        outer = math.prod(self.shape[: self.dimension])
        if start >= stop or not inner * outer:
            return
        if source == target:
            yield 0, 0, outer * (stop - start) * inner
            return
        lengths = source[1] - source[0], target[1] - target[0]
        for index in range(outer):
            yield (
                (index * lengths[0] + start - source[0]) * inner,
                (index * lengths[1] + start - target[0]) * inner,
                (stop - start) * inner,
            )


@dataclass(frozen=True)
class Shards:
    """The parts of the sharded tensors that one process has."""

    process: int  # its index in the replica, from 0
    count: int  # number of processes of the replica
    model: Mapping[str, Division]  # by the name of the tensor
    optimizer: Mapping[int, Division]  # of what it keeps for a parameter, by the parameter's number

    def division_of(self, path: Sequence[str | int]) -> Division | None:
        """Return how the tensor at a place of a state is divided; None if it is not sharded."""
        if len(path) == len(_MODEL) + 1 and tuple(path[:-1]) == _MODEL:
            return self.model.get(str(path[-1]))
        if len(path) == len(_OPTIMIZER) + 2 and tuple(path[:-2]) == _OPTIMIZER:
            number = path[-2]
            return self.optimizer.get(number) if isinstance(number, int) else None
        return None

    def to_state(self) -> dict[str, Any]:
        """Return the description, for a state."""
        return {
            "process": self.process,
            "count": self.count,
            "model": {name: each.to_state() for name, each in self.model.items()},
            "optimizer": {number: each.to_state() for number, each in self.optimizer.items()},
        }

    @classmethod
    def from_state(cls, value: Any) -> Shards:
        """Return the shards that a state describes."""
        try:
            return cls(
                int(value["process"]),
                int(value["count"]),
                {str(name): _division(*each) for name, each in value["model"].items()},
                {int(number): _division(*each) for number, each in value["optimizer"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidSpecError(f"the description of its shards is invalid: {error!r}") from error


def without_previous_gradient(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without the shards of the last gradient."""
    copied = result = dict(state)
    for key in PREVIOUS_GRADIENT[:-1]:
        if not isinstance(copied.get(key), dict):
            return result
        copied[key] = dict(copied[key])
        copied = copied[key]
    copied[PREVIOUS_GRADIENT[-1]] = None
    return result


def _division(dimension: Any, shape: Any, copies: Any = 1) -> Division:
    division = Division(int(dimension), tuple(int(length) for length in shape), int(copies))
    if not 0 <= division.dimension < len(division.shape) or min(*division.shape, division.copies - 1) < 0:
        raise ValueError(f"dimension {dimension} of shape {shape}, copies {copies}")
    return division


def division_of(tensor: Any) -> Division | None:
    """Return how a DTensor is divided; None if a module has gathered it, so that all processes have it."""
    mesh, placement = tensor.device_mesh, tensor.placements[-1]
    if placement.is_replicate():
        return None
    return Division(int(placement.dim), tuple(tensor.shape), mesh.size() // mesh.size(-1))


def with_local(template: Any, local: Tensor) -> Tensor:
    """Return a DTensor like another one, with another tensor on this process, whose memory it uses."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=torch.Size(template.shape),
        stride=template.stride(),
    )


def converted(state: Tree, convert: Callable[[Tensor, object], Tensor]) -> Tree:
    """Return a state in which the tensors of the model and of the optimizer are converted."""
    program = dict(state["program"])
    optimizer = dict(program["optimizer"])
    model = type(program["model"])()
    for name, value in program["model"].items():
        model[name] = convert(value, name) if isinstance(value, Tensor) else value
    vars(model).update(vars(program["model"]) if hasattr(program["model"], "__dict__") else {})
    optimizer["state"] = {
        number: {
            key: convert(value, number) if isinstance(value, Tensor) else value for key, value in kept.items()
        }
        for number, kept in optimizer["state"].items()
    }
    program["model"], program["optimizer"] = model, optimizer
    return {**state, "program": program}


def local_part(tensor: Any) -> Tensor:
    """Return the shard of this process, if a tensor is sharded."""
    local: Tensor = tensor.to_local().contiguous() if hasattr(tensor, "to_local") else tensor
    return local.detach()
