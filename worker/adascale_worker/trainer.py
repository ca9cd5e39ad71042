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
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from adascale_client import MetricsServiceClient
from adascale_core.batch import BatchPlan, batch_choice, is_valid_replicas, plan_batch, valid_replicas
from adascale_core.checkpoint_manifest import Manifest
from adascale_core.errors import InvalidJobError
from adascale_core.exit_codes import EXIT_REENTRY
from adascale_core.throughput import StepTimeModel
from adascale_worker import environment, rng_state
from adascale_worker.adascale import AdaScale
from adascale_worker.checkpoint import CheckpointFolder, Standing
from adascale_worker.errors import CheckpointError, DatasetError, StaleBatchSizeError, WorkerError
from adascale_worker.patching import patch_optimizer, patch_scheduler
from adascale_worker.program import Program, Stateful, load_model
from adascale_worker.replicate import Peers, join, replicate
from adascale_worker.reporter import Reporter
from adascale_worker.settings import settle
from adascale_worker.shutdown import LeaveSignal, QuickExit, leave_with_lost_peers
from adascale_worker.stream import MicroBatches, SampleStream
from adascale_worker.telemetry import Telemetry
from adascale_worker.training_progress import TrainingProgress

SLOW_STEP = 0.05
"""Seconds of a step from which on the replicas agree on each step what to do, not on measured ones only."""
REPLAN_INTERVAL = 1.0
"""Seconds of training after which the local batch size is chosen anew, at the end of the epoch."""


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


