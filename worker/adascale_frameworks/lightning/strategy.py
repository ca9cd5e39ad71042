"""The strategy that makes Lightning's `Trainer.fit` elastic."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from adascale_core.errors import requires_extra
from adascale_frameworks.common import ElasticLoader, ReportedValues, crossed, options_of
from adascale_frameworks.lightning.loops import (
    Count,
    Counts,
    ElasticEvaluationLoop,
    ElasticTrainingLoop,
    EvaluationLoader,
    is_divisible,
    logged_sums,
    make_elastic,
)
from adascale_frameworks.lightning.refusals import (
    require_one_loader,
    require_optimizers,
    require_supported,
    split_schedulers,
)
from adascale_frameworks.lightning.states import LightningStates
from adascale_worker.batches.order import Lengths, OrderFunction
from adascale_worker.errors import WorkerError
from adascale_worker.trainer import ElasticTrainer, ReentryState

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
else:
    Strategy = object


_FITTING = "fit"
Package = Literal["lightning.pytorch", "pytorch_lightning"]

PACKAGES: tuple[Package, ...] = ("lightning.pytorch", "pytorch_lightning")
_OF_MODULE = ("named_children", "named_modules", "get_submodule", "state_dict", "load_state_dict")
"""Methods that a `TrainingStep` has of the program's module."""


def import_package(name: Package | None) -> ModuleType:
    """Import the package whose `Trainer` the program uses."""
    if name is not None and name not in PACKAGES:
        raise WorkerError(
            f'ElasticStrategy got package={name!r}: it must be "lightning.pytorch" or "pytorch_lightning"'
        )
    imported = [each for each in PACKAGES if each in sys.modules]
    if name is None and len(imported) > 1:
        raise WorkerError(
            "the program has imported both lightning.pytorch and pytorch_lightning, whose classes are "
            'distinct: pass ElasticStrategy(package="lightning.pytorch"), or package="pytorch_lightning", '
            "the one that its Trainer is imported from"
        )
    installed = (each for each in PACKAGES if find_spec(each.partition(".")[0]) is not None)
    with requires_extra("adascale.lightning", "lightning"):
        return import_module(name or next(chain(imported, installed, PACKAGES)))


class TrainingStep(torch.nn.Module):
    """The module that is made data-parallel: its forward pass is `training_step` of the program's module.

    It has the parameters, buffers and state of that module, which itself stays as it is: `self(x)` in
    `training_step` is not made data-parallel again.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = (module,)  # not a submodule, whose names would have a prefix
        super().__init__()
        for name in _OF_MODULE:
            setattr(self, name, getattr(module, name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `training_step` returns."""
        return self._module[0].training_step(*args, **kwargs)  # type: ignore[operator]

    @property
    def training(self) -> bool:
        """Whether the program's module is in training mode."""
        return self._module[0].training

    @training.setter
    def training(self, mode: bool) -> None:
        """Do nothing: `train` sets it."""

    def train(self, mode: bool = True) -> TrainingStep:
        """Set the mode of the program's module."""
        self._module[0].train(mode)
        return self


