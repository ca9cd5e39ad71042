"""Reads workloads and profiles in the format of Pollux's artifact (Qiao et al. 2021)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from math import inf, isfinite
from pathlib import Path

from adascale_core.batch import BatchBounds
from adascale_core.simulation.application import (
    Placement,
    ProfiledApplication,
    ProfileError,
    ValidationRun,
    canonical,
)
from adascale_core.simulation.engine import Submission

PUBLISHED_LIMITS: Mapping[str, Mapping[str, int]] = {
    "yolov3": {"max_local_bsz": 8},
    "ncf": {"max_replicas": 1, "pinned_batch_size": 32768},
}
"""Limits of the published simulations that are not in the files of a profile."""


def read_workload(path: Path, profiles: Path) -> list[Submission]:
    """Return the jobs of a CSV file with the columns `name,time,application,num_replicas,batch_size`.

    Args:
        path: the workload.
        profiles: a folder with a folder per application.

    Raises:
        ProfileError: a file is missing, or has an invalid value.
    """
    applications: dict[str, ProfiledApplication] = {}
    submissions: dict[str, Submission] = {}
    for row in _rows(path, ("name", "time", "application", "num_replicas", "batch_size")):
        if row["name"] in submissions:
            raise ProfileError(
                f"{path} has two jobs of the name {row['name']!r}: each needs a name of its own"
            )
        name = row["application"]
        if name not in applications:
            applications[name] = read_application(profiles / name)
        sizes = applications[name].runs
        submissions[row["name"]] = Submission(
            row["name"],
            _number(path, row, "time", least=0),
            applications[name],
            _whole_number(path, row, "num_replicas", 1, None),
            _whole_number(path, row, "batch_size", min(sizes), max(sizes)),
        )
    if not submissions:
        raise ProfileError(f"{path} has no jobs: it needs a row for each job below the header")
    return list(submissions.values())


def read_application(folder: Path) -> ProfiledApplication:
    """Return the application of a folder with `placements.csv`, `scalability.csv` and `validation-*.csv`.

    Raises:
        ProfileError: a file is missing, or has an invalid value.
    """
    limits = PUBLISHED_LIMITS.get(folder.name, {})
    runs = {
        int(path.stem.removeprefix("validation-")): _read_run(path)
        for path in sorted(folder.glob("validation-*.csv"))
    }
    if not runs:
        raise ProfileError(f"{folder} has no validation-<batch size>.csv: --profiles names the wrong folder")
    placements: dict[Placement, dict[int, tuple[float, float]]] = {}
    path = folder / "placements.csv"
    for row in _rows(path, ("placement", "local_bsz", "step_time", "sync_time")):
        placement = tuple(int(digit) for digit in row["placement"])
        placements.setdefault(canonical(placement), {})[int(_number(path, row, "local_bsz"))] = (
            _number(path, row, "step_time"),
            _number(path, row, "sync_time"),
        )
    scalability: dict[tuple[int, int], dict[int, tuple[float, float]]] = {}
    path = folder / "scalability.csv"
    if path.exists():
        for row in _rows(path, ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")):
            key = int(_number(path, row, "num_nodes")), int(_number(path, row, "num_replicas"))
            scalability.setdefault(key, {})[int(_number(path, row, "local_bsz"))] = (
                _number(path, row, "step_time"),
                _number(path, row, "sync_time"),
            )
    sizes = [size for table in placements.values() for size in table]
    epochs = min(len(run.progress) for run in runs.values())
    return ProfiledApplication(
        name=folder.name,
        placements=placements,
        scalability=scalability,
        runs=runs,
        bounds=BatchBounds(
            min(runs),
            max(runs),
            (min(sizes), min(max(sizes), limits.get("max_local_bsz", max(sizes)))),
            elastic_single_replica=True,
        ),
        epoch_ends=tuple(min(run.progress[i] for run in runs.values()) for i in range(epochs)),
        max_replicas=limits.get("max_replicas"),
        pinned_batch_size=limits.get("pinned_batch_size"),
    )


def _read_run(path: Path) -> ValidationRun:
    columns = ("progress", "iteration", "grad_sqr", "grad_var")
    rows = [[_number(path, row, column) for column in columns] for row in _rows(path, columns)]
    if not rows:
        raise ProfileError(f"{path} has no rows: it needs a row for each epoch below the header")
    progress, iterations, grad_sqr, grad_var = (tuple(column) for column in zip(*rows, strict=True))
    return ValidationRun(progress, iterations, grad_sqr, grad_var)


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise ProfileError(f"{path} has no column {missing[0]}: its first line must name the columns")
            yield from reader
    except FileNotFoundError as error:
        raise ProfileError(f"{path} does not exist: check the path, and --profiles") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not a text file in UTF-8: a workload or profile is CSV") from error


def _number(path: Path, row: Mapping[str, str], column: str, least: float = -inf) -> float:
    try:
        number = float(row[column])
    except (TypeError, ValueError) as error:
        raise ProfileError(f"{path}: {column} must be a number, got {row[column]!r}") from error
    if not (isfinite(number) and number >= least):
        allowed = f" of at least {least:g}" if isfinite(least) else ""
        raise ProfileError(f"{path}: {column} must be a finite number{allowed}, got {row[column]!r}")
    return number


def _whole_number(path: Path, row: Mapping[str, str], column: str, least: int, most: int | None) -> int:
    number = _number(path, row, column)
    if number != int(number) or number < least or (most is not None and number > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ProfileError(
            f"{path}: {column} of {row['name']} must be a whole number {allowed}, got {row[column]!r}"
        )
    return int(number)
