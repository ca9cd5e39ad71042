"""Measures steps: from the first backward pass to what the step says of each parameter group."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.statistics.backward import BackwardWatch, Reading
from adascale_worker.statistics.estimates import (
    Samples,
    from_consecutive_gradients,
    from_micro_gradients,
)
from adascale_worker.statistics.exchange import Exchange, Statistics, sqr_norms_of_mean
from adascale_worker.statistics.fingerprint import Fingerprint
from adascale_worker.statistics.loss_scale import GradScaler, LossScale
from adascale_worker.statistics.norms import local, sqr_norms, widest_type
from adascale_worker.statistics.previous import Label, PreviousGradient

if TYPE_CHECKING:
    from adascale_worker.statistics.sharded import ShardedGradients

HOST = torch.device("cpu")

AVERAGING_HOOKS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)
"""DDP communication hooks after which `.grad` is the mean of the ranks' gradients, up to rounding."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a step is made.

    Attributes:
        world_size: replicas.
        accumulation: backward passes.
        scale: S of the whole step.
        is_scaled_loss: whether each loss is divided by `accumulation`.
    """

    world_size: int
    accumulation: int
    scale: float
    is_scaled_loss: bool

    @property
    def micro_gradients(self) -> int:
        """n: the gradients that a step is the mean of."""
        return self.world_size * self.accumulation


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step's measurement.

    Attributes:
        samples: None if the step is of no use: not measured, or the first of a difference.
        flags: sums over ranks, shape (flags,); None if there was no all-reduce, or no flag in it.
    """

    samples: Samples | None = None
    flags: Tensor | None = None