class ElasticStrategy(Strategy):
    """The strategy for a Trainer of Lightning whose `fit` is elastic, once.

        trainer = Trainer(max_steps=10_000, strategy=ElasticStrategy(max_batch_size=512))
        trainer.fit(module, datamodule)

    The initial batch size (B0) is that of the train dataloader, and `max_steps`, `max_epochs`, `global_step`,
    schedules and intervals count steps at it. A job file overrides the batch sizes and `max_steps`.

    Args:
        max_batch_size: upper bound of the global batch size, in samples. None: not bounded.
        local_bsz_bounds: (lower, upper) bounds of the batch on one replica, in samples; the upper one may be
            "auto". None: not bounded.
        batch_size: the initial batch size. None: that of the train dataloader.
        checkpoint_dir: folder or URL of the checkpoints from which the job resumes. None: nothing is saved
            besides what Lightning's callbacks save.
        order: a function of the number of a pass and a seed that returns the order of samples, in place of a
            sampler.
        lengths: the length of each sample, for batches of samples of similar length.
        package: the package of the Trainer, if the program imports both.
        options: other arguments of `ElasticTrainer`, such as `seed` or `checkpoint_interval`; `train_samples`
            is used in place of `max_steps` and `max_epochs`.

    Raises:
        WorkerError: Lightning is not installed, or both of its packages are imported and none is named.
    """

    cluster_environment: Any = None
    """One process, whatever launcher Lightning would find."""

    def __new__(cls, *args: Any, package: Package | None = None, **kwargs: Any) -> ElasticStrategy:
        """Return an instance that is also a `Strategy` of the package that the program uses."""
        del args, kwargs
        base = import_module(f"{import_package(package).__name__}.strategies").Strategy
        return object.__new__(type(cls.__name__, (cls, base), {"__abstractmethods__": frozenset()}))

    def __init__(
        self,
        max_batch_size: int | None = None,
        local_bsz_bounds: Sequence[int | Literal["auto"]] | None = None,
        *,
        batch_size: int | None = None,
        checkpoint_dir: str | Path | None = None,
        order: OrderFunction | None = None,
        lengths: Lengths | None = None,
        package: Package | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._package = import_package(package).__name__
        bounds = {"max_batch_size": max_batch_size, "local_bsz_bounds": local_bsz_bounds}
        self._batch_size = batch_size
        self._options: dict[str, Any] = {**bounds, "checkpoint_dir": checkpoint_dir, **options}
        given = {"order": order, "lengths": lengths}
        self._data_options = {name: value for name, value in given.items() if value is not None}
        environments = import_module(f"{self._package}.plugins.environments")
        self.cluster_environment = environments.LightningEnvironment()
        self._layer_sync: object = None
        self._trainer: Any = None
        self._elastic: ElasticTrainer | None = None
        self._loader: ElasticLoader
        self._train_loaders = 0
        self._step_module: TrainingStep | None = None
        self._counts = Counts(1.0, 1)
        self._batches: Any = None
        self._epoch_to_end: int | None = None
        self._steps_at_batch = 0
        self._has_written = False
        self._has_begun = False
        self._is_in_step = False
        self._is_training = False
        """Whether `fit` has had its first batch, and not ended."""
        self._finishes = False

    # -- what Lightning asks ------------------------------------------------------------------------------

    @property
    def elastic_trainer(self) -> ElasticTrainer:
        """The elastic trainer, from the beginning of `fit`."""
        if self._elastic is None:
            raise WorkerError("the strategy has no elastic trainer before Trainer.fit(module)")
        return self._elastic

    @property
    def global_rank(self) -> int:
        """The index of this replica. It may change between two steps."""
        return 0 if self._elastic is None else self._elastic.rank

    local_rank = node_rank = 0
    world_size = 1
    """Lightning counts as in one process: steps at the initial batch size."""
    num_processes = 1
    is_distributed = True
    """So `self.log(..., sync_dist=True)` has an effect."""
    handles_gradient_accumulation = True
    """So `optimizer_step` is called for each micro-batch."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """The device of the model."""
        if self._elastic is not None:
            return self._elastic.device
        return torch.device("cpu" if self._is_on_cpu or not torch.cuda.is_available() else "cuda")

    @property
    def _is_on_cpu(self) -> bool:
        return type(self.accelerator).__name__ == "CPUAccelerator"

    @property
    def divides_evaluation(self) -> bool:
        """Whether the replicas share the batches of the present evaluation."""
        return self._has_begun and not self._trainer.sanity_checking

    # -- the beginning of fit -----------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Set the device up, which is known only in `setup` for `fit`."""
        assert self.lightning_module is not None
        self._trainer = trainer = self.lightning_module.trainer
        # The trainer's own loader shares out the samples.
        trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn != _FITTING or self._elastic is not None:
            super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Make the module and its optimizers, and for `fit` the elastic trainer."""
        self._trainer = trainer
        if trainer.state.fn != _FITTING:
            super().setup(trainer)
            return
        module = trainer.lightning_module
        if self._elastic is not None:
            raise WorkerError(
                "Trainer.fit was called twice with one ElasticStrategy: an elastic job trains once. Train "
                "the second module in a program of its own"
            )
        require_supported(trainer, module, self._layer_sync, self._package)
        trainer.fit_loop.setup_data()
        require_one_loader(self._train_loaders)
        self._elastic = self._make_elastic_trainer(trainer, self._loader)
        self._reported = ReportedValues(self._elastic)
        trainer.accelerator.setup_device(self.root_device)
        make_elastic(trainer.fit_loop.epoch_loop, ElasticTrainingLoop, self)
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            make_elastic(loop, ElasticEvaluationLoop, self)
        super().setup(trainer)
        require_optimizers(self.optimizers, trainer)
        state = self._enter(trainer, self._elastic, module)
        self._follow(trainer, self._elastic, state)

    def _make_elastic_trainer(self, trainer: Any, loader: ElasticLoader) -> ElasticTrainer:
        fit = trainer.fit_loop
        batch_size = self._batch_size or loader.batch_size
        steps = None if fit.max_steps == -1 else fit.max_steps
        epochs = None if fit.max_epochs in (None, -1) else fit.max_epochs
        if self._options.get("train_samples") is not None:
            steps = epochs = None
        if steps is not None and epochs is not None:
            # What ends earlier.
            is_earlier = steps <= epochs * loader.samples / batch_size
            steps, epochs = (steps, None) if is_earlier else (None, epochs)
        return ElasticTrainer(
            batch_size,
            scale_invariant_steps=steps,
            epochs=epochs,
            device="cpu" if self._is_on_cpu else None,
            **self._options,
        )

    def _enter(self, trainer: Any, elastic: ElasticTrainer, module: Any) -> ReentryState:
        """Make the module data-parallel, and restore the state of training."""
        schedulers, others = split_schedulers(self.lr_scheduler_configs, module)
        self._states = LightningStates(trainer)
        register: dict[str, Any] = {"lightning": self._states, **others}
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            register["scaler"] = scaler
        if module.automatic_optimization:
            self._step_module = step_module = TrainingStep(module)
            scheduler = next(iter(schedulers.values()), None)
            state = elastic.program_reentry(step_module, self.optimizers[0], scheduler, register=register)
        else:
            # `training_step` calls the backward passes and steps itself, of one or several optimizers.
            names = {id(optimizer): f"optimizer_{n}" for n, optimizer in enumerate(self.optimizers)}
            state = elastic.program_reentry(
                {"module": module},
                {names[id(each)]: each for each in self.optimizers},
                {names[optimizer]: scheduler for optimizer, scheduler in schedulers.items()},
                register=register,
            )
        self.optimizers = self.optimizers  # Lightning's wrappers copy the methods, which were replaced
        return state

    def _follow(self, trainer: Any, elastic: ElasticTrainer, state: ReentryState) -> None:
        """Set Lightning's limits and counters, after the state was restored."""
        fit = trainer.fit_loop
        length = self._loader.samples / elastic.batch_size
        self._counts = Counts(length, int(fit.max_batches), state.epoch, state.progress, state.progress)
        if elastic.scale_invariant_steps is not None:
            fit.epoch_loop.max_steps, fit.max_epochs = elastic.scale_invariant_steps, -1
        if state.restored:
            trainer.num_sanity_val_steps = 0  # the other replicas wait for this one
            _count(fit.epoch_progress.total, state.epoch)
            _count(fit.epoch_progress.current, state.epoch)
        self._set_rank()
        for callback in trainer.callbacks:
            if hasattr(callback, "file_exists"):
                callback.file_exists = partial(_exists_on_rank_0, callback.file_exists)

    def _set_rank(self) -> None:
        rank_zero = import_module(f"{self._package}.utilities.rank_zero")
        rank_zero.rank_zero_only.rank = self.global_rank
        if self.is_global_zero and not self._has_written:
            self._states.begin_writing()
        self._has_written = self.is_global_zero

    # -- batches ------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Replace a loader, for training or for evaluation."""
        trainer = self._trainer
        if trainer.state.fn == _FITTING and trainer.training and not trainer.sanity_checking:
            self._train_loaders += 1
            self._loader = ElasticLoader(
                dataloader,
                "the train dataloader of Trainer.fit",
                "ElasticStrategy({}=...)",
                self._deliver,
                has_order=bool(self._data_options),
            )
            return self._loader
        if is_divisible(dataloader):
            return EvaluationLoader(dataloader, self._share)
        return dataloader

    def _deliver(self, loader: ElasticLoader) -> Iterator[Any]:
        """Yield the micro-batches of the rest of the present epoch."""
        elastic, fit = self.elastic_trainer, self._trainer.fit_loop
        self.end_epoch()
        self._epoch_to_end = self._counts.epoch = self._trainer.current_epoch
        order = {**self._data_options, **loader.order}
        self._batches = iter(elastic.dataloader(loader.dataset, **order, **options_of(loader.loader)))
        for batch in self._batches:
            self._begin_batch(fit.epoch_loop)
            yield batch

    def _begin_batch(self, loop: Any) -> None:
        """Set Lightning's counters before a micro-batch."""
        elastic, counts = self.elastic_trainer, self._counts
        if not self._has_begun:
            self._states.begin()
        interval = max(self._trainer.log_every_n_steps, 1)
        if not self.awaits_micro_batches and crossed(interval, counts.before, counts.after):
            self._reported.report(self._trainer.callback_metrics)
        self._has_begun = self._is_training = True
        self._steps_at_batch = elastic.steps
        counts.after = elastic.progress
        self._set_rank()
        _count(loop.batch_progress.current, counts.batch_index)
        _count(loop.batch_progress.total, int(counts.after))
        if not self._automatic and not elastic.completes_step:
            # No multiple: Lightning logs after each call of `training_step` with manual optimization.
            loop._batches_that_stepped = int(counts.after) - 0.5
            return
        worth = elastic.adascale.scale if elastic.train_samples else elastic.adascale.gain()
        expected = counts.after + worth
        loop._batches_that_stepped = counts.logged_steps(self._trainer.log_every_n_steps, expected)

    def _end_batch(self) -> None:
        """Set Lightning's counters after the micro-batch that has completed a step."""
        elastic, counts, trainer = self.elastic_trainer, self._counts, self._trainer
        if self.awaits_micro_batches:
            return
        loop = trainer.fit_loop.epoch_loop
        counts.before, counts.after = counts.after, elastic.progress
        loop._batches_that_stepped = counts.logged_steps(trainer.log_every_n_steps)
        is_last = counts.ends_epoch
        interval = float("inf") if trainer.val_check_batch is None else trainer.val_check_batch
        loop.batch_progress.current.ready = counts.batches(interval, is_last=is_last)
        loop.batch_progress.total.ready = counts.total_batches(interval)
        loop.batch_progress.is_last_batch = is_last

    @property
    def awaits_micro_batches(self) -> bool:
        """Whether the last micro-batch has not completed an optimizer step."""
        return self.elastic_trainer.steps == self._steps_at_batch

    @property
    def global_step(self) -> int:
        """Steps at the initial batch size; the steps of several optimizers for a batch are one."""
        counts = self._counts
        if self._is_in_step and not self._automatic:
            return Count(counts.after, steps=self._steps_at_batch)
        return Count(counts.after, counts.before)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run `training_step` of the module as the forward pass of a data-parallel model."""
        step = self._step_module or self._trainer.lightning_module.training_step
        if not self._automatic and self._is_training and len(args) > 1:
            counts = self._counts
            steps = self._steps_at_batch - counts.epoch * counts.epoch_length
            args = (args[0], Count(args[1], steps=steps), *args[2:])
        self._is_in_step = self._is_training
        try:
            with self.precision_plugin.train_step_context():
                output = step(*args, **kwargs)
        finally:
            self._is_in_step = False
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and self._is_training:
            self.elastic_trainer.log(loss=loss.detach())
        if not self._automatic:
            self._end_batch()
        return output

    def on_validation_end(self) -> None:
        """Report the values of a validation."""
        super().on_validation_end()
        if self._is_training:
            self._reported.report(self._trainer.callback_metrics)

    @property
    def _automatic(self) -> bool:
        return bool(self._trainer.lightning_module.automatic_optimization)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Count a micro-batch, and after the last one of a step clip gradients and make the step.

        Hooks before the step, and clipping, see the mean gradient of the step.
        """
        if self._elastic is None or not self._has_begun:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with torch.enable_grad():
            result = closure()
        if result is None and self._automatic:
            return None  # training_step has returned None
        if self._elastic.completes_step:
            super().optimizer_step(optimizer, lambda: result, model, **kwargs)
        else:
            optimizer.step()
        if self._automatic:
            self._end_batch()
        return result

    # -- epochs and the end -------------------------------------------------------------------------------

    def leave_epoch(self) -> None:
        """Request what follows the last batch: the end of the epoch, or of training."""
        batches, self._batches = self._batches, None
        if batches is None:
            return
        loop = self._trainer.fit_loop.epoch_loop
        if loop.batch_progress.is_last_batch or self.elastic_trainer.finished or self._finishes:
            next(batches, None)
        batches.close()
        trainer, elastic = self._trainer, self.elastic_trainer
        # Perhaps another replica has requested the end, in the last step or before. First of the exchanges
        # here, since a replica that has just joined makes this one, and perhaps no other.
        requested = elastic.sum_over_replicas(stop=float(trainer.should_stop))["stop"]
        trainer.should_stop = bool(requested) or elastic.finished
        self._add_up_epoch()

    def _add_up_epoch(self) -> None:
        """Replace what was logged in the epoch with sync_dist=True by the sums over all replicas."""
        elastic = self.elastic_trainer
        logged = [each for each in logged_sums(self._trainer._results) if each[1].meta.sync.should]
        if elastic.replicas == 1 or not logged:
            return
        # Not a collective call: a replica that has just joined may have logged nothing, or be ahead.
        evaluation = elastic.evaluation(
            [0] * elastic.replicas, batch_size=1, model=torch.nn.Identity().eval()
        )
        sums = {name: getattr(metric, part) for name, metric, part in logged}
        for _ in evaluation:
            evaluation.add(**sums)
            sums = {}
        _set_sums(logged, evaluation.sums)

    def end_epoch(self) -> None:
        """End the epoch whose loop has ended, after the program's hooks at its end."""
        epoch, self._epoch_to_end = self._epoch_to_end, None
        if epoch is not None:
            self.elastic_trainer.step(epoch)

    def finish_early(self) -> bool:
        """Request that training ends, and return whether it has."""
        elastic = self.elastic_trainer
        if not self._finishes and not elastic.finished:
            self._finishes = True
            elastic.finish("stopped early")
        return elastic.finished

    def on_train_end(self) -> None:
        """Save the end of training."""
        self._is_training = False
        self.end_epoch()
        elastic = self.elastic_trainer
        if not elastic.finished and self._trainer.should_stop:
            self.finish_early()
        super().on_train_end()

    # -- evaluation ---------------------------------------------------------------------------------------

    def _share(self, loader: DataLoader[Any], batches: int) -> Iterator[Any] | None:
        """Return the replica's part of the first batches; None if each replica gets all of them."""
        is_divided = self.divides_evaluation and batches >= self.elastic_trainer.replicas
        return self._evaluate(loader, batches) if is_divided else None

    def _evaluate(self, loader: DataLoader[Any], batches: int) -> Iterator[Any]:
        """Yield the replica's batches, and replace what the program logs by the sums over all replicas."""
        assert loader.batch_size is not None
        dataset: Any = loader.dataset
        if batches < len(loader):
            dataset = Subset(dataset, range(batches * loader.batch_size))
        evaluation = self.elastic_trainer.evaluation(
            dataset,
            batch_size=loader.batch_size,
            model=self._step_module or self.lightning_module,
            **options_of(loader, evaluates=True),
        )
        results = self._trainer._results
        before = {name: getattr(metric, part) for name, metric, part in logged_sums(results)}
        for batch in evaluation:
            yield batch
            for name, metric, part in logged_sums(results):
                reduction = metric.meta.reduce_fx
                if not (metric.meta.is_mean_reduction or metric.meta.is_sum_reduction):
                    raise WorkerError(
                        f"self.log({metric.meta.name!r}, reduce_fx={reduction.__name__!r}) was called in an "
                        "evaluation, which is divided among the replicas: log a mean or a sum, or the values "
                        "to a torchmetrics.Metric"
                    )
                value = getattr(metric, part)
                if name in before:
                    value = value - before.pop(name)
                evaluation.add(**{name: value})
                setattr(metric, part, torch.zeros_like(value))
        _set_sums(logged_sums(results), evaluation.sums)

    # -- communication ------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum of a tensor over the replicas, if it is logged in a training step.

        Elsewhere the sums are those of all replicas already, or a replica that joins would be alone.
        """
        del group
        if not isinstance(tensor, Tensor) or not self._is_in_step:
            return tensor
        elastic = self.elastic_trainer
        mean = elastic.mean_over_replicas(tensor)
        if str(reduce_op).rpartition(".")[2].lower() in ("sum", "redoptype.sum"):
            return mean * elastic.replicas
        return mean

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return `obj`: a replica that joins is alone where Lightning broadcasts names of folders."""
        del src
        return obj

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: a replica that joins passes Lightning's barriers alone."""

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all replicas."""
        del group
        if sync_grads or not self._is_in_step:
            raise WorkerError(
                "all_gather of Lightning was called with sync_grads=True, or outside of training_step, where "
                "a replica that joins is alone: call it in training_step, or torch.distributed.all_gather"
            )
        gathered = [torch.empty_like(tensor) for _ in range(self.elastic_trainer.replicas)]
        torch.distributed.all_gather(gathered, tensor.contiguous())
        return torch.stack(gathered)

    # -- files --------------------------------------------------------------------------------------------

    def model_to_device(self) -> None:
        """Move the module to the device of this replica."""
        assert self.model is not None
        self.model.to(self.root_device)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file for an evaluation."""
        if self._trainer is not None and self._trainer.state.fn == _FITTING:
            raise WorkerError(
                f"Trainer.fit got ckpt_path={str(checkpoint_path)!r}: an elastic job resumes by itself, from "
                "its checkpoint folder (checkpoint_dir of ElasticStrategy, or the job file's), at any number "
                "of replicas. To begin with the weights of a file, load them into the module before fit: "
                "module.load_state_dict(torch.load(path)['state_dict'])"
            )
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a file of Lightning's on rank 0."""
        checkpoint["global_step"] = int(checkpoint["global_step"])
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # -- what the program may set in the Trainer ------------------------------------------------------------

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device of this replica."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[Any]) -> None:
        if len(devices) > 1 and self._is_on_cpu:
            raise WorkerError(
                f"Trainer(devices={len(devices)}) was passed with an ElasticStrategy: a replica is one "
                "process with one device, and adascale starts the replicas. Leave devices out"
            )

    @property
    def num_nodes(self) -> int:
        """1: adascale knows the machines."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number > 1:
            raise WorkerError(
                f"Trainer(num_nodes={number}) was passed with an ElasticStrategy: a replica is one process, "
                "and adascale starts the replicas, on one machine or on a cluster. Leave num_nodes out"
            )


def _count(tracker: Any, number: int) -> None:
    """Let a counter of Lightning have counted a number of batches or epochs, and no other be begun."""
    tracker.ready = tracker.started = tracker.processed = tracker.completed = number


def _exists_on_rank_0(original: Callable[..., bool], filepath: Any, trainer: Any) -> bool:
    """`ModelCheckpoint.file_exists` on rank 0 only: another replica may see the file that rank 0 wrote."""
    return bool(trainer.is_global_zero) and original(filepath, trainer)


def _set_sums(logged: Iterable[tuple[str, Any, str]], sums: Mapping[str, int | float]) -> None:
    """Replace what Lightning has added up on this replica."""
    for name, metric, part in logged:
        if name in sums:
            present = getattr(metric, part)
            setattr(metric, part, torch.as_tensor(sums[name], dtype=present.dtype, device=present.device))
