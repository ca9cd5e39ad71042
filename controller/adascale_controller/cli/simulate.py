"""`adascale simulate`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console

from adascale_controller.cli.fairness_option import Fairness
from adascale_controller.cli.service_client import client_at
from adascale_controller.simulation.adascale_policy import AdaScalePolicy
from adascale_controller.simulation.application import ProfileError
from adascale_controller.simulation.cluster import PlacementMode
from adascale_controller.simulation.competitors import (
    EarliestDeadlineFirst,
    EqualShares,
    FirstComeFirstServed,
    Optimus,
    Tiresias,
)
from adascale_controller.simulation.deadlines import with_deadlines
from adascale_controller.simulation.elasticflow import ElasticFlow
from adascale_controller.simulation.engine import Policy, Settings, Submission, simulate
from adascale_controller.simulation.isolated_cluster import IsolatedCluster
from adascale_controller.simulation.pictures import draw
from adascale_controller.simulation.profiles import Costs, read_costs, read_workload
from adascale_controller.simulation.recording import read_recording, record
from adascale_controller.simulation.results import Results
from adascale_controller.simulation.results_table import render_results
from adascale_controller.simulation.sia import Sia

MAX_SECONDS = 86400.0
"""The largest restart, interval and preparation that can be simulated."""


class PolicyName(StrEnum):
    """The policies that can be simulated."""

    ADASCALE = "adascale"
    TIRESIAS = "tiresias"
    OPTIMUS = "optimus"
    FCFS = "fcfs"
    EQUAL = "equal"
    SIA = "sia"
    EDF = "edf"
    ELASTICFLOW = "elasticflow"


FIXED_SIZE = (PolicyName.TIRESIAS, PolicyName.FCFS, PolicyName.EDF)
"""The policies that run a job on the number of replicas of the workload only."""


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
    policy: Annotated[
        PolicyName,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="adascale, tiresias, optimus, fcfs, equal, sia, edf or elasticflow.",
        ),
    ] = PolicyName.ADASCALE,
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
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated",
            help="Simulate each job alone on its fair share too, for finish-time fairness as Sia reports it.",
        ),
    ] = False,
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
    sizes, types = ([gpus] * nodes, []) if cluster is None else _nodes_of(cluster)
    free_moves = policy in (PolicyName.SIA, PolicyName.ELASTICFLOW)
    settings = Settings(sizes, restart, interval, prepare, types=types, free_moves=free_moves)
    if types and policy not in (PolicyName.ADASCALE, PolicyName.SIA):
        raise typer.BadParameter(
            f"{policy} knows no types of accelerators: leave out --cluster, or use adascale or sia",
            param_hint="--policy",
        )
    if fairness is not None and policy is not PolicyName.ADASCALE:
        raise typer.BadParameter(
            f"it is a setting of the policy adascale, and {policy} has none: leave it out",
            param_hint="--fairness",
        )
    random = Random(seed)
    submissions = _submissions(workload, profiles, from_service, types, costs)
    _require_room(submissions, settings, policy)
    if deadlines is not None:
        submissions = with_deadlines(submissions, settings, _tightness(deadlines), seed)
    new_policy = partial(_policy, policy, placement, fairness)
    with output_on_stderr():
        jobs = simulate(submissions, new_policy(), settings, lambda: random.lognormvariate(0.0, noise))
        alone = IsolatedCluster(settings, new_policy, fixed_size=policy in FIXED_SIZE) if isolated else None
        results = Results.of(jobs, settings, alone)
    if pictures is not None:
        for path in draw(jobs, settings, pictures):
            typer.echo(f"saved {path}", err=True)
    if output is ResultFormat.JSON:
        typer.echo(json.dumps(results.to_json(), indent=2))
    else:
        Console(highlight=False).print(render_results(results, settings))


def _nodes_of(cluster: str) -> tuple[list[int], list[str]]:
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


def _tightness(deadlines: str) -> tuple[float, float]:
    """Return the least and the most tightness of `--deadlines`."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)-([0-9]{1,3}(?:\.[0-9]{1,6})?)", deadlines)
    least, most = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    if not 0 < least <= most:
        raise typer.BadParameter(
            f"two positive numbers are needed, the smaller one first, as in 0.5-1.5, got {deadlines!r}",
            param_hint="--deadlines",
        )
    return least, most


@contextmanager
def output_on_stderr() -> Iterator[None]:
    """Write to stderr what is written to stdout: HiGHS prints messages, which would make the JSON invalid."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


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


def _require_room(submissions: Sequence[Submission], settings: Settings, policy: PolicyName) -> None:
    """Check that each job fits when it is alone."""
    is_fixed = policy in FIXED_SIZE
    needed = {each.name: each.replicas if is_fixed else each.application.min_replicas for each in submissions}
    largest = max(needed, key=lambda name: needed[name])
    if needed[largest] > settings.total:
        runs = f"runs on {needed[largest]} replicas with this policy"
        runs = runs if is_fixed else f"needs {needed[largest]} replicas"
        raise ProfileError(
            f"job {largest} {runs}, and the nodes hold {settings.total}: raise --nodes or --gpus"
            + (", or choose another --policy" if is_fixed else "")
        )


def _policy(name: PolicyName, placement: PlacementMode, fairness: float | None) -> Policy:
    match name:
        case PolicyName.ADASCALE:
            return AdaScalePolicy(placement, fairness)
        case PolicyName.TIRESIAS:
            return Tiresias()
        case PolicyName.OPTIMUS:
            return Optimus()
        case PolicyName.FCFS:
            return FirstComeFirstServed()
        case PolicyName.EQUAL:
            return EqualShares()
        case PolicyName.SIA:
            return Sia()
        case PolicyName.EDF:
            return EarliestDeadlineFirst()
        case PolicyName.ELASTICFLOW:
            return ElasticFlow()
