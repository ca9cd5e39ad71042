"""What accuracy costs at a larger batch: AdaScale beside other rules for the learning rate.

    OMP_NUM_THREADS=1 python bench/accuracy.py [digits|text] [--seeds 5] [--out bench/accuracy]

`digits`: scikit-learn's handwritten digits, a 64-64-10 network, SGD without momentum, batch 4,
lr 0.3 * 0.01 ** (progress / T), T = 12,000. `text`: a character model on the descriptions of data sets that
scikit-learn carries, SGD with momentum 0.9, batch 8, T = 6,000; its score is the loss in bits per character.

A rule says what the learning rate is at scale S and how much progress a step makes; all train until
progress reaches T. AdaScale and FairScale count gains, the others count S. "exact gain" is what the two
estimate: the gain from the gradients of all samples one by one, of each step alone or smoothed as AdaScale
smooths (`digits` only). A step at scale S is the mean of min(S, 8) micro-gradients (`--micro-gradients`).
The same seeds give all rules the same initial weights and the same data. Writes a table (Markdown), a plot
(SVG) and all runs (JSON).
"""

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adascale_worker.adascale import AdaScale

SCALES = (1, 4, 16, 64, 128)
ELASTIC = {"16-64-128": (16, 64, 128), "128-64-16": (128, 64, 16)}
MICRO_GRADIENTS = 8


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        model: makes a network.
        inputs, targets: to train on.
        score: of a trained network; in percent, or in bits.
        higher_is_better: of the score.
        gradient: of a network, the squared norm of the true gradient and the variance of one sample's, if
            they can be had.
    """

    name: str
    batch_size: int
    steps: int
    lr: float
    momentum: float
    model: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    score: Callable[[nn.Module], float]
    higher_is_better: bool
    gradient: Callable[[nn.Module], tuple[float, float]] | None = None

    def lr_at(self, progress: float) -> float:
        return float(self.lr * 0.01 ** (progress / self.steps))


def digits() -> Task:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
    x_test, y_test = torch.tensor(x_test, dtype=torch.float32), torch.tensor(y_test)
    inputs, targets = torch.tensor(x_train, dtype=torch.float32), torch.tensor(y_train)

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return float(100 * (model(x_test).argmax(1) == y_test).float().mean().item())

    return Task(
        "digits",
        4,
        12_000,
        0.3,
        0.0,
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        inputs,
        targets,
        accuracy,
        higher_is_better=True,
        gradient=lambda model: exact_gradient(model, inputs, targets),
    )


def exact_gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Squared norm of the mean gradient and variance of one sample's, of a network of two layers.

    A sample's gradient of a layer is the outer product of what came in, with a 1 for the bias, and of the
    loss's derivative by what came out.
    """
    first, _, second = model.children()
    with torch.no_grad():
        one = torch.ones(len(inputs), 1)
        hidden = first(inputs)
        active = hidden.relu()
        back = second(active).softmax(1)
        back[torch.arange(len(targets)), targets] -= 1
        layers = [
            (torch.cat([inputs, one], 1), back @ second.get_parameter("weight") * (hidden > 0)),
            (torch.cat([active, one], 1), back),
        ]
        each = sum((x.square().sum(1) * d.square().sum(1) for x, d in layers), torch.zeros(()))
        sqr = sum(((d.T @ x / len(inputs)).square().sum() for x, d in layers), torch.zeros(())).item()
    return sqr, each.mean().item() - sqr


CONTEXT = 12


def text() -> Task:
    """The next character from the twelve before it."""
    from sklearn import datasets

    folder = Path(datasets.__file__).parent / "descr"
    whole = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.rst"))).lower()
    letters = sorted(set(whole) & set(map(chr, range(128))))
    number = {letter: index for index, letter in enumerate(letters)}
    codes = torch.tensor([number.get(letter, 0) for letter in whole])
    windows = codes.unfold(0, CONTEXT + 1, 1)
    held_out = len(windows) // 10
    train, test = windows[:-held_out], windows[-held_out:][::4]

    def bits(model: nn.Module) -> float:
        with torch.no_grad():
            nats = nn.functional.cross_entropy(model(test[:, :-1]), test[:, -1]).item()
        return float(nats / math.log(2))

    return Task(
        "text",
        8,
        6_000,
        0.05,
        0.9,
        lambda: nn.Sequential(
            nn.Embedding(len(letters), 16),
            nn.Flatten(),
            nn.Linear(16 * CONTEXT, 96),
            nn.Tanh(),
            nn.Linear(96, len(letters)),
        ),
        train[:, :-1],
        train[:, -1],
        bits,
        higher_is_better=False,
    )


TASKS = {"digits": digits, "text": text}


