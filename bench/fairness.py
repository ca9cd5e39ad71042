"""Finish-time fairness and the mean completion time of simulations, as a picture and a table.

    python bench/compare_policies.py saturn/workload-*.csv --profiles profiles --fairness X \
        --cluster aws=6x4,dgx-ext=2x8,rtx=3x8 --costs costs.json --isolated --json results
    python bench/fairness.py results --out docs/fairness.svg

for each fairness X. With `--policies sia --noise 0` in place of `--fairness X`, the twin of Sia is shown too.
Left: what a fairness costs, over all workloads. Right: the
distribution of the isolated finish-time fairness, over all jobs of all workloads.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Setting:
    """The results of a setting on all workloads.

    Args:
        name: the fairness, or the name of a policy.
        results: of each workload.
    """

    name: str
    results: list[dict[str, Any]]

    @property
    def label(self) -> str:
        return f"fairness {self.name}" if self.name[0].isdigit() else f"twin of {self.name.title()}"

    @property
    def ratios(self) -> list[float]:
        """The finish-time fairness of all jobs, ascending."""
        return sorted(
            float(job["isolated_finish_time_fairness"]) for result in self.results for job in result["jobs"]
        )

    @property
    def above_one(self) -> float:
        """The share of the jobs above 1, in percent."""
        return 100 * statistics.mean(ratio > 1 for ratio in self.ratios)

    def mean(self, name: str) -> float:
        """Return the mean of a number over the workloads."""
        return statistics.mean(float(result[name]) for result in self.results)


def read(folder: Path) -> list[Setting]:
    """Read `<setting>-<workload>-<seed>.json`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*-*.json")):
        found.setdefault(path.stem.partition("-")[0], []).append(json.loads(path.read_text()))
    return [Setting(name, results) for name, results in found.items()]


def draw_frontier(axes: Axes, settings: list[Setting]) -> None:
    for setting in settings:
        axes.plot(
            setting.ratios[-1],
            setting.mean("mean_completion_time"),
            marker="o",
            linestyle="",
            label=f"{setting.label}: {setting.above_one:.1f}% of the jobs above 1",
        )
    axes.margins(x=0.2, y=0.4)
    axes.set(
        title="What fairness costs",
        xlabel="worst finish-time fairness of a job",
        ylabel="mean completion time, seconds",
    )


def draw_distributions(axes: Axes, settings: list[Setting]) -> None:
    for setting in settings:
        ratios = setting.ratios
        # A point for each percent of the jobs, and each of the last jobs.
        shown = [i for i in range(len(ratios)) if i % (len(ratios) // 100 + 1) == 0 or i > len(ratios) - 10]
        axes.plot([ratios[i] for i in shown], [(i + 1) / len(ratios) for i in shown], label=setting.label)
    axes.set(
        title="How all jobs are treated",
        xlabel="finish-time fairness; above 1 is unfair",
        ylabel="share of the jobs",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="the folder of the results")
    parser.add_argument("--out", type=Path, required=True, help="the SVG file to write")
    options = parser.parse_args()
    settings = read(options.results)
    if not settings:
        parser.error(f"{options.results} has no files of compare_policies.py --json: simulate first")
    print("| | workloads | mean, seconds | worst | above 1 | 99th percentile, h | makespan, h | restarts |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for each in settings:
        hours = [each.mean(name) / 3600 for name in ("p99_completion_time", "makespan")]
        print(
            f"| {each.label} | {len(each.results)} | {each.mean('mean_completion_time'):,.0f} "
            f"| {each.ratios[-1]:.2f} | {each.above_one:.1f}% | {hours[0]:.1f} | {hours[1]:.1f} "
            f"| {each.mean('restarts_per_job'):.1f} |"
        )
    mpl.rcParams["svg.hashsalt"] = "adascale"
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_frontier(left, settings)
    draw_distributions(right, settings)
    for axes in (left, right):
        axes.axvline(1, color="#999999", linestyle="--")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="best" if axes is right else "upper right")
    figure.savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
