"""The batches of one rank, for a program with its own trainer: each sample once, at any world size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.feed import CHOSEN_BY_TRAINER, MicroBatches, make_loader
from adascale_worker.batches.order import Lengths, OrderFunction, SampleSequence, order_of
from adascale_worker.batches.stream import Stream, StreamFeed
from adascale_worker.errors import DatasetError

_REFUSED = CHOSEN_BY_TRAINER | {"in_order", "shards", "exactly_once"}
"""Options of DataLoader, and of `ElasticTrainer.dataloader`, that it does not have."""


class ElasticDataLoader:
    """Yields the batches of this rank without end, from a position on.

    A step takes the next `world_size * batch_size` samples of one sequence: pass after pass over the data,
    each sample once per pass. A loader that begins at the same position with another number of ranks goes on
    exactly. Iterating again continues at `position`. Nothing is communicated.

    Args:
        dataset: a data set with a length and items by index, or a stream, which each rank reads as a whole;
            the same on all ranks.
        batch_size: samples of one rank in a step.
        rank, world_size: of this process. Default: those of the process group, else of the environment
            variables RANK and WORLD_SIZE that torchrun sets, else one rank.
        position: samples that all ranks have trained before. For a stream, use `load_state_dict`.
        seed: determines the order; the same on all ranks and in all runs.
        shuffle: whether each pass has another order. A stream has its own.
        order, map, shuffle_buffer: as of `ElasticTrainer.dataloader`.
        lengths: the length of each sample; those of similar length come in groups of `group_size`.
        group_size: as `seed`, the same in all runs.
        **options: options of `torch.utils.data.DataLoader`, such as `num_workers` and `collate_fn`.

    Raises:
        DatasetError: the data cannot be divided exactly, or an option chooses batches.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        position: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        order: OrderFunction | None = None,
        lengths: Lengths | None = None,
        group_size: int = 32,
        map: Callable[[Any], Any] | None = None,  # noqa: A002
        shuffle_buffer: int = 0,
        **options: Any,
    ) -> None:
        self._rank, ranks = _rank_and_size(rank, world_size)
        _require(batch_size, "batch_size", 1, "the samples of one rank in a step")
        _require(position, "position", 0, "the samples that all ranks have trained before")
        _require(group_size, "group_size", 1, "the samples of similar length that come together")
        if refused := _REFUSED.intersection(options):
            raise DatasetError(
                f"ElasticDataLoader got {', '.join(sorted(refused))}, which would change the samples or "
                "their order: leave it out. order= chooses the samples of each pass"
            )
        self._plan = BatchPlan(ranks, batch_size)
        self._dataset, self._options, self._seed, self._position = dataset, options, seed, position
        stream = Stream.of(
            dataset, None, order, lengths, transform=map, shuffle_buffer=shuffle_buffer, seed=seed
        )
        self._samples: SampleSequence | None = None
        if stream is None:
            self._samples = order_of(dataset, shuffle, order, lengths, seed=seed, group=group_size, number=0)
            return
        if position:
            raise DatasetError(
                f"ElasticDataLoader got position={position} and a stream, whose passes have no known length: "
                "save state_dict() of the loader, and load it by load_state_dict()"
            )
        self._stream = StreamFeed(0)
        # Each rank reads the whole, since nothing is communicated.
        self._stream.open(replace(stream, count=0), options)

    @property
    def position(self) -> int:
        """The number of samples of all ranks up to the present batch. Save it when its step is done."""
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and of a stream its place. Call it when the step of a batch is done."""
        if self._samples is not None:
            return {"position": self._position, "samples": self._samples.length}
        return {"position": self._position, "stream": self._stream.place_at(self._position).state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the place of a state, whatever number of ranks has saved it, from the next loop on.

        Raises:
            DatasetError: the state is of other data.
        """
        if self._samples is None and "stream" in state:
            self._stream.restore(state["stream"], state["position"])
        elif self._samples is None or state.get("samples") != self._samples.length:
            now = "a stream" if self._samples is None else f"{self._samples.length} samples in a pass"
            then = f"{state['samples']} samples in a pass" if "samples" in state else "a stream"
            raise DatasetError(
                f"ElasticDataLoader has {now}, but the state is of {then}: use the data from before"
            )
        self._position = state["position"]

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches from `position` on, without end."""
        step = self._plan.global_bsz
        for batch in self._load():
            self._position += step
            yield batch
            if self._samples is None:
                self._stream.finished_step(self._position)

    def _load(self) -> Iterator[Any]:
        if self._samples is None:
            return self._stream.micro_batches(self._position, self._plan, self._rank)
        batches = MicroBatches(self._samples, self._position, self._plan, self._rank)
        return iter(make_loader(self._dataset, batches, self._seed + self._position, self._options))


def _rank_and_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"got rank={rank} and world_size={world_size}: pass both, or neither")
    if rank is None or world_size is None:
        if dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    _require(world_size, "world_size", 1, "the number of ranks")
    if type(rank) is not int or not 0 <= rank < world_size:
        raise ValueError(
            f"got rank={rank!r}: it must be an integer from 0 to {world_size - 1}, world_size - 1"
        )
    return rank, world_size


def _require(value: object, name: str, least: int, meaning: str) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"got {name}={value!r}: it must be an integer of at least {least}, {meaning}")
