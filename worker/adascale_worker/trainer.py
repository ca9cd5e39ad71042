"""The elastic trainer: a training loop that can stop at any step, save, and go on at another size.

    trainer = ElasticTrainer(batch_size=32, max_batch_size=512, local_bsz_bounds=(16, 128))
    state = trainer.program_reentry(model, optimizer, lr_scheduler)
    for epoch in range(state.epoch, epochs):
        for x, y in trainer.dataloader(dataset):
            ...  # zero_grad, forward, backward, optimizer.step(), as ever
        trainer.step(epoch)

Started by an agent, it takes its place and the job's bounds from the environment, reports its gain, and
leaves when a new generation of replicas is active. Started by torchrun or alone it does the same without
a service. All replicas decide to save or to leave on the same step, by flags that ride on AdaScale's own
all-reduce.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from adascale_core.batch import BatchPlan, is_valid_replicas, plan_batch, valid_replicas
from adascale_core.errors import AdaScaleError, InvalidJobError
from adascale_core.messages import GainReport
from adascale_core.names import EXIT_PEER_LOST, EXIT_REENTRY, REPORT_INTERVAL
from adascale_core.throughput import StepTimeModel
from adascale_worker import environment, randomness
from adascale_worker.adascale import AdaScale
from adascale_worker.checkpoint import CheckpointFolder, Manifest, Standing
from adascale_worker.errors import CheckpointError, DatasetError, StaleBatchSizeError, WorkerError
from adascale_worker.patching import patch_optimizer, patch_scheduler, scheduler_state
from adascale_worker.replicate import is_lost_peer, join, replicate
from adascale_worker.reporter import Reporter
from adascale_worker.service import ServiceClient
from adascale_worker.settings import settle
from adascale_worker.signals import LeaveSignal
from adascale_worker.stopwatch import Stopwatch
from adascale_worker.stream import MicroBatches, SampleStream

REPLAN_INTERVAL = 1.0
"""Seconds of training after which the local batch size is chosen anew, at the end of the epoch."""


class Stateful(Protocol):
    """Something whose state is saved with the job's."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its state, in tensors, numbers, texts, lists and dicts."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take up a saved state."""


@dataclass(frozen=True)
class ReentryState:
    """Where the program comes in.

    Args:
        epoch: the epoch to go on with, from 0.
        step: optimizer steps made before.
        progress: scale-invariant steps made before.
        restored: whether a checkpoint was restored.
    """

    epoch: int
    step: int
    progress: float
    restored: bool


@dataclass
class _Position:
    """How far training has come."""

    step: int = 0
    progress: float = 0.0
    epoch: int = 0
    consumed: int = 0
    """Samples of the stream, all replicas together."""


