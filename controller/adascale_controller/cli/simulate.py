"""`adascale simulate`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console

from adascale_client import MetricsServiceClient
from adascale_controller.simulation.adascale_policy import AdaScalePolicy
from adascale_controller.simulation.application import ProfileError
from adascale_controller.simulation.cluster import PlacementMode
from adascale_controller.simulation.competitors import EqualShares, FirstComeFirstServed, Optimus, Tiresias
from adascale_controller.simulation.engine import Policy, Settings, Submission, simulate
from adascale_controller.simulation.pictures import draw
from adascale_controller.simulation.profiles import read_workload
from adascale_controller.simulation.recording import read_recording, record
from adascale_controller.simulation.results import Results
from adascale_controller.simulation.results_table import render_results
from adascale_core import names

MAX_SECONDS = 86400.0
"""The largest restart, interval and preparation that can be simulated."""


class PolicyName(StrEnum):
    """The policies that can be simulated."""

    ADASCALE = "adascale"
    TIRESIAS = "tiresias"
    OPTIMUS = "optimus"
    FCFS = "fcfs"
    EQUAL = "equal"


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
    policy: Annotated[
        PolicyName,
        typer.Option("--policy", metavar="NAME", help="adascale, tiresias, optimus, fcfs or equal."),
    ] = PolicyName.ADASCALE,
    output: Annotated[
        ResultFormat, typer.Option("--output", "-o", metavar="FORMAT", help="table or json.")
    ] = ResultFormat.TABLE,
    pictures: Annotated[
        Path | None,
        typer.Option(
            "--pictures",
            metavar="DIR",
            help="Save pictures: jobs by node, completion times.",
            show_default=False,
        ),
    ] = None,
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
    """Replay a workload on a simulated cluster, with the decision of the operator or another policy."""
    settings = Settings([gpus] * nodes, restart, interval, prepare)
    random = Random(seed)
    submissions = _submissions(workload, profiles, from_service)
    _require_room(submissions, settings, policy)
    jobs = simulate(
        submissions, _policy(policy, placement), settings, lambda: random.lognormvariate(0.0, noise)
    )
    results = Results.of(jobs, settings)
    if pictures is not None:
        for path in draw(jobs, settings, pictures):
            typer.echo(f"saved {path}", err=True)
    if output is ResultFormat.JSON:
        typer.echo(json.dumps(results.to_json(), indent=2))
    else:
        Console(highlight=False).print(render_results(results, settings))


def _submissions(workload: Path | None, profiles: Path | None, url: str | None) -> list[Submission]:
    if url is not None:
        return record(MetricsServiceClient(url, os.environ.get(names.ENV_TOKEN)), workload)
    if workload is None:
        raise typer.BadParameter("a WORKLOAD is needed, or --from-service URL", param_hint="WORKLOAD")
    if workload.suffix == ".json":
        return read_recording(workload)
    if profiles is None:
        raise typer.BadParameter("a workload in CSV needs --profiles DIR", param_hint="--profiles")
    return read_workload(workload, profiles)


def _require_room(submissions: Sequence[Submission], settings: Settings, policy: PolicyName) -> None:
    """Check that each job fits when it is alone.

    Raises:
        ProfileError: a job does not fit.
    """
    is_fixed = policy in (PolicyName.TIRESIAS, PolicyName.FCFS)
    needed = {each.name: each.replicas if is_fixed else each.application.min_replicas for each in submissions}
    largest = max(needed, key=lambda name: needed[name])
    if needed[largest] > settings.total:
        runs = f"runs on {needed[largest]} replicas with this policy"
        runs = runs if is_fixed else f"needs {needed[largest]} replicas"
        raise ProfileError(
            f"job {largest} {runs}, and the nodes hold {settings.total}: raise --nodes or --gpus"
            + (", or choose another --policy" if is_fixed else "")
        )


def _policy(name: PolicyName, placement: PlacementMode) -> Policy:
    match name:
        case PolicyName.ADASCALE:
            return AdaScalePolicy(placement)
        case PolicyName.TIRESIAS:
            return Tiresias()
        case PolicyName.OPTIMUS:
            return Optimus()
        case PolicyName.FCFS:
            return FirstComeFirstServed()
        case PolicyName.EQUAL:
            return EqualShares()
