"""Lightning's loops and what they count: steps at the initial batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeGuard

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from adascale_frameworks.common import ReplacedLoader, crossed
from adascale_worker.errors import WorkerError

if TYPE_CHECKING:
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop

    from adascale_frameworks.lightning.strategy import ElasticStrategy
else:
    TrainingEpochLoop = EvaluationLoop = object


class Count(int):
    """`global_step` or `batch_idx`, whose remainder follows another count, too. Saved as a plain integer."""

    # `before`: steps before the last one. Lightning and callbacks act when `global_step % interval` is 0, and
    # a step of a larger batch may pass over a multiple. So the remainder is 0 once for each multiple that a
    # step reaches or passes over.
    # `steps`: optimizer steps, in manual optimization. `training_step` decides by a remainder which of the
    # optimizers make a step. So that each nth one does, the remainder is that of optimizer steps.

    _before: int
    _steps: int | None

    def __new__(cls, value: float, before: float = 0.0, *, steps: float | None = None) -> Self:
        """Make the integer, and round the other count down."""
        count = super().__new__(cls, int(value))
        count._before, count._steps = math.floor(before), None if steps is None else math.floor(steps)
        return count

    def __mod__(self, interval: Any) -> int:
        if self._steps is not None:
            return int(self._steps % interval)
        if isinstance(interval, int) and interval >= 1 and int(self) // interval > self._before // interval:
            return 0
        return int(int(self) % interval)

    def __add__(self, number: int) -> int:
        value = int(self) + number
        if type(number) is not int:
            return value
        return type(self)(
            value, self._before + number, steps=None if self._steps is None else self._steps + number
        )

    __radd__ = __add__

    def __sub__(self, number: int) -> int:
        return self + -number if type(number) is int else int(self) - number

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def plain(value: Any) -> Any:
    """Return a tree of dicts and lists with plain integers in place of counts."""
    if isinstance(value, Count):
        return int(value)
    if type(value) is dict:
        return {plain(key): plain(member) for key, member in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


@dataclass
class Counts:
    """The position in training, from which Lightning's counters are set."""

    epoch_length: float  # steps at the initial batch size in an epoch: samples over the batch size
    max_batches: int  # what Lightning takes for the number of batches in an epoch
    epoch: int = 0
    before: float = 0.0  # progress before the last optimizer step
    after: float = 0.0

    @property
    def ends_epoch(self) -> bool:
        """Whether the present epoch has all its steps."""
        return self.after >= (self.epoch + 1) * self.epoch_length

    @property
    def batch_index(self) -> int:
        """The number of the next batch in the epoch, from 0."""
        return Count(self._in_epoch(self.after), self.before - self.epoch * self.epoch_length)

    def batches(self, interval: float, *, is_last: bool) -> int:
        """Return the batches of the epoch that are done; a multiple of `interval` if the step crossed one."""
        if is_last:
            return self.max_batches
        done = self._in_epoch(self.after)
        return _last_crossed(interval, self._in_epoch(self.before), done) or done

    def total_batches(self, interval: float) -> int:
        """Return the batches of all epochs; a multiple of `interval` if the step crossed one."""
        return _last_crossed(interval, int(self.before), int(self.after)) or int(self.after)

    def logged_steps(self, interval: int, after: float | None = None) -> int:
        """Return the number of the step that is logged, from 0: that of a crossed multiple of `interval`.

        `after` is the progress at the end of the step. None if that is the last step, which has ended.
        """
        before, end = (self.before, self.after) if after is None else (self.after, after)
        return (_last_crossed(interval, int(before), int(end)) or int(end)) - 1

    def _in_epoch(self, progress: float) -> int:
        """Return the whole steps of the epoch, less than `max_batches`, which only the last step reaches."""
        return max(0, min(int(progress - self.epoch * self.epoch_length), self.max_batches - 1))


def _last_crossed(interval: float, before: int, after: int) -> int:
    if not 1 <= interval < float("inf") or after <= before:
        return 0
    multiples = crossed(int(interval), before, after)
    return multiples[-1] if multiples else 0


class EvaluationLoader(ReplacedLoader):
    """Delivers the replica's share of the batches of a data set, or all of them."""

    def __init__(
        self, loader: DataLoader[Any], share: Callable[[DataLoader[Any], int], Iterator[Any] | None]
    ) -> None:
        super().__init__(loader)
        self._share = share  # returns None if each replica gets all batches
        self.limit = math.inf  # batches that are evaluated, at most

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # Not before the first batch is requested: Lightning makes iterators that it does not use.
        count = int(min(self.limit, len(self.loader)))
        share = self._share(self.loader, count)
        yield from islice(self.loader, count) if share is None else share


