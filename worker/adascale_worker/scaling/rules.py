"""What a step that is worth several steps at the initial batch size does with an optimizer's hyperparameters.

SGD: the learning rate is multiplied by the gain r, as in AdaScale SGD.

Adam and AdamW: a step at a larger batch divides by the square root of a second moment that is about r times
smaller, because noise dominates it. So the learning rate is multiplied by sqrt(r): the mean of such a step is
r times that of a step at the initial batch size. The moving averages of Adam keep their length in units of
progress: beta ** r. This is the scaling of Malladi et al. ("On the SDEs and Scaling Rules for Adaptive
Gradient Algorithms", NeurIPS 2022, arXiv 2205.10287, definition 5.2) with the gain in place of the ratio of
batch sizes; beta ** r is their 1 - r (1 - beta) where r (1 - beta) is small. Their eps / sqrt(r) is used
too. The limit of small steps, from which they derive it, needs r (1 - beta) well below 1. So the beta of the
first moment does not fall below `LEAST_BETA1`, with which its average covers 2.5 steps. The decoupled weight
decay of AdamW is per progress: a step multiplies the weights by 1 - r * lr * weight_decay. The weight decay
of Adam is a part of the gradient, and stays as it is.

`docs/adascale.md` shows the comparison with other rules.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from adascale_worker.scaling.statistics.norms import accumulation_dtype, are_read_together, local_shard
from adascale_worker.torch_private.autograd import flatten_together, multiply_in_place

Gain = float | Tensor


UNIT: Final = "adascale_unit"
"""The entry of a parameter group of Adam with the unit of its counts of steps: r of the last step."""

LEAST_BETA1: Final = 0.6
"""The least beta of the first moment at any gain; a smaller one stays as it is."""

Function = TypeVar("Function")


def _not_compiled(function: Function) -> Function:
    """Let `torch.compile` of a step leave out `function`, whose numbers are others in each step.

    torch would compile it again for each of them.
    """
    return cast(Function, torch.compiler.disable(function))


class SecondMoment(NamedTuple):
    """The second moment that an optimizer divides the gradient of a parameter by, as `value * factor`."""

    value: Tensor  # of the shape of the parameter
    # a positive number; or for values on a GPU, the factors of several parameters: shape (n,)
    factor: float | Tensor = 1.0
    place: int = 0  # index of the parameter's own factor among these


@runtime_checkable
class SecondMomentOptimizer(Protocol):
    """What AdaScale needs of an optimizer that divides gradients by the square root of their second moment.

    For optimizers other than those of torch. Each parameter group has an "eps", which is added to the square
    root, or none.
    """

    param_groups: list[dict[str, Any]]

    def second_moment(self, parameter: Tensor) -> Tensor | None:
        """Return the moving average of the squared gradients of `parameter`, of the same shape and >= 0.

        The same on all ranks. With a correction of its bias, if the optimizer corrects it. None before the
        first step of the parameter.
        """
        ...

    def hyperparameters_at(self, group: Mapping[str, Any], gain: float) -> Mapping[str, Any]:
        """Return the values of a group for a step that is worth `gain` steps at the initial batch size.

        AdaScale sets them for the step, and restores the others after it. `adam_hyperparameters` returns them
        for an optimizer that has the "lr", "betas" and "eps" of Adam.
        """
        ...


class ScalingRule:
    """The rule of SGD, and the interface of the others: the lr is multiplied by the gain."""

    has_second_moments = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer

    def hyperparameters_at(self, group: Mapping[str, Any], gain: Gain) -> Mapping[str, Any]:
        """Return the values of a group for a step that is worth `gain` steps."""
        return {"lr": scaled(group["lr"], gain)}

    @contextmanager
    def applied(self, gains: Sequence[Gain]) -> Iterator[None]:
        """Set the hyperparameters of each group for its gain, and restore the user's afterwards."""
        groups = self._optimizer.param_groups
        changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for number, group in enumerate(groups):
                gain = gains[number] if number < len(gains) else 1.0
                new = self.hyperparameters_at(group, gain)
                changed.append((group, {name: group[name] for name in new}))
                group.update(new)
                self.prepare(number, gain)
            yield
        finally:
            for group, originals in changed:
                group.update(originals)

    def prepare(self, number: int, gain: Gain) -> None:
        """Prepare the state of group `number` for a step that is worth `gain` steps."""

    def second_moments(self, number: int) -> dict[int, SecondMoment]:
        """Return the second moments of group `number` by the id of the parameter, of those with a step."""
        raise NotImplementedError

    def eps(self, number: int) -> float:
        """Return what group `number` adds to the square root of the second moment."""
        raise NotImplementedError

    def state_dict(self) -> list[float]:
        """Return the state that must survive a restart, a number for each group."""
        return []

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Restore what `state_dict` returned."""

    def loaded_optimizer(self) -> None:
        """Record that the optimizer has loaded a state."""


class AdamRule(ScalingRule):
    """The rule of `torch.optim.Adam` and `AdamW`.

    Adam corrects the bias of its averages by 1 - beta ** step. With beta ** r in the place of beta, `step`
    has to be the progress P in units of r, so that (beta ** r) ** (P / r) = beta ** P, the weight that the
    initial zero has left. So the counts of steps in the optimizer's state are multiplied by (old r) / (new r)
    when r changes. The correction of the second moment is exact then, and that of the first while its beta is
    above `LEAST_BETA1` or r does not change.
    """

    has_second_moments = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.units: list[float] = []  # r of the last step, by group

    @_not_compiled
    def hyperparameters_at(self, group: Mapping[str, Any], gain: Gain) -> Mapping[str, Any]:
        """Return the values of a group for a step that is worth `gain` steps."""
        values = dict(adam_hyperparameters(group, float(gain)))
        if isinstance(self._optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False):
            values["weight_decay"] = group["weight_decay"] * math.sqrt(gain)
        return values

    @_not_compiled
    def prepare(self, number: int, gain: Gain) -> None:
        """Convert the counts of steps of group `number` to units of `gain`."""
        gain, unit = float(gain), self._unit(number)
        if gain == unit:
            return
        states = (self._optimizer.state.get(p) for p in self._optimizer.param_groups[number]["params"])
        multiply_in_place([state["step"] for state in states if state], unit / gain)
        self.units += [1.0] * (number + 1 - len(self.units))
        self.units[number] = gain
        # The program may save and restore the state of its optimizer.
        self._optimizer.param_groups[number][UNIT] = gain

    def second_moments(self, number: int) -> dict[int, SecondMoment]:
        """Return the second moments of group `number` by the id of the parameter, of those with a step."""
        group = self._optimizer.param_groups[number]
        name = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        beta, unit, states = float(group["betas"][1]), self._unit(number), self._optimizer.state
        found: dict[int, SecondMoment] = {}
        factors: dict[float, float] = {}
        on_gpu: dict[torch.device, dict[int, dict[str, Tensor]]] = {}
        for parameter in group["params"]:
            state = states.get(parameter)
            if not state:
                continue
            step = state["step"]
            if are_read_together([step]):
                # On a GPU (capturable or fused) a tensor, which the program does not wait for.
                on_gpu.setdefault(step.device, {})[id(parameter)] = state
                continue
            passed = step.item()
            if passed == 0.0:
                continue  # All steps were skipped, in the kernel of a fused optimizer.
            factor = factors.get(passed)
            if factor is None:
                factor = factors[passed] = 1.0 / (1.0 - beta ** (passed * unit))
            found[id(parameter)] = SecondMoment(local_shard(state[name]), factor)
        for device, others in on_gpu.items():
            steps = flatten_together([state["step"] for state in others.values()])
            steps = steps.to(accumulation_dtype(device))  # 1 - beta loses digits.
            tensor = (1.0 - beta ** (steps * unit)).reciprocal()
            for place, (parameter_id, state) in enumerate(others.items()):
                found[parameter_id] = SecondMoment(local_shard(state[name]), tensor, place)
        return found

    def eps(self, number: int) -> float:
        """Return what group `number` adds to the square root of the second moment."""
        return float(self._optimizer.param_groups[number]["eps"] / math.sqrt(self._unit(number)))

    def state_dict(self) -> list[float]:
        """Return r of the last step, by group."""
        return list(self.units)

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Restore what `state_dict` returned."""
        self.units = list(state)

    def loaded_optimizer(self) -> None:
        """Use the units of the state that the optimizer has loaded: 1 if a plain optimizer has saved it."""
        self.units = [group.get(UNIT, 1.0) for group in self._optimizer.param_groups]

    def _unit(self, number: int) -> float:
        return self.units[number] if number < len(self.units) else 1.0


