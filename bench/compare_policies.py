"""Scheduling policies beside each other: completion times, restarts and fairness of simulated workloads.

    python bench/compare_policies.py WORKLOAD... [--profiles DIR] [--policies adascale tiresias optimus ...]
        [--seeds 0 1 2] [--deadlines 0.5-1.5] [--isolated] [--json DIR] [--pictures DIR]

and the options of the cluster that `adascale simulate` has. A WORKLOAD is a recorded JSON file, or a CSV file
(`published_workloads.py` has the format) with --profiles, a folder per application. --cluster has nodes of
several types, as in `aws=6x4,dgx-ext=2x8`, in place of --nodes and --gpus. The file of --costs is JSON:
`{"restart": {APPLICATION: SECONDS}, "slowdown": {APPLICATION: FACTOR}}`; a slowdown is a factor of step
times, and a restart takes the place of --restart. --deadlines draws a deadline for each job. The table has
the mean over the seeds for each workload. Files of --json are `<policy or fairness>-<workload>-<seed>.json`,
which `bench/fairness.py` draws. Policies other than `adascale`:

- `tiresias`, `optimus`, `fcfs` (first come first served), `edf` (earliest deadline first) and `equal` (equal
  shares) of `policies.py`; `tiresias`, `fcfs` and `edf` run a job on the replicas of the workload only;
- `sia`, the only one of them that knows types of accelerators (--cluster); `elasticflow`, which needs
  --deadlines. Both move a job to other nodes of its type without a restart, as published. `elasticflow-all`
  is the same, but each job that it does not admit keeps a GPU.

With --isolated each job is also simulated alone on its fair share with the same policy, for finish-time
fairness as Sia reports it (`isolated_cluster.py`). It takes as long again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from elasticflow import ElasticFlow
from isolated_cluster import IsolatedCluster
from matplotlib import colormaps
from matplotlib.figure import Figure
from policies import EarliestDeadlineFirst, EqualShares, FirstComeFirstServed, Optimus, Tiresias
from published_workloads import Costs, nodes_of, read_costs, read_workload, tightness_of, with_deadlines
from sia import Sia

from adascale_controller.simulation.adascale_policy import AdaScalePolicy, PlacementMode
from adascale_controller.simulation.engine import (
    Policy,
    SimulatedJob,
    SimulationSettings,
    Submission,
    simulate,
)
from adascale_controller.simulation.recording import read_recording
from adascale_controller.simulation.results import Contention, Results
from adascale_core.errors import AdaScaleError

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "adascale": AdaScalePolicy,
    "tiresias": Tiresias,
    "optimus": Optimus,
    "fcfs": FirstComeFirstServed,
    "equal": EqualShares,
    "sia": Sia,
    "edf": EarliestDeadlineFirst,
    "elasticflow": ElasticFlow,
    "elasticflow-all": partial(ElasticFlow, keeps_all=True),
}
FIXED_SIZE = {"tiresias", "fcfs", "edf"}
"""The policies that run a job on the number of replicas of the workload only."""
FREE_MOVES = {"sia", "elasticflow", "elasticflow-all"}
KNOW_TYPES = {"adascale", "sia"}


def run(
    name: str,
    new_policy: Callable[[], Policy],
    jobs: Sequence[Submission],
    settings: SimulationSettings,
    noise: float,
    seed: int,
    *,
    isolated: bool,
) -> tuple[list[SimulatedJob], dict[str, Any]]:
    """Simulate a workload, and return its jobs and what `adascale simulate --output json` shows of them.

    If `isolated`, each job has its `isolated_finish_time_fairness` too, and the results have the worst of
    them and the share of the jobs above 1.
    """
    is_fixed = name in FIXED_SIZE
    needed = {each.name: each.replicas if is_fixed else each.application.min_replicas for each in jobs}
    largest = max(needed, key=lambda job: needed[job])
    if needed[largest] > settings.total:
        raise AdaScaleError(
            f"job {largest} runs on {needed[largest]} replicas with the policy {name}, and the nodes hold "
            f"{settings.total}: raise --nodes or --gpus"
        )
    random = Random(seed)
    simulated = simulate(jobs, new_policy(), settings, lambda: random.lognormvariate(0.0, noise))
    results = Results.of(simulated, settings).to_json()
    if isolated:
        alone = IsolatedCluster(settings, new_policy, fixed_size=is_fixed)
        ratios = isolated_fairness(simulated, alone)
        for job, ratio in zip(results["jobs"], ratios, strict=True):
            job["isolated_finish_time_fairness"] = ratio
        results["worst_isolated_finish_time_fairness"] = max(ratios)
        results["isolated_unfairly_treated_share"] = mean(ratio > 1 for ratio in ratios)
    return simulated, results


def isolated_fairness(jobs: Sequence[SimulatedJob], alone: IsolatedCluster) -> list[float]:
    """Return the completion time of each job divided by that in an isolated cluster of its fair share."""
    contention = Contention(jobs)
    return [
        ((job.completed_at or 0.0) - job.submission.time)
        / alone.completion_time(job.submission, contention.of(job))
        for job in jobs
    ]


def rows_of(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return measure -> its mean over the results, as text."""

    def average(name: str) -> float:
        return float(mean(each[name] for each in results))

    rows = {
        "mean completion time, seconds": f"{average('mean_completion_time'):,.0f}",
        "99th percentile, hours": f"{average('p99_completion_time') / 3600:.1f}",
        "makespan, hours": f"{average('makespan') / 3600:.1f}",
        "restarts per job": f"{average('restarts_per_job'):.1f}",
        "finish-time fairness, worst": f"{average('worst_finish_time_fairness'):.2f}",
        "jobs above 1": f"{average('unfairly_treated_share'):.1%}",
    }
    if "worst_isolated_finish_time_fairness" in results[0]:
        rows["isolated finish-time fairness, worst"] = f"{average('worst_isolated_finish_time_fairness'):.2f}"
        rows["jobs above 1, isolated"] = f"{average('isolated_unfairly_treated_share'):.1%}"
    if "deadlines_met_share" in results[0]:
        rows["deadlines met"] = f"{average('deadlines_met_share'):.1%}"
    return rows


