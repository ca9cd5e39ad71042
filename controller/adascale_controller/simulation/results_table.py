"""Renders the results of a simulation for people."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from adascale_controller.formatting import duration, percent, significant
from adascale_controller.simulation.engine import Settings
from adascale_controller.simulation.results import Results


def render_results(results: Results, settings: Settings) -> RenderableType:
    """Return the summary of a simulation."""
    summary = results.summary()
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = [
        ("jobs", str(len(results.jobs))),
        ("nodes x replicas", f"{len(settings.nodes)} x {max(settings.nodes)}"),
        ("completion time, mean", duration(summary["mean_completion_time"])),
        ("completion time, median", duration(summary["median_completion_time"])),
        ("completion time, p95", duration(summary["p95_completion_time"])),
        ("completion time, p99", duration(summary["p99_completion_time"])),
        ("makespan", duration(summary["makespan"])),
        ("GPU-hours", significant(summary["gpu_hours"])),
        ("restarts per job", significant(summary["restarts_per_job"])),
        ("queueing, mean", duration(summary["mean_queueing_time"])),
        ("queueing, longest", duration(summary["max_queueing_time"])),
        ("finish-time fairness, worst", significant(summary["worst_finish_time_fairness"])),
        ("jobs treated unfairly", percent(summary["unfairly_treated_share"])),
    ]
    for name, text in rows:
        table.add_row(name, text)
    return table
