"""AdaScale: an SGD, Adam or AdamW whose hyperparameters follow the gain of its batch size.

The algorithm is AdaScale SGD (Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed
Training", ICML 2020, arXiv 2007.05105). The interface is that of FairScale's `AdaScale`, so that a user of it
changes only the import; `docs/adascale.md` lists the differences. The formulas are in
`adascale_core.batch.gain`, what a gain changes is in `adascale_worker.scaling.rules`, and the measurement of
gradients is in `adascale_worker.scaling.statistics`.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from adascale_core.batch.gain import GradientEstimate, require_scale
from adascale_worker.errors import UnsupportedOptimizerError
from adascale_worker.scaling.observation import Report, report_to
from adascale_worker.scaling.observation import observe as observe_steps
from adascale_worker.scaling.rules import scaling_rule_of
from adascale_worker.scaling.statistics.all_reduce import Shards
from adascale_worker.scaling.statistics.gradient_statistics import GradientStatistics
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.scaling.statistics.steps import GainOptions, require_count
from adascale_worker.torch_private.autograd import divide_in_place
from adascale_worker.torch_private.distributed import is_fully_sharded

STATE_KEY = "adascale"
"""Key of AdaScale's own state in its state_dict, beside that of the inner optimizer."""

STATE_VERSION = 4


