"""The one place where the parts of a trainer are made, each with the parts that it uses.

`context.py` makes those that need no model, before the program passes it.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
from torch import nn

from adascale_core.names import ENV_ADDRESS, ENV_JOINS_OTHERS
from adascale_worker.batches.feed import DataFeed
from adascale_worker.errors import ReplicaCheckError, WorkerError
from adascale_worker.gradients.accumulation import Accumulation, BackwardGuard
from adascale_worker.gradients.loss_scaling import UnregisteredScaler, patch_scaler, scaler_of
from adascale_worker.gradients.optimizer_gradients import OptimizerGradients
from adascale_worker.gradients.sharded import require_sharded
from adascale_worker.gradients.step_division import StepDivision
from adascale_worker.gradients.step_failure import StepFailure
from adascale_worker.gradients.step_times import StepTimes
from adascale_worker.gradients.trained_models import ModelBuffers, TrainedForward
from adascale_worker.loop.agreement import LoopDepartures, StepAgreement
from adascale_worker.loop.context import Context, Replica, TrainedReplica, make_reporter
from adascale_worker.loop.evaluation import EvaluationSequence
from adascale_worker.loop.failures import Failures, MemoryShortage, StepWatchdog
from adascale_worker.loop.generations import Generations, Membership
from adascale_worker.loop.steps import SeveralOptimizers, Steps, StepUndo
from adascale_worker.loop.training_loop import TrainingLoop
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process import environment
from adascale_worker.process.device import DeviceClock, find_fault
from adascale_worker.process.environment import listen
from adascale_worker.process.user_code import warn_user
from adascale_worker.program.hyperparameters import Choice, Hyperparameters
from adascale_worker.program.learning_rates import LearningRates
from adascale_worker.program.module_attributes import ModuleAttributes
from adascale_worker.program.optimizers import ElasticAdaScale, OptimizerSet
from adascale_worker.program.parts import OtherTraining, ProgramParts
from adascale_worker.program.patching import patch_scheduler
from adascale_worker.program.program_loop import ProgramLoop
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.program.weight_checks import FiniteWeights, WeightComparison
from adascale_worker.reporting.reports import Telemetry
from adascale_worker.state.program import ProgramState, Stateful
from adascale_worker.state.state import State, TrainerPart

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class Training(Context):
    """The training of a program: makes its models data-parallel, and its optimizers elastic."""

    def __init__(
        self,
        replica: Replica,
        parts: ProgramParts,
        registered: dict[str, Stateful],  # objects whose state is saved, by name
        hyperparameters: Choice,  # which are used after a checkpoint was restored
    ) -> None:
        scaler = scaler_of(registered.values())
        trained = _trained_replica(replica, parts, registered, hyperparameters, scaler)
        group, progress, program, loop = trained.group, trained.progress, trained.program, trained.loop
        settings, optimizer = trained.job.settings, trained.optimizer
        is_saved = trained.checkpointing.enabled or trained.channel is not None
        feed = DataFeed(settings.bounds, group, trained.seed, progress, trained.division, is_saved=is_saved)
        telemetry = Telemetry(
            settings.bounds,
            group,
            make_reporter,
            trained.accelerator,
            trained.times.sync_time,
            trained.tracker,
            trained.run,
        )
        weights = FiniteWeights(optimizer, settings.max_nonfinite_steps, group)
        saved: dict[str, TrainerPart] = {
            "plan": trained.planner,
            "progress": progress,
            "data": feed,
            "step_times": telemetry.step_timer,
            "division": trained.division,
            "run": telemetry.run,
            "attributes": ModuleAttributes(program.model),
        }
        state = State(
            program,
            saved,
            trained.job.checkpoint_info,
            weights,
            trained.undo,
            progress,
            trained.checkpointing,
            trained.snapshot_memory,
        )
        super().__init__(
            **vars(trained),
            feed=feed,
            telemetry=telemetry,
            weights=weights,
            comparison=WeightComparison(program.model, optimizer, group),
            state=state,
            membership=None
            if trained.channel is None
            else Membership(
                trained.channel,
                listen(os.environ.get(ENV_ADDRESS, "127.0.0.1")),
                group,
                trained.shutdown_request,
                state,
            ),
            departures=LoopDepartures(group),
            evaluations=EvaluationSequence(group, progress, telemetry.step_timer, loop),
        )
        doors = dict(vars(self))
        kind = SeveralOptimizers if parts.are_several else Steps
        self.steps: Steps = kind(agreement=StepAgreement(**doors), scaler=UnregisteredScaler(scaler), **doors)
        self.generations = Generations(steps=self.steps, **doors)
        self.main_loop = TrainingLoop(steps=self.steps, generations=self.generations, **doors)
        self._failures = Failures(steps=self.steps, **doors)
        self._other_training = OtherTraining(parts, group, loop, lambda: self.accumulation.has_stepped)
        self._backward_guard = BackwardGuard(self.failure, self.accumulation)
        self._watchdog = StepWatchdog(
            telemetry.step_timer,
            loop,
            group,
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
        if os.environ.get(ENV_JOINS_OTHERS) == "1" and not self.group.has_mesh:
            self.generations.prepare_to_receive()
        self.membership.start(self.accelerator)
        self.generations.enter()

    def _require_sound_devices(self) -> None:
        """Check the device of each process of this replica before the agent registers it."""
        group, fault = self.group, find_fault(self.device)
        fault = next(filter(None, group.own.exchange(fault)), None)
        if fault is not None:
            raise ReplicaCheckError(fault)

    def install(self) -> None:
        """Replace methods of the program's objects, and install the handlers of the process.

        Not earlier: nothing can be saved before, and an NCCL error during the first collective calls means a
        wrong configuration rather than a lost peer.
        """
        rates, steps, progress = self.program.rates, self.steps, self.progress
        steps.patch(rates.observe_optimizer)
        scaler = scaler_of(self.program.registered.values())
        if scaler is not None:
            patch_scaler(scaler, self.parts.optimizers.values(), steps)
        for scheduler in self.parts.schedulers.values():
            patch_scheduler(
                scheduler,
                rates,
                self.loop,
                lambda: progress.schedule_position,
                lambda: steps.made_step,
            )
        self._other_training.install()
        self._watchdog.start()
        shutdown_request = self.shutdown_request
        if self.membership is not None:
            shutdown_request.install(signal.SIGTERM)
        elif self.checkpointing.enabled:
            if threading.current_thread() is not threading.main_thread():
                warn_user(
                    "the program trains in a thread, where Python handles no signals: SIGTERM and Ctrl-C end "
                    "it without a checkpoint. Call program_reentry and train in the main thread"
                )
            # Of a terminal that is closed, unless the program was started by nohup.
            hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
            shutdown_request.install(signal.SIGTERM, signal.SIGINT, *hangup)
        self.process_exit.install(self._failures)

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
        self._other_training.uninstall()


def _trained_replica(
    replica: Replica,
    parts: ProgramParts,
    registered: dict[str, Stateful],
    hyperparameters: Choice,
    scaler: torch.amp.GradScaler | None,
) -> TrainedReplica:
    """Make a replica train what the program has passed."""
    group, progress, planner = replica.group, replica.progress, replica.planner
    if group.has_mesh:
        _require_sharded(group, parts, scaler)
    loop = ProgramLoop()
    adascale_options = _adascale_options(replica, scaler)
    elastic = {name: ElasticAdaScale(each, **adascale_options) for name, each in parts.optimizers.items()}
    optimizer = OptimizerSet(elastic) if parts.are_several else elastic[""]
    program = ProgramState(
        parts.model,
        optimizer,
        parts.scheduler,
        registered,
        LearningRates(parts.optimizers, parts.schedulers, registered.values()),
        TrainedParameters(parts.model, group),
        Hyperparameters.read(parts, parts.scheduler),
        hyperparameters,
    )
    if replica.checkpointing.enabled or group.is_elastic:
        program.require_loadable()
    buffers = None if parts.are_several else ModelBuffers(parts.model)
    undo = buffers or StepUndo(program, progress)
    shortage = MemoryShortage(replica, loop)
    failure = StepFailure(group, shortage.handle, undo.revert_progress)
    division = StepDivision(
        lambda: planner.bounds,
        is_allowed=replica.job.settings.single_replica_gain == "divided" and not group.has_mesh,
        has_batch_norm=any(isinstance(each, _BATCH_NORMS) for each in parts.model.modules()),
    )
    # The program may clip all gradients of the model together.
    clipped = [] if parts.are_several else list(parts.model.parameters())
    gradients = [
        OptimizerGradients(name, each, clipped, group, has_several_passes=parts.are_several)
        for name, each in elastic.items()
    ]
    times = StepTimes(group, DeviceClock(replica.device))
    accumulation = Accumulation(
        gradients, group, failure, division, loop, program.trained, times, lambda: progress.step
    )
    for model in parts.models:
        TrainedForward(model, group, failure, accumulation, buffers)
    return TrainedReplica(
        **vars(replica),
        parts=parts,
        loop=loop,
        program=program,
        optimizer=optimizer,
        undo=undo,
        shortage=shortage,
        failure=failure,
        division=division,
        times=times,
        accumulation=accumulation,
    )


def _require_sharded(group: ReplicaGroup, parts: ProgramParts, scaler: torch.amp.GradScaler | None) -> None:
    """Check what a program passes whose replicas have several processes."""
    if parts.are_several:
        raise WorkerError(
            f"program_reentry got several models or optimizers, and a replica has {group.processes} "
            "processes (processesPerReplica): pass one sharded model and its optimizer, or leave out "
            "processesPerReplica"
        )
    if scaler is not None:
        raise WorkerError(
            f"program_reentry got a GradScaler, and a replica has {group.processes} processes "
            "(processesPerReplica): use bfloat16, which needs none, as "
            "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
        )
    require_sharded(parts.model, group)


def _adascale_options(replica: Replica, scaler: torch.amp.GradScaler | None) -> dict[str, Any]:
    return {
        "world_size": replica.group.replicas,
        "is_scaled_loss": False,
        # A scaler that is not registered is refused. So without one, any change of gradients is clipping.
        "grad_scaler": scaler or torch.amp.GradScaler("cpu", enabled=False),
        "disjoint_pairs": True,
        "observes_backward": False,
        "shards": replica.group if replica.group.has_mesh else None,
        "max_gain": replica.job.settings.max_gain,
    }
