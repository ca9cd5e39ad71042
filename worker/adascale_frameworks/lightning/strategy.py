"""The strategy that makes Lightning's `Trainer.fit` elastic."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
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
from adascale_frameworks.common import (
    ElasticRun,
    TrainingLoader,
    by_optimizer,
    evaluate,
    is_divisible,
    take_data_options,
)
from adascale_frameworks.lightning.loops import (
    Count,
    Counts,
    ElasticEvaluationLoop,
    ElasticTrainingLoop,
    EvaluationLoader,
    TrainingBatches,
    logged_sums,
    make_elastic,
    plain,
    put_sums,
    take_sums,
)
from adascale_frameworks.lightning.refusals import (
    require_optimizers,
    require_shardable,
    require_sums,
    require_supported,
    require_tensors,
    split_schedulers,
)
from adascale_frameworks.lightning.states import LightningStates
from adascale_frameworks.sharding import Sharding, place_of, whole
from adascale_worker.errors import DatasetError, WorkerError
from adascale_worker.trainer import ElasticTrainer, ReentryState

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
else:
    Strategy = object


_FITTING = "fit"
Package = Literal["lightning.pytorch", "pytorch_lightning"]

PACKAGES: tuple[Package, ...] = ("lightning.pytorch", "pytorch_lightning")
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
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
        super().__init__()
        self.training_step: Any = module.training_step
        sharded = [name for name in ("set_requires_gradient_sync",) if hasattr(module, name)]
        for name in (*_OF_MODULE, *sharded):
            setattr(self, name, getattr(module, name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `training_step` returns."""
        return self.training_step(*args, **kwargs)


