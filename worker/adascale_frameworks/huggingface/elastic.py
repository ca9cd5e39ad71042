"""`elastic`, which makes a `Trainer` elastic, the subclass that it gets, and what is refused."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin, parse_flag_from_env
from accelerate.utils.other import is_repeated_blocks
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, seed_worker

from adascale_core.names import ENV_AGENT_SOCKET
from adascale_frameworks.common import (
    TrainingLoader,
    evaluate,
    hide_launcher,
    is_divisible,
    refuse,
    take_data_options,
)
from adascale_frameworks.huggingface.run import TrainingRun
from adascale_frameworks.sharding import Sharding, divide_loaded_state, whole
from adascale_worker.errors import DatasetError, WorkerError
from adascale_worker.process import environment
from adascale_worker.program.hyperparameters import Choice
from adascale_worker.trainer import ElasticTrainer

T = TypeVar("T", bound=Trainer)
_Trainer: Any = Any if TYPE_CHECKING else object

_ONE_COPY = "each process has the whole model, or a share of it by FSDP or DeepSpeed: leave it out"
_REFUSED = {
    "deepspeed": "pass the configuration to elastic(trainer, deepspeed=...), with processesPerReplica in the "
    "job file, and leave it out here",
    "parallelism_config": _ONE_COPY,
    "device_map over several devices": _ONE_COPY,
    "auto_find_batch_size": 'pass elastic(trainer, max_batch_size=..., local_bsz_bounds=(4, "auto")), with '
    "which the local batch size is what fits into memory",
    "enable_jit_checkpoint": "a job that is stopped saves a checkpoint by itself: leave it out",
    "save_on_each_node": "one replica writes the files, and which one it is may change: set output_dir to a "
    "folder that the replicas share",
    "lr_scheduler_type": "it follows the losses of one replica: use reduce_lr_on_plateau, which follows the "
    "evaluation, or a schedule in steps",
}
"""What is not supported, by name, and what to do instead."""
_GENERATING = {
    f"{name}Trainer"
    for name in (
        *("A2PO", "AsyncDistillation", "AsyncGRPO", "Distillation", "GKD", "GOLD", "GRPO", "IWOPD"),
        *("NashMD", "OnlineDPO", "PPO", "RLOO", "SDFT", "SDPO", "XPO"),
    )
}
"""Trainers of TRL whose samples depend on the model that is trained."""

_USE_FSDP = "ACCELERATE_USE_FSDP"
"""The variable with which `accelerate launch` requests FSDP, and others say how."""

_RESULT = "adascale_result"
"""The name of the result of a prediction step in a batch for the framework's loop."""

_NOT_REPORTED = re.compile(r"epoch|total_flos|.*(_runtime|_per_second|_model_preparation_time)")
"""Names of the framework's logs that are not sent to the metrics service."""


