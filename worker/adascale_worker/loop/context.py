"""What the modules of the loop have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adascale_worker.loop.replica import Replica

if TYPE_CHECKING:
    from adascale_worker.batches.feed import DataFeed
    from adascale_worker.gradients.accumulation import Accumulation
    from adascale_worker.gradients.step_division import StepDivision
    from adascale_worker.gradients.step_failure import StepFailure
    from adascale_worker.gradients.step_times import StepTimes
    from adascale_worker.gradients.trained_models import ModelBuffers
    from adascale_worker.loop.agreement import FinishRequest
    from adascale_worker.loop.departures import LoopDepartures
    from adascale_worker.loop.exchange import EvaluationSequence
    from adascale_worker.loop.failures import MemoryShortage
    from adascale_worker.loop.several_optimizers import StepUndo
    from adascale_worker.membership.generations import Membership
    from adascale_worker.program.optimizers import Optimizers
    from adascale_worker.program.parts import OtherOptimizers, OtherParallelism, ProgramParts
    from adascale_worker.program.program_loop import ProgramLoop
    from adascale_worker.program.weight_checks import FiniteWeights, WeightComparison
    from adascale_worker.reporting.reports import Telemetry
    from adascale_worker.state.program import ProgramState
    from adascale_worker.state.state import State


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
    other_parallelism: OtherParallelism
    other_optimizers: OtherOptimizers


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
