"""What of Lightning an elastic job does not support, each with what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from adascale_worker.errors import DatasetError, WorkerError

_REFUSED_CALLBACKS = {
    "GradientAccumulationScheduler": "the trainer accumulates by itself, as max_batch_size allows",
    "LearningRateFinder": "find the learning rate in a program of its own, at the initial batch size",
    "StochasticWeightAveraging": "use the callback WeightAveraging, or average in a program of its own",
}
_SUBSET = "pass a part of the data set, torch.utils.data.Subset(dataset, range(n))"


def require_supported(trainer: Any, module: Any, layer_sync: object, package: str) -> None:
    """Check the settings of a Trainer before `fit`."""
    settings = [
        (
            trainer.accumulate_grad_batches != 1,
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            "the trainer accumulates gradients by itself: leave it out, and multiply the batch_size of the "
            "train dataloader by it, because that is the batch size the learning rate was tuned for",
        ),
        (
            trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run,
            f"limit_train_batches={trainer.limit_train_batches}",
            f"{_SUBSET}, or max_steps",
        ),
        (trainer.overfit_batches > 0, f"overfit_batches={trainer.overfit_batches}", _SUBSET),
        (
            trainer.reload_dataloaders_every_n_epochs != 0,
            f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}",
            "a job trains on one data set: leave it out",
        ),
        (
            layer_sync is not None,
            "sync_batchnorm=True",
            "BatchNorm normalizes by the batch of its replica; convert the module yourself with "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm, on GPUs",
        ),
    ]
    for is_refused, setting, way in settings:
        if is_refused:
            raise WorkerError(f"Trainer({setting}) is not supported with an ElasticStrategy: {way}")
    callbacks = import_module(f"{package}.callbacks")
    for callback in trainer.callbacks:
        for name, way in _REFUSED_CALLBACKS.items():
            if isinstance(callback, getattr(callbacks, name)):
                raise WorkerError(f"the callback {name} is not supported with an ElasticStrategy: {way}")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise WorkerError(
            f"{type(module).__name__}.training_step takes dataloader_iter, by which it would read ahead of "
            "the step: take batch and batch_idx"
        )


def require_one_loader(number: int) -> None:
    """Check how many train dataloaders there are."""
    if number != 1:
        raise DatasetError(
            f"Trainer.fit got {number} train dataloaders, but an elastic job has one position in its data: "
            "pass one dataloader of a data set that combines them, such as torch.utils.data.StackDataset or "
            "ConcatDataset"
        )


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


def split_schedulers(configs: Sequence[Any], module: Any) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return the schedulers that follow progress, by the id of their optimizers, and others, by a name."""
    following: dict[int, Any] = {}
    others: dict[str, Any] = {}
    for number, config in enumerate(configs):
        kind = type(config.scheduler).__name__
        counts_steps = config.interval == "step" or not module.automatic_optimization
        if not counts_steps or (config.reduce_on_plateau and not module.automatic_optimization):
            others[f"scheduler_{number}"] = config.scheduler
            continue
        if config.frequency != 1 or config.reduce_on_plateau:
            what = "a ReduceLROnPlateau" if config.reduce_on_plateau else f"frequency={config.frequency}"
            raise WorkerError(
                f'configure_optimizers returned the scheduler {kind} with interval="step" and {what}, which '
                "counts optimizer steps, not steps at the initial batch size: use frequency=1 with a "
                'schedule of that many steps, or interval="epoch"'
            )
        optimizer = id(config.scheduler.optimizer)
        if optimizer in following:
            raise WorkerError(
                f'configure_optimizers returned two schedulers of one optimizer with interval="step", '
                f"{type(following[optimizer]).__name__} and {kind}: combine them, in a SequentialLR or a "
                "ChainedScheduler"
            )
        following[optimizer] = config.scheduler
    return following, others
