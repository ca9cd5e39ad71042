"""Measures a step, from its first backward pass to the estimates for each parameter group."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Joinable

from adascale_worker.process.user_code import OneTimeWarnings
from adascale_worker.scaling.rules import ScalingRule
from adascale_worker.scaling.statistics.all_reduce import (
    LocalStatistics,
    ReducedStatistics,
    StatisticsAllReduce,
    joins_without,
)
from adascale_worker.scaling.statistics.backward import HookedGradients
from adascale_worker.scaling.statistics.estimates import (
    StepEstimate,
    from_consecutive_gradients,
    from_micro_gradients,
)
from adascale_worker.scaling.statistics.loss_scale import GradientFingerprint, LossScale
from adascale_worker.scaling.statistics.metric import SecondMomentMetric
from adascale_worker.scaling.statistics.norms import EuclideanMetric
from adascale_worker.scaling.statistics.parameters import HOST, OptimizerParameters
from adascale_worker.scaling.statistics.previous_gradient import PreviousGradient, PreviousStep
from adascale_worker.scaling.statistics.reader import GradientReader
from adascale_worker.scaling.statistics.sharded import ShardedGradients
from adascale_worker.scaling.statistics.steps import GainOptions, StepSettings, StepWeights
from adascale_worker.torch_private.distributed import is_fully_sharded


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """The result of a step; all fields are None if it was not measured."""

    estimate: StepEstimate | None = None  # None if there is no other gradient to compare with
    flag_sums: Tensor | None = None  # sums over ranks, shape (flags,). None without an all-reduce or flags.
    finite: Tensor | None = None  # whether all gradients were finite, shape ()


class GradientStatistics:
    """Measures the steps of one optimizer.

    For each step: `begin_step`, the backward passes, perhaps `preview`, then `finish_step` before the
    optimizer uses the gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: ScalingRule,
        options: GainOptions,
        model: torch.nn.Module | None,
        grad_scaler: GradScaler | None,
    ) -> None:
        self._settings = options.settings
        self._shards = shards = options.shards
        self._observes_backward = options.observes_backward
        adapts = rule.has_second_moments
        observes_shards = model is not None and is_fully_sharded(model)
        self.parameters = OptimizerParameters(
            optimizer, scales_lr_alone=not adapts, is_sharded=observes_shards or shards is not None
        )
        add_shards = shards.add_shards if shards is not None else dist.all_reduce if observes_shards else None
        self._metric = SecondMomentMetric(rule, optimizer, add_shards) if adapts else EuclideanMetric()
        own = self.parameters, options.settings, self._metric
        self.reader = GradientReader(*own)
        if options.observes_backward:
            kind = ShardedGradients if observes_shards else HookedGradients
            self.reader = kind(*own, model, self._on_pass_start, self._on_pass_end)
        self.flags: Sequence[float] = ()
        """Numbers of this rank that are summed over ranks together with the statistics."""
        self.joinable: Joinable | None = None
        """The object that represents the statistics in a `Join` context."""
        self.gradients_are_divided = False
        """Whether the gradients were divided by `divisor` since the last backward pass."""
        self._weights: StepWeights | None = None
        self._step_number = 0
        self._is_measuring = False
        self._is_left_out = False
        self._begins_pair = False
        self._all_reduce: StatisticsAllReduce | None = None
        self._previous_gradient = PreviousGradient(self._metric)
        self._previous_step: PreviousStep | None = None
        self.loss_scale = LossScale(grad_scaler)
        self._scale_of_scaler: float | None = None
        self._fingerprint: GradientFingerprint | None = None
        self._warnings = OneTimeWarnings()

    # -- a step -----------------------------------------------------------------------------------------

    @property
    def awaits_comparison(self) -> bool:
        """Whether the gradient of the last step is kept for a comparison that ends with this step."""
        return self._previous_gradient.step is not None and not self._begins_pair

    def begin_step(
        self, settings: StepSettings, step_number: int, *, measuring: bool, begins_pair: bool
    ) -> None:
        """Prepare for a step: add hooks to the parameters if it is measured, remove them if not."""
        self._settings, self._step_number, self._is_measuring = settings, step_number, measuring
        self._begins_pair = begins_pair
        self._is_left_out = False
        self.discard_step()
        self._metric.begin_step()
        if settings.micro_gradients > 1 or not measuring:
            self._previous_gradient.clear()
        if measuring:
            self.reader.observe(settings)
        else:
            self.reader.remove_hooks()

    def discard_step(self) -> None:
        """Discard what this step has measured so far, because its gradients were deleted."""
        self.gradients_are_divided = False
        self._discard_passes()

    def _discard_passes(self) -> None:
        self._weights = None
        all_reduce, self._all_reduce = self._all_reduce, None
        if all_reduce is not None:
            self._previous_gradient.clear()
            all_reduce.wait()
        self.reader.begin_step(measuring=self._is_measuring)

    def leave_out_step(self) -> None:
        """Leave this step out of the estimates, because its micro-gradients or its parameters are others."""
        self._is_left_out = True
        self._previous_gradient.clear()
        self._fingerprint = None

    def weigh_step(self, weights: StepWeights) -> None:
        """Use the weights of the micro-batches of this step. Call after its last backward pass."""
        # With weights w_i and gradients g_i of n micro-batches on K replicas, the gradient of the step is
        # G = sum(w_i g_i) / sum(w_i). If the noise of g_i is in inverse proportion to w_i, the formulas of
        # `docs/adascale.md` hold with M = |G|^2 and L = sum(w_i |g_i|^2) / sum(w_i).
        self._weights = weights

    @property
    def divisor(self) -> float:
        """The divisor of the sum over the backward passes of a step, if the loss is not scaled."""
        return float(self._settings.accumulation) if self._weights is None else self._weights.divisor

    @property
    def reads_gradients(self) -> bool:
        """Whether the micro-gradients of this step are read."""
        return self._is_measuring and self._settings.micro_gradients > 1

    def measure(self, weight: float) -> None:
        """Measure the step, after the micro-gradient that completes it was read. A collective call.

        `.grad` is the sum over the micro-batches of the gradient averaged over ranks. Not in place of an
        earlier measurement of the same step, unless it was discarded.
        """
        self.reader.end_last(weight)
        if self._is_measuring:
            self._measure()

    def discard_measurement(self) -> None:
        """Discard what `measure` has measured, but not the micro-gradients before."""
        self.gradients_are_divided = False
        all_reduce, self._all_reduce = self._all_reduce, None
        if all_reduce is not None:
            all_reduce.wait()
        self.reader.discard_last()

    def discard_comparison(self) -> None:
        """Discard the gradient of the last step, because the next is not made by one replica alone."""
        self._previous_gradient.clear()

    def remove_hooks(self) -> None:
        """Stop measuring, and remove all hooks from the parameters."""
        self._is_measuring = False
        self._discard_passes()
        self.reader.remove_hooks()

    def preview(self) -> StepEstimate | None:
        """Return the estimate of this step as far as it can be made before the step; None without any."""
        if self._all_reduce is None or self._is_left_out:
            return None
        statistics = self._all_reduce.result(self.parameters.lr_device)
        if self._scale_of_scaler is None:
            return self._estimate(statistics, self.loss_scale.inferred.to(statistics.averaged))
        return self._estimate(statistics, torch.full_like(statistics.averaged[0], self._scale_of_scaler))

    def exchange(self) -> None:
        """Start the all-reduce of a measured step if it has not started, and wait for it.

        On a GPU, what is launched from now on waits. `finish_step` does so too.
        """
        if not self._is_measuring or self.is_excluded_from_join():
            return
        if self._all_reduce is None:
            self._measure()
        if self._all_reduce is not None:
            self._all_reduce.wait()

    def finish_step(self) -> StepMeasurement:
        """Return the result of this step. Called when the optimizer is about to use the gradients."""
        if not self._is_measuring or self.is_excluded_from_join():
            return StepMeasurement()
        self.exchange()
        all_reduce, self._all_reduce = self._all_reduce, None
        if all_reduce is None:
            return StepMeasurement()
        if self._is_left_out:
            # Gradients that were measured may be deleted since.
            self._previous_gradient.clear()
            result = all_reduce.result(self.parameters.lr_device)
            return StepMeasurement(None, result.flags if result.flags.numel() else None, result.finite)
        self._warn_of_synchronisation_problem()
        before_step = None
        if self._observes_backward and not self._gradients_are_unchanged():
            divisor = self.divisor if self.gradients_are_divided else 1.0
            before_step = self.reader.current_sqr_norms() * divisor**2
        statistics = all_reduce.result(self.parameters.lr_device, before_step)
        statistics, loss_scale = self._with_loss_scale(statistics)
        estimate = self._estimate(statistics, loss_scale)
        if self._previous_gradient.is_from(self._step_number):
            self._previous_gradient.step = PreviousStep(statistics.averaged, self._settings.scale, loss_scale)
        elif not self._begins_pair:
            self._previous_gradient.invalidate()
        flag_sums = statistics.flags if statistics.flags.numel() else None
        return StepMeasurement(estimate, flag_sums, statistics.finite)

    def is_excluded_from_join(self) -> bool:
        """Whether the model takes uneven inputs without AdaScale, so that peers may be without data."""
        if not joins_without(self.reader.ddp, self.joinable):
            return False
        self._warnings.warn(
            "join",
            "the model takes uneven inputs and AdaScale does not. It measures nothing, since its all-reduce "
            "would wait for ranks without data. Use `with Join([model, optimizer]):` of "
            "torch.distributed.algorithms.join instead of `with model.join():`",
        )
        return True

    def join_all_reduce(self) -> None:
        """Take part in the all-reduce of peers that still have data; they leave the step out."""
        if self._is_measuring and self._settings.world_size > 1:
            zeros = torch.zeros(len(self.parameters.groups()), **self.parameters.statistics_options)
            self._start_all_reduce(LocalStatistics(zeros, zeros, complete=False))

    # -- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must survive a restart, as tensors and numbers."""
        return {
            "loss_scale": self.loss_scale.inferred.item(),
            "previous_gradient": self._previous_gradient.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Discards what this step has measured so far."""
        self._discard_passes()
        self.loss_scale.inferred = torch.tensor(state["loss_scale"], dtype=torch.float64)
        self._previous_gradient.load_state_dict(state["previous_gradient"], self.parameters.measured())

    # -- measuring --------------------------------------------------------------------------------------

    def _on_pass_start(self) -> None:
        # A GradScaler skips the step after gradients that are not finite, so this pass begins a new step.
        if self._all_reduce is not None and not self._all_reduce.result(self.parameters.lr_device).finite:
            self._discard_passes()
            self.reader.mark_incomplete()

    def _on_pass_end(self) -> None:
        if self.reader.passes == self._settings.accumulation and not self.is_excluded_from_join():
            self._measure()

    def _measure(self) -> None:
        """Read the averaged gradients, and start the all-reduce."""
        averaged = self.reader.averaged_sqr_norms()
        if self._settings.micro_gradients == 1:
            local = LocalStatistics(self._compare_with_previous(), averaged, complete=True)
        else:
            local = LocalStatistics(
                self.reader.sum_of_sqr_norms(),
                averaged,
                complete=self.reader.has_read_all,
            )
        self._scale_of_scaler = self.loss_scale.from_scaler()
        if self._observes_backward:
            self._record_fingerprint()
        self._start_all_reduce(local)

    def _compare_with_previous(self) -> Tensor:
        """Return the inner products with the previous gradient, shape (groups,).

        Copies the current gradient if the next step is compared with it.
        """
        groups = self.parameters.measured()
        self._previous_step = self._previous_gradient.preceding(self._step_number, groups)
        if self._previous_step is None:
            products = torch.zeros(len(groups), **self.parameters.statistics_options)
        else:
            products = self._previous_gradient.inner_products(groups, self.parameters.device)
        if self._begins_pair:
            self._previous_gradient.copy_from(groups, step_number=self._step_number)
        return products

    def _start_all_reduce(self, local: LocalStatistics) -> None:
        if self._all_reduce is not None:
            self._all_reduce.wait()
        if self._shards is not None:
            local = local.over(self._shards)
        self._all_reduce = StatisticsAllReduce(
            local,
            self.flags,
            ranks=self._settings.world_size,
            same_on_all_ranks=not self.parameters.is_sharded,
            process_group=self.reader.process_group,
            shards=self._shards,
        )

    def _warn_of_synchronisation_problem(self) -> None:
        problem = self.reader.synchronisation_problem()
        if problem is not None and self._settings.micro_gradients > 1:
            self._warnings.warn("sharded", f"{problem}. Until then such steps are left out of the estimates")

    # -- gradients that change between backward and step ------------------------------------------------

    def _record_fingerprint(self) -> None:
        if self.parameters.lr_is_on_device or self.parameters.device != HOST:
            # Comparing would wait for the device, and reading all gradients costs only a few kernels.
            self._fingerprint = None
            return
        if self._fingerprint is None:
            self._fingerprint = GradientFingerprint(
                p for group in self.parameters.groups() for p in group if p.requires_grad
            )
        self._fingerprint.record()

    @contextmanager
    def own_change_of_gradients(self) -> Iterator[None]:
        """A change of the gradients inside is not taken for one that the program has made."""
        is_unchanged = self._all_reduce is not None and self._gradients_are_unchanged()
        yield
        if is_unchanged and self._fingerprint is not None:
            self._fingerprint.record()

    def _gradients_are_unchanged(self) -> bool:
        """Whether gradients are certainly as they were after backward: not unscaled, clipped or averaged."""
        return self._fingerprint is not None and self._fingerprint.is_unchanged()

    def _with_loss_scale(self, statistics: ReducedStatistics) -> tuple[ReducedStatistics, Tensor]:
        """Return the statistics of the averaged gradients, and their loss scale.

        The loss scale has the shape (), and is NaN if it cannot be determined.
        """
        averaged, before_step = statistics.averaged, statistics.before_step
        given = torch.full_like(averaged[0], self._scale_of_scaler or 1.0)
        if before_step is None:
            if self._scale_of_scaler is None:
                self.loss_scale.inferred = torch.ones_like(averaged[0])  # nothing was unscaled
            return statistics, given
        if self._scale_of_scaler is not None or self.reader.is_compressed or self.parameters.is_sharded:
            loss_scale = given
        else:
            # Where ranks disagree, the program averages gradients itself after backward. The gradients before
            # the step are the mean then, and give no information about the loss scale.
            after_backward = torch.where(statistics.agreed, averaged.sum(), before_step.sum())
            loss_scale = self.loss_scale.infer(after_backward, before_step.sum())
        averaged = torch.where(statistics.agreed, averaged, before_step)
        return replace(statistics, averaged=averaged, agreed=torch.ones_like(statistics.agreed)), loss_scale

    # -- estimates --------------------------------------------------------------------------------------

    def _estimate(self, statistics: ReducedStatistics, loss_scale: Tensor) -> StepEstimate | None:
        is_single = self._settings.micro_gradients == 1
        if is_single:
            is_empty = self._weights is not None and self._weights.positive == 0
            if is_empty or not self._has_expected_passes():
                # What was read is the gradient of the first passes only, or of no valid samples.
                self._previous_gradient.invalidate()
                return None
            if self._previous_step is None:
                return None
            numbers = self._from_difference(statistics, loss_scale, self._previous_step)
        else:
            if (count := self.reader.micro_gradients) < 2 or not self._has_expected_passes():
                return None
            if self._weights is not None and self._weights.positive < 2:
                return None
            numbers = self._from_micro_gradients(statistics, loss_scale, count)
        valid = statistics.complete & statistics.agreed & statistics.finite
        valid = valid & torch.isfinite(numbers[0] + numbers[1])
        valid = valid & self.parameters.has_trainable(valid.device)
        defined = self._metric.defined_groups()
        if defined is not None:
            groups = range(len(self.parameters.groups()))
            valid = valid & torch.tensor([group in defined for group in groups], device=valid.device)
        return StepEstimate(*numbers, valid, biased=is_single)

    def _has_expected_passes(self) -> bool:
        passes = self.reader.passes
        if passes in (0, self._settings.accumulation):
            return True
        self._warnings.warn(
            "passes",
            f"got {passes} backward passes in a step, where {self._settings.accumulation} are expected: such "
            "steps are left out of the estimates, so the gain is not measured. Add up the losses of a batch, "
            "and call backward() once. Only a loop without ElasticTrainer accumulates gradients itself, and "
            "calls AdaScale.set_num_gradients_to_accumulate() and AdaScale.set_scale() with its numbers",
        )
        return False

    def _from_micro_gradients(
        self, statistics: ReducedStatistics, loss_scale: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        passes = self._settings.accumulation
        count_of_rank = count // self._settings.world_size
        mean_of_sqr, sqr_of_mean = statistics.summed / count, statistics.averaged
        if self._settings.is_scaled_loss:
            mean_of_sqr = mean_of_sqr * count_of_rank**2
        elif self._weights is not None:
            # The mean of the squares is weighted too.
            mean_of_sqr = statistics.summed / (self._settings.world_size * self.divisor)
            sqr_of_mean = sqr_of_mean / self.divisor**2
            count = self._weights.positive
        else:
            mean_of_sqr = mean_of_sqr / (passes / count_of_rank) ** 2
            sqr_of_mean = sqr_of_mean / passes**2
        unit = loss_scale.square()
        return from_micro_gradients(count, mean_of_sqr / unit, sqr_of_mean / unit, self._settings.scale)

    def _from_difference(
        self, statistics: ReducedStatistics, loss_scale: Tensor, previous: PreviousStep
    ) -> tuple[Tensor, Tensor]:
        previous_loss_scale = previous.loss_scale.to(loss_scale)
        product = statistics.summed / (loss_scale * previous_loss_scale)
        sqr_norm = statistics.averaged / loss_scale**2
        previous_sqr_norm = previous.sqr_norms.to(loss_scale) / previous_loss_scale**2
        sqr_of_difference = (sqr_norm + previous_sqr_norm - 2.0 * product).clamp(min=0.0)
        return from_consecutive_gradients(product, sqr_of_difference, previous.scale, self._settings.scale)
