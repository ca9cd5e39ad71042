"""`ElasticAccelerator`: Accelerate's `Accelerator` for an elastic job.

Accelerate reads its rank and the number of processes once, when the process starts. Here they may change
between two steps. So its states begin as those of a process that runs alone, which wraps no model, and get
the present replicas when training has begun: its functions that communicate use torch's default process
group, which is that of the replicas, or with a sharded model that of the processes of one replica. The
prepared objects are those of the program, which no public method adds to the lists from which `Accelerator`
saves, and unscales gradients.
"""

from __future__ import annotations

import inspect
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState, is_initialized
from accelerate.utils import (
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    concatenate,
    parse_flag_from_env,
    recursively_apply,
    send_to_device,
)
from torch.utils.data import RandomSampler, SequentialSampler

from adascale_core.names import ENV_JOB_ID
from adascale_frameworks.common import (
    TrainingLoader,
    by_optimizer,
    evaluate,
    hide_launcher,
    refuse,
    take_data_options,
)
from adascale_frameworks.sharding import Sharding, place_of, whole
from adascale_worker.errors import DatasetError, WorkerError
from adascale_worker.loop.evaluation import Evaluation
from adascale_worker.trainer import ElasticTrainer

T = TypeVar("T")

_EPOCHS = "for epoch in accelerator.epochs(num_epochs)"

_ONE_COPY = "the processes of a replica have the whole model, or share it by FSDP"
_REFUSED = {
    "deepspeed_plugins": "pass one, as deepspeed_plugin=",
    "megatron_lm_plugin": f"{_ONE_COPY}. Leave it out",
    "torch_tp_plugin": f"{_ONE_COPY}. Leave it out",
    "parallelism_config": f"{_ONE_COPY}. Leave it out",
    "mixed_precision": "use 'bf16' or 'fp16'",
    "rng_types": "the trainer seeds each step itself, from seed=. Leave it out",
    "comm_hook": "the trainer exchanges the gradients. Leave it out of DistributedDataParallelKwargs",
}
"""Arguments of `Accelerator` that are not supported, and what to do instead."""
_REFUSED_VARIABLES = dict.fromkeys(
    ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    f"{_ONE_COPY}. Start the program without a configuration of `accelerate config` that uses it",
)