class AdaScale(torch.optim.Optimizer):
    """Scales the learning rate of an optimizer by the gain of its batch size.

    A step at scale S (a batch of S times the initial batch size) makes as much progress as `gain()` steps of
    the initial batch size, 1 <= gain <= S. `step()` multiplies the lr of each group by the gain of the group,
    and restores it afterwards; for Adam and AdamW it changes other hyperparameters too (docs/adascale.md,
    "Optimizers"). Advance schedules, and count progress, by `gain()` per step instead of by 1.

    The estimates come from the n = world_size * num_gradients_to_accumulate gradients that a step is the
    mean of. With n = 1 they come from the difference of consecutive gradients, which is biased
    (docs/adascale.md, "One replica").

    Args:
        optimizer: a `torch.optim.SGD`, with or without momentum, or a wrapper of it such as
            `ZeroRedundancyOptimizer`; a `torch.optim.Adam` or `AdamW`; or an optimizer with the methods of
            `SecondMomentOptimizer`. Its parameter groups and state are shared with it.
        world_size: number of replicas. Default: the size of the process group, 1 without a process group.
        scale: S, positive. Default: `world_size * num_gradients_to_accumulate`.
        smoothing: weight of the past in the moving average, in [0, 1). Default: max(1 - S/1000, 0), which
            follows the scale.
        num_gradients_to_accumulate: backward passes per step.
        is_scaled_loss: whether the training loop divides the loss by `num_gradients_to_accumulate`. If
            not, `step()` divides the gradients.
        debias_ewma: whether the moving average is debiased; False is appendix B.3 of the paper.
        model: the `DistributedDataParallel` around the model, whose process group is used. Required for a
            model with `fully_shard` (FSDP2).
        sample_every: measure every k-th step. Default: all of the first 100 steps, then up to every 16th
            step, depending on the smoothing.
        grad_scaler: the `torch.amp.GradScaler` of the training loop. Required only if gradients are clipped
            between `unscale_()` and `step()`, or passed by the training loop; otherwise the loss scale is
            inferred from the gradients.
        disjoint_pairs: with n = 1, whether each gradient is compared with at most one other. Half of the
            gradients are then neither kept for the next step nor saved.
        observes_backward: whether backward passes are observed. If not, the training loop passes its
            gradients to `statistics`.
        shards: exchanges the statistics, if each process of a replica has shards of the gradients.
        observe: measure without changing anything (docs/adascale.md, "Only observing"). Rank 0 reports: True
            writes a line to stderr, a path appends to a CSV file, a function is called with an
            `Observation`.
        observe_every: number of steps from one report to the next.
        max_gain: L, a finite number above 1. Every gain r becomes 1 / (1 / L + (1 - 1 / L) / r), which is
            below L at every scale (docs/adascale.md, "A limit of the gain"). Default: None, no limit.

    Raises:
        UnsupportedOptimizerError: (a TypeError) `optimizer` is not one of these; some of its parameters are
            DTensors that `fully_shard` on `model` did not make, or only some parameters are sharded.
        UnsupportedTorchError: the installed torch does not have what this needs.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
        *,
        model: torch.nn.Module | None = None,
        sample_every: int | None = None,
        grad_scaler: GradScaler | None = None,
        disjoint_pairs: bool = False,
        observes_backward: bool = True,
        shards: Shards | None = None,
        max_gain: float | None = None,
        observe: bool | str | Path | Report = False,
        observe_every: int = 100,
    ) -> None:
        if isinstance(optimizer, AdaScale):
            raise UnsupportedOptimizerError(
                "got an AdaScale optimizer; pass the inner optimizer to AdaScale, once"
            )
        self._observes = observe is not False
        is_sharded = shards is not None or is_fully_sharded(model)
        self._rule = scaling_rule_of(optimizer, observes=self._observes, is_sharded=is_sharded)
        self._inner = optimizer
        super().__init__(
            cast(Any, [dict(group) for group in optimizer.param_groups]), dict(optimizer.defaults)
        )
        process_group = model.process_group if isinstance(model, DistributedDataParallel) else None
        replicas = _world_size(process_group) if world_size is None else world_size
        options = GainOptions(
            replicas,
            num_gradients_to_accumulate,
            float(replicas * num_gradients_to_accumulate if scale is None else scale),
            is_scaled_loss,
            chosen_smoothing=smoothing,
            sample_every=sample_every,
            disjoint_pairs=disjoint_pairs,
            debias=debias_ewma,
            observes_backward=observes_backward,
            shards=shards,
            max_gain=max_gain,
        )
        statistics = GradientStatistics(self._rule, options, model, grad_scaler)
        if shards is None:
            statistics.reader.require_readable()
        # Methods of this class set no attribute after this: the optimizer of Lightning takes AdaScale as its
        # class and reads its attributes, but what a method sets on it would not reach AdaScale.
        self._inner_step: Callable[[], float | None] = optimizer.step  # may be replaced by ours later
        self.statistics = statistics
        weakref.finalize(self, statistics.stop)
        self._share_groups_and_state()
        reference = weakref.ref(self)

        def share(_: torch.optim.Optimizer) -> None:
            adascale = reference()
            if adascale is not None:
                adascale._share_groups_and_state()

        optimizer.register_load_state_dict_post_hook(share)
        statistics.begin_step()
        if self._observes:
            require_count("observe_every", observe_every)
            observe_steps(self, statistics, optimizer, report_to(observe), observe_every)

    # -- results ----------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer, which makes the steps."""
        return self._inner

    @property
    def scale(self) -> float:
        """S: the batch size of a step over the initial batch size."""
        return self.statistics.options.scale

    @property
    def smoothing(self) -> float:
        """Weight of the past in the moving average of the estimates."""
        return self.statistics.options.smoothing

    @property
    def estimate(self) -> GradientEstimate | None:
        """The estimate for the gradients of all trained groups; None before the first measured step.

        A group is not trained if it is frozen, or if its lr is 0 and that of another group is not.
        """
        return self.statistics.total_estimate()

    @property
    def grad_sqr(self) -> float:
        """Estimated squared norm of the true gradient, all trained groups; 0 without an estimate."""
        estimate = self.estimate
        return 0.0 if estimate is None else estimate.grad_sqr

    @property
    def grad_var(self) -> float:
        """Estimated total variance of a gradient at the initial batch size; 0 without an estimate."""
        estimate = self.estimate
        return 0.0 if estimate is None else estimate.grad_var

    @property
    def grad_sqr_error(self) -> float:
        """Standard error of `grad_sqr`; 0 without an estimate."""
        estimate = self.estimate
        return 0.0 if estimate is None else estimate.grad_sqr_error

    def gain(self, pg_idx: int | None = None) -> float:
        """Return how many steps at the initial batch size this step is worth.

        From the end of the last backward pass on, it includes the gradients of this step.

        Args:
            pg_idx: a parameter group. Default: all groups that are trained, the gain to count progress by.

        Raises:
            IndexError: there is no such group.
        """
        return self.statistics.gain(self.scale, pg_idx)

    def predict_gain(self, scale: float) -> float:
        """Return the gain of all trained groups together at another scale.

        Raises:
            ValueError: `scale` is not a positive finite number.
        """
        require_scale(scale)
        return self.statistics.gain(scale)

    # -- settings ---------------------------------------------------------------------------------------

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:  # noqa: ARG002
        """Set the batch size, as a multiple of the initial batch size.

        Args:
            scale: S.
            update_estimate: has no effect, because the estimates do not depend on S.

        Raises:
            ValueError: `scale` is not a positive finite number.
        """
        self.statistics.change_options(scale=float(scale))

    def set_num_gradients_to_accumulate(
        self,
        num_gradients_to_accumulate: int,
        update_smoothing: bool = True,
    ) -> None:
        """Set the number of backward passes per step. Does not change the scale; call `set_scale` for that.

        Args:
            num_gradients_to_accumulate: at least 1.
            update_smoothing: whether the smoothing follows the scale again, if it was chosen.

        Raises:
            ValueError: a number is out of range.
        """
        smoothing = None if update_smoothing else self.statistics.options.chosen_smoothing
        self.statistics.change_options(accumulation=num_gradients_to_accumulate, chosen_smoothing=smoothing)

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide the gradients of an unscaled loss by the number of accumulated gradients, now.

        `step()` does so itself; this is for a loop that clips the gradients first.

        Raises:
            RuntimeError: the loss is already scaled.
        """
        if self.statistics.options.is_scaled_loss:
            raise RuntimeError(
                "AdaScale was constructed with is_scaled_loss=True, so the loss is already divided by "
                "num_gradients_to_accumulate and the gradients must not be divided again; construct AdaScale "
                "with is_scaled_loss=False, or remove this call"
            )
        self._divide_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as `torch.optim.Optimizer.add_param_group`. Its gain is 1 until measured."""
        if not hasattr(self, "statistics"):  # Optimizer.__init__ calls this for the groups that it gets
            super().add_param_group(param_group)
            return
        self._inner.add_param_group(param_group)
        self._share_groups_and_state()
        self.statistics.restart_sampling()

    def unhook(self) -> None:
        """Remove all hooks from the parameters. The gain does not change from then on."""
        self.statistics.stop()

    # -- a step -----------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make a step with the hyperparameters of each group scaled by the gain of the group.

        Args:
            closure: computes loss and gradients again; called once, as torch's optimizers do.

        Returns:
            the result of `closure`, or of the inner optimizer's step without a closure.
        """
        if self._observes:  # by hooks of the inner optimizer
            return self._inner.step() if closure is None else self._inner.step(closure)
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.statistics.finish_measurement()
        if not self.statistics.options.is_scaled_loss:
            self._divide_gradients()
        with self._rule.applied(self.statistics.group_gains()):
            returned = self._inner_step()
        self.statistics.end_step()
        return loss if closure is not None else returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, as `torch.optim.Optimizer.zero_grad`."""
        self._inner.zero_grad(set_to_none)
        self.statistics.discard_step()

    def _divide_gradients(self) -> None:
        statistics = self.statistics
        if statistics.divisor == 1.0 or statistics.gradients_are_divided:
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        divide_in_place([local_shard(p.grad) for p in parameters if p.grad is not None], statistics.divisor)
        statistics.gradients_are_divided = True

    # -- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, with AdaScale's own under the key "adascale".

        Tensors, numbers, strings, lists and dicts only. Arguments of the constructor (scale, replicas,
        accumulation, smoothing, max_gain) are not in it.
        """
        state = dict(self._inner.state_dict())
        state[STATE_KEY] = {"version": STATE_VERSION, **self.statistics.state_dict()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, at any scale, number of replicas and accumulation.

        The state of the plain optimizer is accepted with a warning; AdaScale then starts without estimates.

        Raises:
            ValueError: the state is of another version or another kind of optimizer, or does not fit the
                parameters.
        """
        inner = dict(state_dict)
        own = inner.pop(STATE_KEY, None)
        if own is not None and own["version"] != STATE_VERSION:
            raise ValueError(
                f"got AdaScale state of version {own['version']}; this release reads {STATE_VERSION}: "
                "load it with the release that saved it"
            )
        _check_kind(inner.get("param_groups", []), self._inner)
        self._inner.load_state_dict(inner)
        self._share_groups_and_state()
        if own is None:
            warnings.warn(
                "the loaded state has no AdaScale part, because another optimizer saved it; AdaScale starts "
                "without estimates, with a gain of 1",
                UserWarning,
                stacklevel=2,
            )
        self.statistics.load_state_dict(own)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies, which would lack the hooks of this process."""
        raise TypeError(
            "an AdaScale optimizer can not be copied or pickled, because it observes parameters by hooks: "
            "make another one, and pass state_dict() to its load_state_dict()"
        )

    def _share_groups_and_state(self) -> None:
        """Use the groups and the state of the inner optimizer, which replaces them when it loads."""
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state


def _check_kind(saved: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Check that the groups of a state are those of such an optimizer: torch replaces groups unseen."""
    for group, own in zip(saved, optimizer.param_groups, strict=False):
        for name in ("momentum", "betas"):
            if name in group and name not in own:
                has, lacks = "the state", type(optimizer).__name__
            elif name in own and name not in group:
                has, lacks = type(optimizer).__name__, "the state"
            else:
                continue
            raise ValueError(f"the parameter groups of {has} have {name}, those of {lacks} do not")


def _world_size(process_group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1
