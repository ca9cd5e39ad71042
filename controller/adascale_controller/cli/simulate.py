"""`adascale simulate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from adascale_controller.cli.arguments import Fairness, Output, OutputFormat, option
from adascale_controller.cli.connections import client_at
from adascale_controller.formatting import OutputConsole, duration, percent, significant
from adascale_controller.simulation.adascale_policy import AdaScalePolicy, PlacementMode
from adascale_controller.simulation.engine import SimulationSettings, Submission, simulate
from adascale_controller.simulation.recording import read_recording, record
from adascale_controller.simulation.results import Results
from adascale_core.errors import AdaScaleError

MAX_SECONDS = 86400.0
"""The largest restart, interval and preparation that can be simulated."""


def simulate_workload(
    workload: Annotated[
        Path | None,
        typer.Argument(
            metavar="WORKLOAD",
            help="A recorded workload, a JSON file.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=100_000, help="The number of nodes.")
    ] = 16,
    gpus: Annotated[
        int, typer.Option("--gpus", metavar="G", min=1, max=1000, help="Replicas that a node holds.")
    ] = 4,
    restart: Annotated[
        float,
        typer.Option(
            "--restart", metavar="SECONDS", min=0, max=MAX_SECONDS, help="Training stands still for a change."
        ),
    ] = 30.0,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", metavar="SECONDS", min=0.1, max=MAX_SECONDS, help="The time between two decisions."
        ),
    ] = 60.0,
    prepare: Annotated[
        float,
        typer.Option(
            "--prepare",
            metavar="SECONDS",
            min=0,
            max=MAX_SECONDS,
            help="Training continues while a change is prepared.",
        ),
    ] = 0.0,
    noise: Annotated[
        float,
        typer.Option(
            "--noise", metavar="SIGMA", min=0, max=1, help="Of reported step times, as a standard deviation."
        ),
    ] = 0.04,
    seed: Annotated[int, typer.Option("--seed", metavar="SEED", help="Of the noise.")] = 0,
    placement: Annotated[
        PlacementMode, typer.Option("--placement", metavar="MODE", help="packed, affinity or spread.")
    ] = PlacementMode.PACKED,
    fairness: Fairness = None,
    output: OutputFormat = Output.TEXT,
    from_service: Annotated[
        str | None,
        option(
            "--from-service",
            metavar="URL",
            help="Replay the jobs of a metrics service, and save them as WORKLOAD if that is given.",
        ),
    ] = None,
) -> None:
    """Replay a workload on a simulated cluster, with the decision of the operator."""
    settings = SimulationSettings([gpus] * nodes, restart, interval, prepare)
    if from_service is not None:
        submissions = record(client_at(from_service), workload, partial(typer.echo, err=True))
    elif workload is None:
        raise typer.BadParameter("a WORKLOAD is needed, or --from-service URL", param_hint="WORKLOAD")
    else:
        submissions = read_recording(workload)
    _require_room(submissions, settings)
    policy = AdaScalePolicy(placement, fairness)
    random = Random(seed)
    jobs = simulate(submissions, policy, settings, lambda: random.lognormvariate(0.0, noise))
    results = Results.of(jobs, settings)
    if output is Output.JSON:
        typer.echo(json.dumps(results.to_json(), indent=2))
    else:
        OutputConsole().print(_rendered(results, f"{nodes} x {gpus}"))


def _require_room(submissions: Sequence[Submission], settings: SimulationSettings) -> None:
    """Check that each job fits when it is alone."""
    largest = max(submissions, key=lambda each: each.application.min_replicas)
    needed = largest.application.min_replicas
    if needed > settings.total:
        raise AdaScaleError(
            f"job {largest.name} needs {needed} replicas, and the nodes hold {settings.total}: "
            "raise --nodes or --gpus"
        )


def _rendered(results: Results, nodes: str) -> RenderableType:
    """Return the summary of a simulation."""
    summary = results.summary()
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = [
        ("jobs", str(len(results.jobs))),
        ("nodes x replicas", nodes),
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
