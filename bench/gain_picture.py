"""The picture of the README: what the gain of a larger batch is, and what it is for.

    python bench/gain_picture.py --out docs/gain.svg

Left: a network is trained on digits at the small batch (`digits` of `bench/accuracy.py`). At three points of
training, the gain r(S) = (g + v) / (g + v / S) is computed from g, the squared norm of the gradient of all
samples, and v, the variance of the mean gradient of a small batch. Right: the mean test accuracy at larger
batches, from the runs in bench/accuracy.digits.json.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import torch
from accuracy import SCALES, Task, digits, exact_gradient
from matplotlib.axes import Axes
from matplotlib.figure import Figure

POINTS = {0.0: "at the start of training", 0.05: "after 5% of training", 0.5: "after half of training"}
"""Shares of training, with their labels."""
RULES = {"AdaScale": "AdaScale", "linear": "learning rate times S"}


def gradients_at_points(task: Task) -> dict[float, tuple[float, float]]:
    """Train at the small batch, and return g and v at each point."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.new_optimizer(model)
    found = {}
    for step in range(int(max(POINTS) * task.steps) + 1):
        if step / task.steps in POINTS:
            sqr, variance = exact_gradient(model, task.inputs, task.targets)
            found[step / task.steps] = sqr, variance / task.batch_size
        batch = torch.randint(len(task.inputs), (task.batch_size,))
        for group in optimizer.param_groups:
            group["lr"] = task.lr_at(step)
        torch.nn.functional.cross_entropy(model(task.inputs[batch]), task.targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def draw_gains(axes: Axes, gradients: dict[float, tuple[float, float]]) -> None:
    scales = [2 ** (exponent / 4) for exponent in range(29)]
    axes.plot(scales, scales, color="#999999", linestyle="--", label="a step of S batches is worth S steps")
    for point, (sqr, variance) in gradients.items():
        gains = [(sqr + variance) / (sqr + variance / scale) for scale in scales]
        axes.plot(scales, gains, label=f"measured {POINTS[point]}")
    axes.set(title="What a larger batch is worth", ylabel="gain: steps at the small batch per step")
    axes.set_yscale("log", base=2)
    axes.set_yticks(SCALES, [str(scale) for scale in SCALES])


def draw_accuracies(axes: Axes, runs: list[dict[str, str | float]]) -> None:
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        scores[str(run["rule"]), str(run["scale"])].append(float(run["score"]))
    for rule, label in RULES.items():
        # All rules are the same at S = 1.
        means = [statistics.mean(scores[rule if scale > 1 else "AdaScale", str(scale)]) for scale in SCALES]
        axes.plot(SCALES, means, marker="o", label=label)
    axes.set(title="What it is for", ylabel="test accuracy (%)", ylim=(0, 102))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the SVG file to write")
    out = parser.parse_args().out
    mpl.rcParams["svg.hashsalt"] = "adascale"
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_gains(left, gradients_at_points(digits(torch.device("cpu"))))
    runs = json.loads(Path(__file__).with_name("accuracy.digits.json").read_text())
    draw_accuracies(right, runs)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(SCALES, [str(scale) for scale in SCALES])
        axes.set_xlabel("batch size relative to the small batch, S")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