class Rule:
    """A plain SGD whose lr is a function of scale and progress; a step makes S steps' progress."""

    def __init__(self, task: Task, model: nn.Module, scale: int, micro: int) -> None:
        self.task, self.scale, self.micro = task, scale, micro
        self.sgd: Any = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)

    def factor(self, _: float, /) -> float:
        return 1.0

    def set_scale(self, scale: int) -> None:
        self.scale = scale

    def step(self, progress: float) -> float:
        for group in self.sgd.param_groups:
            group["lr"] = self.task.lr_at(progress) * self.factor(progress)
        self.sgd.step()
        self.sgd.zero_grad()
        return self.gain()

    def gain(self) -> float:
        return float(self.scale)


class Linear(Rule):
    def factor(self, _: float, /) -> float:
        return float(self.scale)


class WarmUp(Rule):
    def factor(self, progress: float, /) -> float:
        """From 1 to S during the first 5.5% (5 of 90 epochs, Goyal et al. 2017)."""
        return 1 + (self.scale - 1) * min(progress / (0.055 * self.task.steps), 1.0)


class SquareRoot(Rule):
    def factor(self, _: float, /) -> float:
        return math.sqrt(self.scale)


class Ours(Rule):
    sample_every: int | None = None

    def __init__(self, task: Task, model: nn.Module, scale: int, micro: int) -> None:
        super().__init__(task, model, scale, micro)
        self.sgd = AdaScale(
            self.sgd,
            world_size=1,
            scale=float(scale),
            num_gradients_to_accumulate=micro,
            sample_every=self.sample_every,
        )

    def set_scale(self, scale: int) -> None:
        super().set_scale(scale)
        self.sgd.set_scale(float(scale))

    def gain(self) -> float:
        return float(self.sgd.gain())


class EveryStep(Ours):
    sample_every = 1


class FairScales(Rule):
    def __init__(self, task: Task, model: nn.Module, scale: int, micro: int) -> None:
        super().__init__(task, model, scale, micro)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fairscale.optim import AdaScale as FairScale
        self.sgd = FairScale(self.sgd, world_size=1, scale=float(scale), num_gradients_to_accumulate=micro)

    def set_scale(self, scale: int) -> None:
        super().set_scale(scale)
        self.sgd.set_scale(float(scale))

    def gain(self) -> float:
        return float(self.sgd.gain())


class ExactGain(Rule):
    smoothed = False

    def __init__(self, task: Task, model: nn.Module, scale: int, micro: int) -> None:
        super().__init__(task, model, scale, micro)
        self.model = model
        self.sums = [0.0, 0.0]

    def step(self, progress: float) -> float:
        assert self.task.gradient is not None
        sqr, var = self.task.gradient(self.model)
        past = max(1 - self.scale / 1000, 0.0) if self.smoothed else 0.0
        news = (sqr, var / self.task.batch_size)
        self.sums = [past * old + (1 - past) * new for old, new in zip(self.sums, news, strict=True)]
        return super().step(progress)

    def factor(self, _: float, /) -> float:
        return self.gain()

    def gain(self) -> float:
        sqr, var = self.sums
        return (var + sqr) / (var / self.scale + sqr)


class SmoothedExactGain(ExactGain):
    smoothed = True


RULES: dict[str, type[Rule]] = {
    "AdaScale": Ours,
    "AdaScale, every step": EveryStep,
    "FairScale": FairScales,
    "exact gain": ExactGain,
    "exact gain, smoothed": SmoothedExactGain,
    "linear": Linear,
    "linear, warm-up": WarmUp,
    "square root": SquareRoot,
}


@dataclass(frozen=True)
class Run:
    rule: str
    scale: str
    seed: int
    score: float
    iterations: int


class Order:
    """Sample numbers, epoch after epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._generator = torch.Generator().manual_seed(seed)
        self._rest = torch.empty(0, dtype=torch.int64)

    def take(self, desired: int) -> Tensor:
        while len(self._rest) < desired:
            self._rest = torch.cat([self._rest, torch.randperm(self._count, generator=self._generator)])
        taken, self._rest = self._rest[:desired], self._rest[desired:]
        return taken


def train(task: Task, rule_name: str, scales: tuple[int, ...], seed: int, most_micro: int) -> Run:
    """Train until progress reaches the task's steps, an equal part of it at each scale."""
    torch.manual_seed(seed)
    model = task.model()
    micro = min(scales[0], most_micro)
    rule = RULES[rule_name](task, model, scales[0], micro)
    order = Order(len(task.inputs), seed)
    progress, iterations, part = 0.0, 0, 0
    while progress < task.steps:
        if progress >= task.steps * (part + 1) / len(scales):
            part += 1
            rule.set_scale(scales[part])
        numbers = order.take(task.batch_size * scales[part])
        for piece in numbers.chunk(micro):
            loss = nn.functional.cross_entropy(model(task.inputs[piece]), task.targets[piece])
            (loss / micro).backward()
        progress += rule.step(progress)
        iterations += 1
    name = "-".join(map(str, scales))
    return Run(rule_name, name, seed, task.score(model), iterations)


