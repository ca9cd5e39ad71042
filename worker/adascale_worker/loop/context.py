"""What the modules of the loop have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adascale_worker.batches.feed import DataFeed
    from adascale_worker.batches.planning import BatchPlanner
    from adascale_worker.loop.agreement import FinishRequest
    from adascale_worker.loop.exchange import EvaluationSequence
    from adascale_worker.loop.failures import MemoryShortage
    from adascale_worker.loop.job import Job
    from adascale_worker.loop.program_loop import LoopDepartures, ProgramLoop
    from adascale_worker.loop.steps import StepStrategy
    from adascale_worker.membership.agent_channel import AgentChannel
    from adascale_worker.membership.generations import Membership
    from adascale_worker.membership.process_group import ReplicaGroup
    from adascale_worker.process.exit import ProcessExit
    from adascale_worker.process.shutdown_request import ShutdownRequest
    from adascale_worker.program.weight_checks import WeightComparison
    from adascale_worker.reporting.progress import TrainingProgress
    from adascale_worker.reporting.reports import Telemetry
    from adascale_worker.state.program import ProgramState
    from adascale_worker.state.schedule import Checkpointing
    from adascale_worker.state.state import State


@dataclass(eq=False, kw_only=True)
class Context:
    """The doors of the other rooms, and the records of where the program and its training are.

    Modules of the loop extend it.
    """

    job: Job
    group: ReplicaGroup
    membership: Membership | None  # None without an agent
    channel: AgentChannel | None  # None without an agent
    process_exit: ProcessExit
    shutdown_request: ShutdownRequest
    steps: StepStrategy
    loop: ProgramLoop
    departures: LoopDepartures
    evaluations: EvaluationSequence
    finish_request: FinishRequest
    comparison: WeightComparison
    program: ProgramState
    progress: TrainingProgress
    planner: BatchPlanner
    feed: DataFeed
    telemetry: Telemetry
    state: State
    checkpointing: Checkpointing
    shortage: MemoryShortage
