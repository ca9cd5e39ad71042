"""The parts of Lightning's loops that count batches and decide when an epoch ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from adascale_frameworks.lightning.loaders import EvaluationLoader

if TYPE_CHECKING:
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop

    from adascale_frameworks.lightning.strategy import ElasticStrategy
else:
    TrainingEpochLoop = EvaluationLoop = object


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
        state: dict[str, Any] = super().on_save_checkpoint()
        return state

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
    """Let a loop of Lightning have the methods of `kind`."""
    if not isinstance(loop, kind):
        loop.__class__ = type(kind.__name__, (kind, type(loop)), {})
    loop._elastic_strategy = strategy


def logged_sums(results: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield what Lightning has added up for the values that were logged: a name, the metric, an attribute."""
    for key, metric in results.items():
        if metric.is_tensor and metric.meta.on_epoch:
            yield f"{key} value", metric, "value"
            if metric.meta.is_mean_reduction:
                yield f"{key} weight", metric, "cumulated_batch_size"
