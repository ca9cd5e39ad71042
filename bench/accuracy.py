"""Accuracy at larger batch sizes: AdaScale beside other rules for the learning rate.

    OMP_NUM_THREADS=1 python bench/accuracy.py [TASK] [--seeds 5] [--out bench/accuracy]
    python bench/accuracy.py [TASK] --from-json --out bench/accuracy
    python bench/accuracy.py [TASK] --device cuda

`digits`: the handwritten digits of scikit-learn, a 64-64-10 network, SGD without momentum, batch size 4,
lr 0.3 * 0.01 ** (progress / T), T = 12,000. The score is the test accuracy in percent. `text`: a character
model on the descriptions of data sets in scikit-learn, SGD with momentum 0.9, batch size 8, T = 6,000. The
score is the test loss in bits per character. `digits-adamw`: the same network and AdamW, lr 0.01, T = 6,000.
`transformer`: a character model with one attention block and AdamW on the same texts, batch size 4 of 32
characters, lr 0.004, T = 2,000. With AdamW, the lr falls along a cosine to 1%; both were the best at S = 1 of
`bench/adam_rules.py`.

A rule gives the learning rate at scale S and the progress of a step; all train until progress reaches T.
AdaScale and FairScale count gains, the others count S. "exact gain" is the quantity that the two estimate:
the gain from the gradients of all samples, of each step alone or smoothed as AdaScale smooths (`digits`
only). A step at scale S is the mean of min(S, 8) micro-gradients (`--micro-gradients`). The same seed gives
all rules the same initial weights and the same data, on each device. With `--device cuda`, networks and data
are on a GPU.

Writes a table (Markdown), a plot (SVG) and all runs (JSON). With `--from-json`, reads the runs instead of
training, and writes the table and the plot again.
"""

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import device_option
import torch
from torch import Tensor, nn

from adascale_worker.adascale import AdaScale

SCALES = (1, 4, 16, 64, 128)
ELASTIC = {"16-64-128": (16, 64, 128), "128-64-16": (128, 64, 16)}
MICRO_GRADIENTS = 8


