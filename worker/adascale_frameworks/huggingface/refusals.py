"""What an elastic `Trainer` does not support, each with what to do instead."""

from __future__ import annotations

from typing import Any

from adascale_frameworks.huggingface.run import TrainingRun
from adascale_worker.errors import DatasetError, WorkerError

_ONE_COPY = (
    "each replica has the whole model: leave it out; a model that does not fit on one device cannot be "
    "trained by a Trainer elastically yet"
)


def require_supported(trainer: Any) -> None:
    """Check the arguments of a trainer."""
    args = trainer.args
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    refused = {
        "deepspeed": (trainer.is_deepspeed_enabled, _ONE_COPY),
        "fsdp": (trainer.is_fsdp_enabled, _ONE_COPY),
        "parallelism_config": (parallelism is not None, _ONE_COPY),
        "a device_map over several devices": (trainer.is_model_parallel, _ONE_COPY),
        "fp16": (
            args.fp16,
            "the scaler of accelerate is not a part of the state of training: use bf16=True",
        ),
        "torch_compile": (
            args.torch_compile,
            "compile the model before it is passed to the Trainer, model.compile(dynamic=True), which "
            "compiles it once for all batch sizes",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            'pass elastic(trainer, max_batch_size=..., local_bsz_bounds=(4, "auto")), with which the local '
            "batch size is what fits into memory",
        ),
        "enable_jit_checkpoint": (
            getattr(args, "enable_jit_checkpoint", False),
            "a job that is stopped saves a checkpoint by itself: leave it out",
        ),
        "save_on_each_node": (
            args.save_on_each_node,
            "one replica writes the files, and which one it is may change: set output_dir to a folder that "
            "the replicas share",
        ),
        f"lr_scheduler_type={str(args.lr_scheduler_type)!r}": (
            "greedy" in str(args.lr_scheduler_type).lower(),
            "it follows the losses of one replica: use reduce_lr_on_plateau, which follows the evaluation, "
            "or a schedule in steps",
        ),
    }
    for name, (is_used, remedy) in refused.items():
        if is_used:
            raise WorkerError(f"elastic() does not support {name} of TrainingArguments: {remedy}")


def require_train_dataset(trainer: Any) -> int:
    """Return the number of samples of the training data."""
    dataset = trainer.train_dataset
    if dataset is None:
        raise DatasetError(
            "elastic() got a Trainer without train_dataset, from which the number of steps follows: pass "
            "train_dataset to the Trainer"
        )
    try:
        return len(dataset)
    except TypeError:
        raise DatasetError(
            f"the train_dataset (type {type(dataset).__name__}) has no length: an elastic Trainer needs a "
            "data set with __len__ and __getitem__, so that any number of replicas can share it"
        ) from None


def require_trainable(run: TrainingRun, resume_from_checkpoint: Any, trial: Any) -> None:
    """Check the arguments of `train`."""
    if resume_from_checkpoint:
        raise WorkerError(
            f"train() got resume_from_checkpoint={resume_from_checkpoint!r}, but an elastic job continues by "
            "itself from its own checkpoints, which have the state of all replicas: leave it out, and keep "
            "the checkpoint folder of the job (checkpoint_dir=...; adascale run and a cluster set it). To "
            "begin a new training with the weights of a checkpoint of the Trainer, load the model from its "
            "folder with from_pretrained"
        )
    if trial is not None:
        raise WorkerError(
            "elastic() does not support hyperparameter_search: make a Trainer and a job for each trial"
        )
    if run.is_entered:
        raise WorkerError(
            "train() was called before: an elastic Trainer trains once. Make another Trainer and another job "
            "for another training"
        )
