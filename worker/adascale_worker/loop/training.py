"""The one place where the parts of a trainer are made, each with the parts that it uses.

`replica.py` makes those that need no model, before the program passes it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adascale_core.names import ENV_JOINS_OTHERS
from adascale_worker.batches.feed import DataFeed
from adascale_worker.errors import ReplicaCheckError, WorkerError
from adascale_worker.gradients.accumulation import Accumulation, BackwardGuard
from adascale_worker.gradients.loss_scaling import UnregisteredScaler, patch_scaler, scaler_of
from adascale_worker.gradients.micro_batch_weights import MicroBatchWeights
from adascale_worker.gradients.optimizer_gradients import OptimizerGradients
from adascale_worker.gradients.sharded import ShardedWeights, require_sharded
from adascale_worker.gradients.step_division import StepDivision
from adascale_worker.gradients.step_failure import StepFailure
from adascale_worker.gradients.trained_models import TrainedModels
from adascale_worker.loop.agreement import FinishRequest, StepAgreement
from adascale_worker.loop.context import Context
from adascale_worker.loop.ending import Ending
from adascale_worker.loop.exchange import EvaluationSequence, ProgramCollectives, ReplicaSums
from adascale_worker.loop.failures import Failures, MemoryShortage
from adascale_worker.loop.generations import Generations
from adascale_worker.loop.held_state import ModelBuffers, StepUndo
from adascale_worker.loop.one_optimizer import OneOptimizer
from adascale_worker.loop.program_loop import LoopDepartures, ProgramLoop
from adascale_worker.loop.replica import Replica, make_reporter
from adascale_worker.loop.several_optimizers import SeveralOptimizers
from adascale_worker.loop.step_watchdog import StepWatchdog
from adascale_worker.loop.steps import StepCounter, StepParts, StepStrategy
from adascale_worker.loop.training_loop import EpochLoops, TrainingLoop
from adascale_worker.membership.generations import (
    AgentConnection,
    FollowingMembership,
    Membership,
)
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process import environment
from adascale_worker.process.device import find_fault
from adascale_worker.process.device_clock import clock_of
from adascale_worker.process.gpu_monitor import monitor_of
from adascale_worker.process.shutdown_request import ShutdownRequest
from adascale_worker.process.user_code import warn_user
from adascale_worker.program.hyperparameters import Choice, Hyperparameters
from adascale_worker.program.learning_rates import LearningRates
from adascale_worker.program.module_attributes import ModuleAttributes
from adascale_worker.program.optimizers import ElasticAdaScale, Optimizers, OptimizerSet
from adascale_worker.program.parts import OtherOptimizers, ProgramParts
from adascale_worker.program.patching import patch_scheduler
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.program.weight_checks import FiniteWeights, WeightComparison
from adascale_worker.reporting.reports import Telemetry
from adascale_worker.state.program import ProgramState, Stateful
from adascale_worker.state.state import State
from adascale_worker.state.training import ShardedTrainingState, TrainerPart, TrainingState

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


@dataclass(frozen=True)
class ProgramOptions:
    """What a program passes to `program_reentry` besides its parts."""

    registered: Mapping[str, Stateful]  # objects whose state is saved, by name
    hyperparameters: Choice  # which are used after a checkpoint was restored


@dataclass(frozen=True)
class _Gradients:
    """The optimizers and their gradients, and how a step is made and undone."""

    optimizer: Optimizers
    program: ProgramState
    models: TrainedModels
    accumulation: Accumulation
    failure: StepFailure
    undo: ModelBuffers | StepUndo
    make_steps: Callable[[StepParts, FinishRequest, State], StepStrategy]


class Training:
    """The training of a program: makes its models data-parallel, and its optimizers elastic."""

    def __init__(
        self, replica: Replica, parts: ProgramParts, options: ProgramOptions, end_epoch: Callable[[int], None]
    ) -> None:
        self._replica = replica
        self.parts = parts
        job, group, progress, planner = replica.job, replica.group, replica.progress, replica.planner
        checkpointing, shutdown_request = replica.checkpointing, replica.shutdown_request
        channel = replica.agent.channel if replica.agent is not None else None
        bounds = job.settings.bounds
        self.loop = loop = ProgramLoop()
        shortage = MemoryShortage(planner, group, replica.device, channel)

        def repeats_in_smaller_batches(error: BaseException) -> bool:
            return loop.has_batch and shortage.handle(error)

        division = StepDivision(
            lambda: planner.bounds,
            is_allowed=job.settings.single_replica_gain == "divided" and not group.has_mesh,
            has_batch_norm=any(isinstance(each, _BATCH_NORMS) for each in parts.model.modules()),
        )
        gradients = _make_gradients(replica, parts, options, loop, repeats_in_smaller_batches, division)
        optimizer, models, self.program = gradients.optimizer, gradients.models, gradients.program
        program = self.program
        self.accumulation = gradients.accumulation
        self.collectives = ProgramCollectives(group, gradients.failure, loop)

        is_saved = checkpointing.enabled or channel is not None
        self.feed = feed = DataFeed(bounds, group, replica.seed, progress, division, is_saved=is_saved)
        self.telemetry = telemetry = Telemetry(
            bounds,
            group,
            make_reporter,
            clock_of(replica.device),
            replica.accelerator,
            models.sync_time,
            monitor_of(replica.device),
            replica.tracker,
            replica.run,
        )
        departures = LoopDepartures(group)
        self.evaluations = evaluations = EvaluationSequence(group, progress, telemetry.step_timer, loop)
        self.sums = ReplicaSums(evaluations)

        saved: dict[str, TrainerPart] = {
            "plan": planner,
            "progress": progress,
            "data": feed,
            "step_times": telemetry.step_timer,
            "division": division,
            "run": telemetry.run,
            "attributes": ModuleAttributes(program.model),
        }
        contents = (
            ShardedTrainingState(group, program, saved, job.checkpoint_info)
            if group.has_mesh
            else TrainingState(program, saved, job.checkpoint_info)
        )
        weights = FiniteWeights(optimizer, job.settings.max_nonfinite_steps, group)
        self.state = state = State(
            contents, weights, gradients.undo, progress, group, checkpointing, replica.snapshot_memory
        )
        finish_request = FinishRequest(progress, group, state)
        self.membership = membership = (
            _membership(replica.agent, group, shutdown_request, state) if replica.agent is not None else None
        )

        self._other_optimizers = OtherOptimizers(
            list(parts.optimizers.values()),
            lambda: loop.has_batch,
            lambda: self.steps.has_stepped,
            lambda: group.replicas,
        )
        comparison = WeightComparison(program.model, optimizer, group, self._other_optimizers.parameters)
        agreement = StepAgreement(
            optimizer,
            group,
            planner,
            checkpointing,
            comparison,
            models.compute,
            finish_request,
            shutdown_request,
            membership,
        )
        counter = StepCounter(
            optimizer,
            loop,
            planner,
            progress,
            telemetry,
            agreement,
            weights,
            comparison,
            UnregisteredScaler(scaler_of(options.registered.values())),
            shutdown_request,
            membership,
        )
        self.steps: StepStrategy = gradients.make_steps(
            StepParts(gradients.failure, counter, loop, departures, progress, group, planner, checkpointing),
            finish_request,
            state,
        )
        context = Context(
            job=job,
            group=group,
            membership=membership,
            channel=channel,
            process_exit=replica.process_exit,
            shutdown_request=shutdown_request,
            steps=self.steps,
            loop=loop,
            departures=departures,
            evaluations=evaluations,
            finish_request=finish_request,
            comparison=comparison,
            program=program,
            progress=progress,
            planner=planner,
            feed=feed,
            telemetry=telemetry,
            state=state,
            checkpointing=checkpointing,
            shortage=shortage,
        )
        self.generations = Generations(**vars(context))
        self.ending = Ending(generations=self.generations, **vars(context))
        self.batches = TrainingLoop(generations=self.generations, ending=self.ending, **vars(context))
        self.epochs = EpochLoops(self.ending, end_epoch)
        self._failures = Failures(**vars(context))
        self._backward_guard = BackwardGuard(gradients.failure, gradients.accumulation)
        self._other_parallelism = models.other_parallelism
        self._watchdog = StepWatchdog(
            telemetry.step_timer,
            lambda: loop.trains,
            lambda: f"rank {group.rank}",
            lambda: group.replicas,
            environment.read_step_timeout(os.environ),
            self._failures.explain_stall,
            self._failures.report_stall,
        )

    # -- the program --------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Restore the state of training, in the first generation of this trainer."""
        self._backward_guard.install()
        if self.membership is None:
            self.generations.begin_alone()
            return
        self._require_sound_devices()
        if os.environ.get(ENV_JOINS_OTHERS) == "1" and not self._replica.group.has_mesh:
            self.generations.prepare_to_receive()
        self.membership.start()
        self.generations.enter()

    def _require_sound_devices(self) -> None:
        """Check the device of each process of this replica before the agent registers it."""
        group, fault = self._replica.group, find_fault(self._replica.device)
        fault = next(filter(None, group.own.exchange(fault)), None)
        if fault is not None:
            raise ReplicaCheckError(fault)

    def install(self) -> None:
        """Replace methods of the program's objects, and install the handlers of the process.

        Not earlier: nothing can be saved before, and an NCCL error during the first collective calls means a
        wrong configuration rather than a lost peer.
        """
        rates, steps, loop, progress = self.program.rates, self.steps, self.loop, self._replica.progress
        steps.patch(lambda step: rates.observe_optimizer(step, lambda: loop.has_batch))
        scaler = scaler_of(self.program.registered.values())
        if scaler is not None:
            patch_scaler(scaler, list(self.parts.optimizers.values()), steps)
        for scheduler in self.parts.schedulers.values():
            patch_scheduler(
                scheduler,
                rates,
                lambda: progress.schedule_position,
                lambda: loop.has_batch,
                lambda: steps.made_step,
                lambda: loop.is_overtaken,
            )
        self._other_optimizers.install()
        self._other_parallelism.install()
        self._watchdog.start()
        shutdown_request = self._replica.shutdown_request
        if self.membership is not None:
            shutdown_request.install(signal.SIGTERM)
        elif self._replica.checkpointing.enabled:
            if threading.current_thread() is not threading.main_thread():
                warn_user(
                    "the program trains in a thread, where Python handles no signals: SIGTERM and Ctrl-C end "
                    "it without a checkpoint. Call program_reentry and train in the main thread"
                )
            # Of a terminal that is closed, unless the program was started by nohup.
            hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
            shutdown_request.install(signal.SIGTERM, signal.SIGINT, *hangup)
        self._replica.process_exit.install(self._failures)

    def stop_watchdog(self) -> None:
        """Do not observe the main thread any more. May be called again."""
        self._watchdog.stop()

    def close(self) -> None:
        """Post outstanding reports, leave the other members, and undo what affects the whole process."""
        self.feed.close()
        self.telemetry.close()
        if self.membership is not None:
            self.membership.close()
        self._backward_guard.uninstall()
        self.stop_watchdog()
        self._other_optimizers.uninstall()
        self._other_parallelism.uninstall()