class ProtocolRule(ScalingRule):
    """The rule of a `SecondMomentOptimizer`, which it defines itself."""

    has_second_moments = True

    def hyperparameters_at(self, group: Mapping[str, Any], gain: Gain) -> Mapping[str, Any]:
        """Return the values of a group for a step that is worth `gain` steps."""
        values: Mapping[str, Any] = self._optimizer.hyperparameters_at(group, float(gain))
        return values

    def second_moments(self, number: int) -> dict[int, SecondMoment]:
        """Return the second moments of group `number` by the id of the parameter, of those with a step."""
        found = {}
        for parameter in self._optimizer.param_groups[number]["params"]:
            value = self._optimizer.second_moment(parameter)
            if value is not None:
                found[id(parameter)] = SecondMoment(local_shard(value))
        return found

    def eps(self, number: int) -> float:
        """Return what group `number` adds to the square root of the second moment."""
        return float(self._optimizer.param_groups[number].get("eps", 0.0))


def adam_hyperparameters(group: Mapping[str, Any], gain: float) -> Mapping[str, Any]:
    """Return "lr", "betas" and "eps" of a group for a step that is worth `gain` steps.

    lr * sqrt(gain), beta ** gain and eps / sqrt(gain), as `AdaScale` changes those of an Adam. The first beta
    does not fall below 0.6; one that is smaller already stays as it is.

    Args:
        group: the parameter group, with these three.
        gain: at least 1.
    """
    root = math.sqrt(gain)
    beta1, *others = group["betas"]
    return {
        "lr": scaled(group["lr"], root),
        "betas": (_scaled_beta1(beta1, gain), *(beta**gain for beta in others)),
        "eps": group["eps"] / root,
    }


def _scaled_beta1(beta: float | Tensor, gain: float) -> float | Tensor:
    if isinstance(beta, Tensor):
        return torch.maximum(beta.pow(gain), beta.clamp(max=LEAST_BETA1))
    return float(max(beta**gain, min(beta, LEAST_BETA1)))


def scaled(lr: float | Tensor, factor: Gain) -> float | Tensor:
    """Return the learning rate of a step, of the same type as `lr`."""
    product = lr * factor
    return product.to(lr.dtype) if isinstance(lr, Tensor) and isinstance(product, Tensor) else product
