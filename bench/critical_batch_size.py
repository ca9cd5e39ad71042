"""Is the gain the critical batch size? Branches of one run, beside the noise scales at the same weights.

    OMP_NUM_THREADS=1 python bench/critical_batch_size.py measure [--size 0.5M] [--tokens N] [--minutes 30]
    python bench/critical_batch_size.py report              write the table and the picture from the results

    ... measure --optimizer muon --lr 0.004             Muon for the blocks' matrices, AdamW for the rest

The model, the data and AdamW are those of bench/ramp.py. One run trains with the small batch; after a
warm-up over 2% of its tokens its lr is constant. Its state is kept at `POINTS`. At each point:

- Branches continue with k times the small batch and the lr times the square root of k, all for the same
  number of tokens and on the same sequences in the same order, after the branched training of Merrill et al.
  ("Critical Batch Size Revisited", arXiv 2505.23971). The loss of a branch is the mean over its last quarter,
  of each batch before its step. The critical batch size is the largest k up to which no branch has a loss
  more than `TOLERANCE` above that of k = 1, interpolated between two k on a logarithmic scale.
- The efficiency of a branch is the share of its tokens after which the branch with k = 1 has the same loss,
  if that falls linearly in the logarithm of the tokens. The gain predicts gain(k) / k for it, which is one
  half at k = `grad_var` / `grad_sqr` + 2.
- The noise scale `grad_var` / `grad_sqr` (McCandlish et al., arXiv 1812.06162), in small batches, is measured
  with the gradients divided as AdamW divides them, the metric of the worker's gain, and with the gradients as
  they are. Each is measured precisely, from `--micro-gradients` gradients of small batches at these weights,
  and as AdaScale has it there: the moving average of the steps of the run, which are divided into two
  micro-gradients.

`measure` saves its state every half minute and after each branch, and continues there the next time. Results
are in bench/critical_batch_size.SIZE.json (SIZE.muon.json), states in build/critical_batch_size.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import device_option
import torch
from ramp import (
    BENCH,
    SIZES,
    WARM_UP,
    Contender,
    Gpt,
    Sequences,
    Size,
    Text,
    adamw,
    evaluate,
    loss_of,
    read_text,
)
from torch import Tensor, nn

from adascale_core.batch.gain import GradientEstimate
from adascale_worker.adascale import AdaScale

POINTS = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Shares of the tokens after which the state is kept."""
SCALES = (1, 2, 4, 8, 16, 32)
PARTS, LAST = 16, 4
"""The parts of a branch whose mean losses are kept, and the last of them, whose mean is its loss."""
TOLERANCE = 0.02
"""In bits per byte."""
TOLERANCES = (0.01, TOLERANCE, 0.04)
HELD_OUT = 256
REPETITIONS = 4
"""Parts of the precise measurement, whose spread shows its error."""
SEQUENCES_OF_A_PASS = 16
BRANCH_DATA, MEASURED_DATA = 1_000, 2_000
"""What is added to a seed to draw other sequences than those of the run."""