class ElasticTrainer:
    """Trains one model elastically.

    What an AdaScaleJob says, through the environment, goes before the arguments.

    Args:
        batch_size: the global batch size that the learning rate was tuned for (B0), in samples.
        max_batch_size: upper bound of the global batch size.
        local_bsz_bounds: (lower, upper) bounds of the batch on one replica.
        scale_invariant_steps: steps at `batch_size` after which training is finished; none: the
            program's own epochs decide.
        efficiency_target: gain per scale that a batch must be worth while throughput is not known.
        checkpoint_dir: where state is saved; none: nothing is saved.
        checkpoint_interval: seconds between two checkpoints.
        seed: determines the order of samples.
        device: where the model is; by default the replica's own GPU, or the CPU.

    Raises:
        InvalidJobError: bounds that contradict themselves, or a replica count that is not valid.
        EnvironmentVariableError: an environment variable that does not say what it should.
    """

    def __init__(
        self,
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        local_bsz_bounds: Sequence[int] | None = None,
        *,
        scale_invariant_steps: int | None = None,
        efficiency_target: float | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_interval: float | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        asked = environment.JobEnvironment(
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            local_bsz_bounds=_pair(local_bsz_bounds),
            scale_invariant_steps=scale_invariant_steps,
            efficiency_target=efficiency_target,
            checkpoint_dir=Path(checkpoint_dir) if checkpoint_dir else None,
            checkpoint_interval=checkpoint_interval,
        )
        _explain_errors()
        # Registered first, so that it runs last.
        atexit.register(self._skip_teardown)
        if environment.is_ahead(os.environ):
            _import_what_optimizers_import()
        environment.await_place(os.environ)
        self._place = environment.read_place(os.environ)
        self._generation = environment.read_generation(os.environ)
        self._service = environment.read_service(os.environ)
        self._settings, differences = settle(asked, environment.read_job(os.environ))
        if self.is_main:
            for difference in differences:
                print(f"adascale: {difference}; the job's is used", flush=True)
        self._bounds = self._settings.bounds
        self._require_valid_replicas()
        self._seed = seed
        self.device = _device(device, self._place.local_rank)
        """Where this replica's model and batches belong."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._joined = join(
            self._place, self.device, self._generation, environment.read_listen_fd(os.environ)
        )

        self._plan = plan_batch(self._bounds, self.replicas)
        self._plan_acknowledged = False
        self._position = _Position()
        self._micro_batch = 0
        self._inside_epoch = False
        self._stream: SampleStream | None = None
        self._stopwatch = Stopwatch()
        self._losses: list[torch.Tensor] = []

        self._folder = (
            CheckpointFolder(self._settings.checkpoint_dir) if self._settings.checkpoint_dir else None
        )
        self._manifest: Manifest | None = None
        self._end_is_saved = False
        self._leaving: int | None = None
        """The exit code to leave with, once the state is saved."""
        self._saved_at = time.monotonic()
        self._random_state: dict[str, Any] | None = None
        self._result: dict[str, float | str] = {}

        self._reported_at = 0.0
        self._planned_at = time.monotonic()
        self._flags = _Flags()
        self._reporter: Reporter | None = None
        self._leave_signal: LeaveSignal | None = None
        self._ddp: DistributedDataParallel | None = None
        self._adascale: AdaScale | None = None
        self._model: torch.nn.Module | None = None
        self._scheduler: LRScheduler | None = None
        self._registered: dict[str, Stateful] = {}

    # -- what the program may ask -----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The index of this replica, from 0."""
        return self._place.rank

    @property
    def replicas(self) -> int:
        """The number of replicas (K)."""
        return self._place.replicas

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and evaluates."""
        return self.rank == 0

    @property
    def generation(self) -> int:
        """The allocation that this trainer runs in; 0 without an agent."""
        return self._generation

    @property
    def progress(self) -> float:
        """Scale-invariant steps made so far: the sum of gains, in steps at `batch_size`."""
        return self._position.progress

    @property
    def finished(self) -> bool:
        """Whether all the scale-invariant steps asked for have been made."""
        steps = self._settings.scale_invariant_steps
        return steps is not None and self._position.progress >= steps

    @property
    def scale_invariant_steps(self) -> int | None:
        """The scale-invariant steps asked for."""
        return self._settings.scale_invariant_steps

    @property
    def accumulation(self) -> int:
        """Micro-batches per step (a)."""
        return self._plan.accumulation

    @property
    def adascale(self) -> AdaScale:
        """The AdaScale optimizer around the program's own."""
        if self._adascale is None:
            raise WorkerError("there is no optimizer yet: call program_reentry(model, optimizer) first")
        return self._adascale

    def get_local_bsz(self) -> int:
        """The local batch size of the current epoch: samples per micro-batch on each replica."""
        self._plan_acknowledged = True
        return self._plan.local_bsz

    # -- entering ---------------------------------------------------------------------------------------

    def program_reentry(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LRScheduler | None = None,
        *,
        register: Mapping[str, Stateful] | None = None,
        find_unused_parameters: bool = False,
    ) -> ReentryState:
        """Make the program's model, optimizer and scheduler elastic, and restore the last checkpoint.

        All in place: the model becomes data-parallel, `optimizer.step()` scales the learning rate by the
        gain and counts progress, and a scheduler stepped inside the data loop follows progress. From here
        on SIGTERM (and Ctrl-C, without an agent) saves and leaves.

        Args:
            model: on `trainer.device` already.
            optimizer: an SGD over the model's parameters.
            lr_scheduler: of that optimizer.
            register: whatever else is to be saved and restored, by name.
            find_unused_parameters: as DDP's, for a model that does not use all parameters in each step.

        Returns:
            where to go on.

        Raises:
            CheckpointError: no whole checkpoint is left, or it is of another program.
            TypeError: not an SGD.
        """
        if self._adascale is not None:
            raise WorkerError("program_reentry was called already: call it once, with everything")
        self._model, self._scheduler, self._registered = model, lr_scheduler, dict(register or {})
        loaded = self._load()
        if loaded is not None:
            self._restore_model(loaded[0]["model"])
        if self.replicas > 1:
            self._ddp = replicate(model, self.device, find_unused_parameters=find_unused_parameters)
        self._adascale = AdaScale(optimizer, world_size=self.replicas, is_scaled_loss=False, model=self._ddp)
        if loaded is not None:
            self._restore(*loaded)
        self._apply_plan()
        patch_optimizer(optimizer, model, self._step, lambda: self._micro_batch == 0)
        if lr_scheduler is not None:
            patch_scheduler(lr_scheduler, lambda: self._position.progress, lambda: self._inside_epoch)
        self._listen()
        return ReentryState(
            self._position.epoch, self._position.step, self._position.progress, restored=loaded is not None
        )

    def _listen(self) -> None:
        """Start to report, and to mind signals and lost peers."""
        if self._service is not None and self.is_main:
            self._reporter = Reporter(ServiceClient(self._service), self._generation)
        if self._generation > 0:
            self._leave_signal = LeaveSignal(signal.SIGTERM)
        elif self._folder is not None:
            self._leave_signal = LeaveSignal(signal.SIGTERM, signal.SIGINT)
        if self._generation > 0 and self.replicas > 1:
            _leave_with_lost_peers(self._generation)
        atexit.register(self._close)

    def _skip_teardown(self) -> None:
        """End at once when leaving: taking the interpreter apart would hold up the next generation."""
        if self._leaving is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._leaving)

    def _close(self) -> None:
        if self._reporter is not None:
            self._reporter.close()
        if self._joined and dist.is_initialized():
            self._joined = False
            dist.destroy_process_group()

    # -- the data ---------------------------------------------------------------------------------------

    def dataloader(self, dataset: Sized, *, shuffle: bool = True, **options: Any) -> Iterator[Any]:
        """The rest of the current epoch, batch by batch.

        An epoch is len(dataset) / batch_size scale-invariant steps, so at a large scale it may take more
        than one pass over the data. Each pass has every sample exactly once, whatever happens to the
        replicas meanwhile.

        Args:
            dataset: with a length and items by index.
            shuffle: whether each pass has an order of its own.
            options: as of `torch.utils.data.DataLoader` (num_workers, collate_fn, pin_memory, ...).

        Yields:
            micro-batches of `get_local_bsz()` samples.

        Raises:
            DatasetError: a data set that has no length, is smaller than a batch, or has changed.
        """
        taken = {"batch_size", "sampler", "batch_sampler", "drop_last"} & set(options)
        if taken:
            raise DatasetError(
                f"dataloader() got {', '.join(sorted(taken))}: the trainer chooses the batches. Give bounds "
                "to ElasticTrainer, and for anything else leave it to a DataLoader of your own"
            )
        length = self._require_large_enough(dataset)
        if self._adascale is None:
            raise WorkerError(
                "there is no model yet: call program_reentry(model, optimizer) before dataloader()"
            )
        self._plan_acknowledged = True
        self._stream = SampleStream(length, self._seed, shuffle=shuffle)
        epoch_end = (self._position.epoch + 1) * length / self._bounds.batch_size
        return self._epoch(dataset, epoch_end, options)

    def _epoch(self, dataset: Sized, epoch_end: float, options: dict[str, Any]) -> Iterator[Any]:
        assert self._stream is not None
        micro_batches = MicroBatches(self._stream, self._position.consumed, self._plan, self.rank)
        seeds = torch.Generator().manual_seed(self._seed + self._position.consumed)
        loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=micro_batches,  # type: ignore[arg-type]
            generator=seeds,
            **options,
        )
        self._stopwatch.pause()
        batches: Iterator[Any] | None = None
        try:
            while True:
                if self._micro_batch == 0:
                    self._between_steps()
                    if self.finished or self._position.progress >= epoch_end:
                        return
                if batches is None:
                    batches = iter(loader)
                if self._random_state is not None:
                    # Last of all, so that nothing on the way in has drawn from it.
                    randomness.restore(self._random_state)
                    self._random_state = None
                batch = next(batches)
                self._inside_epoch = True
                yield batch
                self._inside_epoch = False
        finally:
            self._inside_epoch = False
            self._stopwatch.pause()

    def _require_large_enough(self, dataset: Sized) -> int:
        try:
            length = len(dataset)
        except TypeError:
            raise DatasetError(
                f"the data set, a {type(dataset).__name__}, has no length: an elastic job needs one with "
                "__len__ and __getitem__, so that replicas can share it out anew"
            ) from None
        largest = self._bounds.max_batch_size or max(self._plan.global_bsz, self._bounds.batch_size)
        if length < largest:
            name = "max_batch_size" if self._bounds.max_batch_size else "a global batch"
            raise DatasetError(
                f"the data set has {length} samples, fewer than {name} of {largest}: "
                f"lower it to {length} or less, or use more data"
            )
        if self._stream is not None and self._stream.length != length:
            raise DatasetError(
                f"the data set has {length} samples, but had {self._stream.length} before: "
                "a job trains on one data set; evaluate with a DataLoader of your own"
            )
        return length

    # -- a step -----------------------------------------------------------------------------------------

    def _step(self, closure: None = None) -> None:
        """What `optimizer.step()` does."""
        if closure is not None:
            raise WorkerError("optimizer.step(closure) is not supported: compute the gradients before step()")
        if not self._plan_acknowledged:
            raise StaleBatchSizeError(
                f"the local batch size is {self._plan.local_bsz} now, and this epoch was not asked for it: "
                "call trainer.get_local_bsz() or trainer.dataloader() at the beginning of each epoch"
            )
        self._micro_batch += 1
        if self._micro_batch < self._plan.accumulation:
            self._synchronise_next_backward()
            return
        self._micro_batch = 0
        self._synchronise_next_backward()
        adascale = self.adascale
        adascale.flags = self._wishes()
        adascale.step()
        self._flags.add(adascale.flags_sum)
        self._position.step += 1
        self._position.consumed += self._plan.global_bsz
        self._position.progress += adascale.gain()
        self._stopwatch.step(self._plan, time.perf_counter())
        self._report()

    def _synchronise_next_backward(self) -> None:
        """Replicas exchange gradients in the last micro-batch of a step only."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = self._micro_batch == self._plan.accumulation - 1

    def _wishes(self) -> tuple[float, float, float]:
        """What this replica wants all to do after this step: leave, save, choose the batch size anew."""
        leave = self._leave_signal is not None and self._leave_signal.received is not None
        if not self.is_main:
            return (float(leave), 0.0, 0.0)
        leave = leave or (self._reporter is not None and self._reporter.generation_is_over)
        now = time.monotonic()
        save = self._folder is not None and now - self._saved_at >= self._settings.checkpoint_interval
        plan = now - self._planned_at >= REPLAN_INTERVAL
        return (float(leave), float(save), float(plan))

    def _between_steps(self) -> None:
        """Leave or save, if the replicas have agreed to."""
        if self._flags.leave:
            self._leave()
        if self._flags.save:
            self._flags.save = False
            try:
                self._save()
            except CheckpointError as error:
                # What was saved before is untouched, so training on loses nothing that stopping would keep.
                print(f"adascale: {error}; training goes on", flush=True)
            self._stopwatch.pause()

    def log(self, *, loss: torch.Tensor) -> None:
        """Tell the loss of a micro-batch, to be reported with the gain. Does not wait for the device."""
        if self._reporter is not None:
            self._losses.append(loss.detach())

    def _report(self, *, now: bool = False) -> None:
        """Report the gain: the first step of a generation, then every so often."""
        if self._reporter is None:
            return
        clock = time.monotonic()
        if not now and clock - self._reported_at < REPORT_INTERVAL:
            return
        self._reported_at = clock
        estimate = self.adascale.estimate
        position, plan = self._position, self._plan
        losses, self._losses = self._losses, []
        self._reporter.report(
            GainReport(
                generation=self._generation,
                step=position.step,
                progress=position.progress,
                epoch=position.epoch,
                replicas=plan.replicas,
                local_bsz=plan.local_bsz,
                accumulation=plan.accumulation,
                scale=plan.scale(self._bounds),
                gain=self.adascale.gain(),
                grad_sqr=estimate.grad_sqr if estimate else 0.0,
                grad_var=estimate.grad_var if estimate else 0.0,
                step_time=self._stopwatch.lap(),
                time=time.time(),
                loss=_finite(torch.stack(losses).mean().item()) if losses else None,
            )
        )

    # -- the end of an epoch ----------------------------------------------------------------------------

    def step(self, epoch: int) -> None:
        """The epoch `epoch` is done. Call it last in the epoch.

        Chooses the local batch size anew, from the gain and the times of steps measured meanwhile, and
        saves the end of training when it is reached.
        """
        if epoch != self._position.epoch:
            raise WorkerError(
                f"trainer.step({epoch}) was called, but the current epoch is {self._position.epoch}: "
                "begin at the epoch that program_reentry returned, and call step(epoch) once for each"
            )
        self._position.epoch += 1
        if self.finished:
            if not self._end_is_saved:
                self._report(now=True)
                self._save(finished=True)
                self._end_is_saved = True
            return
        if self._flags.plan:
            self._flags.plan = False
            self._planned_at = time.monotonic()
            self._choose_plan()
        self._between_steps()

    def _choose_plan(self) -> None:
        """Rank 0 chooses the batch plan, and all take it."""
        choice = [self._plan.local_bsz, self._plan.accumulation]
        if self.is_main:
            model = StepTimeModel.fit(self._stopwatch.step_times())
            plan = plan_batch(
                self._bounds,
                self.replicas,
                estimate=self.adascale.estimate,
                throughput=model.throughput if model is not None and model.known else None,
                efficiency_target=self._settings.efficiency_target,
            )
            choice = [plan.local_bsz, plan.accumulation]
        if self.replicas > 1:
            told = torch.tensor(choice, dtype=torch.int64, device=self.device)
            dist.broadcast(told, src=0)
            choice = [int(value) for value in told.tolist()]
        plan = BatchPlan(self.replicas, *choice)
        if plan != self._plan:
            self._plan = plan
            self._plan_acknowledged = False
            self._apply_plan()

    def _apply_plan(self) -> None:
        adascale = self.adascale
        adascale.set_num_gradients_to_accumulate(self._plan.accumulation)
        adascale.update_scale(self._plan.scale(self._bounds), self.replicas)
        self._micro_batch = 0
        self._synchronise_next_backward()

    def report_result(self, **result: float | str) -> None:
        """Tell what training came to, for the run's last line and for whoever asks later.

        Args:
            result: by name, e.g. accuracy=0.979.
        """
        self._result.update(result)
        if (
            self.is_main
            and self._folder is not None
            and self._manifest is not None
            and self._manifest.finished
        ):
            self._manifest = self._folder.annotate(self._manifest, self._result)

    # -- leaving ----------------------------------------------------------------------------------------

    def _leave(self) -> NoReturn:
        """Save, and end the program so that it can go on elsewhere."""
        self._report(now=True)
        self._save()
        self._close()
        received = self._leave_signal.received if self._leave_signal is not None else None
        if self._generation == 0 and received is not None:
            if self.is_main:
                print(
                    f"adascale: saved at step {self._position.step}; the same command goes on from there",
                    flush=True,
                )
            self._leaving = 128 + received
        else:
            self._leaving = EXIT_REENTRY
        sys.exit(self._leaving)

    # -- state ------------------------------------------------------------------------------------------

    def _save(self, *, finished: bool = False) -> None:
        """Save the state: rank 0 writes, with the random states of all; all learn whether it went well.

        Raises:
            CheckpointError: on all replicas, if it could not be written.
        """
        self._saved_at = time.monotonic()
        if self._folder is None:
            return
        states = self._gather_random_states()
        failure: str | None = None
        if self.is_main:
            standing = Standing(
                step=self._position.step,
                progress=self._position.progress,
                epoch=self._position.epoch,
                replicas=self.replicas,
                generation=self._generation,
                finished=finished,
            )
            try:
                self._manifest = self._folder.save(self._state(states), standing, self._result)
            except CheckpointError as error:
                failure = str(error)
        self._saved_at = time.monotonic()
        failure = self._from_main(failure)
        if failure is not None:
            raise CheckpointError(failure)

    def _gather_random_states(self) -> list[dict[str, Any]]:
        own = randomness.capture() if self._random_state is None else self._random_state
        if self.replicas == 1:
            return [own]
        states: list[Any] = [None] * self.replicas
        dist.all_gather_object(states, own)
        return states

    def _from_main(self, value: Any) -> Any:
        if self.replicas == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _state(self, random_states: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._model is not None
        position, plan = self._position, self._plan
        return {
            "model": self._model.state_dict(),
            "optimizer": self.adascale.state_dict(),
            "scheduler": scheduler_state(self._scheduler) if self._scheduler is not None else None,
            "registered": {name: dict(one.state_dict()) for name, one in self._registered.items()},
            "position": [position.step, position.progress, position.epoch, position.consumed],
            "plan": [plan.replicas, plan.local_bsz, plan.accumulation],
            "batch_size": self._bounds.batch_size,
            "samples": self._stream.length if self._stream is not None else None,
            "seed": self._seed,
            "step_times": self._stopwatch.state_dict(),
            "random": random_states,
        }

    def _load(self) -> tuple[dict[str, Any], Manifest] | None:
        """The newest whole checkpoint, the same on all replicas: rank 0 finds it, the others read it."""
        if self._folder is None:
            return None
        loaded, failure, number = None, None, None
        if self.is_main:
            try:
                loaded = self._folder.load()
                number = loaded[1].number if loaded is not None else None
            except CheckpointError as error:
                failure = str(error)
        number, failure = self._from_main((number, failure))
        if failure is not None:
            raise CheckpointError(failure)
        if number is not None and loaded is None:
            loaded = self._folder.load(number)
        return loaded

    def _restore_model(self, saved: dict[str, Any]) -> None:
        assert self._model is not None
        assert self._folder is not None
        own = self._model.state_dict()
        differences = [f"{name} is missing" for name in own if name not in saved]
        differences += [f"{name} is not in the model" for name in saved if name not in own]
        differences += [
            f"{name} has shape {tuple(saved[name].shape)}, the model's has {tuple(own[name].shape)}"
            for name in own
            if name in saved and isinstance(own[name], torch.Tensor) and own[name].shape != saved[name].shape
        ]
        if differences:
            shown = "; ".join(differences[:5]) + (
                f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
            )
            raise CheckpointError(
                f"the checkpoint in {self._folder.directory} is of another model: {shown}. "
                "Train the model it was saved from, or give another folder"
            )
        self._model.load_state_dict(saved)

    def _restore(self, state: dict[str, Any], manifest: Manifest) -> None:
        assert self._folder is not None
        if state["batch_size"] != self._bounds.batch_size:
            raise CheckpointError(
                f"the checkpoint in {self._folder.directory} has batch_size {state['batch_size']}, "
                f"now it is {self._bounds.batch_size}: progress counts steps at batch_size, so it cannot "
                "change. Put it back, or give another folder"
            )
        self.adascale.load_state_dict(state["optimizer"])
        if (self._scheduler is None) != (state["scheduler"] is None):
            had = "no scheduler" if state["scheduler"] is None else "a scheduler"
            raise CheckpointError(
                f"the checkpoint in {self._folder.directory} was saved with {had}: "
                "give program_reentry the same"
            )
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        if set(self._registered) != set(state["registered"]):
            raise CheckpointError(
                f"the checkpoint in {self._folder.directory} has {sorted(state['registered']) or 'nothing'} "
                f"registered, the program {sorted(self._registered) or 'nothing'}: register the same"
            )
        for name, one in self._registered.items():
            one.load_state_dict(state["registered"][name])
        self._position = _Position(*state["position"])
        self._seed = state["seed"]
        if state["samples"] is not None:
            self._stream = SampleStream(state["samples"], self._seed)
        self._stopwatch.load_state_dict(state["step_times"])
        if self.rank < len(state["random"]):
            self._random_state = state["random"][self.rank]
        self._manifest = manifest
        self._result = dict(manifest.result)
        saved_plan = BatchPlan(*state["plan"])
        if saved_plan.replicas == self.replicas:
            self._plan = saved_plan
        else:
            self._choose_plan()

    def _require_valid_replicas(self) -> None:
        if not is_valid_replicas(self._bounds, self.replicas):
            most = max(16, 2 * self.replicas)
            raise InvalidJobError(
                f"{self.replicas} replicas are not valid for {self._bounds}: "
                f"up to {most}, {valid_replicas(self._bounds, most) or 'none'} are"
            )


@dataclass
class _Flags:
    """What the replicas have agreed to do."""

    leave: bool = False
    save: bool = False
    plan: bool = False

    def add(self, wishes: tuple[float, ...] | None) -> None:
        """Take up the sum of all replicas' wishes, if they were exchanged on this step."""
        if wishes is not None:
            leave, save, plan = wishes
            self.leave = self.leave or leave > 0
            self.save = self.save or save > 0
            self.plan = self.plan or plan > 0


def _device(asked: torch.device | str | None, local_rank: int) -> torch.device:
    if asked is not None:
        return torch.device(asked)
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _pair(bounds: Sequence[int] | None) -> tuple[int, int] | None:
    """The bounds as `BatchBounds` takes them, which also says what is wrong with them."""
    return None if bounds is None else tuple(bounds)  # type: ignore[return-value]


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _import_what_optimizers_import() -> None:
    """Make a first optimizer, which imports much of torch's compiler, while there is time to wait."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def _explain_errors() -> None:
    """Print an `AdaScaleError` that nobody catches as its message, not as a traceback."""
    before = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, AdaScaleError):
            before(kind, error, trace)
            return
        print(f"adascale: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        atexit._run_exitfuncs()
        os._exit(error.exit_code)

    sys.excepthook = explain


def _leave_with_lost_peers(generation: int) -> None:
    """End the program with the code for a lost peer when that is what its uncaught error says."""
    before = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not is_lost_peer(error):
            before(kind, error, trace)
            return
        print(
            f"adascale: a peer of generation {generation} is gone; leaving for the next one",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(EXIT_PEER_LOST)

    sys.excepthook = leave