def refuse_unsupported(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Check the arguments of `Accelerator`, and what `accelerate config` sets in the environment."""
    precision = arguments.get("mixed_precision") or environ.get("ACCELERATE_MIXED_PRECISION")
    settings = {**arguments, "mixed_precision": "fp8" if str(precision) == "fp8" else None}
    for handler in arguments.get("kwargs_handlers") or ():
        hook = DDPCommunicationHookType(getattr(handler, "comm_hook", "no"))
        if hook is not DDPCommunicationHookType.NO:
            settings["comm_hook"] = hook.value
    variables = {name: value for name, value in environ.items() if value.lower() in ("true", "1")}
    refuse("by ElasticAccelerator", settings, _REFUSED)
    refuse("by ElasticAccelerator", variables, _REFUSED_VARIABLES)


_SHARDING = {
    "fsdp_plugin": ("ACCELERATE_USE_FSDP", FullyShardedDataParallelPlugin),
    "deepspeed_plugin": ("ACCELERATE_USE_DEEPSPEED", DeepSpeedPlugin),
}
"""The arguments that shard a model, each with its variable in the environment."""


def take_sharding(options: dict[str, Any]) -> Any:
    """Remove, and return, the plugin of FSDP or DeepSpeed that the program or `accelerate config` uses."""
    found = []
    for name, (variable, kind) in _SHARDING.items():
        plugin = options.pop(name, None)
        if plugin is not None or parse_flag_from_env(variable):
            found.append(plugin or kind())
    if len(found) > 1:
        raise WorkerError("ElasticAccelerator got FSDP and DeepSpeed: use one of them")
    return found[0] if found else None


class ElasticDataLoader(TrainingLoader):
    """Iterates over the batches that the trainer delivers to this replica.

    With the model in training mode, these are the rest of the present epoch of `accelerator.epochs(n)`. In
    evaluation mode, they are this replica's share of the data set. The next batch is requested when the
    program requests it: Accelerate's own loader reads ahead, and would begin the next step too early.
    """

    device: torch.device | None  # of the batches. None if they stay where the loader makes them

    @property
    def total_batch_size(self) -> int:
        """The batch size: Accelerate's loaders have it on one process."""
        return self.batch_size

    def __len__(self) -> int:
        """Return the number of batches of `batch_size` in the data set, at any number of replicas."""
        return len(self.loader)


class ElasticAccelerator(Accelerator):  # type: ignore[misc]
    """Trains elastically, in place of Accelerate's `Accelerator`.

        accelerator = ElasticAccelerator()
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(...)
        for epoch in accelerator.epochs(num_epochs):
            model.train()
            for batch in train_loader:
                ...  # backward, optimizer.step(), scheduler.step(), optimizer.zero_grad()
            model.eval()
            for batch in eval_loader:
                ...  # accelerator.gather_for_metrics(...)

    `prepare` returns the program's own objects, which `epochs` makes elastic; data loaders become those of
    the trainer. Before `epochs`, `num_processes` is 1, because the schedule and the learning rate are those
    of `batch_size` at any number of replicas. The batch size of the training loader, times
    `gradient_accumulation_steps`, has to be `batch_size`.

    Args:
        args: of `Accelerator`.
        batch_size, scale_invariant_steps, seed: of `ElasticTrainer`. A job file overrides them.
        options: of `Accelerator`, and of `ElasticTrainer`: `max_batch_size`, `local_bsz_bounds`,
            `train_samples`, `efficiency_target`, `checkpoint_dir`, `checkpoint_interval`,
            `max_nonfinite_steps`, `single_replica_gain`, `max_gain`; and of `ElasticTrainer.dataloader`, for
            the training loaders: `order`, `lengths`, and for a stream `map`, `shuffle_buffer` and
            `exactly_once`.

    Attributes:
        trainer: the `ElasticTrainer`, for what Accelerate has no name for, such as `trainer.weighted` and
            `trainer.log`.

    Raises:
        InvalidJobError, EnvironmentVariableError: see `ElasticTrainer`.
        WorkerError: an option of Accelerate is not supported, or an Accelerator was made before.
    """

    def __init__(
        self,
        *args: Any,
        batch_size: int | None = None,
        scale_invariant_steps: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        of_trainer = inspect.signature(ElasticTrainer).parameters
        arguments = {name: options.pop(name) for name in [*options] if name in of_trainer}
        self._data_options = take_data_options(options)
        options = dict(inspect.signature(Accelerator).bind(*args, **options).arguments)
        refuse_unsupported(options, os.environ)
        if is_initialized():
            raise WorkerError(
                "an Accelerator was made before ElasticAccelerator in this process, and all of them share "
                "their state: make one ElasticAccelerator, in place of the first Accelerator"
            )
        self._plugin = take_sharding(options)
        """How the model is sharded; None for a whole model."""
        self._sharding: Sharding | None = None  # before the model is prepared
        self.trainer = ElasticTrainer(
            batch_size,
            scale_invariant_steps=scale_invariant_steps,
            seed=seed,
            device="cpu" if options.get("cpu") else None,
            **arguments,
        )
        used = [variable for variable, _ in _SHARDING.values() if variable in os.environ]
        hidden = hide_launcher(os.environ) | {name: os.environ.pop(name) for name in used}
        try:
            super().__init__(**{**options, "cpu": self.trainer.device.type == "cpu"})
        finally:
            os.environ.update(hidden)
        for state in _states():
            state.device = self.trainer.device
        self._known_processes: tuple[int, int] | None = None
        """The index and the number of processes that Accelerate knows."""
        self._trained_models: list[torch.nn.Module] = []
        self._whole: dict[int, Any] = {}
        """The states of sharded objects that are saved, by id."""
        self._preparing: list[torch.optim.Optimizer] = []
        """The optimizers among the arguments of the present call of `prepare`."""
        self._has_entered = False
        self._is_in_epochs = False
        self._trains = False
        """Whether the program works on a batch of a training loader."""
        self._has_stepped = False
        """Whether `optimizer.step()` was called for that batch."""
        self._passes, self._left_out = 1, 0
        """Calls of `backward` for the present batch, and batches without one before it."""
        self._has_several_passes = False
        """Whether a batch, without others before it that were left out, has had several of them."""
        self._evaluation: Evaluation | None = None
        self._tracker_arguments: tuple[Any, ...] | None = None
        self._is_alone = False
        self._follow_replicas()

    _optimizers: list[Any]
    native_amp: bool
    _is_alone = True
    """Whether Accelerate runs as if alone, as until it is made."""

    # -- the replicas -----------------------------------------------------------------------------------

    def _follow_replicas(self) -> None:
        """Let Accelerate know the index and number of processes, which may change between two batches."""
        if not self._is_alone:
            index, processes = self._place
            self._set_processes(index, processes if self._has_entered else 1)

    @property
    def _place(self) -> tuple[int, int]:
        """The index of this process, and the number of processes of all replicas."""
        return place_of(self.trainer, is_sharded=self._plugin is not None)

    def _set_processes(self, index: int, processes: int) -> None:
        if self._known_processes == (index, processes):
            return
        self._known_processes = index, processes
        is_on_gpu = self.trainer.device.type == "cuda"
        together = DistributedType.MULTI_GPU if is_on_gpu else DistributedType.MULTI_CPU
        for state in _states():
            state.num_processes, state.process_index, state.local_process_index = processes, index, index
            state.distributed_type = together if processes > 1 else DistributedType.NO
            state.backend = torch.distributed.get_backend() if processes > 1 else None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let Accelerate run as if alone, to write files on this replica without the others."""
        self._set_processes(0, 1)
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False
            self._follow_replicas()

    @property
    def state(self) -> Any:
        """Accelerate's state, with the present rank and number of replicas; 1 before `epochs`."""
        self._follow_replicas()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    def wait_for_everyone(self) -> None:
        """Wait for the other replicas, once training has begun. Before, the others may train already."""
        self._follow_replicas()
        if self._evaluation is None:
            if self._sharding is None:
                super().wait_for_everyone()
            else:
                self._of_all(torch.zeros(1))

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let one replica of this machine at a time enter, so that the others find what it has downloaded."""
        job = os.environ.get(ENV_JOB_ID, str(os.getppid()))
        name = f"adascale-first-{os.getuid()}-{job.replace('/', '-')}"
        with self.trainer.download_lock(Path(tempfile.gettempdir()) / name):
            yield

    local_main_process_first = main_process_first

    # -- preparation ------------------------------------------------------------------------------------

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader of the trainer's batches, see `ElasticDataLoader`."""
        del slice_fn_for_dispatch
        if isinstance(data_loader, ElasticDataLoader):
            return data_loader
        loader = ElasticDataLoader(
            data_loader,
            "the DataLoader that accelerator.prepare() got",
            "ElasticAccelerator({}=...)",
            self._begin_loop,
            given=self._data_options,
        )
        place = self.device_placement if device_placement is None else device_placement
        loader.device = self.device if place else None
        return loader

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Place a model on the device, with mixed precision. `epochs` makes it data-parallel in place."""
        if self._plugin is not None and not evaluation_mode:
            self._shard(model)
            device_placement = False
        uses_autocast = self.native_amp
        # The precision of a sharded model is that of its shards.
        self.native_amp = uses_autocast and (self._plugin is None or evaluation_mode)
        try:
            with self._alone():
                model = super().prepare_model(model, device_placement, evaluation_mode=True)
        finally:
            self.native_amp = uses_autocast
        return model if evaluation_mode else self._add(self._trained_models, model, "a model")

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare the objects of the program, see `Accelerator`. A model may be sharded in place."""
        self._preparing = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        try:
            return super().prepare(*args, device_placement=device_placement)
        finally:
            self._preparing = []

    def _shard(self, model: torch.nn.Module) -> None:
        plugin = self._plugin
        if isinstance(plugin, DeepSpeedPlugin):
            # What Accelerate fills in.
            auto = {name: self.mixed_precision == name for name in ("bf16", "fp16")} | {
                "gradient_clipping": 1.0
            }
            config = {"gradient_clipping": plugin.gradient_clipping, **plugin.deepspeed_config}
            if config.get("gradient_accumulation_steps") in (1, self.gradient_accumulation_steps):
                del config["gradient_accumulation_steps"]
            self._sharding = Sharding.of_deepspeed(config, model, **auto)
        else:
            self._sharding = Sharding.of_plugin(plugin, model, self.mixed_precision)
        self._sharding.apply(model, self.trainer, [*self._optimizers, *self._preparing], methods=["generate"])

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Return the program's own optimizer, which `epochs` makes elastic in place."""
        del device_placement
        return self._add(self._optimizers, optimizer, "an optimizer")

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the program's own scheduler, which follows progress in steps at `batch_size`."""
        return self._add(self._schedulers, scheduler, "a scheduler")

    def _add(self, prepared: list[Any], item: T, what: str) -> T:
        self._require_before_epochs(f"prepare() got {what}")
        if not any(item is known for known in prepared):
            prepared.append(item)
        return item

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore the state of more objects, with that of the job."""
        self._require_before_epochs("register_for_checkpointing() was called")
        super().register_for_checkpointing(*objects)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Refuse, before the end of training: a job loads no folder of `save_state`."""
        if not self.trainer.finished:
            raise WorkerError(
                "accelerator.register_load_state_pre_hook() was called, but a job resumes from its own "
                "checkpoints, without the folders that hooks write and read. Leave the hook out, and pass "
                "what it restores besides prepared objects, such as an average of the weights, to "
                "accelerator.register_for_checkpointing(): an object with state_dict and load_state_dict. A "
                "hook for accelerator.load_state() after training may be registered then"
            )
        return super().register_load_state_pre_hook(hook)

    def _require_before_epochs(self, what: str) -> None:
        if self._has_entered:
            raise WorkerError(
                f"accelerator.{what} after training has begun, with accelerator.epochs() or the first "
                "evaluation: the state of a job has the same parts from its beginning. Do it before, and in "
                "place of find_executable_batch_size pass local_bsz_bounds=(1, 'auto')"
            )

    def _enter(self) -> None:
        """Make the prepared objects elastic, and restore the state of training, once."""
        if self._has_entered:
            return
        optimizers = self._optimizers
        trained = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        models = [
            model for model in self._trained_models if any(id(p) in trained for p in model.parameters())
        ]
        if not optimizers or not models:
            missing = "no optimizer" if not optimizers else "no model with parameters of the optimizer"
            raise WorkerError(
                f"accelerator.prepare() got {missing}: pass the model and its optimizer to it before the "
                "loop over accelerator.epochs(), also to evaluate"
            )
        prepared = [*self._trained_models, *optimizers, *self._schedulers]
        registered: dict[str, Any] = {"accelerator": _SaveIteration(self)}
        if self.scaler is not None:
            registered["scaler"] = self.scaler
        for number, custom in enumerate(self._custom_objects):
            if not any(custom is each for each in prepared):
                registered[f"registered_{number}"] = custom
        self.trainer.program_reentry(*self._parts(models), register=registered)
        for optimizer in optimizers:
            self._observe_step(optimizer)
        self._has_entered = True
        self._follow_replicas()

    def _parts(self, models: list[torch.nn.Module]) -> tuple[Any, ...]:
        """Return models, optimizers and schedulers: each alone, or by name if there are several."""
        what = "accelerator.prepare() got"
        optimizers, schedulers = by_optimizer(self._optimizers, self._schedulers, what)
        if len(models) == len(optimizers) == 1:
            return models[0], *optimizers.values(), next(iter(schedulers.values()), None)
        return (
            {f"model_{number}": model for number, model in enumerate(models)},
            optimizers,
            schedulers or None,
        )

    def _observe_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record calls of `optimizer.step()`, and let them go through the GradScaler if there is one."""
        scaler, step = self.scaler, optimizer.step
        max_norm = None if self._sharding is None else self._sharding.max_norm
        is_in_scaler = False

        @wraps(getattr(step, "__func__", step))
        def observed(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_in_scaler
            self._has_stepped = True
            if self._left_out and self._passes == self._left_out + 1 and not self._has_several_passes:
                raise WorkerError(
                    f"accelerator.backward() was called {self._passes} times for a batch, after "
                    f"{self._left_out} batches for which it was not called: each batch is a part of a step, "
                    "whose gradients the trainer adds up. Call it once for each batch, after which the loop "
                    "requests the next one, and use accelerator.trainer.weighted for a mean over valid tokens"
                )
            if max_norm is not None and self.trainer.completes_step:
                groups = optimizer.param_groups
                torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], max_norm)
            if scaler is None or is_in_scaler:
                return step(*args, **kwargs)
            is_in_scaler = True
            try:
                result = scaler.step(optimizer, *args, **kwargs)
            finally:
                is_in_scaler = False
            scaler.update()
            return result

        optimizer.step = MethodType(observed, optimizer)  # type: ignore[method-assign]

    # -- loops ------------------------------------------------------------------------------------------

    def epochs(self, epochs: int | None = None) -> Iterator[int]:
        """Return an iterator over the epochs that are left, in place of `range(num_epochs)`.

        Begins with the present epoch: a replica that joins, or a program that resumes, gets the state of
        training here. Ends after `epochs` epochs, or at the `scale_invariant_steps` or `train_samples` of the
        job.
        """
        self._enter()
        return self._each_epoch(self.trainer.epochs(epochs))

    def _each_epoch(self, epochs: Iterator[int]) -> Iterator[int]:
        try:
            for epoch in epochs:
                self._is_in_epochs = True
                self._follow_replicas()
                yield epoch
        finally:
            self._is_in_epochs = False
            self._follow_replicas()

    def _begin_loop(self, loader: ElasticDataLoader) -> Iterator[Any]:
        if not self._trained_models:
            raise WorkerError(
                "a loop over a prepared data loader began before accelerator.prepare() got the model: "
                "prepare the model and its optimizer before the loop"
            )
        if any(model.training for model in self._trained_models):
            return self._training_batches(loader)
        return self._evaluation_batches(loader)

    def _training_batches(self, loader: ElasticDataLoader) -> Iterator[Any]:
        if not self._is_in_epochs:
            raise WorkerError(
                "a loop over a prepared data loader began outside of accelerator.epochs(), with a model in "
                f"training mode. To train, write `{_EPOCHS}:` in place of `for epoch in range(num_epochs):`, "
                "so that a replica that joins, and a program that resumes, begin with the present epoch. To "
                "evaluate, call model.eval() before"
            )
        size, accumulation = loader.batch_size, self.gradient_accumulation_steps
        if size * accumulation != self.trainer.batch_size:
            steps = f" and gradient_accumulation_steps={accumulation}" if accumulation > 1 else ""
            raise WorkerError(
                f"the training data loader has batch_size={size}{steps}, but the batch size of the job is "
                f"{self.trainer.batch_size}: the schedule and the learning rate have to be for the same "
                "batch size. Change the loader, or batchSize of the job file "
                "(ElasticAccelerator(batch_size=...) without one)"
            )
        try:
            for batch in self.trainer.dataloader(loader.dataset, **loader.options):
                self._follow_replicas()
                self._trains, self._has_stepped = True, False
                self._left_out = 0 if self._passes else self._left_out + 1
                self._passes = 0
                self.gradient_state.sync_gradients = self.trainer.completes_step
                yield self._placed(batch, loader)
                self._trains = False
        finally:
            self._trains = False
            self._follow_replicas()

    def _evaluation_batches(self, loader: ElasticDataLoader) -> Iterator[Any]:
        self._enter()
        if loader.samples is None:
            raise DatasetError(
                "a loop over a prepared data loader of a stream began with the model in evaluation mode: the "
                "replicas share the samples of an evaluation, so it needs a data set with __len__ and "
                "__getitem__. To train on the stream, call model.train() before the loop"
            )
        sampler = getattr(loader.loader.batch_sampler, "sampler", None)
        if not isinstance(sampler, SequentialSampler | RandomSampler):
            raise WorkerError(
                f"a prepared data loader with a {type(sampler).__name__} cannot be used for evaluation, in "
                "which each sample counts once: make the loader with shuffle=False"
            )
        outer = self._trains, self._has_stepped, self._evaluation
        evaluation = evaluate(self.trainer, loader.loader, self._trained_models[0], gathers=True)
        try:
            for batch in evaluation:
                self._follow_replicas()
                self._trains, self._evaluation = False, evaluation
                yield self._placed(batch, loader)
                self._trains, self._has_stepped, self._evaluation = outer
        finally:
            self._trains, self._has_stepped, self._evaluation = outer
            self._follow_replicas()

    def _placed(self, batch: Any, loader: ElasticDataLoader) -> Any:
        if loader.device is None:
            return batch
        return send_to_device(batch, loader.device, non_blocking=self.non_blocking)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Refuse: a loop over a prepared loader continues where training is."""
        if num_batches:
            raise WorkerError(
                "accelerator.skip_first_batches() is not needed: a loop over a prepared loader continues "
                "where training is, by itself. Leave it out, with accelerator.load_state"
            )
        return dataloader

    # -- steps ------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """Do nothing: the trainer divides a step into micro-batches and adds up their gradients."""
        del models
        yield

    @property
    def sync_gradients(self) -> bool:
        """Whether the present batch completes a step; after `optimizer.step()`, whether it was made."""
        if not self._trains:
            return True
        return self.trainer.made_step if self._has_stepped else self.trainer.completes_step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the GradScaler, or the loss of a replica, has prevented the step that was complete."""
        is_complete = bool(self.gradient_state.sync_gradients)
        return self._trains and self._has_stepped and is_complete and not self.trainer.made_step

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """Clip gradients, and return their norm. With DeepSpeed, its configuration alone clips them."""
        if isinstance(self._plugin, DeepSpeedPlugin):
            max_norm = math.inf
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients. The loss is that of a whole batch, and is not divided by anything."""
        if self._evaluation is not None:
            raise WorkerError(
                "accelerator.backward() was called in a loop over evaluation batches: the model is in "
                "evaluation mode, in which a prepared loader divides its data set for evaluation. Call "
                "model.train() before the training loop"
            )
        self._passes += 1
        self._has_several_passes |= self._passes > 1 and not self._left_out
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**kwargs)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing: all replicas have the same number of batches."""
        del joinables, even_batches
        yield

    # -- communication ----------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all replicas, on all of them.

        In a loop over evaluation batches, as `gather_for_metrics`; elsewhere a collective call.
        """
        if self._evaluation is not None:
            return self._gather_of(self._evaluation, tensor)
        self._follow_replicas()
        if self._sharding is None:
            return super().gather(tensor)
        return recursively_apply(lambda each: torch.cat([*self._of_all(torch.atleast_1d(each))]), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Concatenate the results of all replicas for their present evaluation batches.

        After the loop, each replica has got the result of each sample once, also if replicas were lost
        meanwhile. Elsewhere as `gather`.
        """
        if self._evaluation is None:
            self._follow_replicas()
            if use_gather_object and self._sharding is not None:
                raise WorkerError(
                    "accelerator.gather_for_metrics() got objects outside of a loop over evaluation batches, "
                    "and the model is sharded: pass tensors"
                )
            return super().gather_for_metrics(input_data, use_gather_object)
        try:
            recursively_apply(lambda each: each, input_data, error_on_other_type=True)
        except TypeError:  # It has other values than tensors.
            use_gather_object = True
        if not use_gather_object:
            return self._gather_of(self._evaluation, input_data)
        values = self._evaluation.gather(input_data)
        return [each for value in values for each in value]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce the tensors of all replicas; in a loop over evaluation batches without a collective call."""
        evaluation = self._evaluation
        if evaluation is None and self._sharding is None:
            self._follow_replicas()
            return super().reduce(tensor, reduction, scale)
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "sum": lambda each: each.sum(0),
            "mean": lambda each: each.mean(0),
            "max": lambda each: each.amax(0),
        }
        if reduction not in functions:
            return tensor
        if evaluation is None:
            stacked = recursively_apply(self._of_all, tensor)
        else:
            stacked = self._gather_of(evaluation, recursively_apply(lambda each: each[None], tensor))
        # Zeros for what was gathered before, from a replica that was lost after it.
        return recursively_apply(lambda each: functions[reduction if len(each) else "sum"](each), stacked)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors to the largest size on any replica, see `Accelerator`."""
        evaluation = self._evaluation
        if evaluation is None and self._sharding is None:
            self._follow_replicas()
            return super().pad_across_processes(tensor, dim, pad_index, pad_first)

        def pad(each: torch.Tensor) -> torch.Tensor:
            if each.ndim <= dim:
                return each
            size = each.shape[dim]
            sizes = (
                self._of_all(torch.tensor(size)).tolist() if evaluation is None else evaluation.gather(size)
            )
            missing = max([*sizes, each.shape[dim]]) - each.shape[dim]
            shape = list(each.shape)
            shape[dim] = missing
            padding = each.new_full(shape, pad_index)
            return torch.cat([padding, each] if pad_first else [each, padding], dim)

        return recursively_apply(pad, tensor, error_on_other_type=True)

    def _of_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes of all replicas, which have the same shape, one on another.

        A collective call. Accelerate's own are those of the processes of a replica, if the model is sharded.
        """
        index, count = self._place if self._has_entered and not self._is_alone else (0, 1)
        every = torch.zeros((count, *tensor.shape), dtype=torch.float64, device=tensor.device)
        every[index] = tensor
        if count > 1:
            every = self.trainer.mean_over_replicas(every) * count
            every[index] = tensor  # exactly, also if another replica was lost
        return (every if tensor.is_floating_point() else every.round()).to(tensor.dtype)

    def _gather_of(self, evaluation: Evaluation, value: Any) -> Any:
        value = recursively_apply(lambda each: each[None] if each.ndim == 0 else each, value)
        values = evaluation.gather(send_to_device(value, "cpu"))
        if not values:
            return recursively_apply(lambda each: each[:0], value)
        return send_to_device(concatenate(values), self.device)

    # -- files ------------------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Write the state in Accelerate's format, on rank 0, for use outside of this job.

        The job does not need it: the trainer saves and restores checkpoints of its own. A folder that is
        named automatically is replaced if it is there, since after a restart some steps are made again.
        """
        if not self._has_entered:
            raise WorkerError(
                "accelerator.save_state() was called before training: call it inside or after the loop over "
                "accelerator.epochs()"
            )
        configuration = self.project_configuration
        optimizers = self._optimizers
        states: dict[int, Any] = {}
        if self._sharding is not None:
            # All processes of the replica take part.
            parts: list[Any] = [*self._models, *self._optimizers]
            states = {id(each): whole(self.trainer, each) for each in parts}
        if not self.is_main_process:
            configuration.iteration += 1
            return None
        if configuration.automatic_checkpoint_naming:
            folder = Path(self.project_dir) / "checkpoints" / f"checkpoint_{configuration.iteration}"
            shutil.rmtree(folder, ignore_errors=True)
        self._whole = states
        if states:
            # Not the optimizers, whose states are shards.
            self._optimizers = [SimpleNamespace(state_dict=partial(states.get, id(o))) for o in optimizers]
        try:
            with self._alone():
                return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        finally:
            self._whole, self._optimizers = {}, optimizers

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
        """Return the state of a model: of a sharded one on rank 0, all of whose processes take part."""
        if self._sharding is None:
            return super().get_state_dict(model, unwrap)
        known = self._whole.get(id(model))
        return whole(self.trainer, model) if known is None else known

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Do nothing in a job that resumes by itself; load the state after training is finished.

        A replica that joins, and a program that starts again, have newer state than any folder, from the
        other replicas or the checkpoints of the job.
        """
        self._enter()
        if self.trainer.finished:
            if self._sharding is not None:
                raise WorkerError(
                    "accelerator.load_state() got a sharded model, whose files are for one process: load the "
                    "weights by model.load_state_dict(safetensors.torch.load_file(path))"
                )
            with self._alone():
                super().load_state(input_dir, load_kwargs, **options)
            return
        if self.trainer.steps > 0 and not self._is_in_epochs:
            self.print(
                f"adascale: accelerator.load_state() has loaded nothing, because the job continues at step "
                f"{self.trainer.steps} from its own state"
            )
            return
        where = (
            "inside the loop over accelerator.epochs()" if self._is_in_epochs else "by a job without state"
        )
        raise WorkerError(
            f"accelerator.load_state() was called {where}: an elastic job resumes from its own checkpoints. "
            "To begin with weights of another run, load them into the model before accelerator.prepare(), as "
            "with accelerate.load_checkpoint_in_model(model, folder)"
        )

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the model, which is the program's own."""
        if not keep_fp32_wrapper:
            raise WorkerError(
                "accelerator.unwrap_model(keep_fp32_wrapper=False) would remove the forward pass that "
                "averages the gradients: leave the argument out. state_dict, save_pretrained and copies of "
                "the model do not contain the wrapper"
            )
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    # -- trackers ---------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Begin the trackers' runs, when rank 0 first logs. Another replica that becomes rank 0 does too.

        So that it continues the same run, pass its id, such as `{"wandb": {"id": name, "resume": "allow"}}`.
        """
        self._tracker_arguments = (project_name, config, init_kwargs)

    def _start_trackers(self) -> None:
        if self._tracker_arguments is not None and not self.trackers:
            with self._alone():
                super().init_trackers(*self._tracker_arguments)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name on rank 0, and one without effect on the others."""
        if self.is_main_process:
            self._start_trackers()
        return super().get_tracker(name, unwrap)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log values by name on rank 0. The default of `step` is the progress, in steps at `batch_size`."""
        if not self.is_main_process:
            return
        self._start_trackers()
        with self._alone():
            super().log(values, int(self.trainer.progress) if step is None else step, log_kwargs or {})

    def end_training(self) -> None:
        """End the trackers' runs. The trainer ends the process group with the process."""
        with self._alone():
            for tracker in self.trackers:
                tracker.finish()


def _states() -> list[Any]:
    """Return Accelerate's states: `AcceleratorState` has copies of the values of `PartialState`."""
    return [PartialState(), AcceleratorState()]


class _SaveIteration:
    """The number of the next automatic name of `save_state`, which a replica that joins continues."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._configuration = accelerator.project_configuration

    def state_dict(self) -> Mapping[str, Any]:
        """Return the number."""
        return {"iteration": self._configuration.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number."""
        self._configuration.iteration = state["iteration"]
