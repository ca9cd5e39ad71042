"""Pictures of a simulation, drawn with matplotlib, which is not a dependency of the commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from adascale_controller.simulation.engine import Settings, SimulatedJob
from adascale_core.errors import AdaScaleError


class PictureError(AdaScaleError):
    """Pictures cannot be drawn."""


def draw(jobs: Sequence[SimulatedJob], settings: Settings, folder: Path) -> list[Path]:
    """Save a Gantt chart by node and the distribution of completion times, and return their paths."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PictureError(
            "--pictures needs matplotlib, which is not installed: run `pip install matplotlib`"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PictureError(
            f"cannot create the folder {folder} for pictures: {error.strerror}: choose another"
        ) from error
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
    axes.set_xlabel("hours")
    axes.set_ylabel("node")
    for name in names:
        axes.barh(0, 0, color=color[name], label=name)
    axes.legend(loc="upper right", fontsize="small")

    distribution = Figure(figsize=(7, 4), layout="constrained")
    axes = distribution.add_subplot()
    times = sorted((job.completed_at or 0.0) - job.submission.time for job in jobs)
    axes.step(
        [time / 3600 for time in times], [(i + 1) / len(times) for i in range(len(times))], where="post"
    )
    axes.set_xscale("log")
    axes.set_xlabel("completion time, hours")
    axes.set_ylabel("share of the jobs")
    paths = [folder / "jobs-by-node.png", folder / "completion-times.png"]
    for figure, path in zip((gantt, distribution), paths, strict=True):
        figure.savefig(path, dpi=120)
    return paths
