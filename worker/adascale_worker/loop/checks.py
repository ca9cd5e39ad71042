"""Checks that the program's training loop makes its steps in the way that the trainer counts them.

Each check costs a few comparisons per step. It finds a loop that would train without an error, but with
gradients that are not averaged over the replicas, or with steps that are not counted as they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adascale_worker.errors import ReplicationError, WorkerError
from adascale_worker.gradients.data_parallel import ForwardRecord
from adascale_worker.gradients.optimizer_gradients import MAX_STEPS_WITHOUT_GRADIENTS
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.user_code import OneTimeWarnings
from adascale_worker.program.hyperparameters import HasGroups
from adascale_worker.program.optimizers import ElasticAdaScale
from adascale_worker.torch_private.autograd import accumulates_gradient

MAX_BATCHES_WITHOUT_STEP = 1000
"""Batches without an optimizer step after which a warning is issued, because the epoch cannot end."""

CHECKED_STEPS = 3
"""Steps in which gradients that were computed before the step are searched."""

Place = TypeVar("Place")

_USE_THE_MODEL = (
    "Compute the loss from the output of model(...) in training mode (model.train(); call eval() only on the "
    "submodules that are to stay in evaluation mode): call a method or a submodule that the loss needs in "
    "the model's forward(), and do not keep a reference to model.forward from before program_reentry"
)


class BatchChecks:
    """Finds a loop that makes no steps. It is the only check of several optimizers together."""

    passes_per_batch = 0
    """Unknown."""
    left_out_step = False
    """Unknown."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._batches = 0
        self._warnings = OneTimeWarnings()

    def begin_generation(self) -> None:
        """Nothing depends on the number of replicas."""

    def observe(self) -> None:
        """Nothing depends on which parameters are trained."""

    def begin_epoch(self) -> None:
        """Record that a step was made, or a loop over batches begins."""
        self._batches = 0

    def discarded_step(self) -> None:
        """Record that the trainer has discarded a step."""
        self._batches = 0

    def count_passes(self, batches: int) -> None:
        """Passes are not counted."""

    def check_step(self, *, inside_epoch: bool) -> None:
        """Record a step."""
        del inside_epoch
        self._batches = 0

    def delivered_batch(self) -> None:
        """Record that the program gets the next batch of `trainer.dataloader`."""
        self._batches += 1
        if self._batches == MAX_BATCHES_WITHOUT_STEP:
            found = (
                f"trainer.dataloader() has delivered {MAX_BATCHES_WITHOUT_STEP} batches since the last "
                "optimizer.step(): an epoch ends after its steps, so without steps it does not end. Call "
                "step() of the optimizer that was passed to program_reentry once per batch"
            )
            if self._group.replicas > 1:
                raise WorkerError(f"{found}, on all {self._group.replicas} replicas")
            self._warnings.warn("no step", found)