@dataclass(frozen=True)
class Task:
    """A data set and a network to train on it.

    Attributes:
        batch_size: the initial batch size B0, in samples.
        steps: T, the progress to train for.
        lr: at the start.
        model: makes a network, on the CPU.
        inputs, targets: training data, on the device to train on.
        score: of a trained network, in percent or in bits.
        gradient: returns the squared norm of the true gradient of a network, and the variance of the gradient
            of one sample; None without a closed form.
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
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    gradient: Callable[[nn.Module], tuple[float, float]] | None = None

    def lr_at(self, progress: float) -> float:
        if self.optimizer is torch.optim.SGD:
            return float(self.lr * 0.01 ** (progress / self.steps))
        return float(self.lr * (0.01 + 0.99 * math.cos(math.pi / 2 * min(progress / self.steps, 1.0)) ** 2))

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer is torch.optim.SGD:
            return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
        return torch.optim.AdamW(model.parameters(), lr=self.lr, fused=True)


def digits(device: torch.device) -> Task:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
    x_test, y_test = (
        torch.tensor(x_test, dtype=torch.float32, device=device),
        torch.tensor(y_test, device=device),
    )
    inputs, targets = (
        torch.tensor(x_train, dtype=torch.float32, device=device),
        torch.tensor(y_train, device=device),
    )

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
        gradient=lambda model: exact_gradient(model, inputs, targets),
    )


def exact_gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """The squared norm of the mean gradient, and the variance of the gradient of one sample, of two layers.

    The gradient of a sample with respect to a layer is the outer product of the layer's input, with a 1 for
    the bias, and of the derivative of the loss by the layer's output.
    """
    first, _, second = model.children()
    with torch.no_grad():
        ones = torch.ones(len(inputs), 1, device=inputs.device)
        hidden = first(inputs)
        active = hidden.relu()
        back = second(active).softmax(1)
        back[torch.arange(len(targets), device=targets.device), targets] -= 1
        layers = [
            (torch.cat([inputs, ones], 1), back @ second.get_parameter("weight") * (hidden > 0)),
            (torch.cat([active, ones], 1), back),
        ]
        each = sum((x.square().sum(1) * d.square().sum(1) for x, d in layers), torch.zeros(()))
        sqr = sum(((d.T @ x / len(inputs)).square().sum() for x, d in layers), torch.zeros(())).item()
    return sqr, each.mean().item() - sqr


CONTEXT = 12


def text(device: torch.device) -> Task:
    """Predict the next character from the twelve before it."""
    from sklearn import datasets

    folder = Path(datasets.__file__).parent / "descr"
    whole = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.rst"))).lower()
    letters = sorted(set(whole) & set(map(chr, range(128))))
    number = {letter: index for index, letter in enumerate(letters)}
    codes = torch.tensor([number.get(letter, 0) for letter in whole], device=device)
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
    )


def digits_adamw(device: torch.device) -> Task:
    return replace(
        digits(device), name="digits-adamw", steps=6_000, lr=0.01, optimizer=torch.optim.AdamW, gradient=None
    )


class Transformer(nn.Module):
    """One block of causal attention and a network of two layers, with RMSNorm before each."""

    def __init__(self, letters: int, context: int, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(context, width)
        nn.init.normal_(self.letter.weight, std=0.1)
        nn.init.normal_(self.place.weight, std=0.1)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )
        self.logits = nn.Linear(width, letters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.letter(x) + self.place.weight[: x.shape[1]]
        qkv = self.qkv(self.norms[0](h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(-2))
        h = h + self.mlp(self.norms[1](h))
        logits: Tensor = self.logits(self.norms[2](h))
        return logits


def transformer(device: torch.device, context: int = 32, block: int = 1024) -> Task:
    """Predict each of 32 characters from those before it."""
    from sklearn import datasets

    folder = Path(datasets.__file__).parent / "descr"
    whole = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.rst"))).lower()
    letters = sorted(set(whole) & set(map(chr, range(128))))
    number = {letter: index for index, letter in enumerate(letters)}
    codes = torch.tensor([number.get(letter, 0) for letter in whole], device=device)
    # Every tenth block is for the test, so that both parts have the same kinds of text.
    blocks = codes[: len(codes) // block * block].view(-1, block).unfold(1, context + 1, 1)
    is_test = torch.arange(len(blocks), device=device) % 10 == 9
    train, test = blocks[~is_test].flatten(0, 1), blocks[is_test].flatten(0, 1)[::7]

    def bits(model: nn.Module) -> float:
        with torch.no_grad():
            return loss_of(model, test[:, :-1], test[:, 1:]).item() / math.log(2)

    return Task(
        "transformer",
        4,
        2_000,
        0.004,
        0.0,
        lambda: Transformer(len(letters), context),
        train[:, :-1],
        train[:, 1:],
        bits,
        torch.optim.AdamW,
    )


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


TASKS = {"digits": digits, "text": text, "digits-adamw": digits_adamw, "transformer": transformer}
SCORE_LABELS = {
    "digits": "test accuracy (%)",
    "text": "test loss (bits per character)",
    "digits-adamw": "test accuracy (%)",
    "transformer": "test loss (bits per character)",
}


class Rule:
    """An optimizer whose lr is a function of scale and progress; a step counts as S steps of progress."""

    def __init__(self, task: Task, model: nn.Module, scale: int, micro: int) -> None:
        self.task, self.scale, self.micro = task, scale, micro
        self.sgd: Any = task.new_optimizer(model)

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


class LinearScaling(Rule):
    def factor(self, _: float, /) -> float:
        return float(self.scale)


class LinearScalingWithWarmUp(Rule):
    def factor(self, progress: float, /) -> float:
        """From 1 to S during the first 5.5% (5 of 90 epochs, Goyal et al. 2017)."""
        return 1 + (self.scale - 1) * min(progress / (0.055 * self.task.steps), 1.0)


class SquareRootScaling(Rule):
    def factor(self, _: float, /) -> float:
        return math.sqrt(self.scale)


class AdaScaleRule(Rule):
    sample_every: int | None = None
    max_gain: float | None = None

    def __init__(self, task: Task, model: nn.Module, scale: int, micro: int) -> None:
        super().__init__(task, model, scale, micro)
        self.sgd = AdaScale(
            self.sgd,
            world_size=1,
            scale=float(scale),
            num_gradients_to_accumulate=micro,
            sample_every=self.sample_every,
            max_gain=self.max_gain,
        )

    def set_scale(self, scale: int) -> None:
        super().set_scale(scale)
        self.sgd.set_scale(float(scale))

    def gain(self) -> float:
        return float(self.sgd.gain())


class AdaScaleEveryStep(AdaScaleRule):
    sample_every = 1


class FairScaleRule(Rule):
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


class SquareRootOfGain(AdaScaleRule):
    """AdaptDL's rule for Adam, with its smoothing: lr times the root of the gain, and the same betas."""

    def __init__(self, task: Task, model: nn.Module, scale: int, micro: int) -> None:
        super().__init__(task, model, scale, micro)
        self.sgd = AdaScale(
            self.sgd.optimizer,
            world_size=1,
            scale=float(scale),
            num_gradients_to_accumulate=micro,
            smoothing=0.999**scale,
        )
        rule = self.sgd._rule
        rule.hyperparameters_at = lambda group, gain: {"lr": group["lr"] * math.sqrt(gain)}
        rule.prepare = lambda *_: None