def print_table(found: Mapping[str, Mapping[str, Sequence[dict[str, Any]]]]) -> None:
    """Print setting -> workload -> the results of each seed, as a table in Markdown."""
    workloads = list(next(iter(found.values())))
    print(f"| | {' | '.join(workloads)} | all |")
    print(f"| --- |{' --- |' * (len(workloads) + 1)}")
    for setting, by_workload in found.items():
        columns = [rows_of(results) for results in by_workload.values()]
        columns.append(rows_of([each for results in by_workload.values() for each in results]))
        for measure in columns[0]:
            print(f"| {setting}: {measure} | {' | '.join(column[measure] for column in columns)} |")


def draw(jobs: Sequence[SimulatedJob], settings: SimulationSettings, path: str) -> None:
    """Save a Gantt chart by node, and the distribution of completion times."""
    names = sorted({job.application.name for job in jobs})
    color = {name: colormaps["tab20"](i % 20) for i, name in enumerate(names)}
    gantt = Figure(figsize=(14, max(3.0, 0.35 * len(settings.nodes))), layout="constrained")
    axes = gantt.add_subplot()
    for job in jobs:
        ends = [time for time, _ in job.history[1:]] + [job.completed_at or 0.0]
        for (start, nodes), end in zip(job.history, ends, strict=True):
            for node, count in Counter(nodes).items():
                axes.barh(
                    node,
                    (end - start) / 3600,
                    left=start / 3600,
                    height=0.9 * count / settings.nodes[node],
                    color=color[job.application.name],
                    alpha=0.6,
                    linewidth=0,
                )
    axes.set(xlabel="hours", ylabel="node")
    for name in names:
        axes.barh(0, 0, color=color[name], label=name)
    axes.legend(loc="upper right", fontsize="small")
    gantt.savefig(f"{path}-jobs-by-node.png", dpi=120)

    distribution = Figure(figsize=(7, 4), layout="constrained")
    axes = distribution.add_subplot()
    times = sorted((job.completed_at or 0.0) - job.submission.time for job in jobs)
    axes.step(
        [time / 3600 for time in times], [(i + 1) / len(times) for i in range(len(times))], where="post"
    )
    axes.set(xscale="log", xlabel="completion time, hours", ylabel="share of the jobs")
    distribution.savefig(f"{path}-completion-times.png", dpi=120)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("workloads", type=Path, nargs="+", metavar="WORKLOAD", help="CSV or recorded JSON")
    found.add_argument("--profiles", type=Path, help="the folder of the applications, for CSV files")
    found.add_argument("--policies", nargs="+", choices=POLICIES, default=["adascale"], metavar="POLICY")
    found.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the noise and the deadlines")
    found.add_argument("--nodes", type=int, default=16)
    found.add_argument("--gpus", type=int, default=4, help="of a node")
    found.add_argument("--cluster", type=nodes_of, metavar="TYPE=NODESxGPUS,...")
    found.add_argument("--costs", type=Path)
    found.add_argument("--restart", type=float, default=30.0, help="seconds")
    found.add_argument("--interval", type=float, default=60.0, help="seconds")
    found.add_argument("--prepare", type=float, default=0.0, help="seconds")
    found.add_argument("--noise", type=float, default=0.04)
    found.add_argument("--placement", type=PlacementMode, choices=PlacementMode, default=PlacementMode.PACKED)
    found.add_argument("--fairness", type=float, help="of the policy adascale")
    found.add_argument("--deadlines", type=tightness_of, metavar="LEAST-MOST")
    found.add_argument("--isolated", action="store_true")
    found.add_argument("--json", type=Path, help="save the results of each simulation to this folder")
    found.add_argument("--pictures", type=Path, help="save pictures of each simulation to this folder")
    return found