def _membership(
    agent: AgentConnection, group: ReplicaGroup, shutdown_request: ShutdownRequest, state: State
) -> Membership:
    kind = Membership if group.own.is_leader else FollowingMembership
    return kind(agent, group, shutdown_request, state)


def _make_gradients(
    replica: Replica,
    parts: ProgramParts,
    options: ProgramOptions,
    loop: ProgramLoop,
    repeats_in_smaller_batches: Callable[[BaseException], bool],
    division: StepDivision,
) -> _Gradients:
    group, model, progress, planner = replica.group, parts.model, replica.progress, replica.planner
    if group.has_mesh:
        _require_sharded(group, parts, options)
    trained = TrainedParameters(model, group)
    elastic = {
        name: ElasticAdaScale(optimizer, **_adascale_options(replica, options))
        for name, optimizer in parts.optimizers.items()
    }
    optimizers = OptimizerSet(elastic) if parts.are_several else elastic[""]
    program = _program_state(replica, parts, options, optimizers, trained)
    buffers = ModelBuffers(model)
    undo = StepUndo(program, progress) if parts.are_several else buffers
    is_sharded = group.has_mesh

    def repeats(error: BaseException) -> bool:
        # A batch that does not fit into the memory of one process of several ends its replica: its collective
        # calls would not be those of the other processes.
        return not is_sharded and repeats_in_smaller_batches(error)

    on_discard = undo.revert_progress if isinstance(undo, StepUndo) else lambda: None
    failure = StepFailure(group, repeats, on_discard)

    def before_forward() -> None:
        if not is_sharded:
            accumulation.note_trained()
        if not parts.are_several and (group.is_elastic or group.replicas == 1):
            buffers.record()

    def trains() -> bool:
        has_own_batches = not parts.are_several and loop.number == 0
        return loop.trains or (has_own_batches and not loop.is_evaluating)

    models = TrainedModels(
        parts.models,
        replica.device,
        group,
        failure,
        lambda: planner.step_plan.local_bsz,
        before_forward,
        is_sharded=is_sharded,
    )
    gradients = [
        OptimizerGradients(
            name,
            adascale,
            # The program may clip all gradients of the model together.
            [] if parts.are_several else model.parameters(),
            group,
            has_several_passes=parts.are_several,
        )
        for name, adascale in elastic.items()
    ]
    accumulation = Accumulation(
        gradients,
        models,
        group,
        failure,
        division,
        ShardedWeights(group) if group.has_mesh else MicroBatchWeights(group),
        trains,
        trained,
        lambda: progress.step,
    )

    def make_steps(shared: StepParts, finish_request: FinishRequest, state: State) -> StepStrategy:
        if isinstance(optimizers, OptimizerSet):
            assert isinstance(undo, StepUndo)
            return SeveralOptimizers(
                optimizers, models, accumulation, undo, parts, trained, finish_request, state, shared
            )
        return OneOptimizer(optimizers, models, accumulation, buffers, model, trained, state, shared)

    return _Gradients(optimizers, program, models, accumulation, failure, undo, make_steps)