def is_divisible(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether the batches of a loader are those of consecutive samples, which replicas can share."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_size is not None
        and type(loader.sampler) is SequentialSampler
        and not loader.drop_last
    )


class ElasticTrainingLoop(TrainingEpochLoop):
    """The loop over the batches of an epoch. Becomes the class of Lightning's own, by `make_elastic`."""

    _elastic_strategy: ElasticStrategy

    @property
    def global_step(self) -> int:
        """Steps at the initial batch size."""
        return self._elastic_strategy.global_step

    @property
    def done(self) -> bool:
        """Whether the loop ends. If training is to stop early, it goes on until all replicas know of it."""
        if (
            self.trainer.should_stop
            and self.trainer.fit_loop._can_stop_early
            and not self._elastic_strategy.finish_early()
        ):
            return self._is_training_done
        return super().done

    def on_run_start(self, data_fetcher: Any) -> None:
        """Begin without a number of batches, at which the fetcher would end the epoch."""
        super().on_run_start(data_fetcher)
        data_fetcher.length = None
        data_fetcher.done = False

    def run(self, data_fetcher: Any) -> None:
        """Run the epoch, and leave the loop of the elastic trainer."""
        super().run(data_fetcher)
        self._elastic_strategy.leave_epoch()

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the state, after Lightning's counters of optimizer steps were set from progress."""
        steps = int(self.global_step)
        trackers = (
            self.automatic_optimization.optim_progress.optimizer.step,
            self.manual_optimization.optim_step_progress,
        )
        for tracker in trackers:
            tracker.total.ready = tracker.total.completed = steps
        return super().on_save_checkpoint()

    def _num_ready_batches_reached(self) -> bool:
        # Not from the number of batches, which the micro-batches of the last step have too.
        return bool(self.batch_progress.is_last_batch)

    def _should_accumulate(self) -> bool:
        return self._elastic_strategy.awaits_micro_batches

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: the replicas agree in a step on what a signal requests."""

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        strategy, trainer = self._elastic_strategy, self.trainer
        if strategy.awaits_micro_batches:
            return False
        if strategy.elastic_trainer.replicas == 1:
            return super()._should_check_val_fx(data_fetcher)
        # All replicas validate at the same steps, also if training is to stop on some of them only.
        should_stop, trainer.should_stop = trainer.should_stop, False
        try:
            return super()._should_check_val_fx(data_fetcher)
        finally:
            trainer.should_stop = should_stop


class ElasticEvaluationLoop(EvaluationLoop):
    """The loop over the batches for validation. Becomes the class of Lightning's own, by `make_elastic`."""

    _elastic_strategy: ElasticStrategy

    def reset(self) -> None:
        """Begin an evaluation whose number of batches on this replica is not known."""
        super().reset()
        fetcher, loader = self._data_fetcher, self._combined_loader
        assert fetcher is not None
        assert loader is not None
        if self._elastic_strategy.divides_evaluation:
            # Where there is a limit, Lightning does not request what follows the last batch. And its limit is
            # for all replicas together.
            limits = list(loader.limits or [])
            for number, each in enumerate(loader.flattened):
                if isinstance(each, EvaluationLoader):
                    each.limit, limits[number] = limits[number], float("inf")
            loader.limits = limits
            iter(fetcher)
            fetcher.length = None
            fetcher.done = False


def make_elastic(loop: Any, kind: type, strategy: object) -> None:
    """Let a loop of Lightning have the methods of `kind`, each in place of one of its own."""
    if not isinstance(loop, kind):
        missing = [name for name in vars(kind) if not name.startswith("__") and not hasattr(type(loop), name)]
        if missing:
            raise WorkerError(
                f"this version of Lightning has no {type(loop).__name__}.{missing[0]}, in place of which "
                "adascale.lightning has a method: install a version that it was tested with, 2.6"
            )
        loop.__class__ = type(kind.__name__, (kind, type(loop)), {})
    loop._elastic_strategy = strategy


def logged_sums(results: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield what Lightning has added up for the values that were logged: a name, the metric, an attribute."""
    for key, metric in results.items():
        if metric.is_tensor and metric.meta.on_epoch:
            yield f"{key} value", metric, "value"
            if metric.meta.is_mean_reduction:
                yield f"{key} weight", metric, "cumulated_batch_size"