def compare(options: argparse.Namespace) -> None:
    sizes, types = options.cluster or ([options.gpus] * options.nodes, [])
    costs = Costs() if options.costs is None else read_costs(options.costs)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for folder in (options.json, options.pictures):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    for name in options.policies:
        if types and name not in KNOW_TYPES:
            raise AdaScaleError(f"{name} knows no types of accelerators: leave out --cluster or the policy")
        setting, new_policy = name, POLICIES[name]
        if name == "adascale":
            new_policy = partial(AdaScalePolicy, options.placement, options.fairness)
            setting = name if options.fairness is None else f"{options.fairness:g}"
        settings = SimulationSettings(
            sizes,
            options.restart,
            options.interval,
            options.prepare,
            types=types,
            free_moves=name in FREE_MOVES,
        )
        for workload in options.workloads:
            if workload.suffix == ".json":
                submissions = read_recording(workload)
            elif options.profiles is None:
                raise AdaScaleError(f"{workload} needs --profiles DIR: only recorded workloads do not")
            else:
                submissions = read_workload(workload, options.profiles, list(dict.fromkeys(types)), costs)
            for seed in options.seeds:
                drawn = submissions
                if options.deadlines is not None:
                    drawn = with_deadlines(submissions, settings, options.deadlines, seed)
                jobs, results = run(
                    name, new_policy, drawn, settings, options.noise, seed, isolated=options.isolated
                )
                found.setdefault(setting, {}).setdefault(workload.stem, []).append(results)
                file = f"{setting}-{workload.stem}-{seed}"
                if options.json is not None:
                    (options.json / f"{file}.json").write_text(json.dumps(results, indent=2))
                if options.pictures is not None:
                    draw(jobs, settings, str(options.pictures / file))
    print_table(found)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        compare(options)
    except AdaScaleError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