class ExactGain(Rule):
    smoothed = False

    def __init__(self, task: Task, model: nn.Module, scale: int, micro: int) -> None:
        super().__init__(task, model, scale, micro)
        self.model = model
        self.averages = [0.0, 0.0]

    def step(self, progress: float) -> float:
        assert self.task.gradient is not None
        sqr, var = self.task.gradient(self.model)
        smoothing = max(1 - self.scale / 1000, 0.0) if self.smoothed else 0.0
        sample = (sqr, var / self.task.batch_size)
        self.averages = [
            smoothing * old + (1 - smoothing) * new for old, new in zip(self.averages, sample, strict=True)
        ]
        return super().step(progress)

    def factor(self, _: float, /) -> float:
        return self.gain()

    def gain(self) -> float:
        sqr, var = self.averages
        return (var + sqr) / (var / self.scale + sqr)


class SmoothedExactGain(ExactGain):
    smoothed = True


RULES: dict[str, type[Rule]] = {
    "AdaScale": AdaScaleRule,
    "AdaScale, every step": AdaScaleEveryStep,
    "FairScale": FairScaleRule,
    "exact gain": ExactGain,
    "exact gain, smoothed": SmoothedExactGain,
    "linear": LinearScaling,
    "linear, warm-up": LinearScalingWithWarmUp,
    "square root": SquareRootScaling,
    "square root of gain": SquareRootOfGain,
    "no scaling": Rule,
}
ADAMW_RULES = (
    "AdaScale",
    "square root of gain",
    "square root",
    "no scaling",
    "linear",
    "FairScale",
)
SGD_RULES = tuple(rule for rule in RULES if rule not in ("square root of gain", "no scaling"))


@dataclass(frozen=True)
class Run:
    rule: str
    scale: str
    seed: int
    score: float
    iterations: int


class SampleOrder:
    """Shuffled indices of samples, epoch after epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._generator = torch.Generator().manual_seed(seed)
        self._queue = torch.empty(0, dtype=torch.int64)

    def next_batch(self, size: int) -> Tensor:
        while len(self._queue) < size:
            self._queue = torch.cat([self._queue, torch.randperm(self._count, generator=self._generator)])
        batch, self._queue = self._queue[:size], self._queue[size:]
        return batch


def train(task: Task, rule_name: str, scales: tuple[int, ...], seed: int, max_micro_gradients: int) -> Run:
    """Train until progress reaches the steps of the task, an equal part of it at each scale."""
    torch.manual_seed(seed)
    device = task.inputs.device
    model = task.model().to(device)
    micro = min(scales[0], max_micro_gradients)
    rule = RULES[rule_name](task, model, scales[0], micro)
    order = SampleOrder(len(task.inputs), seed)
    progress, iterations, part = 0.0, 0, 0
    while progress < task.steps:
        if progress >= task.steps * (part + 1) / len(scales):
            part += 1
            rule.set_scale(scales[part])
        batch = order.next_batch(task.batch_size * scales[part]).to(device)
        for micro_batch in batch.chunk(micro):
            loss = loss_of(model, task.inputs[micro_batch], task.targets[micro_batch])
            (loss / micro).backward()
        progress += rule.step(progress)
        iterations += 1
    name = "-".join(map(str, scales))
    return Run(rule_name, name, seed, task.score(model), iterations)


def plan(rules: list[str], scales: list[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Return every rule at every scale. At scale 1 all rules are equal, and FairScale refuses it."""
    runs: list[tuple[str, tuple[int, ...]]] = [("AdaScale", (1,))] if 1 in scales else []
    runs += [(rule, (scale,)) for scale in scales if scale > 1 for rule in rules]
    return runs + [(rule, elastic) for elastic in ELASTIC.values() for rule in rules]


