"""What a trainer has: its job, the replica before the program passes its model, and what the loop uses."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from adascale_core.placement.replica_gpus import describe_unused_gpus
from adascale_worker.batches.feed import DataFeed
from adascale_worker.batches.planning import BatchPlanner
from adascale_worker.errors import CheckpointError, WorkerError
from adascale_worker.gradients.step_failure import kind_of
from adascale_worker.membership.links import AgentChannel
from adascale_worker.membership.process_group import ReplicaGroup, ReplicaProcesses
from adascale_worker.process import environment
from adascale_worker.process.device import select_device
from adascale_worker.process.environment import TrainerSettings, resolve_settings
from adascale_worker.process.exit import ProcessExit
from adascale_worker.process.shutdown_request import ShutdownRequest
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.reporting.reports import Reporter
from adascale_worker.reporting.time_spent import TimeSpent
from adascale_worker.reporting.trackers import Tracker
from adascale_worker.state.schedule import Checkpointing
from adascale_worker.state.state import SnapshotMemory
from adascale_worker.state.store import CheckpointInfo

if TYPE_CHECKING:
    from adascale_worker.gradients.accumulation import Accumulation
    from adascale_worker.gradients.step_division import StepDivision
    from adascale_worker.gradients.step_failure import StepFailure
    from adascale_worker.gradients.step_times import StepTimes
    from adascale_worker.loop.agreement import LoopDepartures
    from adascale_worker.loop.evaluation import EvaluationSequence
    from adascale_worker.loop.failures import Failures
    from adascale_worker.loop.generations import Generations
    from adascale_worker.loop.steps import Steps, StepUndo
    from adascale_worker.program.parts import Optimizers, ProgramParts
    from adascale_worker.program.program_loop import ProgramLoop
    from adascale_worker.program.weight_checks import FiniteWeights, WeightComparison
    from adascale_worker.reporting.reports import Telemetry
    from adascale_worker.state.program import ProgramState
    from adascale_worker.state.state import State


class Job:
    """The settings of a job, and its end."""

    def __init__(
        self,
        arguments: environment.JobSettings,
        settings: TrainerSettings,
        progress: TrainingProgress,
        group: ReplicaGroup,
        incarnation: int,
    ) -> None:
        self.arguments = arguments
        """Those of the program."""
        self.settings = settings
        """Those that are used now."""
        self._progress = progress
        self._group = group
        self._incarnation = incarnation

    def set_epochs(self, epochs: int) -> None:
        """Finish training after this number of epochs, which the program sets later than other arguments."""
        self.arguments = replace(self.arguments, epochs=epochs)
        self.settings = replace(self.settings, epochs=epochs)

    def adopt(self, environ: Mapping[str, str | None]) -> None:
        """Use the settings of a generation: the bounds of the job may have changed."""
        environment.apply_settings(os.environ, environ)
        batch_size = self.settings.bounds.batch_size
        settings = resolve_settings(self.arguments, environment.read_job_settings(os.environ))
        if settings.bounds.batch_size != batch_size and self._progress.step > 0:
            raise WorkerError(
                f"batch_size has changed from {batch_size} to {settings.bounds.batch_size}, but progress "
                f"counts steps at batch_size: set it back to {batch_size}, or start from scratch"
            )
        counts_samples = settings.train_samples is not None
        if self._progress.step == 0:
            self._progress.counts_samples = counts_samples
        elif self._progress.counts_samples != counts_samples:
            raise WorkerError(
                f"train_samples was {self.settings.train_samples} and is now {settings.train_samples}, but "
                "progress counts samples with it, and gains without: set it as before, to any number, or "
                "start from scratch"
            )
        self.settings = settings

    def limit_local_bsz(self, limit: int | None) -> None:
        """Let no local batch have more than `limit` samples, because a larger one does not fit."""
        self.settings = replace(self.settings, bounds=self.settings.bounds.with_limit(limit))

    @property
    def finished(self) -> bool:
        """Whether the program has finished training, or all requested steps or epochs are done."""
        settings, progress = self.settings, self._progress
        if progress.finish_reason is not None:
            return True
        if settings.train_samples is not None:
            # The steps are rounded up, and a larger batch may end between two of them.
            return self._samples >= settings.train_samples
        if settings.scale_invariant_steps is not None:
            return progress.progress >= settings.scale_invariant_steps
        return settings.epochs is not None and progress.epoch >= settings.epochs

    @property
    def _samples(self) -> int:
        """The samples so far, if progress counts samples."""
        return round(self._progress.progress * self.settings.bounds.batch_size)

    @property
    def unfinished(self) -> str | None:
        """How far training is from its end, for a message; None if it is finished or has no required end."""
        settings, progress = self.settings, self._progress
        if self.finished:
            return None
        if settings.scale_invariant_steps is not None:
            steps = settings.scale_invariant_steps
            if settings.train_samples is not None:
                return f"{self._samples:,} of {settings.train_samples:,} samples"
            return f"progress {progress.progress:,.0f} of {steps:,} scale-invariant steps"
        if settings.epochs is not None:
            return f"epoch {progress.epoch} of {settings.epochs}"
        return None

    def target(self, feed: DataFeed) -> float | None:
        """Return the progress at which training ends with a data set; None if it is unknown.

        It is unknown if the program decides, or after epochs of a stream whose first pass has not ended.
        """
        settings = self.settings
        if settings.scale_invariant_steps is not None or settings.epochs is None:
            return settings.scale_invariant_steps
        target = feed.progress_at(settings.epochs)
        return target if math.isfinite(target) else None

    def checkpoint_info(self) -> CheckpointInfo:
        """Return the description of a checkpoint of the present state."""
        progress = self._progress
        return CheckpointInfo(
            step=progress.step,
            progress=progress.progress,
            epoch=progress.epoch,
            replicas=self._group.replicas,
            generation=self._group.generation,
            finished=self.finished,
            saved_at=time.time(),
            incarnation=self._incarnation,
            finish_reason=progress.finish_reason or "",
        )


class Replica:
    """What a trainer has before the program passes its model. Its process group is formed here, unless an
    agent controls the membership."""

    def __init__(
        self,
        arguments: environment.JobSettings,
        agent: environment.AgentAccess,
        device: torch.device | str | None,
        seed: int,
        process_exit: ProcessExit,
        tracker: Tracker | None,
    ) -> None:
        environ = os.environ
        assignment = environment.read_assignment(environ, has_agent=agent.exists)
        processes = assignment.processes
        self.device = select_device(device, assignment.local_rank)
        if agent.channel is not None and self.device.type == "cuda" and processes is None:
            unused = describe_unused_gpus(torch.cuda.device_count())
            if unused is not None:
                print(f"adascale: {unused}", file=sys.stderr, flush=True)
        self.accelerator = environment.read_accelerator(environ) or kind_of(self.device)
        """The type of accelerator, under which measurements are stored."""
        timeout = environment.read_peer_timeout(environ) if agent.exists else math.inf
        own = None if processes is None else ReplicaProcesses(assignment.process, processes, self.device)
        self.group = ReplicaGroup(assignment, self.device, own, is_elastic=agent.exists, peer_timeout=timeout)
        if type(seed) is not int or not -(2**63) <= seed < 2**64:
            raise WorkerError(f"ElasticTrainer got seed={seed!r}: it must be an integer of 64 bits")
        self.seed = seed
        settings = resolve_settings(arguments, environment.read_job_settings(environ))
        self.planner = BatchPlanner(settings.bounds, self.group, settings.efficiency)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not agent.exists:
            self.group.form_from_environment()
        elif self.group.has_mesh:
            self.group.form_replica_at(agent.replica_store)
        self.progress = TrainingProgress(counts_samples=settings.train_samples is not None)
        self.shutdown_request, self.process_exit = ShutdownRequest(), process_exit
        incarnation = environment.read_incarnation(environ)
        self.job = Job(arguments, settings, self.progress, self.group, incarnation)
        self.checkpointing = Checkpointing(
            settings.checkpoint_dir,
            settings.checkpoint_interval,
            self.group,
            lambda: self.shutdown_request.is_made,
        )
        self.snapshot_memory = (
            _open_snapshots(agent.snapshot_files) if processes is None and agent.exists else None
        )
        """In the memory of the agent."""
        self.channel = AgentChannel(agent.channel, agent.replica_store)
        self.spent = TimeSpent(self.channel.send)
        self.tracker = tracker
        """Gets the reports too."""
        self.run = _run_of_job(incarnation)
        """The id of the job's run in the tracker; None for any."""


