"""Loss over steps: AdaScale with limits of the gain (`max_gain`), beside other rules for AdamW.

    OMP_NUM_THREADS=1 python bench/frontier.py train [--tasks transformer] [--limits 20] [--seeds 3]
    python bench/frontier.py report

`train` makes the runs of `bench/accuracy.py` at S = 64 and 128 with each limit, and adds them to
bench/frontier.json. `report` writes bench/frontier.md and bench/frontier.svg from them, and from the runs
without a limit in bench/accuracy.TASK.json.
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl
import torch
from accuracy import RULES, SCORE_LABELS, STYLES, TASKS, AdaScaleRule, Run, train
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "frontier.json"
NAMES = ("transformer", "digits-adamw")
SCALES = {"64": "-", "128": "--"}
"""Scales, with the line of each in the picture."""
LIMITS = (40.0, 20.0, 15.0, 10.0)
OTHERS = ("FairScale", "square root of gain")
MICRO_GRADIENTS = 8


def rule_with(limit: float) -> str:
    """Return the name of AdaScale with a limit, which it adds to the rules."""
    name = f"max_gain {limit:g}"
    RULES[name] = type("LimitedAdaScale", (AdaScaleRule,), {"max_gain": limit})
    return name


def train_all(names: list[str], limits: list[float], seeds: int) -> None:
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        task, made = TASKS[name](torch.device("cpu")), runs.setdefault(name, [])
        done = {(run["rule"], run["scale"], run["seed"]) for run in made}
        for seed in range(seeds):
            for rule in map(rule_with, limits):
                for scale in SCALES:
                    if (rule, scale, seed) in done:
                        continue
                    run = train(task, rule, (int(scale),), seed, MICRO_GRADIENTS)
                    made.append(asdict(run))
                    RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
                    print(
                        f"{name} {rule} S={scale} seed {seed}: {run.score:.3f} in {run.iterations}",
                        flush=True,
                    )


Point = tuple[float, float, float]
"""The mean number of steps, the mean score, and the standard deviation of the score."""


def points_of(name: str) -> dict[tuple[str, str], Point]:
    """Return a point for each rule and scale, with the small batch at "1"."""
    runs = [Run(**run) for run in json.loads((FOLDER / f"accuracy.{name}.json").read_text())]
    runs += [Run(**run) for run in json.loads(RESULTS.read_text())[name]]
    return {
        key: (
            statistics.mean(run.iterations for run in own),
            statistics.mean(scores),
            statistics.stdev(scores) if len(scores) > 1 else 0.0,
        )
        for key in {(run.rule, run.scale) for run in runs}
        for own in [[run for run in runs if (run.rule, run.scale) == key]]
        for scores in [[run.score for run in own]]
    }


def rules_of(points: dict[tuple[str, str], Point]) -> list[str]:
    limited = {rule for rule, _ in points if rule.startswith("max_gain")}
    return ["AdaScale", *sorted(limited, key=lambda rule: -float(rule.split()[1]))]


def table() -> str:
    """Return the points of all tasks, as Markdown."""
    lines = [
        "| | " + " | ".join(f"{name}, S = {scale}" for name in NAMES for scale in SCALES) + " |",
        "| --- |" + " --- |" * (len(NAMES) * len(SCALES)),
    ]
    points = {name: points_of(name) for name in NAMES}
    for rule in [*rules_of(points[NAMES[0]]), *OTHERS]:
        cells = []
        for name in NAMES:
            unit, decimals = ("%", 1) if name.startswith("digits") else ("bits", 3)
            for scale in SCALES:
                steps, mean, spread = points[name][rule, scale]
                cells.append(f"{mean:.{decimals}f} ± {spread:.{decimals}f} {unit}, {steps:.0f}")
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(axes: Axes, name: str) -> None:
    points = points_of(name)
    _, small, _ = points["AdaScale", "1"]
    axes.axhline(small, color="#777777", linestyle=":", linewidth=1.2, label="small batch")
    for scale, line in SCALES.items():
        frontier = [(rule, *points[rule, scale]) for rule in rules_of(points)]
        for label, rules, colour, marker in [
            ("AdaScale", frontier, *STYLES["AdaScale"][:2]),
            *((rule, [(rule, *points[rule, scale])], *STYLES[rule][:2]) for rule in OTHERS),
        ]:
            axes.errorbar(
                [steps for _, steps, _, _ in rules],
                [mean for _, _, mean, _ in rules],
                [spread for _, _, _, spread in rules],
                label=f"{label}, S = {scale}",
                color=colour,
                marker=marker,
                markerfacecolor=colour if line == "-" else "white",
                markersize=5,
                linestyle=line,
                linewidth=1.2,
                capsize=2,
            )
        for rule, steps, mean, _ in frontier:
            text = rule.removeprefix("max_gain ") if rule != "AdaScale" else "no limit"
            # The labels of both lines do not cover each other.
            place, side = ((5, 4), "left") if line == "-" else ((-5, -10), "right")
            axes.annotate(text, (steps, mean), place, textcoords="offset points", ha=side, fontsize=7)
    axes.set(title=name, xlabel="steps", ylabel=SCORE_LABELS[name])
    axes.set_xscale("log", base=2)
    axes.set_xticks([100, 150, 200, 300, 400, 600, 1000] if name == NAMES[1] else [75, 100, 150, 200, 300])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)


def report() -> None:
    print(table())
    (FOLDER / "frontier.md").write_text(table())
    # The same runs give the same file.
    mpl.rcParams.update({"svg.hashsalt": "adascale", "svg.fonttype": "none"})
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(NAMES)), NAMES, strict=True):
        draw(axes, name)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(FOLDER / "frontier.svg", format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["train", "report"])
    parser.add_argument("--tasks", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--limits", type=float, nargs="+", default=list(LIMITS))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "train":
        train_all(options.tasks, options.limits, options.seeds)
    else:
        report()


if __name__ == "__main__":
    main()
