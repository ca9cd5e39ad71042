"""`adascale simulate`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from adascale_controller.cli.arguments import Fairness
from adascale_controller.cli.connections import client_at
from adascale_controller.formatting import OutputConsole, duration, percent, significant
from adascale_controller.simulation.adascale_policy import AdaScalePolicy, PlacementMode
from adascale_controller.simulation.application import ProfileError
from adascale_controller.simulation.engine import SimulationSettings, Submission, simulate
from adascale_controller.simulation.profiles import Costs, read_costs, read_workload, with_deadlines
from adascale_controller.simulation.recording import read_recording, record
from adascale_controller.simulation.results import Results

MAX_SECONDS = 86400.0
"""The largest restart, interval and preparation that can be simulated."""


class ResultFormat(StrEnum):
    """The format of results."""

    TABLE = "table"
    JSON = "json"


def simulate_workload(
    workload: Annotated[
        Path | None,
        typer.Argument(
            metavar="WORKLOAD",
            help="A workload: a CSV file (with --profiles), or a recorded JSON file.",
            show_default=False,
        ),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option("--profiles", metavar="DIR", help="The applications' profiles.", show_default=False),
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=100_000, help="The number of nodes.")
    ] = 16,
    gpus: Annotated[
        int, typer.Option("--gpus", metavar="G", min=1, max=1000, help="Replicas that a node holds.")
    ] = 4,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="TYPE=NODESxGPUS,...",
            help="Nodes of several types of accelerators, in place of --nodes and --gpus. Profiles are "
            "placements-TYPE.csv.",
            show_default=False,
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            metavar="FILE",
            help="A JSON file with restart (seconds) and slowdown of applications.",
            show_default=False,
        ),
    ] = None,
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
    deadlines: Annotated[
        str | None,
        typer.Option(
            "--deadlines",
            metavar="LEAST-MOST",
            help="Draw a deadline for each job: its time on the replicas of the workload, times a number "
            "between these, such as 0.5-1.5.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        ResultFormat, typer.Option("--output", "-o", metavar="FORMAT", help="table or json.")
    ] = ResultFormat.TABLE,
    from_service: Annotated[
        str | None,
        typer.Option(
            "--from-service",
            metavar="URL",
            help="Replay the jobs of a metrics service, and save them as WORKLOAD if that is given.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Replay a workload on a simulated cluster, with the decision of the operator."""
    sizes, types = ([gpus] * nodes, []) if cluster is None else nodes_of(cluster)
    settings = SimulationSettings(sizes, restart, interval, prepare, types=types)
    random = Random(seed)
    submissions = _submissions(workload, profiles, from_service, types, costs)
    _require_room(submissions, settings)
    if deadlines is not None:
        submissions = with_deadlines(submissions, settings, tightness_of(deadlines), seed)
    policy = AdaScalePolicy(placement, fairness)
    jobs = simulate(submissions, policy, settings, lambda: random.lognormvariate(0.0, noise))
    results = Results.of(jobs, settings)
    if output is ResultFormat.JSON:
        typer.echo(json.dumps(results.to_json(), indent=2))
    else:
        OutputConsole().print(_rendered(results, settings))


def nodes_of(cluster: str) -> tuple[list[int], list[str]]:
    """Return the size and the type of each node of a cluster, as in `aws=6x4,rtx=3x8`."""
    sizes: list[int] = []
    types: list[str] = []
    for part in cluster.split(","):
        match = re.fullmatch(r"([\w.-]{1,63})=([1-9][0-9]{0,4})x([1-9][0-9]{0,2})", part)
        if match is None or match[1] in types:
            raise typer.BadParameter(
                f"each type must be named once, with its nodes and their GPUs, as in a100=2x8, got {part!r}",
                param_hint="--cluster",
            )
        sizes += [int(match[3])] * int(match[2])
        types += [match[1]] * int(match[2])
    return sizes, types


def tightness_of(deadlines: str) -> tuple[float, float]:
    """Return the least and the most tightness of `--deadlines`."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)-([0-9]{1,3}(?:\.[0-9]{1,6})?)", deadlines)
    least, most = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    if not 0 < least <= most:
        raise typer.BadParameter(
            f"two positive numbers are needed, the smaller one first, as in 0.5-1.5, got {deadlines!r}",
            param_hint="--deadlines",
        )
    return least, most


def _submissions(
    workload: Path | None, profiles: Path | None, url: str | None, types: Sequence[str], costs: Path | None
) -> list[Submission]:
    is_profiled = url is None and workload is not None and workload.suffix != ".json"
    if (types or costs is not None) and not is_profiled:
        raise typer.BadParameter(
            "they need a workload in CSV: a recording has no profiles of types",
            param_hint="--cluster and --costs",
        )
    if url is not None:
        return record(client_at(url), workload, partial(typer.echo, err=True))
    if workload is None:
        raise typer.BadParameter("a WORKLOAD is needed, or --from-service URL", param_hint="WORKLOAD")
    if workload.suffix == ".json":
        return read_recording(workload)
    if profiles is None:
        raise typer.BadParameter("a workload in CSV needs --profiles DIR", param_hint="--profiles")
    found = Costs() if costs is None else read_costs(costs)
    return read_workload(workload, profiles, list(dict.fromkeys(types)), found)


def _require_room(submissions: Sequence[Submission], settings: SimulationSettings) -> None:
    """Check that each job fits when it is alone."""
    largest = max(submissions, key=lambda each: each.application.min_replicas)
    needed = largest.application.min_replicas
    if needed > settings.total:
        raise ProfileError(
            f"job {largest.name} needs {needed} replicas, and the nodes hold {settings.total}: "
            "raise --nodes or --gpus"
        )


def _rendered(results: Results, settings: SimulationSettings) -> RenderableType:
    """Return the summary of a simulation."""
    summary = results.summary()
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = [
        ("jobs", str(len(results.jobs))),
        ("nodes x replicas", _described(settings)),
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


def _described(settings: SimulationSettings) -> str:
    """Return the nodes of each type, with how many replicas a node holds."""
    return ", ".join(
        f"{name} {len(nodes)} x {max(settings.nodes[node] for node in nodes)}".strip()
        for name, nodes in settings.nodes_by_type().items()
    )