class ElasticMixin(_Trainer):  # type: ignore[misc]
    """What an elastic `Trainer` does in another way than its own class. The first base of its new class."""

    elastic: ElasticTrainer
    _elastic_run: TrainingRun
    _elastic_data: dict[str, Any]
    _elastic_batch_size: int
    _elastic_sharding: Sharding | None
    _elastic_make: Callable[[], tuple[ElasticTrainer, int]] | None
    optimizer: Any
    preprocess_logits_for_metrics: Any

    # -- training ---------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args_: Any, **kwargs: Any) -> Any:
        """Train, or go on where the other replicas or the job's last checkpoint are, as `Trainer.train`.

        A job without any state begins with that of `resume_from_checkpoint`, a folder of a Trainer. Outside
        of a job it may be called again, for another training with the same model.
        """
        require_supported(self)
        if trial is not None:
            raise WorkerError(
                "elastic() does not support hyperparameter_search: make a Trainer and a job for each trial"
            )
        if self._elastic_run.is_entered:
            begin_again(self)
        args, run, folder = self.args, self._elastic_run, resume_from_checkpoint or None
        if folder is True:
            folder = last_complete_folder(args.output_dir)
        if folder is not None and not Path(folder, TRAINER_STATE_NAME).is_file():
            folder = None  # A job with a state does not need it.
        run.resumes = folder is not None
        run.missing = resume_from_checkpoint if resume_from_checkpoint and folder is None else None
        before = args.gradient_accumulation_steps, args.eval_on_start, args.ignore_data_skip
        # The loop makes a step of each micro-batch, and the elastic trainer knows the place in the data.
        args.gradient_accumulation_steps, args.ignore_data_skip = 1, True
        try:
            output = super().train(folder, None, *args_, **kwargs)
        finally:
            args.gradient_accumulation_steps, args.eval_on_start, args.ignore_data_skip = before
        return output._replace(training_loss=self._elastic_run.losses.mean("total"))

    def get_train_dataloader(self) -> TrainingLoader:
        """Return the training data, which the replicas share out."""
        compile_model(self)  # which `model_init` has made now, and accelerate prepares next
        run, given = self._elastic_run, self._elastic_data
        source: Any = super().get_train_dataloader()
        sampler = getattr(source.batch_sampler, "sampler", None)
        if "order" not in given and isinstance(sampler, LengthGroupedSampler):
            given = {"lengths": sampler.lengths, **given}
        run.data = data = TrainingLoader(
            source,
            "the training data",
            "elastic(trainer, {}=...)",
            run.iterate,
            given=given,
            batch_size=self._elastic_batch_size,
        )
        if getattr(source.worker_init_fn, "func", None) is seed_worker:
            del data.options["worker_init_fn"]  # The trainer seeds the workers, by the position in the data.
        if data.samples is not None and data.samples != len(self.train_dataset):
            raise WorkerError(
                f"the training data has {data.samples} samples, but train_dataset has "
                f"{len(self.train_dataset)}, from which the number of steps follows: pass the data that is "
                "trained as train_dataset"
            )
        return data

    def get_total_train_batch_size(self, *args: Any, **kwargs: Any) -> int:
        """Return the initial batch size, in which steps are counted."""
        del args, kwargs
        return self._elastic_batch_size

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the framework's numbers of epochs and steps, with those of the elastic trainer."""
        values = super().set_initial_training_values(*args, **kwargs)
        data, max_steps = self._elastic_run.data, self.elastic.scale_invariant_steps
        assert data is not None
        assert max_steps is not None
        epochs = sys.maxsize  # as many as there are steps for
        # A folder of a Trainer, which is loaded next, may be later than the state of the job.
        if data.samples is not None and not ("order" in data.options or self._elastic_run.resumes):
            epochs = -int(-max_steps // data.steps_per_epoch)
        return (epochs, *values[1:-1], max_steps)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, of the sharded model if it is sharded."""
        sharding = self._elastic_sharding
        if sharding is not None:
            self.accelerator.native_amp = False  # The precision is that of the shards.
            given = [] if self.optimizer is None else [self.optimizer]
            sharding.apply(self.model, self.elastic, given, methods=["generate"])
        optimizer = super().create_optimizer(*args, **kwargs)
        if sharding is not None:
            divide_loaded_state(optimizer)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the scheduler of the optimizer itself, and not of accelerate's wrapper."""
        wrapped = self.optimizer if optimizer is None else optimizer
        return super().create_scheduler(num_training_steps, getattr(wrapped, "optimizer", wrapped))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Return all micro-batches of the rest of the epoch, each loaded when the loop requests it."""
        del num_batches
        return _MicroBatches(self._elastic_micro_batches(epoch_iterator, device)), None

    def _elastic_micro_batches(self, epoch_iterator: Iterator[Any], device: Any) -> Iterator[Any]:
        while True:
            # Counted on the host, so that nothing waits for the device.
            batches, items = super().get_batch_samples(epoch_iterator, 1, torch.device("cpu"))
            if not batches:
                return
            self._elastic_weight = None if items is None else float(items)
            # A mean over no items has to be finite.
            self._elastic_items = None if items is None else torch.as_tensor(items).clamp(min=1).to(device)
            yield batches[0]

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Make the forward and the backward pass of a micro-batch."""
        del num_items_in_batch
        self._elastic_trains = True
        try:
            loss: Tensor = super().training_step(model, inputs, self._elastic_items, *args, **kwargs)
        finally:
            self._elastic_trains = False
        # A subclass may compute its loss in another way.
        own = loss if self._elastic_loss is None else self._elastic_loss
        self._elastic_loss, weight = None, self._elastic_weight
        if weight is None:
            # All micro-batches of a step have the same size.
            weight = self.elastic.step_weight / (self._elastic_run.processes * self.elastic.accumulation)
        self._elastic_run.losses.add(own, weight)
        self.elastic.log(loss=own)
        return loss

    _elastic_trains = False
    _elastic_loss: Tensor | None = None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss, weighted by its items in training, so that the mean over a step is right."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if not self._elastic_trains:
            return result
        loss, *rest = result if isinstance(result, tuple) else (result,)
        self._elastic_loss = loss.detach()
        if self._elastic_weight is not None:
            loss = self.elastic.weighted(loss, self._elastic_weight)
        return (loss, *rest) if isinstance(result, tuple) else loss

    # -- logs, evaluation and files ---------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save after a complete step, if the callbacks have requested it."""
        run = self._elastic_run
        if run.is_inside_step:
            return
        if self.elastic.finished and not run.has_delivered:
            return  # Training was finished before this process began.
        control = self.control
        if control.should_log or control.should_evaluate or control.should_save:
            run.synchronize()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        run.stop_if_requested(self.control)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log, with the loss of all replicas."""
        run = self._elastic_run
        if run.is_entered:
            if "train_loss" in logs:
                run.synchronize()
                logs["train_loss"] = run.losses.mean("total")
            elif "loss" in logs:
                logs["loss"] = run.losses.mean("interval")
                run.losses.sums["interval"] = {"loss": 0.0, "steps": 0.0}
            run.report({name: value for name, value in logs.items() if not _NOT_REPORTED.fullmatch(name)})
        super().log(logs, *args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate, each batch on one replica, and then run the framework's loop over the results."""
        elastic, more = self.elastic, (prediction_loss_only, ignore_keys, metric_key_prefix)
        if not self._elastic_run.is_entered:
            return super().evaluation_loop(dataloader, description, *more)
        self.model.eval()
        if elastic.replicas == 1 or not is_divisible(dataloader, LengthGroupedSampler):
            output = None
            # An evaluation with one batch for each replica, in which it evaluates, so that its time counts as
            # that of an evaluation.
            for _ in elastic.evaluation(range(elastic.replicas), batch_size=1, model=self.model):
                output = super().evaluation_loop(dataloader, description, *more)
            return output
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        evaluation, preprocess = evaluate(elastic, dataloader, self.model), self.preprocess_logits_for_metrics
        for inputs in evaluation:
            loss, logits, labels = self.prediction_step(
                self.model, inputs, loss_only, ignore_keys=ignore_keys
            )
            if logits is not None and preprocess is not None:
                logits = preprocess(logits, labels)
            evaluation.collect({_RESULT: (loss, logits, labels), **self._elastic_read_inputs(inputs)})
        self.preprocess_logits_for_metrics = None
        try:
            loader = self.accelerator.prepare_data_loader(results_loader(dataloader, evaluation.outputs))
            return super().evaluation_loop(loader, description, *more)
        finally:
            self.preprocess_logits_for_metrics = preprocess

    def _elastic_read_inputs(self, inputs: Any) -> dict[str, Any]:
        """Return the inputs that the loop of the framework reads besides the results."""
        if "inputs" not in self.args.include_for_metrics:
            return {}
        if self.args.batch_eval_metrics:
            return dict(inputs)
        name = getattr(self.model, "main_input_name", "input_ids")
        return {name: inputs[name]}

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the prediction step of a batch, or return its result that a replica has made."""
        if _RESULT in inputs:
            return inputs.pop(_RESULT)
        return super().prediction_step(model, inputs, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save on rank 0, and wait for it on the others."""
        super()._save_checkpoint(*args, **kwargs)
        if not self._elastic_run.is_entered:
            return
        saved = self.elastic.sum_over_replicas(saved=float(self.elastic.is_main))["saved"]
        state = self.state
        if not saved and state.best_global_step == state.global_step:
            # Rank 0 was lost while it has written the best model. The next evaluation finds another one.
            state.best_metric = state.best_global_step = None
        elif state.best_global_step:
            best = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best.is_dir():
                state.best_model_checkpoint = str(best)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model on rank 0, whole also if it is sharded."""
        if self._elastic_run.is_entered and self._elastic_sharding is not None:
            # All processes of the replica take part.
            self._elastic_weights = whole(self.elastic, self.model)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._elastic_weights = None

    _elastic_weights: dict[str, Any] | None = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the files of the model."""
        super()._save(output_dir, self._elastic_weights if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the states of the optimizer and the scheduler on rank 0, in the format of one process."""
        optimizer: Any = self.optimizer
        if self._elastic_sharding is not None:
            state = whole(self.elastic, optimizer)
            saved: Any = SimpleNamespace(state_dict=lambda: state)
            self.optimizer = saved
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer

    def end(self) -> None:
        """Finish the trackers. The process group of the replicas ends with the process."""
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state of rank 0."""
        if self.elastic.is_main:
            super()._save_rng_state(output_dir)

    def _load_best_model(self) -> None:
        """Load the best model, from a folder that all replicas share."""
        folder = self.state.best_model_checkpoint
        if not Path(folder).is_dir():
            raise WorkerError(
                f"load_best_model_at_end: replica {self.elastic.rank} does not find {folder}, which another "
                "replica has written: set output_dir to a folder that all replicas share, or leave out "
                "load_best_model_at_end"
            )
        super()._load_best_model()


def compile_model(trainer: Any) -> None:
    """Compile the model in place as the arguments request, once for all batch sizes."""
    plugin, model, known = trainer.accelerator.state.dynamo_plugin, trainer.model, trainer._elastic_compiled
    if plugin.backend is not DynamoBackend.NO:
        known["options"] = {**plugin.to_kwargs(), "dynamic": True}
        plugin.backend = DynamoBackend.NO  # Else accelerate would wrap the model.
    if "options" not in known or known.get("model") is model:
        return
    known["model"] = model
    lists = filter(is_repeated_blocks, model.modules() if plugin.use_regional_compilation else ())
    for part in [block for blocks in lists for block in blocks] or [model]:
        part.compile(**known["options"])


def results_loader(source: DataLoader[Any], results: list[dict[str, Any]]) -> DataLoader[Any]:
    """Return a loader of the results of a loader's batches, of the sizes of these batches."""
    batches: Any = source.batch_sampler
    size = batches.batch_size
    return DataLoader(
        range(len(source.dataset)),  # type: ignore[arg-type]
        batch_size=size,
        drop_last=batches.drop_last,
        collate_fn=lambda samples: {"sample": torch.tensor(samples), **results[samples[0] // size]},
    )


class _MicroBatches:
    """The micro-batches of an epoch, for a loop that asks for those of a step."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        """The micro-batches over which the framework would average their losses."""
        return 1

    def __iter__(self) -> Iterator[Any]:
        return self._batches


def require_supported(trainer: Any) -> None:
    """Check a trainer and its arguments."""
    for kind in type(trainer).__mro__:
        if kind.__name__ in _GENERATING:
            raise WorkerError(
                f"{kind.__name__} generates its samples with the model that it trains, which elastic() does "
                "not divide among replicas: train it without elastic()"
            )
    args = trainer.args
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    settings = {
        **vars(args),
        "deepspeed": trainer.is_deepspeed_enabled,
        "parallelism_config": trainer.accelerator.parallelism_config,
        "device_map over several devices": trainer.is_model_parallel,
        "lr_scheduler_type": schedule if "greedy" in schedule.lower() else None,
    }
    refuse("in TrainingArguments with elastic()", settings, _REFUSED)


def last_complete_folder(output: str) -> str | None:
    """Return the last folder of a Trainer in its output folder that is complete."""
    found = Path(output).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    steps = {int(path.parent.name.rpartition("-")[2]): str(path.parent) for path in found}
    return steps[max(steps)] if steps else None


def begin_again(trainer: Any) -> None:
    """Let a trainer train once more, with another elastic trainer."""
    make: Callable[[], tuple[ElasticTrainer, int]] | None = trainer._elastic_make
    if make is None or trainer._elastic_sharding is not None:
        raise WorkerError(
            "train() was called again, in a job or with a sharded model, of which a replica that joins could "
            "not know how far it is: use a job for each training, or one train() with all its steps"
        )
    trainer.elastic.close()
    trainer.elastic, trainer._elastic_batch_size = make()
    run = TrainingRun(trainer, trainer.elastic, trainer._elastic_run.hyperparameters, None)
    trainer._elastic_run = trainer.callback_handler = run
    run.follow_rank()


def elastic(
    trainer: T,
    *,
    batch_size: int | None = None,
    hyperparameters: Choice = "checkpoint",
    deepspeed: Mapping[str, Any] | str | Path | None = None,
    **options: Any,
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
        hyperparameters: of `ElasticTrainer.program_reentry`.
        deepspeed: a DeepSpeed configuration, or its file, in place of that of `TrainingArguments`: its model
            is sharded by `fully_shard`.
        options: other arguments of `ElasticTrainer`: `max_batch_size`, `local_bsz_bounds`,
            `efficiency_target`, `checkpoint_dir`, `checkpoint_interval`, `max_nonfinite_steps`,
            `single_replica_gain`, `max_gain`, and `train_samples`, in place of `max_steps` and
            `num_train_epochs`; of `ElasticTrainer.dataloader`: `order`, in place of a sampler of the
            program's own, `lengths`, and for a stream `map`, `shuffle_buffer`, `exactly_once`.

    Returns:
        `trainer` itself.

    Raises:
        WorkerError: `trainer` is no `Trainer`, is elastic already, or has an argument that is not supported.
        DatasetError: its training data is missing.
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
    if trainer.train_dataset is None:
        raise DatasetError(
            "elastic() got a Trainer without train_dataset, from which the number of steps follows: pass "
            "train_dataset to the Trainer"
        )
    data = take_data_options(options)
    sharding = sharding_of(trainer, deepspeed)
    is_job = ENV_AGENT_SOCKET in os.environ or environment.read_job_settings(os.environ).checkpoint_dir
    made, used = _make_elastic_trainer(trainer, batch_size, options)
    launcher = _run_as_one_process(trainer)

    numbers = itertools.count(2)

    def make_again() -> tuple[ElasticTrainer, int]:
        """Make the elastic trainer of the next training."""
        folder = options.get("checkpoint_dir")
        again = {**options, "checkpoint_dir": folder and f"{folder}/training-{next(numbers)}"}
        os.environ.update(launcher)
        try:
            return _make_elastic_trainer(trainer, batch_size, again)
        finally:
            hide_launcher(os.environ)

    run = TrainingRun(trainer, made, hyperparameters, sharding)
    own = type(trainer)
    trainer.__class__ = type(f"Elastic{own.__name__}", (ElasticMixin, own), {"__module__": own.__module__})
    vars(trainer).update(
        elastic=made,
        _elastic_run=run,
        _elastic_data=data,
        _elastic_batch_size=used,
        _elastic_make=None if is_job else make_again,
        _elastic_sharding=sharding,
        _elastic_compiled={},
        callback_handler=run,
    )
    run.follow_rank()
    return trainer


def sharding_of(trainer: Any, deepspeed: Any) -> Sharding | None:
    """Return how the arguments, a configuration of Accelerate, or that of DeepSpeed shard the model."""
    args, precision = trainer.args, trainer.accelerator.mixed_precision
    plugin, arguments = getattr(trainer.accelerator.state, "fsdp_plugin", None), args.fsdp_plugin_args
    uses_fsdp = plugin is not None or arguments is not None or parse_flag_from_env(_USE_FSDP)
    if deepspeed is not None:
        if uses_fsdp:
            raise WorkerError("elastic() got deepspeed=, and the Trainer uses FSDP: leave out one of them")
        given = {"bf16": args.bf16, "fp16": args.fp16, "gradient_clipping": args.max_grad_norm}
        sharding = Sharding.of_deepspeed(deepspeed, trainer.model, **given)
        if sharding.max_norm not in (None, args.max_grad_norm):
            raise WorkerError(
                f"gradient_clipping={sharding.max_norm} in the DeepSpeed configuration, but max_grad_norm="
                f"{args.max_grad_norm} in TrainingArguments: use 'auto' in the configuration"
            )
        return sharding
    if not uses_fsdp:
        return None
    if plugin is None:
        plugin = FullyShardedDataParallelPlugin(**(arguments or {}))
    if getattr(plugin, "cpu_ram_efficient_loading", False) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise WorkerError(
            "cpu_ram_efficient_loading=True loads the weights in one process of a launcher only, and each "
            "replica needs them: set it to False"
        )
    args.fsdp_plugin_args = None  # So that accelerate, which is made again, does not shard the model itself.
    return Sharding.of_plugin(plugin, trainer.model, precision)


def _make_elastic_trainer(
    trainer: Trainer, batch_size: int | None, options: dict[str, Any]
) -> tuple[ElasticTrainer, int]:
    """Return the elastic trainer of a framework's trainer, and the initial batch size."""
    args = trainer.args
    own = args.per_device_train_batch_size * args.gradient_accumulation_steps
    job = environment.read_job_settings(os.environ)
    argument = own if batch_size is None else batch_size
    used = job.batch_size or argument
    steps = args.max_steps
    if steps <= 0:
        # A Trainer without max_steps requires the length.
        steps = max(1, int(args.num_train_epochs * len(trainer.train_dataset) / used))
    if (ENV_AGENT_SOCKET in os.environ or job.processes_per_replica) and torch.distributed.is_initialized():
        # `TrainingArguments` has initialized a group, for a launcher, which is not that of the replicas.
        torch.distributed.destroy_process_group()
    device: torch.device | None = args.device
    if job.processes_per_replica and args.device.type == "cuda":
        device = None  # That of this process in its replica, which a launcher does not know.
    seed = args.seed if args.data_seed is None else args.data_seed
    made = ElasticTrainer(
        argument,
        scale_invariant_steps=steps if options.get("train_samples") is None else None,
        seed=seed,
        device=device,
        **options,
    )
    args.__dict__["_setup_devices"] = made.device
    return made, used


def _run_as_one_process(trainer: Trainer) -> dict[str, str]:
    """Let the framework believe that it runs alone, and return the launcher's variables.

    The elastic trainer knows the other replicas.
    """
    args = trainer.args
    launcher = hide_launcher(os.environ)
    uses_fsdp = os.environ.pop(_USE_FSDP, None)
    # It uses one of the GPUs that this process sees, as for a model on several.
    args._n_gpu = min(1, args.n_gpu)
    if launcher:
        # `TrainingArguments` has looked for other processes, and has found them.
        AcceleratorState._reset_state(reset_partial_state=True)
        args.distributed_state = PartialState(cpu=args.use_cpu)
        args.distributed_state.device = args.device
        trainer.create_accelerator_and_postprocess()
    if uses_fsdp is not None:
        os.environ[_USE_FSDP] = uses_fsdp
    return launcher
