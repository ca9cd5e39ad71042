"""What a trainer has: before the program passes its model, with it, and what the modules of the loop use."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from adascale_client import MetricsServiceClient
from adascale_core.names import ENV_ADDRESS
from adascale_core.placement.replica_gpus import describe_unused_gpus
from adascale_worker.batches.planning import BatchPlanner
from adascale_worker.errors import WorkerError
from adascale_worker.gradients.step_failure import kind_of
from adascale_worker.loop.job import Job
from adascale_worker.membership.agent_channel import AgentChannel
from adascale_worker.membership.generations import AgentConnection, FollowerChannel
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.membership.replica_processes import ReplicaProcesses
from adascale_worker.process import environment
from adascale_worker.process.device import select_device
from adascale_worker.process.environment import listen, resolve_settings
from adascale_worker.process.exit import ProcessExit
from adascale_worker.process.shutdown_request import ShutdownRequest
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.reporting.reports import Reporter
from adascale_worker.reporting.trackers import RunIdentity, Tracker
from adascale_worker.state.schedule import Checkpointing
from adascale_worker.state.snapshot_memory import NoSnapshotMemoryError, SnapshotMemory

if TYPE_CHECKING:
    from adascale_worker.batches.feed import DataFeed
    from adascale_worker.gradients.accumulation import Accumulation
    from adascale_worker.gradients.step_division import StepDivision
    from adascale_worker.gradients.step_failure import StepFailure
    from adascale_worker.gradients.step_times import StepTimes
    from adascale_worker.gradients.trained_models import ModelBuffers
    from adascale_worker.loop.agreement import FinishRequest, LoopDepartures
    from adascale_worker.loop.evaluation import EvaluationSequence
    from adascale_worker.loop.failures import MemoryShortage
    from adascale_worker.loop.step_undo import StepUndo
    from adascale_worker.membership.generations import Membership
    from adascale_worker.program.optimizers import Optimizers
    from adascale_worker.program.parts import ProgramParts
    from adascale_worker.program.program_loop import ProgramLoop
    from adascale_worker.program.weight_checks import FiniteWeights, WeightComparison
    from adascale_worker.reporting.reports import Telemetry
    from adascale_worker.state.program import ProgramState
    from adascale_worker.state.state import State


@dataclass(eq=False, kw_only=True)
class Replica:
    """What a trainer has before the program passes its model."""

    device: torch.device
    seed: int
    group: ReplicaGroup
    job: Job
    progress: TrainingProgress
    planner: BatchPlanner
    checkpointing: Checkpointing
    snapshot_memory: SnapshotMemory | None  # in the memory of the agent
    agent: AgentConnection | None  # None without an agent
    accelerator: str  # the type of accelerator, under which measurements are stored
    tracker: Tracker | None  # gets the reports too
    run: RunIdentity  # in the tracker
    shutdown_request: ShutdownRequest
    process_exit: ProcessExit

    @property
    def channel(self) -> AgentChannel | None:
        """The channel of the agent; None without one."""
        return None if self.agent is None else self.agent.channel


@dataclass(eq=False, kw_only=True)
class TrainedReplica(Replica):
    """A replica with what the program has passed, and how its gradients are computed."""

    parts: ProgramParts
    loop: ProgramLoop
    program: ProgramState
    optimizer: Optimizers
    undo: ModelBuffers | StepUndo
    shortage: MemoryShortage
    failure: StepFailure
    division: StepDivision
    times: StepTimes
    accumulation: Accumulation


@dataclass(eq=False, kw_only=True)
class Context(TrainedReplica):
    """What the modules of the loop use: they extend it."""

    feed: DataFeed
    telemetry: Telemetry
    weights: FiniteWeights
    comparison: WeightComparison
    state: State
    membership: Membership | None  # None without an agent
    departures: LoopDepartures
    evaluations: EvaluationSequence
    finish_request: FinishRequest


def make_replica(
    arguments: environment.JobSettings,
    channel: socket.socket | None,
    replica_store: str | None,
    snapshot_files: Sequence[str],
    device: torch.device | str | None,
    seed: int,
    process_exit: ProcessExit,
    tracker: Tracker | None,
) -> Replica:
    """Make the parts of a trainer that need no model, and form its process group unless an agent does."""
    environ = os.environ
    processes = environment.read_processes(environ)
    has_agent = channel is not None or replica_store is not None
    assignment, process = (
        environment.read_agent_assignment(environ) if has_agent else environment.read_assignment(environ),
        0,
    )
    if processes is not None and has_agent:
        process = environment.read_process(environ, processes)
    elif processes is not None:
        assignment, process = environment.divide_into_replicas(assignment, processes)
    selected = select_device(device, process if has_agent else assignment.local_rank)
    if channel is not None and selected.type == "cuda" and processes is None:
        unused = describe_unused_gpus(torch.cuda.device_count())
        if unused is not None:
            print(f"adascale: {unused}", file=sys.stderr, flush=True)
    accelerator = environment.read_accelerator(environ) or kind_of(selected)
    timeout = environment.read_peer_timeout(environ) if has_agent else None
    own = None if processes is None else ReplicaProcesses(process, processes, selected)
    group = ReplicaGroup(assignment, selected, own, is_elastic=has_agent, peer_timeout=timeout)
    if type(seed) is not int or not -(2**63) <= seed < 2**64:
        raise WorkerError(f"ElasticTrainer got seed={seed!r}: it must be an integer of 64 bits")
    settings = resolve_settings(arguments, environment.read_job_settings(environ))
    planner = BatchPlanner(settings.bounds, group, settings.efficiency)
    if selected.type == "cuda":
        torch.cuda.set_device(selected)
    if not group.is_elastic:
        group.form_from_environment()
    elif group.has_mesh:
        group.form_replica_at(replica_store)
    progress = TrainingProgress(counts_samples=settings.train_samples is not None)
    shutdown_request = ShutdownRequest()
    incarnation = environment.read_incarnation(environ)
    checkpointing = Checkpointing(
        settings.checkpoint_dir, settings.checkpoint_interval, group, lambda: shutdown_request.is_made
    )
    agent = None
    if timeout is not None:
        listener = listen(environ.get(ENV_ADDRESS, "127.0.0.1"))
        secret = environment.read_secret(environ)
        connected = AgentChannel(channel) if channel is not None else FollowerChannel(str(replica_store))
        agent = AgentConnection(connected, listener, secret, timeout, accelerator)
    return Replica(
        device=selected,
        seed=seed,
        group=group,
        job=Job(arguments, settings, progress, group, incarnation),
        progress=progress,
        planner=planner,
        checkpointing=checkpointing,
        snapshot_memory=_open_snapshots(snapshot_files) if processes is None and has_agent else None,
        agent=agent,
        accelerator=accelerator,
        tracker=tracker,
        run=RunIdentity(_run_of_job(incarnation)),
        shutdown_request=shutdown_request,
        process_exit=process_exit,
    )


def _open_snapshots(files: Sequence[str]) -> SnapshotMemory | None:
    """Return the agent's memory for copies of the state; None if there is none, or it cannot be used."""
    try:
        return SnapshotMemory(files) if files else None
    except NoSnapshotMemoryError as error:
        print(f"adascale: the agent keeps no copy of the state: {error}", flush=True)
        return None


def _run_of_job(incarnation: int) -> str | None:
    """Return the id of the job's run in a tracker, which all replicas of a new job compute; None for any."""
    service = environment.read_service(os.environ)
    if service is None:
        return None
    # Without a time of creation the job is new on this machine, where all replicas have one token.
    distinct = str(incarnation) if incarnation else environment.read_secret(os.environ)
    return f"{service.job_id}-{hashlib.sha256(f'{service.job_id} {distinct}'.encode()).hexdigest()[:8]}"


def make_reporter() -> Reporter | None:
    """Return what posts reports to the metrics service; None without one."""
    service = environment.read_service(os.environ)
    if service is None:
        return None
    client = MetricsServiceClient(service.url, service.token, service.token_file, ca_file=service.ca_file)
    return Reporter(client, service.job_id)
