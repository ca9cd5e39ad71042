"""`elastic`, which makes a `Trainer` of Hugging Face elastic."""

from __future__ import annotations

import os
from typing import Any, TypeVar, Unpack

import torch
from accelerate import PartialState
from transformers import Trainer

from adascale_core.names import ENV_AGENT_SOCKET
from adascale_frameworks.common import TrainerOptions, hide_launcher
from adascale_frameworks.huggingface.data import Order
from adascale_frameworks.huggingface.elastic_trainer import (
    ElasticMixin,
    require_supported,
    require_train_dataset,
)
from adascale_frameworks.huggingface.private import forget_launcher_state, use_one_gpu
from adascale_frameworks.huggingface.run import TrainingRun
from adascale_worker.errors import WorkerError
from adascale_worker.process import environment
from adascale_worker.program.hyperparameters import Choice
from adascale_worker.trainer import ElasticTrainer

T = TypeVar("T", bound=Trainer)


def elastic(
    trainer: T,
    *,
    batch_size: int | None = None,
    order: Order | None = None,
    hyperparameters: Choice = "checkpoint",
    **options: Unpack[TrainerOptions],
) -> T:
    """Make a `Trainer` of Hugging Face elastic, and return it.

        trainer = elastic(Trainer(model, args, ...), max_batch_size=512, local_bsz_bounds=(4, "auto"))
        trainer.train()

    The trainer gets a subclass of its own class, so it may be a `Seq2SeqTrainer` or one of the program's own.
    `trainer.elastic` is its `ElasticTrainer`. The steps of its arguments (`max_steps`, `warmup_steps`,
    `logging_steps`, `eval_steps`, `save_steps`) and those of its schedule are steps at the initial batch
    size. `docs/frameworks.md` has what differs from a plain `Trainer`.

    Args:
        trainer: before its `train` is called.
        batch_size: the initial batch size (B0), in samples. Default: that of a plain `Trainer` on one device,
            `per_device_train_batch_size * gradient_accumulation_steps`.
        order: of `ElasticTrainer.dataloader`, in place of a sampler of the program's own.
        hyperparameters: of `ElasticTrainer.program_reentry`.
        options: other arguments of `ElasticTrainer`: `max_batch_size`, `local_bsz_bounds`,
            `efficiency_target`, `checkpoint_dir`, `checkpoint_interval`, `max_nonfinite_steps`,
            `single_replica_gain`, `max_gain`, and `train_samples`, in place of `max_steps` and
            `num_train_epochs`.

    Returns:
        `trainer` itself.

    Raises:
        WorkerError: `trainer` is no `Trainer`, is elastic already, or has an argument that is not supported.
        DatasetError: its training data is missing, or has no length.
        InvalidJobError: an argument is out of range.
        EnvironmentVariableError: an environment variable has an invalid value.
    """
    if not isinstance(trainer, Trainer):
        raise WorkerError(
            f"elastic() got {type(trainer).__name__}: pass a transformers.Trainer, or an object of a subclass"
        )
    if isinstance(trainer, ElasticMixin):
        raise WorkerError("elastic() got a Trainer that is elastic already: call it once")
    require_supported(trainer)
    samples = require_train_dataset(trainer)
    made, batch_size = _make_elastic_trainer(trainer, samples, batch_size, options)
    _run_as_one_process(trainer)
    run = TrainingRun(trainer, made, hyperparameters)
    own = type(trainer)
    trainer.__class__ = type(f"Elastic{own.__name__}", (ElasticMixin, own), {"__module__": own.__module__})
    values: dict[str, Any] = {
        "elastic": made,
        "_elastic_run": run,
        "_elastic_order": order,
        "_elastic_batch_size": batch_size,
        "callback_handler": run,
    }
    for name, value in values.items():
        setattr(trainer, name, value)
    run.follow_rank()
    return trainer


def _make_elastic_trainer(
    trainer: Trainer, samples: int, batch_size: int | None, options: TrainerOptions
) -> tuple[ElasticTrainer, int]:
    """Return the elastic trainer of a framework's trainer, and the initial batch size."""
    args = trainer.args
    own = args.per_device_train_batch_size * args.gradient_accumulation_steps
    job = environment.read_job_settings(os.environ)
    argument = own if batch_size is None else batch_size
    used = job.batch_size or argument
    steps = args.max_steps if args.max_steps > 0 else max(1, int(args.num_train_epochs * samples / used))
    if ENV_AGENT_SOCKET in os.environ and torch.distributed.is_initialized():
        # `TrainingArguments` has initialized a group of this process alone, for a launcher in between.
        torch.distributed.destroy_process_group()
    seed = args.seed if args.data_seed is None else args.data_seed
    made = ElasticTrainer(
        argument,
        scale_invariant_steps=steps if options.get("train_samples") is None else None,
        seed=seed,
        device=args.device,
        **options,
    )
    return made, used


def _run_as_one_process(trainer: Trainer) -> None:
    """Let the framework believe that it runs alone: the elastic trainer knows the other replicas."""
    args = trainer.args
    launched = bool(hide_launcher(os.environ))
    use_one_gpu(args)
    if launched:
        # `TrainingArguments` has looked for other processes, and has found them.
        forget_launcher_state()
        args.distributed_state = PartialState(cpu=args.use_cpu)
        args.distributed_state.device = args.device
        trainer.create_accelerator_and_postprocess()
