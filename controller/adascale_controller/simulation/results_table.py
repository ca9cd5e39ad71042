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
        ("nodes x replicas", _cluster(settings)),
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
    if "worst_isolated_finish_time_fairness" in summary:
        worst = significant(summary["worst_isolated_finish_time_fairness"])
        unfair = percent(summary["isolated_unfairly_treated_share"])
        rows += [("isolated finish-time fairness, worst", worst), ("jobs above 1", unfair)]
    if "deadlines_met_share" in summary:
        rows.append(("deadlines met", percent(summary["deadlines_met_share"])))
    for name, each in results.types.items():
        rows.append((f"GPU-hours on {name}", significant(each.gpu_hours)))
        rows.append((f"use of {name}", percent(each.use)))
    if results.types:
        rows.append(("moves to another type per job", significant(summary["moves_per_job"])))
    for name, text in rows:
        table.add_row(name, text)
    return table


def _cluster(settings: Settings) -> str:
    """Return the nodes of each type, with how many replicas a node holds."""
    return ", ".join(
        f"{name} {len(nodes)} x {max(settings.nodes[node] for node in nodes)}".strip()
        for name, nodes in settings.nodes_by_type().items()
    )