class LoopChecks:
    """Observes batches, backward passes and steps of the program's loop, and refuses a wrong loop."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: ElasticAdaScale,
        forward: ForwardRecord,
        group: ReplicaGroup,
        at_first_micro_batch: Callable[[], bool] = lambda: True,
        has_set_aside: Callable[[], bool] = lambda: False,  # then `.grad` is None
        arrived: Callable[[], None] = lambda: (
            None
        ),  # called for a gradient of an observed parameter, in any pass
        *,
        requires_all: bool = True,  # whether every parameter needs a gradient in every step, as DDP requires
    ) -> None:
        self._optimizer = optimizer
        self._forward = forward
        self._group = group
        self._parameters: list[Tensor] = []
        self._observed: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self._at_first_micro_batch = at_first_micro_batch
        self._has_set_aside = has_set_aside
        self._arrived = arrived
        self._has_backward = False
        self._earlier_batches = 0
        self._batches = BatchChecks(group)
        self._has_stepped = False
        self._steps = 0
        self._steps_without_gradients = 0
        self._has_stale_gradients = False
        self.passes_per_batch = 0
        """The most backward passes for one batch so far; 0 if unknown."""
        self._warnings = OneTimeWarnings()
        self._model = model
        self._requires_all = requires_all
        self._unused: UnusedParameters | None = None
        self._has_searched_unused = False
        self.observe()

    @property
    def has_stepped(self) -> bool:
        """Whether `optimizer.step()` was called for the present batch."""
        return self._has_stepped

    @property
    def left_out_step(self) -> bool:
        """Whether the program has made a backward pass for the present batch, and not `optimizer.step()`."""
        return self._has_backward and not self._has_stepped

    # -- events -----------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Observe the parameters that are trained now."""
        trained: list[Tensor] = [p for p in self._model.parameters() if p.requires_grad]
        if list(map(id, trained)) == list(map(id, self._parameters)):
            return
        self._parameters = trained
        for hook in self._hooks:
            hook.remove()
        # Two parameters, in case one of them is not used in every pass.
        groups = self._optimizer.param_groups
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        candidates = [p for p in self._parameters if id(p) in optimized] or self._parameters
        ends = candidates[:1] + candidates[-1:]
        self._observed = list({id(parameter): parameter for parameter in ends}.values())
        self._hooks = [
            parameter.register_hook(_BackwardHook(self.arriving_gradient, parameter))
            for parameter in self._observed
        ]
        if self._unused is not None:
            self._unused.remove_hooks()
            self._unused = None
        self._has_searched_unused = False
        self.begin_generation()

    def begin_generation(self) -> None:
        """Look for unused parameters in the next step, if it is the first of these on several replicas."""
        if self._group.replicas > 1 and self._requires_all and not self._has_searched_unused:
            self._has_searched_unused = True
            self._unused = UnusedParameters(self._model, self._group.replicas)

    def begin_epoch(self) -> None:
        """Record that gradients were deleted, and that a loop over batches begins."""
        self._begin_step()
        self._has_stepped = False

    def delivered_batch(self) -> None:
        """Record that the program gets the next batch of `trainer.dataloader`."""
        are_deleted = all(parameter.grad is None for parameter in self._observed)
        if self._has_backward and are_deleted and not self._has_set_aside():
            self.zeroed_gradients()
        self._earlier_batches += self._has_backward
        self._has_backward = False
        self._has_stepped = False
        self._batches.delivered_batch()

    def zeroed_gradients(self) -> None:
        """Record that the program has deleted its gradients."""
        if self._has_backward or self._earlier_batches:
            self._optimizer.discard_step()
        self._has_backward = False
        self._has_stale_gradients = False
        self._earlier_batches = 0

    def arriving_gradient(self, parameter: Tensor) -> None:
        """Record a backward pass. Called before the gradient is added to `parameter.grad`."""
        self._arrived()
        if 0 < self._steps <= CHECKED_STEPS and not accumulates_gradient(parameter):
            return  # torch.autograd.grad calls the same hooks
        self.backward_pass(parameter.grad)

    def backward_pass(self, gradient: Tensor | None) -> None:
        """Record a backward pass, which adds to `gradient`; None if there is none yet."""
        if gradient is None:
            self._earlier_batches = 0
        elif (
            # Reading the gradient waits for the device, so only the first steps are checked.
            0 < self._steps <= CHECKED_STEPS
            and not self._has_backward
            and self._earlier_batches == 0
            and self._at_first_micro_batch()
        ):
            self._has_stale_gradients = bool(gradient.any())
        self._has_backward = True

    def count_passes(self, batches: int) -> None:
        """Record how many backward passes the program makes for each batch, in a step that is measured."""
        self.passes_per_batch = max(self.passes_per_batch, self._optimizer.backward_passes // batches)

    def discarded_step(self) -> None:
        """Record that the trainer has discarded a step, and its gradients."""
        self._begin_step()
        self._has_stale_gradients = False
        self._forward.called = False

    # -- checks -----------------------------------------------------------------------------------------

    def check_step(self, *, inside_epoch: bool) -> None:
        """Check a call of `optimizer.step()`, and begin to observe the next one."""
        if inside_epoch and self._has_stepped:
            raise WorkerError(
                "optimizer.step() was called twice for one batch: call it once for each batch that "
                "trainer.dataloader() delivers, because every step counts a batch and its samples"
            )
        if self._has_stale_gradients:
            raise WorkerError(
                "the gradients of the step before were not deleted, so this step would make it again: call "
                "optimizer.zero_grad() before loss.backward()"
            )
        self._check_gradients_exist()
        batches = self._earlier_batches + self._has_backward
        if inside_epoch and batches > 1:
            raise WorkerError(
                f"optimizer.step() was called after backward passes on {batches} batches: the trainer "
                "accumulates gradients itself. Call optimizer.zero_grad(), loss.backward() and "
                "optimizer.step() for each batch that trainer.dataloader() delivers, and do not divide the "
                "loss. The upper bound of local_bsz_bounds decides how many micro-batches a step has"
            )
        if not self._forward.called:
            self._check_gradients_are_averaged()
        self._forward.called = False
        if self._unused is not None and any(parameter.grad is not None for parameter in self._parameters):
            self._unused.check()
            self._unused = None
        self._begin_step()
        self._steps += 1
        self._has_stepped = True

    def _begin_step(self) -> None:
        self._has_backward = False
        self._earlier_batches = 0
        self._batches.begin_epoch()

    def _check_gradients_exist(self) -> None:
        if any(parameter.grad is not None for parameter in self._parameters):
            self._steps_without_gradients = 0
            return
        self._steps_without_gradients += 1
        if self._steps_without_gradients == MAX_STEPS_WITHOUT_GRADIENTS:
            raise WorkerError(
                f"optimizer.step() was called {MAX_STEPS_WITHOUT_GRADIENTS} times without gradients, which "
                "changes nothing: call loss.backward() before it, with a loss that is computed from the model"
            )

    def _check_gradients_are_averaged(self) -> None:
        if all(parameter.grad is None for parameter in self._parameters):
            return
        if self._group.replicas > 1:
            raise ReplicationError(
                "the gradients of this step do not come from a call of model(...), so they are not averaged "
                f"over the {self._group.replicas} replicas and the weights would differ. {_USE_THE_MODEL}"
            )
        self._warnings.warn(
            "forward",
            "the gradients of this step do not come from a call of model(...). On 1 replica this has no "
            f"effect; on 2 or more, training stops with an error. {_USE_THE_MODEL}",
        )


class _BackwardHook(Generic[Place]):
    """A hook on the gradient of a parameter that does not change it."""

    observes_only = True
    """See `BackwardObserver.observe`."""

    def __init__(self, arrived: Callable[[Place], None], place: Place) -> None:
        self._arrived = arrived
        self._place = place

    def __call__(self, _gradient: Tensor) -> None:
        self._arrived(self._place)


class UnusedParameters:
    """Finds the parameters that get no gradient in the first step.

    DDP then averages the gradients of no parameter, without an error before the next step.
    """

    def __init__(self, model: torch.nn.Module, replicas: int) -> None:
        self._replicas = replicas
        self._missing = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._hooks = [
            parameter.register_hook(_BackwardHook(self._arrived, name))
            for name, parameter in self._missing.items()
        ]

    def _arrived(self, name: str) -> None:
        self._missing.pop(name, None)

    def remove_hooks(self) -> None:
        """Stop observing the parameters."""
        for hook in self._hooks:
            hook.remove()

    def check(self) -> None:
        """Check that no parameter is unused, and stop observing them."""
        self.remove_hooks()
        missing = [name for name, parameter in self._missing.items() if parameter.requires_grad]
        if not missing:
            return
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ReplicationError(
            f"parameter {missing[0]!r}{more} got no gradient in this step, so the gradients are not averaged "
            f"over the {self._replicas} replicas: remove unused parameters from the model, call "
            "requires_grad_(False) on them, or pass program_reentry(..., find_unused_parameters=True)"
        )


def check_optimizer_parameters(model: torch.nn.Module, optimizer: HasGroups, replicas: int) -> None:
    """Check that the optimizer has parameters of the model, and no others.

    The gradients of others are not averaged. On one replica the program is warned, because it works there. It
    is also warned of parameters of the model that require gradients, but are not trained.
    """
    own = {id(parameter) for parameter in model.parameters()}
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if own and not own & optimized:
        raise WorkerError(
            "the optimizer has no parameter of the model, so training would not change the model: make the "
            "optimizer from model.parameters(), after the last statement that replaces the model"
        )
    warn_of_parameters_outside(model, optimizer)
    shapes = [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and id(parameter) not in own
    ]
    if not shapes:
        return
    found = (
        f"the optimizer has {len(shapes)} parameters that are not in the model (the first has shape "
        f"{shapes[0]})"
    )
    remedy = "Make them parameters of the model, for example with a module that contains both"
    if replicas > 1:
        raise ReplicationError(f"{found}, so their gradients are not averaged over the replicas. {remedy}")
    OneTimeWarnings().warn(
        "parameters", f"{found}. On 2 or more replicas, this stops training with an error. {remedy}"
    )


def warn_of_parameters_outside(model: torch.nn.Module, optimizer: HasGroups) -> None:
    """Warn of parameters of the model that require gradients, but are not in the optimizer."""
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in optimized]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        OneTimeWarnings().warn(
            "not optimized",
            f"parameter {left[0]!r}{more} of the model requires gradients, but is not in the optimizer, so "
            "it stays as it is: give it to the optimizer, or call requires_grad_(False) on it",
        )


def check_synchronized_norms(model: torch.nn.Module, device: torch.device) -> None:
    """Check that the device supports the model's layers of type `SyncBatchNorm`, if it has any.

    torch refuses them on a CPU where there is a process group, which a single replica has too.
    """
    if device.type != "cpu":
        return
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.SyncBatchNorm)]
    if names:
        raise WorkerError(
            f"the model has the SyncBatchNorm {names[0]!r}, which torch supports on GPUs only, but this "
            "replica is on the CPU. Call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) only if "
            "trainer.device.type is 'cuda'; BatchNorm works everywhere, with the statistics of each "
            "replica's own batch"
        )
