"""Makes the training loop of a program: with one optimizer and `DistributedDataParallel`, or with several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adascale_worker.adascale import AdaScale
from adascale_worker.gradients.accumulation import Accumulation, GradientAccumulation
from adascale_worker.gradients.data_parallel import DataParallelModel, ForwardRecord
from adascale_worker.gradients.loss_scaling import scaler_of
from adascale_worker.gradients.model_set import ModelSet
from adascale_worker.loop.checks import BatchChecks, LoopChecks, warn_of_parameters_outside
from adascale_worker.loop.several_optimizers import SeveralAccumulations, SeveralOptimizersLoop
from adascale_worker.loop.training_loop import TrainingLoop
from adascale_worker.membership.generations import Membership
from adascale_worker.process.exit import FastExit
from adascale_worker.process.shutdown_request import ShutdownRequest
from adascale_worker.program.buffers import ModelBuffers
from adascale_worker.program.hyperparameters import Choice, Hyperparameters
from adascale_worker.program.learning_rates import LearningRates
from adascale_worker.program.optimizer_set import Optimizers, OptimizerSet
from adascale_worker.program.parts import ProgramParts
from adascale_worker.program.patching import patch_optimizer
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.state.components import TrainerComponents
from adascale_worker.state.program import ProgramState, Stateful


@dataclass(frozen=True)
class LoopOptions:
    """What a training loop needs besides the program and the parts of the trainer.

    Args:
        device: of the models.
        registered: objects whose state is saved, by name.
        hyperparameters: which are used after a checkpoint was restored.
        find_unused_parameters: as DDP's argument of this name.
        membership, adopt_settings, shutdown_request, fast_exit: see `TrainingLoop`.
    """

    device: torch.device
    registered: Mapping[str, Stateful]
    hyperparameters: Choice
    find_unused_parameters: bool
    membership: Membership | None
    adopt_settings: Callable[[Mapping[str, str | None]], None]
    shutdown_request: ShutdownRequest
    fast_exit: FastExit


@dataclass(frozen=True)
class MadeLoop:
    """A training loop.

    Args:
        loop: the loop.
        program: the state of the program.
        models: makes the program's models data-parallel.
        accumulation: has the gradients of a step.
        patch: replaces methods of the program's optimizers and models.
        has_stepped: returns whether an optimizer has made a step for the present batch.
    """

    loop: TrainingLoop
    program: ProgramState
    models: DataParallelModel | ModelSet
    accumulation: Accumulation
    patch: Callable[[], None]
    has_stepped: Callable[[], bool]


def make_loop(parts: ProgramParts, trainer: TrainerComponents, options: LoopOptions) -> MadeLoop:
    """Make the training loop of a program, and make its models data-parallel.

    Raises:
        UnsupportedOptimizerError: AdaScale does not support an optimizer.
        WorkerError: the state of an object could not be loaded again.
    """
    return (_several_optimizers if parts.are_several else _one_optimizer)(parts, trainer, options)


def _one_optimizer(parts: ProgramParts, trainer: TrainerComponents, options: LoopOptions) -> MadeLoop:
    group, model, optimizer = trainer.group, parts.model, parts.optimizers[""]
    forward, buffers, trained = ForwardRecord(), ModelBuffers(model), TrainedParameters(model, group)

    def changed_forward() -> None:
        adascale.change_model(parallel.ddp)
        accumulation.set_gradient_sync()
        checks.observe()

    def changed_trained(parameters: list[torch.Tensor]) -> None:
        adascale.restart_statistics(parameters)
        checks.observe()
        warn_of_parameters_outside(model, adascale)

    parallel = DataParallelModel(
        model,
        options.device,
        group,
        forward,
        trained,
        find_unused_parameters=options.find_unused_parameters,
        before_forward=buffers.record if group.is_elastic or group.replicas == 1 else lambda: None,
        changed_forward=changed_forward,
        changed_trained=changed_trained,
        steps=lambda: trainer.progress.step,
    )
    adascale = AdaScale(optimizer, model=parallel.ddp, **_adascale_options(trainer, options))
    program = _program_state(parts, adascale, trained, trainer, options)
    accumulation = GradientAccumulation(adascale, parallel, model, group)
    checks = LoopChecks(
        model,
        adascale,
        forward,
        group,
        lambda: accumulation.at_first_micro_batch,
        lambda: accumulation.has_set_aside,
        accumulation.weights.gradient_arrived,
        requires_all=not options.find_unused_parameters,
    )
    loop = TrainingLoop(
        trainer,
        program,
        parallel,
        buffers,
        accumulation,
        checks,
        options.membership,
        options.adopt_settings,
        options.shutdown_request,
        options.fast_exit,
    )

    def zeroed_gradients() -> None:
        accumulation.discard_set_aside()
        checks.zeroed_gradients()

    def patch() -> None:
        patch_optimizer(
            optimizer,
            model,
            program.rates.observe_optimizer(loop.optimizer_step, lambda: loop.inside_epoch),
            lambda: accumulation.at_first_micro_batch,
            zeroed_gradients,
            accumulation.zeroed_later,
        )

    return MadeLoop(loop, program, parallel, accumulation, patch, lambda: checks.has_stepped)


def _several_optimizers(parts: ProgramParts, trainer: TrainerComponents, options: LoopOptions) -> MadeLoop:
    models = ModelSet(parts.models, options.device, trainer.group)
    arguments = _adascale_options(trainer, options)
    optimizers = OptimizerSet(
        {
            name: AdaScale(optimizer, observes_backward=False, **arguments)
            for name, optimizer in parts.optimizers.items()
        }
    )
    trained = TrainedParameters(parts.model, trainer.group)
    program = _program_state(parts, optimizers, trained, trainer, options)
    accumulation = SeveralAccumulations(optimizers, models, trainer.group)
    loop = SeveralOptimizersLoop(
        trainer,
        program,
        models,
        None,
        accumulation,
        BatchChecks(trainer.group),
        options.membership,
        options.adopt_settings,
        options.shutdown_request,
        options.fast_exit,
    )
    return MadeLoop(
        loop,
        program,
        models,
        accumulation,
        lambda: loop.patch(parts.optimizers, parts.models),
        lambda: any(part.has_stepped for part in accumulation.parts),
    )


def _adascale_options(trainer: TrainerComponents, options: LoopOptions) -> dict[str, Any]:
    return {
        "world_size": trainer.group.replicas,
        "is_scaled_loss": False,
        # A scaler that is not registered is refused. So without one, any change of gradients is clipping.
        "grad_scaler": scaler_of(options.registered.values()) or torch.amp.GradScaler("cpu", enabled=False),
        "disjoint_pairs": True,
    }


def _program_state(
    parts: ProgramParts,
    optimizers: Optimizers,
    trained: TrainedParameters,
    trainer: TrainerComponents,
    options: LoopOptions,
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
    if trainer.checkpointing.enabled or trainer.group.is_elastic:
        program.require_loadable()
    return program