def _require_sharded(group: ReplicaGroup, parts: ProgramParts, options: ProgramOptions) -> None:
    """Check what a program passes whose replicas have several processes."""
    if parts.are_several:
        raise WorkerError(
            f"program_reentry got several models or optimizers, and a replica has {group.processes} "
            "processes (processesPerReplica): pass one sharded model and its optimizer, or leave out "
            "processesPerReplica"
        )
    if scaler_of(options.registered.values()) is not None:
        raise WorkerError(
            f"program_reentry got a GradScaler, and a replica has {group.processes} processes "
            "(processesPerReplica): use bfloat16, which needs none, as "
            "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
        )
    require_sharded(parts.model, group)


def _adascale_options(replica: Replica, options: ProgramOptions) -> dict[str, Any]:
    return {
        "world_size": replica.group.replicas,
        "is_scaled_loss": False,
        # A scaler that is not registered is refused. So without one, any change of gradients is clipping.
        "grad_scaler": scaler_of(options.registered.values()) or torch.amp.GradScaler("cpu", enabled=False),
        "disjoint_pairs": True,
        "observes_backward": False,
        "shards": replica.group if replica.group.has_mesh else None,
        "max_gain": replica.job.settings.max_gain,
    }


def _program_state(
    replica: Replica,
    parts: ProgramParts,
    options: ProgramOptions,
    optimizers: Optimizers,
    trained: TrainedParameters,
) -> ProgramState:
    declared = Hyperparameters.read(parts, parts.scheduler)
    registered = dict(options.registered)
    program = ProgramState(
        parts.model,
        optimizers,
        parts.scheduler,
        registered,
        LearningRates(parts.optimizers, parts.schedulers, registered.values()),
        trained,
        declared,
        options.hyperparameters,
    )
    if replica.checkpointing.enabled or replica.group.is_elastic:
        program.require_loadable()
    return program
