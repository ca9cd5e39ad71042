"""Lightning's loops and what they count: steps at the initial batch size."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader

from adascale_frameworks.common import ReplacedLoader, TrainingLoader
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

    epoch_length: float  # steps at the initial batch size in an epoch; infinity for a stream
    max_batches: float  # what Lightning takes for the number of batches in an epoch
    per_step: float = 1.0  # batches of the loader in a step at the initial batch size
    epoch: int = 0
    begin: float = 0.0  # progress at the begin of the epoch
    before: float = 0.0  # progress before the last optimizer step
    after: float = 0.0

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on with it."""
        if epoch != self.epoch:
            self.epoch, self.begin = epoch, self.after
        if not self.is_of_stream:
            self.begin = epoch * self.epoch_length

    @property
    def is_of_stream(self) -> bool:
        """Whether the length of an epoch is unknown."""
        return math.isinf(self.epoch_length)

    @property
    def ends_epoch(self) -> bool:
        """Whether the present epoch has all its steps."""
        return self.after >= (self.epoch + 1) * self.epoch_length

    @property
    def batch_index(self) -> int:
        """The number of the next batch in the epoch, from 0."""
        return Count(self._in_epoch(self.after), (self.before - self.begin) * self.per_step)

    @property
    def batches(self) -> int:
        """The batches of the epoch that are done. Their remainder is 0 if the step has crossed a multiple."""
        done = int(self.max_batches) if self.ends_epoch else self._in_epoch(self.after)
        return Count(done, max(0.0, (self.before - self.begin) * self.per_step))

    def logged_step(self, interval: int, before: float, after: float) -> int:
        """Return the number of the step that is logged, from 0: that of a crossed multiple of `interval`."""
        multiple = int(after) // interval * interval if interval else 0
        return (multiple if multiple > before else int(after)) - 1

    def _in_epoch(self, progress: float) -> int:
        """Return the whole batches of the epoch, less than `max_batches`, which only the last one reaches."""
        return int(max(0.0, min((progress - self.begin) * self.per_step, self.max_batches - 1)))


class TrainingBatches(TrainingLoader):
    """Has a length also for a stream: Lightning would request a batch too early to find its end."""

    def __len__(self) -> int:
        return sys.maxsize if self.samples is None else super().__len__()


class EvaluationLoader(ReplacedLoader):
    """Delivers the replica's share of the batches of a data set, or all of them."""

    def __init__(self, loader: DataLoader[Any], strategy: ElasticStrategy) -> None:
        super().__init__(loader)
        self._strategy = strategy
        self.limit = math.inf  # batches that are evaluated, at most

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # Not before the first batch is requested: Lightning makes iterators that it does not use.
        count = int(min(self.limit, len(self.loader)))
        if self._strategy.divides_evaluation and count >= self._strategy.elastic_trainer.replicas:
            yield from self._strategy.evaluate(self.loader, count)
        else:
            yield from islice(self.loader, count)


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
            and not self._elastic_strategy.request_end()
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
        strategy = self._elastic_strategy
        if strategy.ends_with_data(is_read=data_fetcher.done):
            # Lightning would know of the last batch, because it reads ahead.
            self.batch_progress.is_last_batch = True
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        strategy.leave_epoch()

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

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        strategy, trainer = self._elastic_strategy, self.trainer
        if strategy.awaits_micro_batches:
            return False
        if strategy.processes == 1:
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


LoggedSum = tuple[str, Any, str]  # a name, the metric, and its attribute


def logged_sums(results: Any) -> Iterator[LoggedSum]:
    """Yield what Lightning adds up for the values that were logged."""
    for key, metric in results.items():
        if metric.is_tensor and metric.meta.on_epoch and is_sum(metric.meta):
            yield f"{key} value", metric, "value"
            if metric.meta.is_mean_reduction:
                yield f"{key} weight", metric, "cumulated_batch_size"


def is_sum(meta: Any) -> bool:
    """Whether a logged value is a sum, or a mean, which is a quotient of two."""
    return bool(meta.is_mean_reduction or meta.is_sum_reduction)


def take_sums(logged: Iterable[LoggedSum]) -> dict[str, Any]:
    """Return what Lightning has added up on this replica, and let it begin again."""
    taken = {}
    for name, metric, part in logged:
        taken[name] = getattr(metric, part)
        setattr(metric, part, torch.zeros_like(taken[name]))
    return taken


def put_sums(logged: Iterable[LoggedSum], *sums: Mapping[str, Any]) -> None:
    """Add what was added up on all replicas, and what was taken before."""
    for name, metric, part in logged:
        setattr(metric, part, sum((each.get(name, 0) for each in sums), getattr(metric, part)))
