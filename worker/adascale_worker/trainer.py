"""The elastic trainer: a training loop that can stop at any step, save, and resume at another size.

    trainer = ElasticTrainer(batch_size=32, max_batch_size=512, local_bsz_bounds=(16, 128))
    state = trainer.program_reentry(model, optimizer, lr_scheduler)
    for epoch in trainer.epochs(10):
        for x, y in trainer.dataloader(dataset):
            ...  # zero_grad, forward, backward, optimizer.step(), as in any training loop

An agent that starts the program passes its rank and the job's settings in the environment. The trainer
reports the gain to the metrics service. When another generation of replicas begins, or replicas are lost, the
others continue in the same process and loop, with the state that they have in memory. Started by torchrun or
by hand, it works the same without a service.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from adascale_core.batch.plans import LocalBszBounds
from adascale_core.errors import AdaScaleError
from adascale_core.messages.channel import Exiting, Finished
from adascale_worker.adascale import AdaScale
from adascale_worker.batches.feed import require_evaluable
from adascale_worker.batches.order import Lengths, OrderFunction
from adascale_worker.errors import WorkerError, exit_code
from adascale_worker.loop.context import Replica
from adascale_worker.loop.evaluation import Evaluation, average
from adascale_worker.loop.training import DataLoop, Training
from adascale_worker.membership.links import AgentChannel
from adascale_worker.process import environment
from adascale_worker.process.download_lock import download_lock
from adascale_worker.process.environment import check_arguments, describe_differences
from adascale_worker.process.exit import ProcessExit
from adascale_worker.process.user_code import warn_user
from adascale_worker.program.hyperparameters import Choice, describe
from adascale_worker.program.parts import (
    Models,
    OptimizersByName,
    SchedulersByName,
    check_optimizer_parameters,
    program_parts,
)
from adascale_worker.program.patching import Scheduler
from adascale_worker.reporting.reports import plain_result, require_metrics
from adascale_worker.reporting.trackers import Tracker, make_tracker
from adascale_worker.state.program import Stateful, require_choice, require_stateful
from adascale_worker.state.weights import BestWeights

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ReentryState:
    """Where the program resumes training.

    Args:
        epoch: the epoch to continue with, from 0.
        step: optimizer steps so far.
        progress: steps at `batch_size` so far, see `ElasticTrainer.progress`.
        restored: whether training continues from a checkpoint, or from the state of other replicas.
    """

    epoch: int
    step: int
    progress: float
    restored: bool


class ElasticTrainer:
    """Trains one model elastically.

    The settings of an AdaScaleJob, from the environment, override the arguments. With a job file,
    `ElasticTrainer()` is enough. If a job file has another `batch_size` or another end of training, the
    difference is printed; that of the end is not if the program has read the end from
    `scale_invariant_steps` or `train_samples`.

    Under an agent, `program_reentry` waits until the replica's generation begins, and gets the state of
    training from the other replicas. Until then, `rank` and `replicas` are those that the agent expects. What
    needs a model raises a `WorkerError` before `program_reentry`.

    Args:
        batch_size: the global batch size that the learning rate was tuned for (B0), in samples.
        max_batch_size: upper bound of the global batch size, in samples. None: not bounded.
        local_bsz_bounds: (lower, upper) bounds of the batch on one replica, in samples. None: not bounded. An
            upper bound of "auto" is found in training: what fits into memory, up to `max_batch_size`.
        scale_invariant_steps: steps at `batch_size` after which training is finished.
        train_samples: samples after which training is finished, within a batch, in place of
            `scale_invariant_steps`. A step then adds its samples divided by `batch_size` to the progress, and
            not its gain (docs/adascale.md, "The length of training").
        epochs: epochs after which training is finished, if neither of these is set. If no end is set,
            training ends with the program.
        efficiency_target: gain / scale that a batch must reach while the throughput is unknown, in (0, 1];
            with `train_samples`, always. Default: 0.5; with `train_samples`, 0.8.
        checkpoint_dir: folder of the checkpoints, or URL of an object store such as s3://bucket/prefix.
            None: nothing is saved.
        checkpoint_interval: seconds between two checkpoints.
        max_nonfinite_steps: consecutive steps after which training fails if each leaves weights that are NaN
            or infinite. Default: 10. No checkpoint is saved with such weights.
        single_replica_gain: how the gain is measured on one replica without accumulation: "divided" or
            "consecutive" (docs/adascale.md, "One replica").
        max_gain: upper bound of the gain of a step, above 1 (docs/adascale.md, "A limit of the gain"). None:
            not bounded.
        seed: determines the order of samples, and together with the position in the data and the rank the
            random numbers of each step. A job that resumes continues with the seed of its checkpoint.
        device: device of the model. None: the replica's own GPU, or the CPU if there is no GPU.
        tracker: gets what rank 0 logs and measures: "tensorboard", "wandb" or "mlflow", or a `TensorBoard`,
            `WeightsAndBiases`, `MLflow` or other `Tracker` of `adascale.trackers`.

    Raises:
        InvalidJobError: an argument is out of range, the bounds contradict each other, or the number of
            replicas is not valid.
        EnvironmentVariableError: an environment variable has an invalid value.
    """

    def __init__(
        self,
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        local_bsz_bounds: Sequence[int | Literal["auto"]] | None = None,
        *,
        scale_invariant_steps: int | None = None,
        epochs: int | None = None,
        efficiency_target: float | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_interval: float | None = None,
        max_nonfinite_steps: int | None = None,
        single_replica_gain: Literal["divided", "consecutive"] = "divided",
        max_gain: float | None = None,
        train_samples: int | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        tracker: str | Tracker | None = None,
    ) -> None:
        self._process_exit = ProcessExit()
        self._made: Training | None = None
        """What `program_reentry` has made, also if it has failed then."""
        self._training: Training | None = None
        """The same, after the state of training was restored."""
        self._best_metric: str | None = None
        self._best_weights: BestWeights | None = None
        self._logged: set[str] = set()
        self._follows_steps = False
        """Whether the program has read the `scale_invariant_steps` or `train_samples` that are used."""
        arguments = environment.JobSettings(
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            local_bsz_bounds=_pair(local_bsz_bounds),
            scale_invariant_steps=scale_invariant_steps,
            epochs=epochs,
            efficiency_target=efficiency_target,
            checkpoint_dir=checkpoint_dir or None,
            checkpoint_interval=checkpoint_interval,
            max_nonfinite_steps=max_nonfinite_steps,
            single_replica_gain=single_replica_gain,
            max_gain=max_gain,
            train_samples=train_samples,
        )
        agent = environment.AgentAccess()
        try:
            agent = environment.take_agent_access(os.environ)
            made = make_tracker(tracker)
            self._replica = Replica(arguments, agent, device, seed, self._process_exit, made)
        except AdaScaleError as error:
            if agent.channel is not None:
                # A launcher in between may hide the exit code.
                AgentChannel(agent.channel).send(Exiting(exit_code(error)))
            self._process_exit.install()
            raise
        self.device = self._replica.device
        """The device of this replica's model and batches."""
        self._process_exit.before(self._release_at_exit)

    # -- properties -------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The index of this replica, from 0. It may change between two steps."""
        return self._replica.group.rank

    @property
    def replicas(self) -> int:
        """The number of replicas (K). It may change between two steps."""
        return self._replica.group.replicas

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and evaluates; of several processes of it, the first.

        Read this when it is needed, and keep what rank 0 has collected in an object that `program_reentry`
        registers: another replica may become rank 0 between two steps.
        """
        return self._replica.group.is_main

    @property
    def replica_group(self) -> torch.distributed.ProcessGroup:
        """The process group of the replicas, also of a single one, for collective calls of the program.

        Without processesPerReplica, this is torch's default process group. With it, that is the group of the
        replica's own processes, and this is the group of the processes with the same index in all replicas.
        Each generation has its own, so read this when it is needed. A collective call with a group of an
        earlier generation raises a `WorkerError`.

        Raises:
            WorkerError: under an agent, before `program_reentry`.
        """
        return self._replica.group.process_group

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of the processes of this replica, for `fully_shard(model, mesh=trainer.mesh)`.

        Shape (G,), of torch's default process group. It stays the same when the number of replicas changes.

        Raises:
            WorkerError: the job has no processesPerReplica.
        """
        group = self._replica.group
        if not group.has_mesh:
            raise WorkerError(
                "trainer.mesh is that of the processes of a replica, but the job does not set their number: "
                "set processesPerReplica in the job file, or ADASCALE_PROCESSES_PER_REPLICA without one"
            )
        return group.own.mesh

    @property
    def generation(self) -> int:
        """The number of the allocation that this trainer runs in; 0 without an agent."""
        return self._replica.group.generation

    @property
    def progress(self) -> float:
        """Steps at `batch_size` so far: the sum of gains; with `train_samples`, samples / `batch_size`."""
        if self._training is not None:
            self._training.program.rates.reads_progress = True
        return self._replica.progress.progress

    @property
    def steps(self) -> int:
        """Optimizer steps so far. A step in which replicas were lost is discarded, and does not count."""
        return self._replica.progress.step

    @property
    def samples(self) -> int:
        """Samples of the data that all replicas together have consumed so far, over all passes."""
        return self._replica.progress.consumed

    @property
    def scale_invariant_steps(self) -> int | None:
        """The progress at which training is finished, in steps at `batch_size`. None if not set.

        With `train_samples`, the steps in which these are trained, rounded up. A program should make its
        schedule with this number: a job file may have another one than the constructor got.
        """
        self._follows_steps = True
        return self._replica.job.settings.scale_invariant_steps

    @property
    def train_samples(self) -> int | None:
        """The samples after which training is finished. None if not set."""
        self._follows_steps = True
        return self._replica.job.settings.train_samples

    @property
    def finished(self) -> bool:
        """Whether all requested steps, samples or epochs are done, or `finish` has ended training.

        Always False if the program decides how long it trains, and has not called `finish`.
        """
        return self._replica.job.finished

    @property
    def batch_size(self) -> int:
        """The global batch size that the learning rate was tuned for (B0), in samples."""
        return self._replica.job.settings.bounds.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of the present step (a)."""
        return self._replica.planner.step_plan.accumulation

    @property
    def adascale(self) -> AdaScale:
        """The AdaScale optimizer around the program's own; of several, the one with the lowest gain."""
        return self._require_training().optimizer.slowest

    @property
    def begins_step(self) -> bool:
        """Whether the next backward pass is the first of its step.

        Read it before `backward()`. A step may begin again before it was complete, because replicas were lost
        or the batch did not fit into memory.
        """
        return self._require_training().accumulation.at_first_micro_batch

    @property
    def completes_step(self) -> bool:
        """Whether `optimizer.step()` changes the weights after the present micro-batch.

        Read it between `backward()` and `optimizer.step()`. If it is true, `.grad` is the mean gradient of
        the step; otherwise `.grad` is None.
        """
        return not self._require_training().steps.awaits_micro_batches

    @property
    def made_step(self) -> bool:
        """Whether the last `optimizer.step()` has changed the weights.

        False after a micro-batch that does not complete a step, a step that was discarded because replicas
        were lost, and a step that a GradScaler has skipped.
        """
        return self._require_training().steps.made_step

    def get_local_bsz(self) -> int:
        """Return the local batch size of the current epoch (b): samples per micro-batch on each replica.

        If a replica has several processes, this is the share of one of them. On one replica, some steps are
        divided into smaller micro-batches, to measure the gain (`single_replica_gain`).
        """
        return self._replica.planner.plan.local_bsz // self._replica.group.processes

    def weighted(self, loss: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
        """Return the loss of a micro-batch for `backward()`, if batches of the same size weigh differently.

        The gradient of a step is then sum(w g) / sum(w) over its micro-batches on all replicas, with their
        weights w and the gradients g of their losses: that of the whole batch, however it is divided.

            loss = cross_entropy(model(x), y, ignore_index=-1)  # a mean over the valid tokens
            trainer.weighted(loss, (y != -1).sum()).backward()

        Args:
            loss: of the present micro-batch, a mean; with a GradScaler, before `scaler.scale`.
            weight: the number that it is a mean over, at least 0. Reading a tensor waits for its device.

        Returns:
            `loss`, times a factor in proportion to `weight`.

        Raises:
            WorkerError: `weight` is negative or not finite, or the steps before had no weights. If only some
                of the losses of a step have a weight, or those of one micro-batch have different ones,
                `backward()` or `optimizer.step()` raises it.
        """
        return self._require_training().accumulation.weights.weighted(loss, weight)

    def mean_over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over the replicas, such as a metric of the present micro-batch.

        With processesPerReplica, over all of their processes.

        A collective call, at the same place in all data loops. If a replica is lost meanwhile, the others get
        their own values, and the present step is discarded.

        Args:
            value: of the same shape on all replicas.

        Returns:
            A tensor without a graph, of the type of `value`, or float32 if that is no floating-point type.
        """
        value = value.detach()
        value = value if value.is_floating_point() else value.float()
        mean = value.clone()
        return mean if average(self._require_training(), mean) else value.clone()

    def sum_over_replicas(self, **values: float) -> dict[str, float]:
        """Return the sums of numbers over all replicas, the same on all of them.

            sums = trainer.sum_over_replicas(loss=loss_sum, samples=samples)
            mean = sums["loss"] / sums["samples"]

        For logging, and for decisions that all replicas make alike. Call it on all replicas at the same
        place; with processesPerReplica, on all of their processes, whose numbers are added. It is no
        collective call: a replica that is lost meanwhile is left out.

        Args:
            values: numbers of this replica, by name.

        Raises:
            WorkerError: another replica has passed other names.
        """
        return self._require_training().evaluations.sum(values)

    @property
    def step_weight(self) -> float:
        """The sum of the weights of all micro-batches of the last step, on all replicas.

        Read it after `optimizer.step()`, if `made_step`. Without `weighted`, the weights are the numbers of
        samples.
        """
        weight = self._require_training().accumulation.weights.total
        plan = self._replica.planner.plan
        return float(plan.global_bsz) if weight is None else weight

    def log(self, **metrics: torch.Tensor | float) -> None:
        """Log values of a micro-batch, for the next report to the metrics service.

        A report has the mean of each metric since the last report on rank 0, or its last mean. `loss` is also
        on the progress bar. Does not synchronize with the device.

        Args:
            metrics: numbers, or tensors of any shape, whose mean is taken, by name: at most 16, the loss
                included.

        Raises:
            WorkerError: a value is something else, a name has other characters than letters, digits and _, or
                there are too many.
        """
        require_metrics(metrics, len(self._logged - set(metrics)))
        self._logged.update(metrics)
        training, best = self._training, self._best_weights
        if training is None:
            return
        training.telemetry.log(metrics)
        if best is not None and best.metric in metrics and self.is_main:
            value = float(torch.as_tensor(metrics[best.metric], dtype=torch.float64).detach().mean())
            best.offer(value, self.steps, training.parts.model.state_dict)

    def keep_best(self, metric: str, *, mode: Literal["min", "max"] = "min") -> None:
        """Keep the weights for which a metric had its best value, besides the newest checkpoints.

            trainer.keep_best("accuracy", mode="max")
            ...
                trainer.log(accuracy=evaluation.means["accuracy"])

        Whenever rank 0 logs a better value than ever before in this job, it copies the model's weights, and
        writes the copy in the background to `best-<step>-<id>.safetensors` in the folder of the checkpoints.
        Log the metric about once per epoch: reading the value of a tensor waits for its device.

        Args:
            metric: the name under which the program logs it.
            mode: whether the lowest ("min") or the highest ("max") value is the best.

        Raises:
            WorkerError: `mode` is something else, the name is not valid, or a metric was chosen before.
        """
        require_metrics({metric: 0.0}, 0)
        if mode not in ("min", "max"):
            raise WorkerError(f'trainer.keep_best() got mode={mode!r}: it must be "min" or "max"')
        if self._best_metric is not None:
            raise WorkerError(
                f"trainer.keep_best({metric!r}) was called after keep_best({self._best_metric!r}): the "
                "weights are kept for one metric"
            )
        if self._replica.group.has_mesh:
            raise WorkerError(
                "trainer.keep_best() does not support a model that is sharded over the processes of a "
                "replica (processesPerReplica): leave it out, and export the newest checkpoint"
            )
        self._best_metric = metric
        if not self._replica.checkpointing.enabled:
            warn_user(
                f"trainer.keep_best({metric!r}) keeps nothing, because there is no folder for checkpoints: "
                'pass ElasticTrainer(checkpoint_dir="checkpoints"); `adascale run` gives each job one'
            )
        self._best_weights = self._replica.checkpointing.best_weights(metric, mode)

    def report_result(self, **result: torch.Tensor | float | str) -> None:
        """Record the result of training, in the manifest of the last checkpoint.

        Args:
            result: numbers, tensors of one number, or texts, by name, e.g. accuracy=0.979.

        Raises:
            WorkerError: a value is something else.
            CheckpointError: the manifest cannot be written.
        """
        if self._training is not None:
            self._training.end_left_epoch()
        self._replica.checkpointing.report_result(plain_result(result))

    def download_lock(self, folder: str | Path) -> AbstractContextManager[bool]:
        """Return a context in which one process at a time uses a folder, for downloads before training.

            with trainer.download_lock("data"):
                dataset = CIFAR10("data", download=True)

        The first replica that enters downloads the files. Each of the others waits, and finds them. The lock
        is a file in the folder, for all processes that share it, also on a network file system with file
        locks. If a process ends inside, the next one enters.

        Args:
            folder: is created if it does not exist.

        Returns:
            A context manager. Its value is whether the last process inside was killed or had an error. Then
            files may be incomplete: delete them, unless the download checks them itself.

        Raises:
            WorkerError: the folder cannot be created, or written.
        """
        return download_lock(folder)

    # -- entry ------------------------------------------------------------------------------------------

    def program_reentry(
        self,
        model: torch.nn.Module | Models,
        optimizer: torch.optim.Optimizer | OptimizersByName,
        lr_scheduler: Scheduler | SchedulersByName | None = None,
        *,
        register: Mapping[str, Stateful] | None = None,
        hyperparameters: Choice = "checkpoint",
        begin_at: tuple[int, int] = (0, 0),
    ) -> ReentryState:
        """Make the program's model, optimizer and scheduler elastic, and restore the state of training.

        The state is that of the other replicas, if they train already, or else that of the last checkpoint.
        All objects are changed in place: `optimizer.step()` scales the learning rate by the gain and counts
        progress, and a scheduler that is stepped inside the data loop follows progress.

        Signal handlers are installed: SIGTERM (and, without an agent, Ctrl-C and SIGHUP) ends the process
        after the current step, with a checkpoint if no other replica keeps the state. A handler of the
        program for the same signal is called then. Without an agent and without a checkpoint folder, signal
        handlers are not changed.

        Args:
            model: on `trainer.device` already; or several by name.
            optimizer: over the model's parameters; one that `AdaScale` supports; or several by name.
            lr_scheduler: the only scheduler of that optimizer: an `LRScheduler`, or one that has
                `step_update(n)`, as those of timm; or several by the names of their optimizers.
            register: other objects to save and restore, by name.
            hyperparameters: which values are used if the program has changed the optimizer's or the
                scheduler's (lr, momentum, weight_decay, step_size, ...) since the checkpoint was saved: those
                of the "checkpoint" or of the "program". Differences are printed. The position in a schedule
                is the checkpoint's.
            begin_at: where a job begins that has no state yet: the epoch, and the scale-invariant steps that
                another run has made, whose weights, optimizer and scheduler the program has loaded.

        Returns:
            Where to resume training.

        Raises:
            CheckpointError: no intact checkpoint is left, or it was saved by another program.
            WorkerError: an argument has the wrong type, the model is data-parallel already, the scheduler
                belongs to another optimizer, the state of an object could not be loaded again, or
                `program_reentry` was called before.
            UnsupportedOptimizerError: AdaScale does not support the optimizer.
            ReplicaCheckError: the device computes wrong results, so this replica does not join the others.
        """
        self._process_exit.install()
        if self._training is not None:
            raise WorkerError(
                "program_reentry was called before: call it once per trainer. To train several models, pass "
                "them and their optimizers by name, program_reentry({name: model, ...}, {name: optimizer, "
                "...}). To save other objects, pass register={name: object}"
            )
        require_stateful(register or {})
        require_choice(hyperparameters)
        allows_shards = self._replica.group.has_mesh
        parts = program_parts(model, optimizer, lr_scheduler, allows_shards=allows_shards)
        check_optimizer_parameters(parts.model, parts, self.replicas)
        place: Any = begin_at
        is_pair = isinstance(place, tuple | list) and len(place) == 2
        if not is_pair or any(type(each) is not int or each < 0 for each in place):
            raise WorkerError(
                f"program_reentry got begin_at={begin_at!r}: it must be (epoch, steps), two integers of at "
                "least 0"
            )
        self._replica.progress.begin_at(*begin_at, self.batch_size)
        self._made = training = Training(self._replica, parts, dict(register or {}), hyperparameters)
        training.enter()
        arguments = self._replica.job.arguments
        if self._follows_steps:
            arguments = replace(arguments, scale_invariant_steps=None, train_samples=None)
        self._print_differences(arguments)
        self._print_restored(training, hyperparameters)
        training.install()
        self._training = training
        progress = self._replica.progress
        if self.finished:
            training.end_restored_training()
        return ReentryState(
            progress.epoch, progress.step, progress.progress, restored=training.state.was_restored
        )

    def _print_differences(self, arguments: environment.JobSettings) -> None:
        if self.is_main:
            for difference in describe_differences(arguments, environment.read_job_settings(os.environ)):
                print(f"adascale: {difference}", flush=True)

    def _print_restored(self, training: Training, hyperparameters: Choice) -> None:
        """Print what differs from the state that was restored."""
        if not (training.state.was_restored and self.is_main):
            return
        if training.program.differences:
            print(f"adascale: {describe(training.program.differences, hyperparameters)}", flush=True)
        if training.feed.seed != self._replica.seed:
            print(
                f"adascale: seed is {training.feed.seed} in the checkpoint, {self._replica.seed} in the "
                "program. Training continues with that of the checkpoint, whose order says which samples of "
                "a pass are left; to use another, start from scratch (adascale run --fresh, or another "
                "checkpoint folder)",
                flush=True,
            )

    def _require_training(self) -> Training:
        if self._training is None:
            # `program_reentry`, which installs it otherwise, was not called.
            self._process_exit.install()
            raise WorkerError(
                "the trainer has no model and no optimizer: call program_reentry(model, optimizer) first"
            )
        return self._training

    # -- training ---------------------------------------------------------------------------------------

    def epochs(self, epochs: int | None = None) -> Iterator[int]:
        """Return an iterator over the epochs that are left, which ends each of them.

            for epoch in trainer.epochs(10):
                for x, y in trainer.dataloader(dataset):
                    ...

        It begins with the current epoch, and ends when training is finished: after `epochs` epochs, or at
        `scale_invariant_steps` if these are set, or after `finish`. An epoch ends after the body of the loop,
        or when the body calls `step`; if the loop is left early, when another method of the trainer is
        called, or with the program.

        Args:
            epochs: after which training is finished, equal to the constructor's argument. None: that
                argument, or the `scale_invariant_steps`.

        Yields:
            The number of the epoch, from 0.

        Raises:
            InvalidJobError: `epochs` is not an integer of at least 1.
            WorkerError: `epochs` differs from that of the constructor or of an earlier call, neither they nor
                `scale_invariant_steps` are set, an epoch has had no batch, or the loop is inside another one.
            ReplicationError: this replica has left its data loop, and another has not.
            CheckpointError: the end of training cannot be saved.
        """
        training, settings = self._require_training(), self._replica.job.settings
        if epochs is not None:
            self._set_epochs(training, epochs)
        elif settings.scale_invariant_steps is None and settings.epochs is None:
            raise WorkerError(
                "trainer.epochs() does not know when training ends: pass the number of epochs, "
                "trainer.epochs(10), or set scale_invariant_steps or train_samples"
            )
        return training.epochs()

    def _set_epochs(self, training: Training, epochs: int) -> None:
        """Set the epochs after which training is finished, if they are not set."""
        job = self._replica.job
        if job.arguments.epochs is not None:
            if epochs != job.arguments.epochs:
                raise WorkerError(
                    f"trainer.epochs({epochs!r}) was called, but {job.arguments.epochs} epochs were set "
                    "before, by ElasticTrainer(epochs=...) or an earlier call: use the same number"
                )
            return
        argument = environment.JobSettings(epochs=epochs)
        check_arguments(argument)
        was_finished = job.finished
        job.set_epochs(epochs)
        self._print_differences(argument)
        if job.finished and not was_finished:
            training.end_restored_training()

    def dataloader(
        self,
        dataset: Sized | Iterable[Any] | Callable[[int], Iterable[Any]],
        *,
        shards: int | None = None,
        shuffle: bool = True,
        order: OrderFunction | None = None,
        lengths: Lengths | None = None,
        allow_other_length: bool = False,
        map: Callable[[Any], Any] | None = None,  # noqa: A002
        shuffle_buffer: int = 0,
        exactly_once: bool = True,
        **options: Any,
    ) -> Iterator[Any]:
        """Return an iterable over the rest of the current epoch, for a loop in each epoch.

        A data set without a length or without items by index is a stream (docs/training.md, "Streams"). If
        the data set or its iterator has `state_dict` and `load_state_dict`, a replica that begins inside a
        pass loads the last state, which is saved every 1,024 records; otherwise it reads the pass up to its
        place. The shards of a stream, those of `shards` and of a data set with `num_shards` and
        `shard(num_shards, index)`, are divided among the replicas. When fewer shards than replicas are left
        in a pass, all read these.

        Args:
            dataset: a data set with `__len__` and `__getitem__`, or an object whose `__iter__` begins a pass;
                with `shards`, a function.
            shards: the number of shards, if `dataset` is a function that gets the index of a shard, from 0,
                and returns its records, in the same order each time.
            shuffle: whether each pass has its own order: of the samples, or of the shards of a stream.
            order: a function of the number of the pass, from 0, and a seed of 63 bits for this pass, which
                returns the indices of its samples, as a list, a NumPy array or a tensor on the CPU; the same
                on all replicas, and again after a restart. Indices may be repeated or left out; each pass has
                the same number of them, and an epoch counts these. Not for a stream.
            lengths: the length of each sample, for batches of samples of similar length: the shuffled samples
                of each 50 * `batch_size` are sorted by length, and divided into groups of `batch_size`, which
                are shuffled. Not for a stream.
            allow_other_length: whether training that continues from a checkpoint may have a data set of
                another length than before, or of the same length with other samples. With another length, the
                present pass and epoch begin from the start, and a message says how many samples of the pass
                had been seen.
            map: for a stream, a function that makes a sample of a record, for this replica's own records
                only, in the worker processes if there are any.
            shuffle_buffer: for a stream, the number of records that are kept in memory and shuffled, in
                another order in each pass. 0: the order is that of the data set.
            exactly_once: for a stream, whether it is the same on all replicas and again after a restart. If
                it is not, each replica trains all that its own iterator yields.
            options: arguments for `torch.utils.data.DataLoader` (num_workers, collate_fn, pin_memory, ...).
                With persistent_workers=True, pass the same objects in each epoch.

        Yields:
            Micro-batches of `get_local_bsz()` samples.

        Raises:
            WorkerError: the current epoch has ended, and `step` was not called.
            DatasetError: the data set has neither a length and items by index nor `__iter__`, fewer samples
                than `max_batch_size` (or `batch_size`, if that is not set), or another length than before; an
                option would choose the batches; `order` or `lengths` is not as above; a stream is an
                iterator, or an argument is not for streams. In the loop: samples or records differ between
                replicas or from those before, or a pass of a stream has no records.
        """
        training, replica = self._require_training(), self._replica
        feed = training.feed
        training.end_left_epoch()
        training.require_epoch()
        load = feed.open(
            dataset,
            shards=shards,
            shuffle=shuffle,
            order=order,
            lengths=lengths,
            allow_other_length=allow_other_length,
            map=map,
            shuffle_buffer=shuffle_buffer,
            exactly_once=exactly_once,
            **options,
        )
        replica.progress.target = replica.job.target(feed)
        return DataLoop(lambda: training.batches(load))

    def evaluation(
        self,
        dataset: Sized,
        *,
        batch_size: int,
        model: torch.nn.Module | None = None,
        gathers: bool = False,
        **options: Any,
    ) -> Evaluation:
        """Return an iterator over batches for evaluation, which are divided among the replicas.

        Call it on all replicas, with `model.eval()` and without gradients, between two epochs, after
        training, or inside the data loop:

            evaluation = trainer.evaluation(test_set, batch_size=256)
            for x, y in evaluation:
                evaluation.add(correct=(model(x).argmax(1) == y).sum())
            accuracy = evaluation.means["correct"]

        Each batch of `batch_size` samples, the last of which may be smaller, is delivered to one replica; if
        that is lost meanwhile, or does not evaluate, to each of the others. The results are those of the
        whole data set, on all replicas.

        Args:
            dataset: has a length and items by index.
            batch_size: samples of a batch.
            model: the model that is evaluated, such as an averaged copy. Its buffers become those of rank 0.
                Default: the one passed to `program_reentry`; required if there are several.
            gathers: whether the program calls `evaluation.gather` for each batch, and not `evaluation.add`.
                The last batches, if they are fewer than the replicas, are then delivered on all of them.
            options: arguments for `torch.utils.data.DataLoader`.

        Raises:
            DatasetError: the data set has no length, no items by index, or no items; or an option would
                choose the batches.
            WorkerError: `batch_size` is not positive.
        """
        training = self._require_training()
        training.end_left_epoch()
        require_evaluable(dataset, options)
        if type(batch_size) is not int or batch_size < 1:
            raise WorkerError(
                f"trainer.evaluation() got batch_size={batch_size!r}: it must be an integer of at least 1"
            )
        evaluations, models = training.evaluations, training.parts.models
        if model is None:
            if len(models) > 1:
                raise WorkerError(
                    "trainer.evaluation() needs model=, the model that is evaluated, because "
                    f"program_reentry got {len(models)} models"
                )
            model = models[0]
        return Evaluation(
            dataset,
            batch_size,
            model,
            evaluations.next(),
            options,
            evaluations.evaluating,
            gathers=gathers,
        )

    def step(self, epoch: int) -> None:
        """End the epoch `epoch`. Call it after the data loop of each epoch; a loop over `epochs` does it.

        If the program leaves the data loop before its end, all replicas have to leave it after the same step.

        Chooses the local batch size again, and saves the end of training when all scale-invariant steps or
        epochs are done.

        Args:
            epoch: number of the current epoch, from 0.

        Raises:
            WorkerError: `epoch` is not the current epoch or has had no batch.
            ReplicationError: this replica has left its data loop, and another has not.
            CheckpointError: the end of training cannot be saved.
        """
        self._require_training().end_epoch(epoch)

    def finish(self, reason: str) -> None:
        """End training before all requested steps or epochs are done, for example because of early stopping.

        Saves the end of training. `trainer.finished` is then true, and the data loop ends: on one replica at
        once, on several after one of the next steps, the same on all, if any of them has called this. A
        program that leaves its loop at once has to call it on all replicas after the same step, or else
        fails. If a replica has several processes, all of them call it.

        Args:
            reason: shown in the result of the job.

        Raises:
            CheckpointError: the end of training cannot be saved.
        """
        training = self._require_training()
        training.end_left_epoch()
        training.finish(reason)

    def close(self) -> None:
        """Post outstanding reports, destroy the process group, and restore what the trainer has replaced.

        That is: methods of the program's objects, which another trainer may then take, signal handlers and
        `sys.excepthook`. At the end of the process this is not needed. May be called again.
        """
        replica = self._replica
        self._stop_writing()
        if self._made is not None:
            self._made.close()
        replica.group.close()
        replica.shutdown_request.uninstall()
        self._process_exit.uninstall()
        if not replica.group.is_elastic:
            self._process_exit.forget()

    def _release_at_exit(self) -> None:
        """Do what the end of the process requires.

        A program that ends before its training does fails: by itself it would exit with code 0.
        """
        replica, process_exit = self._replica, self._process_exit
        if self._made is not None:
            self._made.failures.watches_steps = False
        if self._training is not None and process_exit.code is None and not process_exit.failed:
            failure = self._training.end_of_program()
            if failure is not None:
                print(f"adascale: {failure}", file=sys.stderr)
                process_exit.code = exit_code(failure)
            else:
                replica.channel.send(Finished())
        replica.channel.send(Exiting(process_exit.status))
        self._stop_writing()
        replica.group.destroy_before_finalization()

    def _stop_writing(self) -> None:
        """Write and post what is outstanding, and leave the other members."""
        if self._best_weights is not None:
            self._best_weights.close()
        self._replica.checkpointing.close()
        if self._made is not None:
            self._made.leave()


def _pair(bounds: Sequence[int | Literal["auto"]] | None) -> LocalBszBounds | None:
    """Return the bounds as a tuple; `BatchBounds` refuses what is not a pair, and checks its items."""
    return tuple(bounds) if isinstance(bounds, Sequence) else bounds  # type: ignore[return-value]