# -- results ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """The estimates in one metric at one point.

    Attributes:
        precise: `grad_sqr` and `grad_var` of each repetition.
        smoothed: `grad_sqr`, `grad_var` and the standard error of `grad_sqr`, from the steps of the run.
    """

    precise: list[list[float]]
    smoothed: list[float]

    @property
    def estimate(self) -> GradientEstimate:
        """The mean of the precise measurements."""
        sqr, var = (statistics.mean(each) for each in zip(*self.precise, strict=True))
        return GradientEstimate(sqr, var)

    @property
    def scale(self) -> float:
        """The precise noise scale."""
        return noise_scale(self.estimate)

    @property
    def error(self) -> float:
        """The standard error of `scale`, by leaving out each repetition once."""
        rest = [
            Noise(self.precise[:n] + self.precise[n + 1 :], self.smoothed).scale
            for n in range(len(self.precise))
        ]
        return math.sqrt((len(rest) - 1) * statistics.pvariance(rest))

    @property
    def smoothed_scale(self) -> float:
        """The noise scale of the moving average."""
        sqr, var, _ = self.smoothed
        return noise_scale(GradientEstimate(sqr, var))

    @property
    def cautious_scale(self) -> float:
        """The noise scale of `GradientEstimate.cautious`, by which batch sizes are chosen."""
        sqr, var, error = self.smoothed
        return noise_scale(GradientEstimate(sqr, var, grad_sqr_error=error).cautious)


def noise_scale(estimate: GradientEstimate) -> float:
    return estimate.grad_var / estimate.grad_sqr if estimate.grad_sqr > 0.0 else math.inf


@dataclass(frozen=True)
class Point:
    """The state that branches start from.

    Attributes:
        tokens: of the run so far.
        loss: on the held-out sequences, in bits per byte.
        adamw: the noise in the metric of AdamW, of its gradients.
        euclidean: of the gradients as they are.
        muon: in the metric of Muon, of its gradients.
    """

    tokens: int
    loss: float
    adamw: Noise
    euclidean: Noise
    muon: Noise | None = None

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Point:
        metrics = {name: Noise(**noise) for name, noise in members.items() if isinstance(noise, dict)}
        return cls(members["tokens"], members["loss"], **metrics)

    @property
    def parts(self) -> list[Noise]:
        """The noise of each optimizer."""
        return [self.adamw] if self.muon is None else [self.adamw, self.muon]

    @property
    def own(self) -> Noise:
        """The noise of the optimizer with the lowest gain."""
        return min(self.parts, key=lambda noise: noise.scale)

    @property
    def smoothed_scale(self) -> float:
        """The lowest noise scale of the moving averages."""
        return min(noise.smoothed_scale for noise in self.parts)

    @property
    def cautious_scale(self) -> float:
        """The lowest noise scale by which batch sizes are chosen."""
        return min(noise.cautious_scale for noise in self.parts)


@dataclass(frozen=True)
class Branch:
    """A continuation of the run.

    Attributes:
        point: its first token.
        scale: k.
        seed: of its data.
        losses: mean of each of `PARTS` of its sequences, before the step that they are used in.
        held_out: loss on the held-out sequences at its end.
        start: loss of the point on the sequences of the `LAST` parts; only for k = 1.
    """

    point: int
    scale: int
    seed: int
    losses: list[float]
    held_out: float
    start: float | None

    @property
    def loss(self) -> float:
        """The mean of the last parts."""
        return statistics.mean(self.losses[-LAST:])


@dataclass
class Results:
    """What `measure` has measured, as a file."""

    path: Path
    settings: dict[str, Any]
    points: list[Point] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, settings: dict[str, Any]) -> Results:
        if not path.exists():
            return cls(path, settings)
        members = json.loads(path.read_text())
        points = [Point.from_json(point) for point in members["points"]]
        return cls(path, members["settings"], points, [Branch(**branch) for branch in members["branches"]])

    def write(self) -> None:
        members = {
            "settings": self.settings,
            "points": [
                {name: member for name, member in asdict(point).items() if member is not None}
                for point in self.points
            ],
            "branches": [asdict(branch) for branch in self.branches],
        }
        self.path.write_text(json.dumps(members, indent=1) + "\n")

    @property
    def branch_tokens(self) -> int:
        size = SIZES[self.settings["size"]]
        tokens: int = self.settings["branch steps"] * size.batch_size * size.context
        return tokens

    def seeds(self, point: Point) -> list[int]:
        """Return the seeds whose branches with all scales are trained."""
        trained = {(each.seed, each.scale) for each in self.branches if each.point == point.tokens}
        return [
            seed
            for seed in sorted({seed for seed, _ in trained})
            if all((seed, scale) in trained for scale in SCALES)
        ]

    def of(self, point: Point, scale: int, seeds: Sequence[int]) -> list[Branch]:
        """Return the branches of these seeds."""
        return [
            each
            for each in self.branches
            if (each.point, each.scale) == (point.tokens, scale) and each.seed in seeds
        ]


# -- the run and its branches -------------------------------------------------------------------------------


class Together:
    """The optimizers of a model by name, which make their steps together."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def optimizers_of(model: nn.Module, lr: float, name: str) -> dict[str, torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the matrices that AdamW decays and AdamW for the rest."""
    whole = adamw(model, lr)
    if name == "adamw":
        return {"adamw": whole}
    matrices, others = whole.param_groups
    muon = torch.optim.Muon(matrices["params"], lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW(others["params"], lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return {"muon": muon, "adamw": rest}


class Stable(Contender):
    """The small batch with a constant lr after the warm-up, measured in each metric."""

    def __init__(self, model: nn.Module, lr: float, name: str) -> None:
        super().__init__(model, lr, 1)
        self.inner = optimizers_of(model, lr, name)
        self.meters = {key: meter_of(each, scale=1.0, micro_gradients=2) for key, each in self.inner.items()}
        self.optimizer: Any = Together(self.meters)
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        self.euclidean = meter_of(plain, scale=1.0, micro_gradients=2)

    @property
    def all_meters(self) -> dict[str, AdaScale]:
        return {**self.meters, "euclidean": self.euclidean}

    def factor(self, share: float, /) -> float:
        return min(share / WARM_UP, 1.0)

    def step(self) -> float:
        self.euclidean.step()
        return super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "euclidean": self.euclidean.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.euclidean.load_state_dict(state["euclidean"])


def meter_of(optimizer: torch.optim.Optimizer, scale: float, micro_gradients: int) -> AdaScale:
    """Return AdaScale that gets its gradients from `add_measured`: two of them cannot observe one pass."""
    return AdaScale(
        optimizer,
        world_size=1,
        scale=scale,
        num_gradients_to_accumulate=micro_gradients,
        observes_backward=False,
    )


def precise_meter(meter: AdaScale, count: int) -> AdaScale:
    """Return one without estimates, with the metric of another, for a step of `count` small batches."""
    precise = meter_of(meter.optimizer, float(count), count)
    state = meter.state_dict()
    precise.load_state_dict({**state, "adascale": {**state["adascale"], "averages": []}})
    return precise


def add_measured(model: nn.Module, micro_batches: Sequence[Tensor], meters: Sequence[AdaScale]) -> None:
    """Add the gradient of the mean loss to `.grad`, which is None, and let the meters read its parts."""
    parameters: list[Tensor] = list(model.parameters())
    for number, part in enumerate(micro_batches, 1):
        loss = loss_of(model, part) / len(micro_batches)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
        own = dict(zip(parameters, gradients, strict=True))
        for meter in meters:
            for index, group in enumerate(meter.param_groups if meter.statistics.reads_gradients else ()):
                own_parameters = group["params"]
                meter.statistics.reader.read(index, own_parameters, [own[each] for each in own_parameters])
            statistics = meter.statistics
            (statistics.measure if number == len(micro_batches) else statistics.reader.end)(1.0)


class LargerBatch(Contender):
    """k times the small batch, with the lr times the square root of k."""

    def __init__(self, stable: Stable, model: nn.Module, name: str, scale: int) -> None:
        super().__init__(model, stable.lr, scale)
        self.optimizer: Any = Together(optimizers_of(model, stable.lr, name))
        for key, part in self.optimizer.parts.items():
            part.load_state_dict(stable.inner[key].state_dict())

    def factor(self, _: float, /) -> float:
        return math.sqrt(self.scale)


class Experiment:
    """Trains the run and its branches, and measures.

    Args:
        options: of the command line.
        text: to train on.
        results: get the points and branches.
    """

    def __init__(self, options: argparse.Namespace, text: Text, results: Results) -> None:
        self.size: Size = SIZES[options.size]
        self.text, self.results = text, results
        self.device = torch.device(options.device)
        self.seed: int = options.seed
        self.lr: float = results.settings["lr"]
        self.optimizer: str = options.optimizer
        self.branch_steps: int = results.settings["branch steps"]
        self.micro_gradients: int = results.settings["micro-gradients"]
        self.total: int = results.settings["tokens"] // self.size.context
        self.deadline = time.monotonic() + 60 * options.minutes
        self.folder: Path = options.states / f"{results.path.stem}-{results.settings['tokens']}-{self.seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        held_out = text.held_out[:: max(len(text.held_out) // HELD_OUT, 1)][:HELD_OUT]
        self.held_out = held_out[: self.size.held_out] if options.size == "tiny" else held_out
        self.held_out = self.held_out.to(self.device)

    @property
    def points(self) -> list[int]:
        """The first sequences of the branches."""
        small = self.size.batch_size
        return [max(round(share * self.total / small), 2) * small for share in POINTS]

    def run(self, until: int) -> bool:
        """Train with the small batch up to a point; return False if the time has ended."""
        if self._point(until).exists():
            return True
        torch.manual_seed(self.seed)
        model = Gpt(self.size).to(self.device)
        contender, position, saved_at = Stable(model, self.lr, self.optimizer), 0, time.monotonic()
        path = self.folder / "run.pt"
        saved = [self._load(each) for each in (path, *self.folder.glob("point-*.pt")) if each.exists()]
        usable = [state for state in saved if state["position"] <= until]
        if usable:
            state = max(usable, key=lambda state: state["position"])
            model.load_state_dict(state["model"])
            contender.load_state_dict(state["contender"])
            position = state["position"]
        sequences = Sequences(self.text, self.size.context, self.total + self.size.batch_size, self.seed)
        while position < until:
            contender.begin(position / self.total)
            batch = sequences.at(position, self.size.batch_size).to(self.device)
            add_measured(model, batch.chunk(2), list(contender.all_meters.values()))
            contender.step()
            position += self.size.batch_size
            is_late = time.monotonic() > min(self.deadline, saved_at + 30)
            if position in self.points or is_late:
                state = {"model": model.state_dict(), "contender": contender.state_dict()}
                for each in [self._point(position)] * (position in self.points) + [path]:
                    torch.save({**state, "position": position}, each.with_suffix(".new"))
                    each.with_suffix(".new").replace(each)
                saved_at = time.monotonic()
                if saved_at > self.deadline:
                    return False
        return True

    def measure(self, position: int) -> None:
        """Measure the noise at a point."""
        count, small = self.micro_gradients // REPETITIONS, self.size.batch_size
        seed = MEASURED_DATA + self.seed
        sequences = Sequences(self.text, self.size.context, self.micro_gradients * small, seed)
        precise: dict[str, list[list[float]]] = {}
        for repetition in range(REPETITIONS):
            model, contender = self._restored(self._load(self._point(position)))
            meters = {key: precise_meter(each, count) for key, each in contender.all_meters.items()}
            batch = sequences.at(repetition * count * small, count * small).to(self.device)
            add_measured(model, batch.chunk(count), list(meters.values()))
            for key, meter in meters.items():
                precise.setdefault(key, []).append(_numbers(meter.estimate)[:2])
        model, contender = self._restored(self._load(self._point(position)))
        noises = {
            key: Noise(precise[key], _numbers(meter.estimate)) for key, meter in contender.all_meters.items()
        }
        loss = evaluate(model, self.held_out)
        self.results.points.append(Point(position * self.size.context, loss, **noises))
        self.results.write()

    def all_branches(self, position: int, seed: int) -> bool:
        """Measure at a point and train its branches; return False if the time has ended."""
        tokens = position * self.size.context
        if all(point.tokens != tokens for point in self.results.points):
            self.measure(position)
            print(self.results.points[-1], flush=True)
        for scale in SCALES:
            key = (tokens, scale, seed)
            if any((each.point, each.scale, each.seed) == key for each in self.results.branches):
                continue
            began = time.monotonic()
            if not self.branch(position, scale, seed):
                return False
            branch, seconds = self.results.branches[-1], time.monotonic() - began
            print(
                f"{tokens:,} tokens, k = {scale}, seed {seed}: {branch.loss:.4f}, "
                f"held out {branch.held_out:.4f}, from {branch.start} ({seconds:.0f} s)",
                flush=True,
            )
        return True

    def branch(self, position: int, scale: int, seed: int) -> bool:
        """Train a branch; return False, without a result, if the time has ended."""
        model, contender = self._restored(self._load(self._point(position)))
        larger = LargerBatch(contender, model, self.optimizer, scale)
        count, batch_size = self.branch_steps * self.size.batch_size, scale * self.size.batch_size
        sequences = Sequences(self.text, self.size.context, count, BRANCH_DATA * (seed + 1) + self.seed)
        tail = sequences.at(count * (PARTS - LAST) // PARTS, count * LAST // PARTS).to(self.device)
        start = evaluate(model, tail) if scale == 1 else None
        parts: list[list[float]] = [[] for _ in range(PARTS)]
        for first in range(0, count, batch_size):
            if time.monotonic() > self.deadline:
                return False
            larger.begin(1.0)
            passes = math.ceil(batch_size / max(SEQUENCES_OF_A_PASS, self.size.batch_size))
            nats = 0.0
            for part in sequences.at(first, batch_size).to(self.device).chunk(passes):
                loss = loss_of(model, part) / passes
                loss.backward()
                nats += loss.item()
            larger.step()
            own = range(first * PARTS // count, math.ceil((first + batch_size) * PARTS / count))
            for number in own:
                parts[number].append(nats / math.log(2))
        means = [statistics.mean(part) for part in parts]
        held_out = evaluate(model, self.held_out)
        self.results.branches.append(
            Branch(position * self.size.context, scale, seed, means, held_out, start)
        )
        self.results.write()
        return True

    def _restored(self, state: dict[str, Any]) -> tuple[Gpt, Stable]:
        model = Gpt(self.size).to(self.device)
        model.load_state_dict(state["model"])
        contender = Stable(model, self.lr, self.optimizer)
        contender.load_state_dict(state["contender"])
        return model, contender

    def _load(self, path: Path) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location=self.device)
        return state

    def _point(self, position: int) -> Path:
        return self.folder / f"point-{position}.pt"


def _numbers(estimate: GradientEstimate | None) -> list[float]:
    if estimate is None:
        return [0.0, 0.0, 0.0]
    return [estimate.grad_sqr, estimate.grad_var, estimate.grad_sqr_error]


def measure_all(options: argparse.Namespace, results: Results) -> None:
    text = read_text(SIZES[options.size].context)
    wanted = {**settings_of(options), "text": text.description["sha256"]}
    if results.points and results.settings != wanted:
        raise SystemExit(
            f"{results.path} has results with other settings, {results.settings} instead of {wanted}; "
            "move it away to begin again"
        )
    results.settings = wanted
    experiment = Experiment(options, text, results)
    for seed in range(options.branch_seeds):
        for position in experiment.points:
            if not (experiment.run(position) and experiment.all_branches(position, seed)):
                return


# -- report -------------------------------------------------------------------------------------------------


def excesses(results: Results, point: Point, seeds: Sequence[int]) -> list[float]:
    """Return by how much the loss of each of `SCALES` is above that of k = 1."""
    losses = [statistics.mean(each.loss for each in results.of(point, scale, seeds)) for scale in SCALES]
    return [loss - losses[0] for loss in losses]


def efficiencies(results: Results, point: Point, seeds: Sequence[int]) -> list[float]:
    """Return the efficiency of each of `SCALES`.

    The loss of k = 1 falls linearly in the logarithm of the tokens, from that of the point to its own.
    """
    small = results.of(point, 1, seeds)
    start = statistics.mean(each.start for each in small if each.start is not None)
    drop = start - statistics.mean(each.loss for each in small)
    branch = results.branch_tokens * (1 - LAST / PARTS / 2) / point.tokens
    shares = [1 - excess / drop for excess in excesses(results, point, seeds)]
    return [max(math.expm1(share * math.log1p(branch)) / branch, 0.0) for share in shares]


def first_above(values: list[float], limit: float) -> float:
    """Return the scale at which values of `SCALES` first exceed a limit, infinite if they do not."""
    for number, (before, after) in enumerate(pairwise(values)):
        if after > limit:
            return float(SCALES[number] * 2 ** ((limit - before) / (after - before)))
    return math.inf


@dataclass(frozen=True)
class Found:
    """What the branches of a point show, in small batches.

    Attributes:
        critical: the critical batch size, by the tolerance.
        from_best: the critical batch size, if the loss is compared with the lowest loss of all k.
        half: the batch at which half of the efficiency is left.
    """

    critical: dict[float, float]
    from_best: float
    half: float

    @classmethod
    def of(cls, results: Results, point: Point, seeds: Sequence[int]) -> Found:
        above = excesses(results, point, seeds)
        lost = [1.0 - each for each in efficiencies(results, point, seeds)]
        best = above.index(min(above))
        over_best = [0.0] * best + [each - above[best] for each in above[best:]]
        critical = {each: first_above(above, each) for each in TOLERANCES}
        return cls(critical, first_above(over_best, TOLERANCE), first_above(lost, 0.5))


def half_of_gain(noise: float) -> float:
    """Return the k with gain(k) = k / 2: (grad_var + grad_sqr) / (grad_var / k + grad_sqr) = k / 2."""
    return noise + 2.0


def number(value: float) -> str:
    return f"> {SCALES[-1]}" if math.isinf(value) else f"{value:.1f}"


def ratio(predicted: float, size: float) -> str:
    return f"< {predicted / SCALES[-1]:.2f}" if math.isinf(size) else f"{predicted / size:.2f}"


def tables(results: Results, points: list[Point]) -> str:
    low, middle, high = TOLERANCES
    metric = "AdamW's metric" if points[0].muon is None else "lower of both optimizers"
    lines = [
        f"| tokens | loss | critical batch size ({low} to {high} bits) | from the best k "
        "| half of the efficiency "
        f"| gain(k) = k / 2 at | noise scale, {metric} | as AdaScale has it (cautious) "
        "| noise scale, Euclidean | as AdaScale has it |",
        "| --- |" + " --- |" * 9,
    ]
    factors = [
        "",
        "Predicted over measured batch size; in brackets with the moving average of AdaScale:",
        "",
        "| tokens | gain / critical | gain / half of the efficiency | Euclidean / critical"
        " | Euclidean / half of the efficiency |",
        "| --- |" + " --- |" * 4,
    ]
    for point in points:
        seeds = results.seeds(point)
        found = Found.of(results, point, seeds)
        critical, half = found.critical[middle], found.half
        lines.append(
            f"| {point.tokens:,} | {point.loss:.3f} "
            f"| {number(critical)} ({number(found.critical[low])} to {number(found.critical[high])}) "
            f"| {number(found.from_best)} | {number(half)} | {half_of_gain(point.own.scale):.1f} "
            f"| {point.own.scale:.1f} ± {point.own.error:.1f} "
            f"| {point.smoothed_scale:.1f} ({point.cautious_scale:.1f}) "
            f"| {point.euclidean.scale:.1f} ± {point.euclidean.error:.1f} "
            f"| {point.euclidean.smoothed_scale:.1f} |"
        )
        cells = [
            f"{ratio(precise, size)} ({ratio(smoothed, size)})"
            for precise, smoothed in (
                (half_of_gain(point.own.scale), half_of_gain(point.smoothed_scale)),
                (point.euclidean.scale, point.euclidean.smoothed_scale),
            )
            for size in (critical, half)
        ]
        factors.append(f"| {point.tokens:,} | " + " | ".join(cells) + " |")
    lines += factors
    if points[0].muon is not None:
        lines += ["", "Noise scale of Muon's and of AdamW's gradients, each in its metric:", ""]
        for point in points:
            pairs = [f"{each.scale:.1f} ({each.smoothed_scale:.1f})" for each in reversed(point.parts)]
            lines.append(f"- {point.tokens:,} tokens: {' and '.join(pairs)}")
    if any(len(results.seeds(point)) > 1 for point in points):
        lines += ["", "Critical batch size and half of the efficiency by each seed of the branches:", ""]
        for point in points:
            own = [Found.of(results, point, [seed]) for seed in results.seeds(point)]
            pairs = [f"{number(each.critical[middle])} and {number(each.half)}" for each in own]
            lines.append(f"- {point.tokens:,} tokens: {'; '.join(pairs)}")
    lines += [
        "",
        "Loss above that of k = 1 in bits per byte; measured efficiency; gain(k) / k:",
        "",
        "| tokens | " + " | ".join(f"k = {scale}" for scale in SCALES[1:]) + " |",
        "| --- |" + " --- |" * len(SCALES[1:]),
    ]
    for point in points:
        seeds = results.seeds(point)
        columns = zip(
            SCALES, excesses(results, point, seeds), efficiencies(results, point, seeds), strict=True
        )
        cells = [
            f"{above:+.4f}; {share:.2f}; {point.own.estimate.efficiency(scale):.2f}"
            for scale, above, share in columns
        ]
        lines.append(f"| {point.tokens:,} | " + " | ".join(cells[1:]) + " |")
    return "\n".join(lines) + "\n"


# Wong, "Points of view: Color blindness", Nature Methods 2011.
COLOURS = ("#000000", "#E69F00", "#D55E00", "#0072B2", "#CC79A7", "#009E73")


def plot(results: Results, points: list[Point], path: Path) -> None:
    """Plot the batch sizes over the tokens, and the efficiencies over k."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "adascale", "svg.fonttype": "none"})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    tokens = [point.tokens / 1e6 for point in points]
    found = [Found.of(results, point, results.seeds(point)) for point in points]
    low, middle, high = (
        [min(each.critical[tolerance], 2.0 * SCALES[-1]) for each in found] for tolerance in TOLERANCES
    )
    left.fill_between(
        tokens, low, high, color="#BBBBBB", alpha=0.5, label="tolerance 0.01 to 0.04", linewidth=0
    )
    lines: list[tuple[str, list[float], list[float] | None, dict[str, Any]]] = [
        ("critical batch size", middle, None, {"color": "#000000", "marker": "o"}),
        (
            "half of the efficiency, measured",
            [min(each.half, 2.0 * SCALES[-1]) for each in found],
            None,
            {"color": "#009E73", "marker": "s"},
        ),
    ]
    for label, colour, added, noises, averaged in (
        (
            "gain(k) = k / 2",
            "#D55E00",
            half_of_gain(0.0),
            [point.own for point in points],
            [point.smoothed_scale for point in points],
        ),
        (
            "Euclidean noise scale",
            "#0072B2",
            0.0,
            [point.euclidean for point in points],
            [point.euclidean.smoothed_scale for point in points],
        ),
    ):
        exact = {"color": colour, "marker": "^"}
        errors = [each.error for each in noises]
        lines.append((f"{label}, at these weights", [each.scale + added for each in noises], errors, exact))
        dotted = {"color": colour, "linestyle": ":", "marker": "v", "markersize": 4}
        lines.append((f"{label}, as AdaScale has it", [each + added for each in averaged], None, dotted))
    for label, values, errors_of_line, style in lines:
        left.errorbar(tokens, values, yerr=errors_of_line, label=label, linewidth=1.3, capsize=3, **style)
    left.set(xlabel="tokens (millions)", ylabel="batch size in small batches")
    left.set_xscale("log")
    left.set_xticks(tokens, [f"{each:.2g}" for each in tokens])
    left.minorticks_off()
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter("{x:g}")
    for point, colour in zip(points, COLOURS, strict=False):
        shares = efficiencies(results, point, results.seeds(point))
        right.plot(SCALES, shares, color=colour, marker="o", label=f"{point.tokens / 1e6:.2g} million tokens")
        predicted = [point.own.estimate.efficiency(scale) for scale in SCALES]
        right.plot(SCALES, predicted, color=colour, linestyle="--", linewidth=1)
    right.plot([], [], color="#777777", linestyle="--", linewidth=1, label="gain(k) / k")
    right.set(xlabel="k (batch size / small batch size)", ylabel="efficiency of a branch", ylim=(0, 2.5))
    right.set_xscale("log", base=2)
    right.set_xticks(SCALES, [str(scale) for scale in SCALES])
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False, loc="best")
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def report(options: argparse.Namespace, results: Results) -> None:
    """Write the tables and the picture of the points with branches at all scales."""
    complete = [point for point in results.points if results.seeds(point)]
    points = sorted(complete, key=lambda point: point.tokens)
    if not points:
        raise SystemExit(
            f"{results.path} has no point with all branches: measure first, with the same options"
        )
    size, settings = SIZES[options.size], results.settings
    counts = sorted({len(results.seeds(point)) for point in points})
    text = (
        f"{settings['size']}, lr {settings['lr']:g}, small batch of {size.batch_size} sequences of "
        f"{size.context} bytes; branches of {results.branch_tokens:,} "
        f"tokens, {' or '.join(map(str, counts))} seed(s) of their data; all sizes in small batches\n\n"
        f"{tables(results, points)}"
    )
    print(text)
    results.path.with_suffix(".md").write_text(text)
    plot(results, points, results.path.with_suffix(".svg"))


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    size: Size = SIZES[options.size]
    return {
        "size": options.size,
        "tokens": options.tokens or size.tokens // 2,
        "seed": options.seed,
        "lr": options.lr or size.lrs[len(size.lrs) // 2],
        "branch steps": options.branch_steps,
        "micro-gradients": options.micro_gradients,
        **({} if options.optimizer == "adamw" else {"optimizer": options.optimizer}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=("measure", "report"))
    parser.add_argument("--size", default="0.5M", choices=list(SIZES))
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--lr", type=float, help="default: the middle one of those of the size")
    parser.add_argument("--tokens", type=int, help="of the run; default: half of those of the size")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data of the run")
    parser.add_argument("--branch-seeds", type=int, default=2, help="branches with the same k, on other data")
    parser.add_argument("--branch-steps", type=int, default=512, help="of the small batch")
    parser.add_argument("--micro-gradients", type=int, default=256, help="of the precise measurement")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which it is interrupted")
    parser.add_argument("--out", type=Path, default=BENCH, help="folder of the results")
    states = BENCH.parent / "build/critical_batch_size"
    parser.add_argument("--states", type=Path, default=states, help="folder of states")
    device_option.add_to(parser)
    options = parser.parse_args()
    device_option.check(parser, options.device)
    if options.branch_steps % max(SCALES) or options.micro_gradients % REPETITIONS:
        parser.error(
            f"--branch-steps must be a multiple of {max(SCALES)}, got {options.branch_steps}; "
            f"--micro-gradients of {REPETITIONS}, got {options.micro_gradients}"
        )
    if options.device == "cpu":
        torch.set_num_threads(1)
    suffix = ".muon" if options.optimizer == "muon" else ""
    suffix += f".seed{options.seed}" if options.seed else ""
    path = options.out / f"critical_batch_size.{options.size}{suffix}.json"
    results = Results.read(path, settings_of(options))
    {"measure": measure_all, "report": report}[options.command](options, results)


if __name__ == "__main__":
    main()