class ElasticTrainer:
    """Trains one model elastically.

    What an AdaScaleJob says, through the environment, goes before the arguments. Under an agent this
    waits until the replica's generation begins; make it after the imports and the loading of data, which
    then take no time from training.

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
        self._exit = QuickExit()
        self._exit.explain_uncaught_errors()
        if environment.is_standby(os.environ):
            _import_what_optimizers_import()
        environment.wait_for_assignment(os.environ)
        place = environment.read_assignment(os.environ)
        self._generation = environment.read_generation(os.environ)
        self._incarnation = environment.read_incarnation(os.environ)
        asked = environment.JobEnvironment(
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            local_bsz_bounds=_pair(local_bsz_bounds),
            scale_invariant_steps=scale_invariant_steps,
            efficiency_target=efficiency_target,
            checkpoint_dir=Path(checkpoint_dir) if checkpoint_dir else None,
            checkpoint_interval=checkpoint_interval,
        )
        self._settings, differences = settle(asked, environment.read_job(os.environ))
        self._bounds = self._settings.bounds
        self.device = _device(device, place.local_rank)
        """Where this replica's model and batches belong."""
        self._peers = Peers(place, self.device)
        if self.is_main:
            for difference in differences:
                print(f"adascale: {difference}; the job's is used", flush=True)
        self._require_valid_replicas()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._joined = join(place, self.device, self._generation, environment.read_listen_fd(os.environ))

        self._plan = plan_batch(self._bounds, self.replicas)
        self._plan_acknowledged = False
        self._planned_at = time.monotonic()
        self._micro_batch = 0
        self._position = TrainingProgress()
        self._delivered = 0
        self._loop: object = None
        self._stream: SampleStream | None = None
        self._seed = seed
        self._inside_epoch = False
        self._flags = _Flags()
        self._stepped_at = float("-inf")
        self._telemetry = Telemetry(self._bounds, self._generation, self._reporter())
        self._leave_signal: LeaveSignal | None = None
        self._ddp: DistributedDataParallel | None = None
        self._program: Program | None = None

        directory = self._settings.checkpoint_dir
        self._folder = CheckpointFolder(directory) if directory else None
        self._saved_at = time.monotonic()
        self._end_is_saved = False
        self._manifest: Manifest | None = None
        self._random_state: dict[str, Any] | None = None
        self._result: dict[str, float | str] = {}
        atexit.register(self._close)

    # -- what the program may ask -----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The index of this replica, from 0."""
        return self._peers.rank

    @property
    def replicas(self) -> int:
        """The number of replicas (K)."""
        return self._peers.replicas

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
    def scale_invariant_steps(self) -> int | None:
        """The scale-invariant steps asked for."""
        return self._settings.scale_invariant_steps

    @property
    def finished(self) -> bool:
        """Whether all the scale-invariant steps asked for have been made."""
        steps = self.scale_invariant_steps
        return steps is not None and self.progress >= steps

    @property
    def accumulation(self) -> int:
        """Micro-batches per step (a)."""
        return self._plan.accumulation

    @property
    def adascale(self) -> AdaScale:
        """The AdaScale optimizer around the program's own."""
        return self._require_entered().optimizer

    def get_local_bsz(self) -> int:
        """The local batch size of the current epoch: samples per micro-batch on each replica."""
        self._plan_acknowledged = True
        return self._plan.local_bsz

    def log(self, *, loss: torch.Tensor | float) -> None:
        """Tell the loss of a micro-batch, to be reported with the gain. Does not wait for the device."""
        self._telemetry.log_loss(loss)

    def report_result(self, **result: float | str) -> None:
        """Tell what training came to, for the run's last line and for whoever asks later.

        Args:
            result: by name, e.g. accuracy=0.979.
        """
        self._result.update(result)
        if self._folder is not None and self._manifest is not None and self._end_is_saved and self.is_main:
            self._manifest = self._folder.annotate(self._manifest, self._result)

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
            WorkerError: something's state could not be loaded again; or this was called before.
            UnsupportedOptimizerError: not an SGD.
        """
        if self._program is not None:
            raise WorkerError("program_reentry was called already: call it once, with everything")
        loaded = self._load()
        if loaded is not None:
            load_model(model, loaded[0]["program"]["model"])
        if self.replicas > 1:
            self._ddp = replicate(model, self.device, find_unused_parameters=find_unused_parameters)
        adascale = AdaScale(optimizer, world_size=self.replicas, is_scaled_loss=False, model=self._ddp)
        self._program = Program(model, adascale, lr_scheduler, dict(register or {}))
        if self._folder is not None:
            self._program.require_loadable()
        if loaded is not None:
            self._restore(*loaded)
        self._apply_plan()
        patch_optimizer(optimizer, model, self._step, lambda: self._micro_batch == 0)
        if lr_scheduler is not None:
            patch_scheduler(lr_scheduler, lambda: self.progress, lambda: self._inside_epoch)
        self._mind_signals_and_peers()
        position = self._position
        return ReentryState(position.epoch, position.step, position.progress, restored=loaded is not None)

    def _require_entered(self) -> Program:
        if self._program is None:
            raise WorkerError(
                "there is no model and no optimizer yet: call program_reentry(model, optimizer) first"
            )
        return self._program

    def _reporter(self) -> Reporter | None:
        service = environment.read_service(os.environ)
        if service is None or not self.is_main:
            return None
        client = MetricsServiceClient(service.url, service.token, service.token_file)
        return Reporter(client.for_job(service.job_id), self._generation)

    def _mind_signals_and_peers(self) -> None:
        if self._generation > 0:
            self._leave_signal = LeaveSignal(signal.SIGTERM)
        elif self._folder is not None:
            self._leave_signal = LeaveSignal(signal.SIGTERM, signal.SIGINT)
        if self._generation > 0 and self.replicas > 1:
            leave_with_lost_peers(self._generation)

    def _require_valid_replicas(self) -> None:
        if not is_valid_replicas(self._bounds, self.replicas):
            most = max(16, 2 * self.replicas)
            raise InvalidJobError(
                f"{self.replicas} replicas are not valid for {self._bounds}: "
                f"up to {most}, {valid_replicas(self._bounds, most) or 'none'} are"
            )

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
        taken = {"batch_size", "sampler", "batch_sampler", "drop_last", "generator"} & set(options)
        if taken:
            raise DatasetError(
                f"dataloader() got {', '.join(sorted(taken))}, but the trainer chooses the batches: give "
                "bounds to ElasticTrainer, and use a DataLoader of your own for anything else"
            )
        self._require_entered()
        length = self._require_large_enough(dataset)
        self._plan_acknowledged = True
        self._stream = SampleStream(length, self._seed, shuffle=shuffle)
        return self._epoch(dataset, self._stream, options)

    def _epoch(self, dataset: Sized, stream: SampleStream, options: dict[str, Any]) -> Iterator[Any]:
        end = (self._position.epoch + 1) * stream.length / self._bounds.batch_size
        batches: Iterator[Any] | None = None
        self._loop = loop = object()
        self._begin_step()
        self._delivered = self._position.consumed
        self._telemetry.step_timer.pause()
        try:
            while True:
                if self._loop is not loop:
                    raise WorkerError(
                        "another loop over trainer.dataloader() has begun before this one has ended: take "
                        "training data from one at a time, and use a DataLoader of your own for anything else"
                    )
                if self._micro_batch == 0:
                    # Also past batches that the program has left out, without a step.
                    self._position.consumed = self._delivered
                    self._between_steps()
                    if self.finished or self.progress >= end:
                        self._restore_random_state()
                        return
                if batches is None:
                    batches = self._batches(dataset, stream, options)
                self._restore_random_state()
                batch = next(batches)
                self._delivered += self.replicas * self._plan.local_bsz
                self._inside_epoch = True
                yield batch
                self._inside_epoch = False
        finally:
            self._inside_epoch = False
            self._telemetry.step_timer.pause()

    def _batches(self, dataset: Sized, stream: SampleStream, options: dict[str, Any]) -> Iterator[Any]:
        consumed = self._position.consumed
        loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=MicroBatches(stream, consumed, self._plan, self.rank),
            # The loader draws seeds for its workers; not from the program's random state.
            generator=torch.Generator().manual_seed(self._seed + consumed),
            **options,
        )
        return iter(loader)

    def _require_large_enough(self, dataset: Sized) -> int:
        if isinstance(dataset, IterableDataset):
            raise DatasetError(
                f"the data set, a {type(dataset).__name__}, has no items by index: an elastic job needs one "
                "with __len__ and __getitem__, so that replicas can share it out anew"
            )
        try:
            length = len(dataset)
        except TypeError:
            raise DatasetError(
                f"the data set, a {type(dataset).__name__}, has no length: an elastic job needs one with "
                "__len__ and __getitem__, so that replicas can share it out anew"
            ) from None
        # Where nothing bounds the global batch, a step may take more than a pass.
        largest = self._bounds.max_batch_size or self._bounds.batch_size
        if length < largest:
            name = "max_batch_size" if self._bounds.max_batch_size else "batch_size"
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
        """What `optimizer.step()` does: nothing, until all micro-batches of the step are in."""
        if closure is not None:
            raise WorkerError("optimizer.step(closure) is not supported: compute the gradients before step()")
        if not self._plan_acknowledged:
            raise StaleBatchSizeError(
                f"the local batch size is {self._plan.local_bsz} now, and this epoch has not asked for it: "
                "call trainer.get_local_bsz() or trainer.dataloader() at the beginning of each epoch"
            )
        self._micro_batch = (self._micro_batch + 1) % self._plan.accumulation
        self._exchange_gradients_in_last_micro_batch()
        if self._micro_batch > 0:
            return
        adascale = self.adascale
        wishes = self._wishes()
        adascale.flags = wishes
        adascale.step()
        agreed = adascale.flags_sum
        if agreed is None and self._flags.slow:
            # AdaScale does not measure each step, and the next measured one may be a minute away.
            agreed = self._peers.sum(wishes)
        self._flags.add(agreed)
        self._stepped_at = time.monotonic()
        self._position.advance(adascale.gain(), self._delivered)
        self._telemetry.step(self._plan, self._position, adascale)

    def _begin_step(self) -> None:
        """Begin with the first micro-batch; of a step that a loop has broken off, nothing is left."""
        self._micro_batch = 0
        self._exchange_gradients_in_last_micro_batch()
        self.adascale.zero_grad()

    def _exchange_gradients_in_last_micro_batch(self) -> None:
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = self._micro_batch == self._plan.accumulation - 1

    def _wishes(self) -> tuple[float, ...]:
        """What this replica wants all to do from this step on, as `_Flags` takes it."""
        leave = self._leave_signal is not None and self._leave_signal.received is not None
        if not self.is_main:
            return (float(leave), 0.0, 0.0, 0.0)
        leave = leave or self._telemetry.generation_is_over
        now = time.monotonic()
        save = self._folder is not None and now - self._saved_at >= self._settings.checkpoint_interval
        plan = now - self._planned_at >= REPLAN_INTERVAL
        slow = now - self._stepped_at >= SLOW_STEP
        return (float(leave), float(save), float(plan), float(slow))

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
            # What was wished for before is done; it must not ride on the next all-reduce too.
            self.adascale.flags = self._wishes()
            self._telemetry.step_timer.pause()

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
        self._begin_step()
        self._position.epoch += 1
        if self.finished:
            self._save_the_end()
            return
        if self._flags.plan:
            self._flags.plan = False
            self._planned_at = time.monotonic()
            self._choose_plan()
            self._apply_plan()
            self.adascale.flags = self._wishes()
        self._between_steps()

    def _save_the_end(self) -> None:
        if self._end_is_saved:
            return
        self._telemetry.report(self._plan, self._position, self.adascale)
        self._save()
        self._end_is_saved = True
        if self._leave_signal is not None and self._generation == 0:
            # What follows, an evaluation perhaps, has no step after which it could be left.
            self._leave_signal.close()

    def _choose_plan(self) -> None:
        """Rank 0 chooses the local batch size and accumulation, and all take them."""
        plan = self._plan
        if self.is_main:
            model = StepTimeModel.fit(self._telemetry.step_timer.step_times())
            plan = plan_batch(
                self._bounds,
                self.replicas,
                estimate=self.adascale.estimate,
                throughput=model.throughput if model is not None and model.separates_batch_size else None,
                efficiency_target=self._settings.efficiency_target,
            )
        local_bsz, accumulation = self._peers.numbers_from_main([plan.local_bsz, plan.accumulation])
        plan = BatchPlan(self.replicas, local_bsz, accumulation)
        if plan != self._plan:
            self._plan = plan
            self._plan_acknowledged = False

    def _apply_plan(self) -> None:
        self.adascale.set_num_gradients_to_accumulate(self._plan.accumulation)
        self.adascale.update_scale(self._plan.scale(self._bounds), self.replicas)
        self._begin_step()

    # -- leaving ----------------------------------------------------------------------------------------

    def _leave(self) -> NoReturn:
        """Save, and end the program so that it can go on elsewhere."""
        self._telemetry.report(self._plan, self._position, self.adascale)
        self._save()
        self._close()
        received = self._leave_signal.received if self._leave_signal is not None else None
        if self._generation > 0 or received is None:
            self._exit.leave(EXIT_REENTRY)
        if self.is_main:
            step = self._position.step
            print(f"adascale: saved at step {step}; the same command goes on from there", flush=True)
        self._exit.leave(128 + received)

    def _close(self) -> None:
        self._telemetry.close()
        if self._joined and dist.is_initialized():
            self._joined = False
            dist.destroy_process_group()

    # -- state ------------------------------------------------------------------------------------------

    def _restore_random_state(self) -> None:
        """Last of all on the way in, so that nothing there draws from what was saved."""
        if self._random_state is not None:
            rng_state.restore(self._random_state)
            self._random_state = None

    def _save(self) -> None:
        """Save the state: rank 0 writes, with the random states of all; all learn whether it went well.

        Raises:
            CheckpointError: on all replicas, if it could not be written.
        """
        if self._folder is not None:
            # Where a checkpoint was just restored, nothing has been drawn from its random state yet.
            states = self._peers.gather(self._random_state or rng_state.capture())
            failure = self._write(self._folder, states) if self.is_main else None
            failure = self._peers.from_main(failure)
            if failure is not None:
                self._saved_at = time.monotonic()
                raise CheckpointError(failure)
        self._saved_at = time.monotonic()

    def _write(self, folder: CheckpointFolder, random_states: list[dict[str, Any]]) -> str | None:
        """Write the checkpoint; what went wrong, if anything did."""
        position = self._position
        standing = Standing(
            step=position.step,
            progress=position.progress,
            epoch=position.epoch,
            replicas=self.replicas,
            generation=self._generation,
            finished=self.finished,
            incarnation=self._incarnation,
        )
        state = {
            "program": self._require_entered().state_dict(),
            "position": position.state_dict(),
            "plan": [self._plan.replicas, self._plan.local_bsz, self._plan.accumulation],
            "batch_size": self._bounds.batch_size,
            "samples": self._stream.length if self._stream is not None else None,
            "seed": self._seed,
            "step_times": self._telemetry.step_timer.state_dict(),
            "random": random_states,
        }
        try:
            self._manifest = folder.save(state, standing, self._result)
        except CheckpointError as error:
            return str(error)
        return None

    def _load(self) -> tuple[dict[str, Any], Manifest] | None:
        """The newest whole checkpoint, the same on all replicas: rank 0 finds it, the others read it."""
        if self._folder is None:
            return None
        loaded, number, failure = None, None, None
        if self.is_main:
            try:
                loaded = self._folder.load()
            except CheckpointError as error:
                failure = str(error)
            number = loaded[1].number if loaded is not None else None
        number, failure = self._peers.from_main((number, failure))
        if failure is not None:
            raise CheckpointError(failure)
        return loaded if number is None or self.is_main else self._folder.load(number)

    def _restore(self, state: dict[str, Any], manifest: Manifest) -> None:
        if state["batch_size"] != self._bounds.batch_size:
            raise CheckpointError(
                f"the checkpoint has batch_size {state['batch_size']}, now it is {self._bounds.batch_size}: "
                "progress counts steps at batch_size, so it cannot change. Put it back, or give another "
                "checkpoint folder"
            )
        self._require_entered().load_state_dict(state["program"])
        self._position = TrainingProgress.from_state_dict(state["position"])
        self._seed = state["seed"]
        if state["samples"] is not None:
            self._stream = SampleStream(state["samples"], self._seed)
        self._telemetry.step_timer.load_state_dict(state["step_times"])
        if self.rank < len(state["random"]):
            self._random_state = state["random"][self.rank]
        self._manifest, self._result = manifest, dict(manifest.result)
        before = BatchPlan(*state["plan"])
        choice = batch_choice(self._bounds, self.replicas)
        allowed = before.local_bsz in choice.local_bsz
        if allowed and before == BatchPlan(self.replicas, before.local_bsz, choice.accumulation):
            self._plan = before
        else:
            self._choose_plan()


@dataclass
class _Flags:
    """What the replicas have agreed to do."""

    leave: bool = False
    save: bool = False
    plan: bool = False
    """Choose the batch size anew."""
    slow: bool = True
    """Agree on each step: steps take so long that a few of them are too long to wait."""

    def add(self, wishes: tuple[float, ...] | None) -> None:
        """Take up the sum of all replicas' wishes, if they were exchanged on this step."""
        if wishes is not None:
            leave, save, plan, slow = wishes
            self.leave = self.leave or leave > 0
            self.save = self.save or save > 0
            self.plan = self.plan or plan > 0
            self.slow = slow > 0


def _device(asked: torch.device | str | None, local_rank: int) -> torch.device:
    if asked is not None:
        device = torch.device(asked)
        if device.type != "cuda" or device.index is not None:
            return device
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))


def _pair(bounds: Sequence[int] | None) -> tuple[int, int] | None:
    """The bounds as `BatchBounds` takes them, which also says what is wrong with them."""
    return None if bounds is None else tuple(bounds)  # type: ignore[return-value]


def _import_what_optimizers_import() -> None:
    """Make a first optimizer, which imports much of torch's compiler, while there is time to wait."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