class ElasticStrategy(Strategy):
    """The strategy for a Trainer of Lightning whose `fit` is elastic, once.

        trainer = Trainer(max_steps=10_000, strategy=ElasticStrategy(max_batch_size=512))
        trainer.fit(module, datamodule)

    The initial batch size (B0) is that of the train dataloader, times `accumulate_grad_batches`. `max_steps`,
    `max_epochs`, `global_step`, schedules and intervals count steps at it. A job file overrides the batch
    sizes and `max_steps`.

    Args:
        max_batch_size: upper bound of the global batch size, in samples. None: not bounded.
        local_bsz_bounds: (lower, upper) bounds of the batch on one replica, in samples; the upper one may be
            "auto". None: not bounded.
        batch_size: the initial batch size. None: that of the train dataloader, times
            `accumulate_grad_batches`.
        checkpoint_dir: folder or URL of the checkpoints from which the job resumes. None: nothing is saved
            besides what Lightning's callbacks save.
        fsdp: an `FSDPStrategy` of Lightning, by whose settings `fully_shard` shards the module over the
            processes of a replica (processesPerReplica). None: each process has the whole module.
        package: the package of the Trainer, if the program imports both.
        options: other arguments of `ElasticTrainer`, such as `seed` or `checkpoint_interval`; `train_samples`
            is used in place of `max_steps` and `max_epochs`. And of `ElasticTrainer.dataloader`: `order`, in
            place of a sampler, `lengths`, and for a stream `map`, `shuffle_buffer`, `exactly_once`.

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
        fsdp: Strategy | None = None,
        package: Package | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.package = import_package(package).__name__
        bounds = {"max_batch_size": max_batch_size, "local_bsz_bounds": local_bsz_bounds}
        self._batch_size = batch_size
        if fsdp is not None and not any(each.__name__ == "FSDPStrategy" for each in type(fsdp).__mro__):
            raise WorkerError(
                f"ElasticStrategy got fsdp={fsdp!r}: pass an FSDPStrategy of {self.package}.strategies"
            )
        self._fsdp: Any = fsdp
        self._sharding: Sharding | None = None  # before the module is sharded
        self._options: dict[str, Any] = {**bounds, "checkpoint_dir": checkpoint_dir, **options}
        self._data_options = take_data_options(self._options)
        environments = import_module(f"{self.package}.plugins.environments")
        self.cluster_environment = environments.LightningEnvironment()
        self._rank_zero_only = import_module(f"{self.package}.utilities.rank_zero").rank_zero_only
        self._layer_sync: object = None
        self._trainer: Any = None
        self._elastic: ElasticTrainer | None = None  # None before `fit`
        self._run: ElasticRun
        self._loaders: list[TrainingLoader] = []
        self._counts = Counts(1.0, 1)
        self._limit: float = 1.0
        """`limit_train_batches` of the Trainer."""
        self._accumulation = 1
        """Its `accumulate_grad_batches`."""
        self._epoch_to_end: int | None = None
        self._steps_at_batch = 0
        self._has_written = False
        self._has_begun = False
        """Whether `fit` has had its first batch."""
        self._is_in_step = False

    # -- what Lightning asks ------------------------------------------------------------------------------

    @property
    def elastic_trainer(self) -> ElasticTrainer:
        """The elastic trainer, from the beginning of `fit`."""
        if self._elastic is None:
            raise WorkerError("the strategy has no elastic trainer before Trainer.fit(module)")
        return self._elastic

    @property
    def global_rank(self) -> int:
        """The index of this process among those of all replicas. It may change between two steps."""
        return 0 if self._elastic is None else self._place[0]

    local_rank = node_rank = 0
    world_size = num_processes = 1
    """Lightning counts as in one process: steps at the initial batch size."""
    parallel_devices: Sequence[torch.device] = ()
    num_nodes = 1
    """Of `Trainer(devices=, num_nodes=)`, which sets these."""
    is_distributed = True
    """So `self.log(..., sync_dist=True)` has an effect."""
    handles_gradient_accumulation = True
    """So `optimizer_step` is called for each micro-batch."""

    @property
    def _place(self) -> tuple[int, int]:
        """The index of this process, and the number of processes of all replicas."""
        return place_of(self.elastic_trainer, is_sharded=self._fsdp is not None)

    @property
    def processes(self) -> int:
        """The number of processes of all replicas."""
        return self._place[1]

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """The device of the model."""
        if self._elastic is not None:
            return self._elastic.device
        return torch.device("cpu" if self.is_on_cpu or not torch.cuda.is_available() else "cuda")

    @property
    def is_on_cpu(self) -> bool:
        """Whether the Trainer trains on the CPU."""
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
        if trainer.state.fn == _FITTING and self._elastic is None:
            # Before the hooks of the program, which may load the data.
            self._limit, trainer.limit_train_batches = trainer.limit_train_batches, 1.0
        else:
            super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Make the module and its optimizers, and for `fit` the elastic trainer."""
        self._trainer = trainer
        if trainer.state.fn != _FITTING:
            super().setup(trainer)
            return
        if self._elastic is not None:
            raise WorkerError(
                "Trainer.fit was called twice with one ElasticStrategy: an elastic job trains once. Train "
                "the second module in a program of its own"
            )
        require_supported(trainer, self)
        self._accumulation = trainer.accumulate_grad_batches
        trainer.fit_loop.setup_data()
        if len(self._loaders) != 1:
            raise DatasetError(
                f"Trainer.fit got {len(self._loaders)} train dataloaders, but an elastic job has one "
                "position in its data: pass one dataloader of a data set that combines them, such as "
                "torch.utils.data.StackDataset or ConcatDataset"
            )
        self._elastic = elastic = self._make_elastic_trainer(trainer, self._loaders[0])
        self._run = ElasticRun(elastic)
        trainer.accelerator.setup_device(self.root_device)
        make_elastic(trainer.fit_loop.epoch_loop, ElasticTrainingLoop, self)
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            make_elastic(loop, ElasticEvaluationLoop, self)
        super().setup(trainer)
        trainer.accumulate_grad_batches = 1  # The trainer accumulates itself.
        require_optimizers(self.optimizers, trainer)
        self._follow(trainer, elastic, self._enter(trainer, elastic))

    def _make_elastic_trainer(self, trainer: Any, loader: TrainingLoader) -> ElasticTrainer:
        fit = trainer.fit_loop
        batch_size = self._batch_size or loader.batch_size * self._accumulation
        steps = None if fit.max_steps == -1 else fit.max_steps
        epochs = None if fit.max_epochs in (None, -1) else fit.max_epochs
        if self._options.get("train_samples") is not None:
            steps = epochs = None
        elif loader.samples is None and (steps is None or epochs is not None):
            raise WorkerError(
                "the data set of the train dataloader has no length: pass max_steps to the Trainer, without "
                "max_epochs"
            )
        if steps is not None and epochs is not None:
            # What ends earlier.
            is_earlier = steps <= epochs * (loader.samples or 0) / batch_size
            steps, epochs = (steps, None) if is_earlier else (None, epochs)
        return ElasticTrainer(
            batch_size,
            scale_invariant_steps=steps,
            epochs=epochs,
            device="cpu" if self.is_on_cpu else None,
            **self._options,
        )

    def _enter(self, trainer: Any, elastic: ElasticTrainer) -> ReentryState:
        """Make the module data-parallel, and restore the state of training."""
        module = trainer.lightning_module
        following, others = split_schedulers(self.lr_scheduler_configs, module)
        if self._loaders[0].samples is None:
            trainer.fit_loop.max_batches = math.inf
            if trainer.enable_validation and isinstance(getattr(trainer, "val_check_interval", None), float):
                raise WorkerError(
                    "the data set of the train dataloader has no length, and validation follows each epoch: "
                    "pass val_check_interval=n to the Trainer, in batches"
                )
        self._states = LightningStates(trainer)
        register: dict[str, Any] = {"lightning": self._states, **others}
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            register["scaler"] = scaler
        optimizers, schedulers = by_optimizer(self.optimizers, following, "configure_optimizers returned")
        parts: tuple[Any, Any, Any] = {"module": module}, optimizers, schedulers
        # With manual optimization, `training_step` calls the backward passes and steps itself.
        self._training_step = module.training_step
        if module.automatic_optimization:
            self._training_step = step_module = TrainingStep(module)
            parts = step_module, self.optimizers[0], next(iter(schedulers.values()), None)
        state = elastic.program_reentry(*parts, register=register)
        self.optimizers = self.optimizers  # Lightning's wrappers copy the methods, which were replaced
        return state

    def _follow(self, trainer: Any, elastic: ElasticTrainer, state: ReentryState) -> None:
        """Set Lightning's limits and counters, after the state was restored."""
        fit = trainer.fit_loop
        samples, size = self._loaders[0].samples, elastic.batch_size
        self._counts = Counts(
            math.inf if samples is None else samples / size,
            fit.max_batches,
            max(1.0, size / self._loaders[0].batch_size),
            state.epoch,
            self._states.epoch_begin,
            state.progress,
            state.progress,
        )
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
        self._rank_zero_only.rank = self.global_rank
        if self.is_global_zero and not self._has_written:
            self._states.begin_writing()
        self._has_written = self.is_global_zero

    # -- batches ------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Replace a loader, for training or for evaluation."""
        trainer = self._trainer
        if trainer.state.fn == _FITTING and trainer.training and not trainer.sanity_checking:
            loader = TrainingBatches(
                dataloader,
                "the train dataloader of Trainer.fit",
                "ElasticStrategy({}=...)",
                self._deliver,
                given=self._data_options,
                limit=self._limit,
            )
            self._loaders.append(loader)
            return loader
        if is_divisible(dataloader) and not dataloader.drop_last:
            return EvaluationLoader(dataloader, self)
        return dataloader

    def _deliver(self, loader: TrainingLoader) -> Iterator[Any]:
        """Yield the micro-batches of the rest of the present epoch."""
        self.end_epoch()
        self._epoch_to_end = epoch = self._trainer.current_epoch
        self._counts.begin_epoch(epoch)
        self._states.epoch_begin = self._counts.begin
        yield from self._run.deliver(loader, self._begin_batch)

    def _begin_batch(self) -> None:
        """Set Lightning's counters before a micro-batch."""
        trainer, elastic, counts = self._trainer, self.elastic_trainer, self._counts
        loop, interval = trainer.fit_loop.epoch_loop, trainer.log_every_n_steps
        if not self._has_begun:
            self._has_begun = True
            self._states.begin()
        if not self.awaits_micro_batches and Count(counts.after, counts.before) % max(interval, 1) == 0:
            self._run.report(trainer.callback_metrics)
        self._steps_at_batch = elastic.steps
        counts.after = elastic.progress
        if counts.is_of_stream:
            counts.begin = self._states.epoch_begin  # that of all replicas
        self._set_rank()
        _count(loop.batch_progress.current, counts.batch_index)
        _count(loop.batch_progress.total, int(counts.after * counts.per_step))
        if not self._automatic and not elastic.completes_step:
            # No multiple: Lightning logs after each call of `training_step` with manual optimization.
            loop._batches_that_stepped = int(counts.after) - 0.5
            return
        worth = elastic.adascale.scale if elastic.train_samples else elastic.adascale.gain()
        loop._batches_that_stepped = counts.logged_step(interval, counts.after, counts.after + worth)

    def _end_batch(self) -> None:
        """Set Lightning's counters after the micro-batch that has completed a step."""
        if self.awaits_micro_batches:
            return
        trainer, counts = self._trainer, self._counts
        loop = trainer.fit_loop.epoch_loop
        counts.before, counts.after = counts.after, self.elastic_trainer.progress
        loop._batches_that_stepped = counts.logged_step(
            trainer.log_every_n_steps, counts.before, counts.after
        )
        loop.batch_progress.current.ready = counts.batches
        loop.batch_progress.total.ready = Count(
            counts.after * counts.per_step, counts.before * counts.per_step
        )
        loop.batch_progress.is_last_batch = counts.ends_epoch

    def ends_with_data(self, *, is_read: bool) -> bool:
        """Whether an epoch has ended with its data, which is a stream that is read."""
        return is_read and self._counts.is_of_stream and not self.elastic_trainer.finished

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
        if not self._automatic and len(args) > 1:
            counts = self._counts
            steps = self._steps_at_batch - counts.begin
            args = (args[0], Count(args[1], steps=steps), *args[2:])
        self._is_in_step = True
        try:
            with self.precision_plugin.train_step_context():
                output = self._training_step(*args, **kwargs)
        finally:
            self._is_in_step = False
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            self.elastic_trainer.log(loss=loss.detach())
        if not self._automatic:
            self._end_batch()
        return output

    def on_validation_end(self) -> None:
        """Report the values of a validation."""
        super().on_validation_end()
        if self.divides_evaluation and self._trainer.state.fn == _FITTING:
            self._run.report(self._trainer.callback_metrics)

    @property
    def _automatic(self) -> bool:
        return bool(self._trainer.lightning_module.automatic_optimization)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Count a micro-batch, and after the last one of a step clip gradients and make the step.

        Hooks before the step, and clipping, see the mean gradient of the step.
        """
        with torch.enable_grad():
            result = closure()
        if result is None and self._automatic:
            return None  # training_step has returned None
        if self.elastic_trainer.completes_step:
            super().optimizer_step(optimizer, lambda: result, model, **kwargs)
        else:
            optimizer.step()
        if self._automatic:
            self._end_batch()
        return result

    # -- epochs and the end -------------------------------------------------------------------------------

    def leave_epoch(self) -> None:
        """Request what follows the last batch: the end of the epoch, or of training."""
        run, trainer = self._run, self._trainer
        if run.batches is None:
            return
        elastic = run.elastic
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_last or elastic.finished or run.has_requested_end:
            next(run.batches, None)
        run.leave()
        # Perhaps another replica has requested the end, in the last step or before. First of the exchanges
        # here, since a replica that has just joined makes this one, and perhaps no other.
        requested = elastic.sum_over_replicas(stop=float(trainer.should_stop))["stop"]
        trainer.should_stop = bool(requested) or elastic.finished
        self._add_up_epoch(elastic)

    def _add_up_epoch(self, elastic: ElasticTrainer) -> None:
        """Replace what was logged in the epoch with sync_dist=True by the sums over all processes."""
        if self._sharding is not None:
            require_tensors(self._trainer._results)
        logged = [each for each in logged_sums(self._trainer._results) if each[1].meta.sync.should]
        if self.processes == 1 or not logged:
            return
        # Not a collective call: a replica that has just joined may have logged nothing, or be ahead.
        evaluation = elastic.evaluation(
            [0] * elastic.replicas, batch_size=1, model=torch.nn.Identity().eval()
        )
        sums = take_sums(logged)
        if self._sharding is not None:
            for each in sums.values():
                torch.distributed.all_reduce(each)  # of the processes of this replica
        for _ in evaluation:
            evaluation.add(**sums)
            sums = {}
        put_sums(logged, evaluation.sums)

    def end_epoch(self) -> None:
        """End the epoch whose loop has ended, after the program's hooks at its end."""
        epoch, self._epoch_to_end = self._epoch_to_end, None
        if epoch is not None:
            if self._counts.is_of_stream:
                self._states.epoch_begin = self.elastic_trainer.progress  # of the next one, if this is saved
            self.elastic_trainer.step(epoch)

    def request_end(self) -> bool:
        """Request that training ends, and return whether it has."""
        return self._run.request_end("stopped early")

    def on_train_end(self) -> None:
        """Save the end of training."""
        self.end_epoch()
        if self._trainer.should_stop:
            self.request_end()
        super().on_train_end()

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluate(self, loader: DataLoader[Any], count: int) -> Iterator[Any]:
        """Yield the replica's share of the first batches, and replace what is logged by the sums over all."""
        shortened: dict[str, Any] = {}
        if count < len(loader):
            size: int = loader.batch_sampler.batch_size  # type: ignore[union-attr]
            shortened["dataset"] = Subset(loader.dataset, range(count * size))
        evaluation = evaluate(self.elastic_trainer, loader, self._trainer.lightning_module, **shortened)
        results = self._trainer._results
        before = take_sums(logged_sums(results))
        for batch in evaluation:
            yield batch
            if self._sharding is not None:
                require_tensors(results)
            require_sums(results)
            evaluation.add(**take_sums(logged_sums(results)))
        put_sums(logged_sums(results), evaluation.sums, before)

    # -- communication ------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum of a tensor over all processes, if it is logged in a training step.

        Elsewhere the sums are those of all replicas already, or a replica that joins would be alone.
        """
        del group
        if not isinstance(tensor, Tensor) or not self._is_in_step:
            return tensor
        elastic = self.elastic_trainer
        mean = elastic.mean_over_replicas(tensor)
        if str(reduce_op).rpartition(".")[2].lower() in ("sum", "redoptype.sum"):
            return mean * self.processes
        return mean

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return `obj`, of the first process of this replica.

        A replica that joins is alone where Lightning broadcasts names of folders.
        """
        del src
        if self._sharding is None:
            return obj
        values = [obj]
        torch.distributed.broadcast_object_list(values, 0)
        return values[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Return whether all, or any, processes of this replica decide so, which all do then."""
        if self._sharding is None:
            return decision
        votes = torch.tensor(float(decision), device=self.root_device)
        torch.distributed.all_reduce(votes)
        return bool(votes == self.elastic_trainer.mesh.size() if all else votes > 0)

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: a replica that joins passes Lightning's barriers alone."""

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all replicas."""
        del group
        if sync_grads or not self._is_in_step or self._sharding is not None:
            raise WorkerError(
                "all_gather of Lightning was called with sync_grads=True, with a sharded module, or outside "
                "of training_step, where a replica that joins is alone: call it in training_step, or "
                "torch.distributed.all_gather"
            )
        gathered = [torch.empty_like(tensor) for _ in range(self.elastic_trainer.replicas)]
        torch.distributed.all_gather(gathered, tensor.contiguous())
        return torch.stack(gathered)

    # -- files --------------------------------------------------------------------------------------------

    def model_to_device(self) -> None:
        """Move the module to the device of this process, or shard it."""
        assert self.model is not None
        if self._fsdp is None or self._elastic is None:
            self.model.to(self.root_device)
            return
        plugin = import_module(f"{self.package}.plugins.precision.fsdp").FSDPPrecision
        require_shardable(self._trainer, self)
        self._fsdp.precision_plugin = plugin(self._trainer.precision)
        self._sharding = Sharding.of_strategy(self._fsdp)
        self._sharding.apply(self.model, self._elastic, methods=_STEPS)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module, whole also if it is sharded, on rank 0."""
        if self._sharding is None:
            return super().lightning_module_state_dict()
        return whole(self.elastic_trainer, self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer, whole also if it is sharded, on rank 0."""
        if self._sharding is None:
            return super().optimizer_state(optimizer)
        return whole(self.elastic_trainer, optimizer)

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
        super().save_checkpoint(plain(checkpoint), filepath, storage_options)


def _count(tracker: Any, number: int) -> None:
    """Let a counter of Lightning have counted a number of batches or epochs, and no other be begun."""
    tracker.ready = tracker.started = tracker.processed = tracker.completed = number


def _exists_on_rank_0(original: Callable[..., bool], filepath: Any, trainer: Any) -> bool:
    """`ModelCheckpoint.file_exists` on rank 0 only: another replica may see the file that rank 0 wrote."""
    return trainer.strategy.elastic_trainer.rank == 0 and original(filepath, trainer)