class GradientStatistics:
    """Measures the steps of one optimizer.

    For each step: `prepare`, the backward passes, perhaps `peek`, then `take` before the gradients are used.

    Args:
        optimizer: whose parameters are watched.
        setup: how steps are made.
        model: a `DistributedDataParallel` or a `fully_shard`ed model, if known.
        grad_scaler: of the training loop, if known.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        setup: Setup,
        model: torch.nn.Module | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._setup = setup
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._sharded = _sharded_gradients(model, self._parameters(), setup.world_size)
        self._watch = BackwardWatch(self._on_pass_start, self._on_pass_end)
        self._previous = PreviousGradient()
        self._loss_scale = LossScale(grad_scaler)
        self._fingerprint: Fingerprint | None = None
        self._exchange: Exchange | None = None
        self._asked_loss_scale: float | None = None
        self._mask: tuple[tuple[tuple[bool, ...], torch.device], Tensor] | None = None
        self._before: Label | None = None
        self._compressed = False
        self._measuring = False
        self._step = 0
        self._warned: set[str] = set()
        self.flags: Sequence[float] = ()
        """Local numbers to be summed over ranks along with the statistics."""
        self.joinable: Joinable | None = None
        """Whoever stands for this gauge in a `Join` context."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Of the ranks; None for the default one."""
        return None if self._ddp is None else self._ddp.process_group

    def unmeasurable(self) -> list[Tensor]:
        """Return the parameters whose gradients can't be read as those of the others are.

        With `fully_shard` on the model, those that it did not shard alone; else all DTensors.
        """
        parameters = [parameter for group in self._parameters() for parameter in group]
        if self._sharded is None:
            return [one for one in parameters if hasattr(one, "placements")]
        return [one for one in parameters if id(one) not in self._sharded.known]

    # -- a step -----------------------------------------------------------------------------------------

    def prepare(self, setup: Setup, step: int, *, measuring: bool) -> None:
        """Get ready for a step: hook the parameters if it is to be measured, unhook them if not.

        Args:
            setup: how it is made.
            step: its number.
            measuring: whether to measure it.
        """
        self._setup, self._step, self._measuring = setup, step, measuring
        self.abandon()
        if setup.micro_gradients > 1 or not measuring:
            self._previous.drop()
        if not measuring:
            self._watch.stop()
            return
        self._watch.watch(self._parameters(), self._reading())

    def abandon(self) -> None:
        """Forget what this step's passes have measured."""
        if self._exchange is not None:
            self._exchange.finish()
            self._exchange = None
            self._previous.drop()
        self._watch.begin_step()
        if self._sharded is not None:
            self._sharded.begin_step(watching=self._measuring)

    def stop(self) -> None:
        """Take all hooks off the parameters."""
        self._measuring = False
        self.abandon()
        self._watch.stop()

    @property
    def hands_off(self) -> bool:
        """Whether all learning rates are tensors where gradients are: the host need not know any gain."""
        device, rates = self._device(), (group["lr"] for group in self._optimizer.param_groups)
        return all(isinstance(rate, Tensor) and rate.device == device for rate in rates)

    @property
    def home(self) -> torch.device:
        """Where sense is made of what is measured: where learning rates are."""
        return self._device() if self.hands_off else HOST

    def peek(self) -> Samples | None:
        """Return what the passes so far say, as far as it can be known before the step."""
        if self._exchange is None:
            return None
        statistics = self._exchange.statistics(self.home)
        if self._asked_loss_scale is None:
            return self._samples(statistics, self._loss_scale.seen.to(statistics.second))
        return self._samples(statistics, torch.full_like(statistics.second[0], self._asked_loss_scale))

    def take(self, *, divided: bool) -> Outcome:
        """Return what the step says. Called when its gradients are ready to be stepped with.

        Args:
            divided: whether gradients were divided by the accumulation count since backward.
        """
        if not self._measuring or self.left_out_of_join():
            return Outcome()
        if self._exchange is None:
            self._measure()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return Outcome()
        self._warn_of_obstacle()
        statistics = exchange.statistics(self.home, self._gradients_now(divided=divided))
        statistics, loss_scale = self._as_of_backward(statistics)
        samples = self._samples(statistics, loss_scale)
        self._previous.label = Label(statistics.second, self._setup.scale, loss_scale)
        return Outcome(samples, statistics.flags if statistics.flags.numel() else None)

    def warn(self) -> None:
        """Tell, once, of steps that were left out; this may wait for the device."""
        self._loss_scale.warn()

    def shadow(self) -> None:
        """Match the all-reduce of peers that still have data. They leave the step out of the estimates."""
        if self._measuring and self._setup.world_size > 1:
            nothing = torch.zeros(len(self._parameters()), **self._number())
            self._start(nothing, nothing, complete=False)

    # -- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart, as tensors and numbers."""
        return {"loss_scale": self._loss_scale.seen.item(), "previous": self._previous.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned. What this step has measured so far is forgotten."""
        self.abandon()
        self._loss_scale.seen = torch.tensor(state["loss_scale"], dtype=torch.float64)
        self._previous.load_state_dict(state["previous"], self._parameters())

    # -- reading gradients ------------------------------------------------------------------------------

    def _reading(self) -> Reading:
        if self._sharded is not None:
            return Reading.ELSEWHERE
        if self._setup.micro_gradients == 1:
            return Reading.NOT_AT_ALL
        if self._setup.accumulation > 1 or self._ddp is None:
            return Reading.ARRIVING
        # If .grad is a view into DDP's bucket, or DDP averages before our callback, that would be too late.
        if self._ddp.gradient_as_bucket_view or self._ddp.static_graph:
            return Reading.ARRIVING
        return Reading.AFTER_PASS

    def _on_pass_start(self) -> None:
        # A GradScaler leaves out the step after gradients that are not finite: then a new one begins here.
        if self._exchange is not None and not self._exchange.statistics(self.home).finite:
            self.abandon()
            if self._sharded is not None:
                self._sharded.miss()  # FSDP calls a hook when the first gradients of a pass are reduced
        self._watch.keep = self._setup.world_size > 1 and self._compresses()

    def _on_pass_end(self) -> None:
        if self._passes() == self._setup.accumulation and not self.left_out_of_join():
            self._measure()

    def _measure(self) -> None:
        """Read the averaged gradients, and start the all-reduce."""
        gradients, device = self._gradients(), self._device()
        averaged, complete = sqr_norms(gradients, device), True
        self._compressed = self._watch.keep
        if self._compressed:
            kept, ranks = self._watch.kept(), self._setup.world_size
            averaged = sqr_norms_of_mean(kept, device, ranks=ranks, process_group=self.process_group)
        if self._setup.micro_gradients == 1:
            first = self._compare(device)
        elif self._sharded is not None:
            first = self._sharded.local_sqr(device)
            complete = self._seen() > 1
            averaged = averaged * self._sharded.shards  # so that the mean over ranks is the sum over shards
        else:
            first = self._watch.local_sqr(len(gradients), device)
            complete = self._watch.saw_any and self._watch.sees_all()
        self._asked_loss_scale = self._loss_scale.ask()
        self._remember(device)
        self._start(first, averaged, complete=complete)

    def _passes(self) -> int:
        """Return the backward passes of this step so far, with those that FSDP does not synchronise."""
        return self._watch.passes if self._sharded is None else self._sharded.passes

    def _seen(self) -> int:
        """Return how many micro-gradients the step was seen to be the mean of; 0 if that is not known."""
        parts = self._setup.accumulation if self._sharded is None else self._sharded.parts
        return self._setup.world_size * parts

    def _warn_of_obstacle(self) -> None:
        obstacle = None if self._sharded is None else self._sharded.obstacle()
        if obstacle is not None and self._setup.micro_gradients > 1:
            self._warn_once("sharded", f"{obstacle}: until then such steps are left out of the estimates")

    def _start(self, first: Tensor, second: Tensor, *, complete: bool) -> None:
        if self._exchange is not None:
            self._exchange.finish()
        self._exchange = Exchange(
            first,
            second,
            self.flags,
            ranks=self._setup.world_size,
            complete=complete,
            replicated=self._sharded is None,
            process_group=self.process_group,
        )

    def _compare(self, device: torch.device) -> Tensor:
        """Return the inner product with the previous gradient, per group, and hold the current one."""
        parameters = self._parameters()
        products = torch.zeros(len(parameters), **self._number())
        self._before = None
        if self._previous.fits(self._step, parameters):
            products = self._previous.inner_products(parameters, device)
            self._before = self._previous.label
        self._previous.hold(parameters, step=self._step)
        return products

    def _compresses(self) -> bool:
        """Whether gradients are averaged by a communication hook that may lose some of them."""
        hooks = () if self._ddp is None else getattr(self._ddp, "_comm_hooks", ())
        return any(hook not in AVERAGING_HOOKS for hook, _ in hooks)

    def left_out_of_join(self) -> bool:
        """Whether the model takes uneven inputs without AdaScale: peers may be without data."""
        if self._ddp is None or not self._ddp._join_config.enable:
            return False
        if self.joinable is not None and self.joinable._join_config.enable:
            return False
        self._warn_once(
            "join",
            "the model takes uneven inputs and AdaScale is not told: it measures nothing, for its all-reduce "
            "would wait for ranks without data. Use `with Join([model, optimizer]):` of "
            "torch.distributed.algorithms.join instead of `with model.join():`",
        )
        return True

    # -- making sense of them ---------------------------------------------------------------------------

    def _remember(self, device: torch.device) -> None:
        """Keep in mind what gradients are like, to tell whether they are scaled before the step."""
        if self.hands_off or device != HOST:
            # A look would cost a synchronisation, and reading all of them costs no more than a few kernels.
            self._fingerprint = None
            return
        if self._fingerprint is None:
            self._fingerprint = Fingerprint(
                p for group in self._parameters() for p in group if p.requires_grad
            )
        self._fingerprint.take()

    def _gradients_now(self, *, divided: bool) -> Tensor | None:
        """Return the squared norms of what will be stepped with, (groups,); None if surely unchanged.

        Between backward and step gradients may have been unscaled, clipped, or averaged by hand.
        """
        if self._fingerprint is not None and self._fingerprint.matches():
            return None
        norms = sqr_norms(self._gradients(), self._device())
        return norms * self._setup.accumulation**2 if divided else norms

    def _as_of_backward(self, statistics: Statistics) -> tuple[Statistics, Tensor]:
        """Return the statistics of averaged gradients, and the loss scale that they are in units of.

        The loss scale is NaN if it can't be told, and of no dimension.
        """
        asked, now, averaged = self._asked_loss_scale, statistics.now, statistics.second
        if now is None:
            # As they were after backward: nothing has unscaled them.
            if asked is None:
                self._loss_scale.seen = torch.ones_like(averaged[0])
            return statistics, torch.full_like(averaged[0], asked or 1.0)
        if asked is not None or self._compressed or self._sharded is not None:
            loss_scale = torch.full_like(averaged[0], asked or 1.0)
        else:
            # Averaged by hand after backward, what is stepped with is the mean, and nothing is to be told.
            same = torch.where(statistics.agreed, averaged.sum(), now.sum())
            loss_scale = self._loss_scale.infer(same, now.sum())
        averaged = torch.where(statistics.agreed, averaged, now)
        return replace(statistics, second=averaged, agreed=torch.ones_like(statistics.agreed)), loss_scale

    def _samples(self, statistics: Statistics, loss_scale: Tensor) -> Samples | None:
        alone = self._setup.micro_gradients == 1
        if not alone and (count := self._seen()) < 2:
            return None
        if not alone and (passes := self._passes()) not in (0, self._setup.accumulation):
            self._warn_once(
                "passes",
                f"got {passes} backward passes in a step, num_gradients_to_accumulate is "
                f"{self._setup.accumulation}: such steps are left out of the estimates. Add up losses before "
                "one backward(), or tell what the loop does: set_num_gradients_to_accumulate(), set_scale()",
            )
            return None
        if not alone:
            numbers = self._from_micro_gradients(statistics, loss_scale, count)
        elif self._before is not None:
            numbers = self._from_difference(statistics, loss_scale, self._before)
        else:
            return None
        valid = statistics.complete & statistics.agreed & statistics.finite
        valid = valid & torch.isfinite(numbers[0] + numbers[1]) & self._trained(valid)
        return Samples(*numbers, valid, biased=alone)

    def _from_micro_gradients(
        self, statistics: Statistics, loss_scale: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        passes = self._setup.accumulation
        parts = count // self._setup.world_size
        mean_of_sqr, sqr_of_mean = statistics.first / count, statistics.second
        if self._setup.is_scaled_loss:
            mean_of_sqr = mean_of_sqr * parts**2
        else:
            mean_of_sqr = mean_of_sqr / (passes / parts) ** 2
            sqr_of_mean = sqr_of_mean / passes**2
        unit = loss_scale.square()
        return from_micro_gradients(count, mean_of_sqr / unit, sqr_of_mean / unit, self._setup.scale)

    def _from_difference(
        self, statistics: Statistics, loss_scale: Tensor, before: Label
    ) -> tuple[Tensor, Tensor]:
        scale_before = before.loss_scale.to(loss_scale)
        product = statistics.first / (loss_scale * scale_before)
        now, then = statistics.second / loss_scale**2, before.sqr.to(loss_scale) / scale_before**2
        difference = (now + then - 2.0 * product).clamp(min=0.0)
        return from_consecutive_gradients(product, difference, before.scale, self._setup.scale)

    # -- the optimizer's parameters -----------------------------------------------------------------------

    def _parameters(self) -> list[list[Tensor]]:
        return [group["params"] for group in self._optimizer.param_groups]

    def _trained(self, like: Tensor) -> Tensor:
        """Whether each group has a parameter that is not frozen: shape (groups,), where `like` is."""
        trained = tuple(any(p.requires_grad for p in group) for group in self._parameters())
        if self._mask is None or self._mask[0] != (trained, like.device):
            # Made once: to bring it to a GPU is to wait for that.
            self._mask = (trained, like.device), torch.tensor(trained, device=like.device)
        return self._mask[1]

    def _gradients(self) -> list[list[Tensor]]:
        return [
            [local(parameter.grad) for parameter in group if parameter.grad is not None]
            for group in self._parameters()
        ]

    def _device(self) -> torch.device:
        return self._parameters()[0][0].device

    def _number(self) -> dict[str, Any]:
        device = self._device()
        return {"dtype": widest_type(device), "device": device}

    def _warn_once(self, subject: str, message: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(message, RuntimeWarning, stacklevel=5)


def _sharded_gradients(
    model: torch.nn.Module | None, parameters: list[list[Tensor]], ranks: int
) -> "ShardedGradients | None":
    if model is None or not hasattr(model, "set_custom_reduce_scatter"):
        return None
    from adascale_worker.statistics.sharded import ShardedGradients  # FSDP2 takes long to import

    return ShardedGradients(model, parameters, ranks)