class Context(Replica):
    """What the modules of the loop use: each extends it, and so has all of it as its own attributes.

    A module that is made before others gets these by `complete`, before training begins.
    """

    parts: ProgramParts
    loop: ProgramLoop
    program: ProgramState
    optimizer: Optimizers
    undo: StepUndo
    failures: Failures
    failure: StepFailure
    division: StepDivision
    times: StepTimes
    accumulation: Accumulation
    feed: DataFeed
    telemetry: Telemetry
    weights: FiniteWeights
    comparison: WeightComparison
    state: State
    generations: Generations
    departures: LoopDepartures
    evaluations: EvaluationSequence
    steps: Steps

    def __init__(self, known: Replica) -> None:
        vars(self).update(vars(known))

    def complete(self, known: Context) -> None:
        """Use what was made after this module."""
        vars(self).update({name: vars(known)[name] for name in Context.__annotations__})


def _open_snapshots(files: Sequence[str]) -> SnapshotMemory | None:
    """Return the agent's memory for copies of the state; None if there is none, or it cannot be used."""
    try:
        return SnapshotMemory(files) if files else None
    except CheckpointError as error:
        print(f"adascale: the agent keeps no copy of the state: {error}", flush=True)
        return None


def _run_of_job(incarnation: int) -> str | None:
    """Return the id of the job's run in a tracker, which all replicas of a new job compute; None for any."""
    service = environment.read_service(os.environ)
    if service is None:
        return None
    _, job_id = service
    # Without a time of creation the job is new on this machine, where all replicas have one token.
    distinct = str(incarnation) if incarnation else environment.read_secret(os.environ)
    return f"{job_id}-{hashlib.sha256(f'{job_id} {distinct}'.encode()).hexdigest()[:8]}"


def make_reporter() -> Reporter | None:
    """Return what posts reports to the metrics service; None without one."""
    service = environment.read_service(os.environ)
    return None if service is None else Reporter(*service)
