"""What of Lightning an elastic job does not support, each with what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from adascale_frameworks.common import refuse
from adascale_frameworks.lightning.loops import is_sum
from adascale_worker.errors import WorkerError

_WHERE = "with an ElasticStrategy"
_SUBSET = "pass a part of the data set, torch.utils.data.Subset(dataset, range(n))"
_REFUSED = {
    "devices": "each process has one device, and adascale starts the processes. Leave devices out",
    "num_nodes": "adascale starts the replicas, on one machine or on a cluster. Leave num_nodes out",
    "fast_dev_run": "one step needs no replicas: leave out the strategy, or pass max_steps",
    "overfit_batches": _SUBSET,
    "reload_dataloaders_every_n_epochs": "a job trains on one data set: leave it out",
    "sync_batchnorm": "BatchNorm normalizes by the batch of its replica; convert the module yourself with "
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm, on GPUs",
}
"""Arguments of a Trainer that are not supported, and what to do instead."""
_UNSET = dict.fromkeys(("devices", "num_nodes"), 1)
_REFUSED_CALLBACKS = {
    "GradientAccumulationScheduler": "the trainer accumulates by itself, as max_batch_size allows",
    "LearningRateFinder": "find the learning rate in a program of its own, at the initial batch size",
    "StochasticWeightAveraging": "use the callback WeightAveraging, or average in a program of its own",
}
_SHARDED = f"{_WHERE} that shards the module"
_REFUSED_IF_SHARDED = {
    "WeightAveraging": "average in a program of its own, from the files of ModelCheckpoint"
}


def require_supported(trainer: Any, strategy: Any) -> None:
    """Check the settings of a Trainer, its callbacks and its module before `fit`."""
    settings = {name: getattr(trainer, name, None) for name in _REFUSED}
    settings["devices"] = len(strategy.parallel_devices) if strategy.is_on_cpu else 1
    used: dict[str, Any] = {name: value for name, value in settings.items() if value != _UNSET.get(name)}
    used["sync_batchnorm"] = strategy._layer_sync is not None
    refuse(f"in a Trainer {_WHERE}", used, _REFUSED)
    _refuse_callbacks(trainer, strategy, _WHERE, _REFUSED_CALLBACKS)
    module = trainer.lightning_module
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise WorkerError(
            f"{type(module).__name__}.training_step takes dataloader_iter, by which it would read ahead of "
            "the step: take batch and batch_idx"
        )


def _refuse_callbacks(trainer: Any, strategy: Any, where: str, refused: Mapping[str, str]) -> None:
    """Raise an error for a callback of one of these classes, with the way in which it is done without."""
    callbacks = import_module(f"{strategy.package}.callbacks")
    for name, way in refused.items():
        for callback in trainer.callbacks:
            if isinstance(callback, getattr(callbacks, name)):
                raise WorkerError(f"the callback {type(callback).__name__} is not supported {where}: {way}")


def require_shardable(trainer: Any, strategy: Any) -> None:
    """Check the callbacks and the optimization of a module that is sharded."""
    _refuse_callbacks(trainer, strategy, _SHARDED, _REFUSED_IF_SHARDED)
    if not trainer.lightning_module.automatic_optimization:
        raise WorkerError(f"manual optimization is not supported {_SHARDED}: use the automatic one")


def require_optimizers(optimizers: Sequence[Any], trainer: Any) -> None:
    """Check what `configure_optimizers` has returned."""
    if not optimizers or type(optimizers[0]).__name__ == "_MockOptimizer":
        raise WorkerError(
            "configure_optimizers returned no optimizer, but an elastic job trains with one: return an "
            "optimizer that AdaScale supports, such as torch.optim.SGD or torch.optim.AdamW"
        )
    if len(optimizers) > 1 and trainer.max_steps != -1:
        raise WorkerError(
            f"Trainer(max_steps={trainer.max_steps}) counts the steps of all {len(optimizers)} optimizers in "
            "Lightning, but an elastic job counts the steps for a batch as one: pass max_epochs, or set "
            "scaleInvariantSteps in the job file"
        )


def require_sums(results: Any) -> None:
    """Check what was logged in an evaluation."""
    for metric in results.values():
        if metric.is_tensor and metric.meta.on_epoch and not is_sum(metric.meta):
            raise WorkerError(
                f"self.log({metric.meta.name!r}, reduce_fx={metric.meta.reduce_fx.__name__!r}) was called in "
                "an evaluation, which is divided among the replicas: log a mean or a sum, or the values to a "
                "torchmetrics.Metric"
            )


def require_tensors(results: Any) -> None:
    """Check what was logged with a sharded module: torchmetrics adds up over the processes of a replica."""
    for result in results.values():
        if not result.is_tensor:
            raise WorkerError(
                f"self.log({result.meta.name!r}, ...) got a torchmetrics.Metric, which is not supported "
                f"{_SHARDED}: log a mean or a sum; in training_step with sync_dist=True"
            )


def split_schedulers(configs: Sequence[Any], module: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the schedulers that follow progress, and others, by a name."""
    following: list[Any] = []
    others: dict[str, Any] = {}
    for number, config in enumerate(configs):
        counts_steps = config.interval == "step" or not module.automatic_optimization
        if not counts_steps or (config.reduce_on_plateau and not module.automatic_optimization):
            others[f"scheduler_{number}"] = config.scheduler
            continue
        if config.frequency != 1 or config.reduce_on_plateau:
            what = "a ReduceLROnPlateau" if config.reduce_on_plateau else f"frequency={config.frequency}"
            raise WorkerError(
                f"configure_optimizers returned the scheduler {type(config.scheduler).__name__} with "
                f'interval="step" and {what}, which counts optimizer steps, not steps at the initial batch '
                'size: use frequency=1 with a schedule of that many steps, or interval="epoch"'
            )
        following.append(config.scheduler)
    return following, others