def table(task: str, runs: list[Run]) -> str:
    """Return the mean score with its standard deviation, and the mean iterations, by rule and scale."""
    scales = list(dict.fromkeys(run.scale for run in runs))
    unit, decimals = ("%", 1) if task.startswith("digits") else ("bits", 3)
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
            iterations = statistics.mean(run.iterations for run in own)
            cells.append(
                f"{statistics.mean(scores):.{decimals}f} ± {spread:.{decimals}f} {unit}, {iterations:.0f}"
            )
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# Wong, "Points of view: Color blindness", Nature Methods 2011, with a marker of its own for each rule.
STYLES = {
    "AdaScale": ("#D55E00", "o", "-"),
    "AdaScale, every step": ("#E69F00", "s", "--"),
    "FairScale": ("#0072B2", "^", "-"),
    "exact gain": ("#56B4E9", "v", ":"),
    "exact gain, smoothed": ("#009E73", "D", ":"),
    "linear": ("#000000", "x", "-."),
    "linear, warm-up": ("#777777", "+", "-."),
    "square root": ("#CC79A7", "P", "--"),
    "square root of gain": ("#009E73", "D", "--"),
    "no scaling": ("#777777", "+", ":"),
}
DETAIL = {
    "digits": (87.0, 99.0),
    "text": (3.1, 4.4),
    "digits-adamw": (93.0, 99.0),
    "transformer": (2.8, 4.0),
}
"""Range of scores of the right panel, which leaves out rules that diverge."""


def plot(task: str, runs: list[Run], path: Path) -> None:
    """Plot the mean score over the scale, with its standard deviation, one line per rule, as SVG."""
    import matplotlib
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator, ScalarFormatter

    # The same runs give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "adascale", "svg.fonttype": "none"})
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    base = [run.score for run in runs if run.scale == "1"]
    rules = list(dict.fromkeys(run.rule for run in runs))
    for number, rule in enumerate(rules):
        scores = {1: base} if base else {}
        for scale in SCALES[1:]:
            own = [run.score for run in runs if (run.rule, run.scale) == (rule, str(scale))]
            if own:
                scores[scale] = own
        # Beside each other, so that equal scores do not cover each other.
        shift = 1.04 ** (number - (len(rules) - 1) / 2)
        colour, marker, line = STYLES[rule]
        means = [statistics.mean(own) for own in scores.values()]
        errors = [statistics.stdev(own) if len(own) > 1 else 0.0 for own in scores.values()]
        low, high = DETAIL[task]
        # An error bar without its mean would be a line across the panel.
        detail_errors = [
            error if low <= mean <= high else math.nan for mean, error in zip(means, errors, strict=True)
        ]
        for axes, bars in zip(panels, (errors, detail_errors), strict=True):
            axes.errorbar(
                [scale * shift for scale in scores],
                means,
                bars,
                label=rule,
                color=colour,
                marker=marker,
                markersize=5,
                linestyle=line,
                linewidth=1.2,
                capsize=2,
            )
    for axes, title in zip(panels, ("all rules", "detail"), strict=True):
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SCALES)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("scale S (batch size / initial batch size)")
        axes.set_ylabel(SCORE_LABELS[task])
        axes.grid(alpha=0.3)
    if not task.startswith("digits"):
        panels[0].set_yscale("log")
        panels[0].set_ylim(bottom=2.0)
        panels[0].yaxis.set_major_formatter(ScalarFormatter())
    panels[1].set_ylim(*DETAIL[task])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def train_all(task: Task, options: argparse.Namespace) -> list[Run]:
    known = SGD_RULES if task.optimizer is torch.optim.SGD else ADAMW_RULES
    rules = [
        rule for rule in options.rules or known if task.gradient or not issubclass(RULES[rule], ExactGain)
    ]
    runs = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for rule, scales in plan(rules, options.scales):
            run = train(task, rule, scales, seed, options.micro_gradients)
            runs.append(run)
            print(
                f"{run.rule:22} S={run.scale:10} seed {seed}: {run.score:.3f} in {run.iterations}", flush=True
            )
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", nargs="?", default="digits", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scales", type=int, nargs="+", default=list(SCALES))
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rules", nargs="+", choices=list(RULES))
    parser.add_argument(
        "--micro-gradients", type=int, default=MICRO_GRADIENTS, help="maximum number in a step"
    )
    parser.add_argument("--out", type=Path, help="path of the files to write, without suffix")
    parser.add_argument("--from-json", action="store_true", help="read the runs at --out instead of training")
    device_option.add_to(parser)
    options = parser.parse_args()
    device_option.check(parser, options.device)
    if options.from_json and not options.out:
        parser.error("--from-json needs --out, the path of the files without suffix")
    torch.set_num_threads(1)
    name = options.task
    if options.from_json:
        runs = [Run(**run) for run in json.loads(options.out.with_suffix(f".{name}.json").read_text())]
    else:
        runs = train_all(TASKS[name](torch.device(options.device)), options)
    print(table(name, runs))
    if options.out:
        options.out.with_suffix(f".{name}.md").write_text(table(name, runs))
        plot(name, runs, options.out.with_suffix(f".{name}.svg"))
        options.out.with_suffix(f".{name}.json").write_text(
            json.dumps([asdict(run) for run in runs], indent=1)
        )


if __name__ == "__main__":
    main()