def plan(rules: list[str], scales: list[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Every rule at every scale; at scale 1 all but FairScale, which refuses it, are the same."""
    runs: list[tuple[str, tuple[int, ...]]] = [("AdaScale", (1,))] if 1 in scales else []
    runs += [(rule, (scale,)) for scale in scales if scale > 1 for rule in rules]
    return runs + [(rule, elastic) for elastic in ELASTIC.values() for rule in rules]


def table(task: Task, runs: list[Run]) -> str:
    """Mean score with standard deviation, and mean iterations, by rule and scale."""
    scales = list(dict.fromkeys(run.scale for run in runs))
    unit = "%" if task.higher_is_better else "bits"
    lines = [
        "| rule | " + " | ".join(f"S = {scale}" for scale in scales) + " |",
        "| --- |" + " --- |" * len(scales),
    ]
    for rule in dict.fromkeys(run.rule for run in runs):
        cells = []
        for scale in scales:
            own = [run for run in runs if (run.rule, run.scale) == (rule, scale)]
            if not own:
                cells.append("")
                continue
            scores = [run.score for run in own]
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            digits_ = 1 if task.higher_is_better else 3
            iterations = statistics.mean(run.iterations for run in own)
            cells.append(
                f"{statistics.mean(scores):.{digits_}f} ± {spread:.{digits_}f} {unit}, {iterations:.0f}"
            )
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


COLOURS = ("#d62728", "#7f7f7f", "#1f77b4", "#17becf", "#8c564b", "#2ca02c", "#9467bd", "#ff7f0e")
WIDTH, HEIGHT, LEFT, TOP = 640, 360, 60, 20


def plot(runs: list[Run]) -> str:
    """Mean score over the scale, one line per rule, as SVG."""
    points: dict[str, list[tuple[int, float]]] = {}
    base = [run.score for run in runs if run.scale == "1"]
    for rule in dict.fromkeys(run.rule for run in runs):
        own = [(1, statistics.mean(base))] if base else []
        for scale in SCALES[1:]:
            scores = [run.score for run in runs if (run.rule, run.scale) == (rule, str(scale))]
            if scores:
                own.append((scale, statistics.mean(scores)))
        points[rule] = own
    values = [value for own in points.values() for _, value in own]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low)
    low, high = low - margin, high + margin

    def x(scale: int) -> float:
        return LEFT + (WIDTH - LEFT - 170) * math.log2(scale) / math.log2(SCALES[-1])

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - 50) * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    ]
    parts += [
        f'<text x="{x(scale):.0f}" y="{HEIGHT - 30}" text-anchor="middle">{scale}</text>' for scale in SCALES
    ]
    middle = (x(1) + x(SCALES[-1])) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">scale S</text>')
    for step in range(6):
        value = low + (high - low) * step / 5
        parts.append(
            f'<line x1="{LEFT}" x2="{x(SCALES[-1]):.0f}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>'
        )
    for colour, (rule, own) in zip(COLOURS, points.items(), strict=False):
        for (s, v), (t, w) in pairwise(own):
            parts.append(
                f'<line x1="{x(s):.1f}" y1="{y(v):.1f}" x2="{x(t):.1f}" y2="{y(w):.1f}" stroke="{colour}" '
                'stroke-width="2"/>'
            )
        row = TOP + 18 * (list(points).index(rule) + 1)
        parts.append(
            f'<line x1="{WIDTH - 160}" x2="{WIDTH - 140}" y1="{row}" y2="{row}" stroke="{colour}" '
            f'stroke-width="2"/><text x="{WIDTH - 134}" y="{row + 4}">{rule}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", nargs="?", default="digits", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scales", type=int, nargs="+", default=list(SCALES))
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--micro-gradients", type=int, default=MICRO_GRADIENTS, help="most that a step has")
    parser.add_argument("--out", help="path of the files to write, without suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[options.task]()
    rules = [rule for rule in options.rules if task.gradient or not issubclass(RULES[rule], ExactGain)]
    runs = []
    for seed in range(options.seeds):
        for rule, scales in plan(rules, options.scales):
            runs.append(train(task, rule, scales, seed, options.micro_gradients))
            run = runs[-1]
            print(
                f"{run.rule:22} S={run.scale:10} seed {seed}: {run.score:.3f} in {run.iterations}", flush=True
            )
    print(table(task, runs))
    if options.out:
        out = Path(options.out)
        out.with_suffix(f".{task.name}.md").write_text(table(task, runs))
        out.with_suffix(f".{task.name}.svg").write_text(plot(runs))
        out.with_suffix(f".{task.name}.json").write_text(json.dumps([asdict(run) for run in runs], indent=1))


if __name__ == "__main__":
    main()
