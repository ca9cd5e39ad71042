"""Workloads and profiles in the format of Pollux's artifact (Qiao et al. 2021), and drawn deadlines.

A workload is a CSV file with the columns `name,time,application,num_replicas,batch_size`, a row per job: each
name is used once, `time` is the second of the arrival, `application` a folder of the profiles, and
`num_replicas` and `batch_size`, which must be one that the profile covers, are those of policies of fixed
size. A folder of the profiles has `placements.csv` (`placement,local_bsz,step_time,sync_time`; a placement
has a digit per node), `scalability.csv` (`num_nodes,num_replicas,local_bsz,step_time,sync_time`) and a
`validation-<batch size>.csv` per batch size (`progress,iteration,metric,grad_sqr,grad_var`, a row per epoch).
The profiles of a type of accelerator are `placements-TYPE.csv` and `scalability-TYPE.csv`, and the largest
`local_bsz` of the file is the limit of its memory. `ProfiledApplication` interpolates linearly between the
measurements, as the simulator of Pollux does (section 5.3).

Deadlines are drawn as for ElasticFlow (Gu et al. 2023, section 6.1): the submission plus the time that the
job takes on the replicas and with the batch size of the workload, times a tightness that is uniform between
two numbers. A job with a tightness below 1 needs more replicas than it requests, or a larger batch.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from io import StringIO
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import TypeVar

from adascale_controller.simulation.application import Application, Placement, fixed_plan
from adascale_controller.simulation.engine import MAX_TIME, SimulationSettings, Submission
from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchBounds
from adascale_core.errors import AdaScaleError

PUBLISHED_LIMITS: Mapping[str, Mapping[str, int]] = {
    "yolov3": {"max_local_bsz": 8},
    "ncf": {"max_replicas": 1, "pinned_batch_size": 32768},
}
"""Limits of the published simulations that are not in the files of a profile."""
MAX_LOCAL_BSZ_ON: Mapping[tuple[str, str], int] = {("deepspeech2", "rtx"): 57}
"""(application, type of accelerator) -> the limit of the published simulation of Sia that is in no file."""
MAX_COST = 86400.0
"""The longest restart, in seconds, and the largest slowdown."""


@dataclass(frozen=True)
class Costs:
    """What is measured of applications beside their profiles."""

    # application -> seconds without training at each start and each change
    restart: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    # application -> the factor of all step times
    slowdown: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def read_costs(path: Path) -> Costs:
    """Return the costs of a JSON file with `restart` and `slowdown`, each with a number by application."""
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise AdaScaleError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise AdaScaleError(f"{path} must be an object with `restart` and `slowdown`, got {content!r:.80}")
    return Costs(
        _numbers_by_application(path, content, "restart", 0.0),
        _numbers_by_application(path, content, "slowdown", 1.0),
    )


def _numbers_by_application(
    path: Path, content: Mapping[str, object], member: str, least: float
) -> Mapping[str, float]:
    numbers = content.get(member, {})
    if not isinstance(numbers, dict):
        raise AdaScaleError(f"{path}: {member} must be an object of numbers, got {numbers!r:.80}")
    for name, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= MAX_COST:
            raise AdaScaleError(
                f"{path}: {member} of {name} must be a number from {least:g} to {MAX_COST:g}, "
                f"got {value!r:.80}"
            )
    return {name: float(value) for name, value in numbers.items()}


def read_workload(
    path: Path, profiles: Path, types: Sequence[str] = (), costs: Costs | None = None
) -> list[Submission]:
    """Return the jobs of a CSV file with the columns `name,time,application,num_replicas,batch_size`."""
    costs = costs or Costs()
    applications: dict[str, Mapping[str, ProfiledApplication]] = {}
    submissions: dict[str, Submission] = {}
    for row in _rows(path, ("name", "time", "application", "num_replicas", "batch_size")):
        if row["name"] in submissions:
            raise AdaScaleError(
                f"{path} has two jobs of the name {row['name']!r}: each needs a name of its own"
            )
        name = row["application"]
        if not re.fullmatch(r"[\w.-]{1,255}", name) or name in (".", ".."):
            raise AdaScaleError(
                f"{path}: application of {row['name']} must be the name of a folder of --profiles, "
                f"got {name[:80]!r}"
            )
        if name not in applications:
            slowdown = costs.slowdown.get(name, 1.0)
            applications[name] = {
                each: read_application(profiles / name, each, slowdown) for each in types or [""]
            }
        by_type = applications[name]
        first = next(iter(by_type.values()))
        sizes = first.runs
        submissions[row["name"]] = Submission(
            row["name"],
            _number(path, row, "time", least=0, most=MAX_TIME),
            first,
            _whole_number(path, row, "num_replicas"),
            _whole_number(path, row, "batch_size", min(sizes), max(sizes)),
            by_type if types else MappingProxyType({}),
            costs.restart.get(name),
        )
    if not submissions:
        raise AdaScaleError(f"{path} has no jobs: it needs a row for each job below the header")
    return list(submissions.values())


def read_application(folder: Path, accelerator: str = "", slowdown: float = 1.0) -> ProfiledApplication:
    """Return the application of a folder with `placements.csv`, `scalability.csv` and `validation-*.csv`."""
    limits = {} if accelerator else PUBLISHED_LIMITS.get(folder.name, {})
    suffix = f"-{accelerator}" if accelerator else ""
    runs = {_batch_size(path): _read_run(path) for path in sorted(folder.glob("validation-*.csv"))}
    if not runs:
        raise AdaScaleError(
            f"application {folder.name!r} is unknown, because {folder} has no validation-<batch size>.csv: "
            f"check the name, and whether --profiles names the right folder{_known(folder.parent)}"
        )
    placements: dict[Placement, dict[int, tuple[float, float]]] = {}
    path = folder / f"placements{suffix}.csv"
    for row in _rows(path, ("placement", "local_bsz", "step_time", "sync_time")):
        if not re.fullmatch("[1-9]+", row["placement"]):
            raise AdaScaleError(
                f"{path}: placement must be a digit from 1 to 9 for each node, got {row['placement']!r}"
            )
        placement = tuple(int(digit) for digit in row["placement"])
        size = _whole_number(path, row, "local_bsz")
        placements.setdefault(canonical(placement), {})[size] = _step_times(path, row)
    if not placements:
        raise AdaScaleError(f"{path} has no rows: it needs a row for each placement and local batch size")
    _require_same_sizes(path, placements)
    scalability: dict[tuple[int, int], dict[int, tuple[float, float]]] = {}
    path = folder / f"scalability{suffix}.csv"
    if path.exists():
        for row in _rows(path, ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")):
            nodes = _whole_number(path, row, "num_nodes")
            key = nodes, _whole_number(path, row, "num_replicas", nodes)
            size = _whole_number(path, row, "local_bsz")
            scalability.setdefault(key, {})[size] = _step_times(path, row)
    sizes = [size for table in placements.values() for size in table]
    most = limits.get("max_local_bsz") or MAX_LOCAL_BSZ_ON.get((folder.name, accelerator)) or max(sizes)
    epochs = min(len(run.progress) for run in runs.values())
    return ProfiledApplication(
        name=folder.name,
        placements=placements,
        scalability=scalability,
        runs=runs,
        bounds=BatchBounds(
            min(runs),
            max(runs),
            (min(sizes), min(max(sizes), most)),
            elastic_single_replica=True,
        ),
        epoch_ends=tuple(min(run.progress[i] for run in runs.values()) for i in range(epochs)),
        max_replicas=limits.get("max_replicas"),
        pinned_batch_size=limits.get("pinned_batch_size"),
        slowdown=slowdown,
    )


def _known(profiles: Path) -> str:
    names = sorted(path.name for path in profiles.iterdir() if path.is_dir()) if profiles.is_dir() else []
    return f", which has {', '.join(names[:12])}" if names else ""


def _batch_size(path: Path) -> int:
    size = path.stem.removeprefix("validation-")
    if not re.fullmatch("[1-9][0-9]*", size):
        raise AdaScaleError(f"{path}: the name must be validation-<batch size>.csv, got {size!r} as the size")
    return int(size)


def _require_same_sizes(path: Path, placements: Mapping[Placement, Mapping[int, object]]) -> None:
    """Check that placements with as many nodes and replicas were measured with the same local batch sizes."""
    first: dict[tuple[int, int], Placement] = {}
    for placement, table in placements.items():
        other = first.setdefault((len(placement), sum(placement)), placement)
        if set(table) != set(placements[other]):
            names = ["".join(map(str, each)) for each in (other, placement)]
            raise AdaScaleError(
                f"{path}: placements {names[0]} and {names[1]} have different values of local_bsz: "
                "measure both with the same"
            )


def _read_run(path: Path) -> ValidationRun:
    columns = ("progress", "iteration", "grad_sqr", "grad_var")
    rows = [[_number(path, row, column) for column in columns] for row in _rows(path, columns)]
    if not rows:
        raise AdaScaleError(f"{path} has no rows: it needs a row for each epoch below the header")
    progress, iterations, grad_sqr, grad_var = (tuple(column) for column in zip(*rows, strict=True))
    for column, values in (("progress", progress), ("iteration", iterations)):
        if any(after <= before for before, after in pairwise((0.0, *values))):
            raise AdaScaleError(f"{path}: {column} must be positive, and grow from each epoch to the next")
    return ValidationRun(progress, iterations, grad_sqr, grad_var)


def _step_times(path: Path, row: Mapping[str, str]) -> tuple[float, float]:
    step = _number(path, row, "step_time")
    sync = _number(path, row, "sync_time", least=0)
    if not sync < step:
        raise AdaScaleError(
            f"{path}: step_time must be more than sync_time, got {row['step_time']!r} and "
            f"{row['sync_time']!r}"
        )
    return step, sync


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file, with a text in each of the columns."""
    reader = csv.DictReader(StringIO(read_text(path), newline=""))
    try:
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise AdaScaleError(f"{path} has no column {missing[0]}: its first line must name the columns")
        for row in reader:
            empty = [column for column in columns if not row[column]]
            if empty:
                raise AdaScaleError(f"{path}: line {reader.line_num} has no {empty[0]}: add it")
            yield row
    except csv.Error as error:
        raise AdaScaleError(f"{path} is not a CSV file: {error} in line {reader.line_num}") from error


def _number(path: Path, row: Mapping[str, str], column: str, least: float = -inf, most: float = inf) -> float:
    try:
        number = float(row[column])
    except ValueError as error:
        raise AdaScaleError(f"{path}: {column} must be a number, got {row[column]!r}") from error
    if not (isfinite(number) and least <= number <= most):
        allowed = f" of at least {least:g}" if isfinite(least) else ""
        allowed = f" from {least:g} to {most:g}" if isfinite(most) else allowed
        raise AdaScaleError(f"{path}: {column} must be a finite number{allowed}, got {row[column]!r}")
    return number


def _whole_number(
    path: Path, row: Mapping[str, str], column: str, least: int = 1, most: int | None = None
) -> int:
    number = _number(path, row, column)
    if number != int(number) or number < least or (most is not None and number > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        of = f" of {row['name']}" if "name" in row else ""
        raise AdaScaleError(f"{path}: {column}{of} must be a whole number {allowed}, got {row[column]!r}")
    return int(number)


def read_text(path: Path) -> str:
    """Return the content of a text file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise AdaScaleError(f"{path} does not exist: check the path, and --profiles") from error
    except UnicodeDecodeError as error:
        raise AdaScaleError(
            f"{path} is not a text file in UTF-8: a workload or profile is CSV or JSON"
        ) from error
    except OSError as error:
        raise AdaScaleError(f"cannot read {path}: {error.strerror or error}: check the path") from error


def with_deadlines(
    submissions: Sequence[Submission], settings: SimulationSettings, tightness: tuple[float, float], seed: int
) -> list[Submission]:
    """Return the jobs with drawn deadlines, in seconds from the begin of the workload."""
    random = Random(seed)
    return [
        replace(each, deadline=each.time + random.uniform(*tightness) * requested_duration(each, settings))
        for each in submissions
    ]


def requested_duration(job: Submission, settings: SimulationSettings) -> float:
    """Return the seconds of a job on its requested replicas and batch size, with its start.

    With several types of accelerators it is the mean over the types, weighted by their GPUs.
    """
    total = 0.0
    for name, nodes in settings.nodes_by_type().items():
        sizes = [settings.nodes[node] for node in nodes]
        replicas = min(job.replicas, sum(sizes))
        seconds = training_seconds(
            job.by_type.get(name, job.application), packed(replicas, max(sizes)), job.batch_size
        )
        total += sum(sizes) * seconds
    return total / settings.total + (settings.restart if job.restart is None else job.restart)


@lru_cache(maxsize=4096)
def canonical(placement: Placement) -> Placement:
    """Return the first of the placements that differ only in the node from which they are counted."""
    return min(placement[i:] + placement[:i] for i in range(len(placement)))


@dataclass(frozen=True)
class ValidationRun:
    """A complete training run at one batch size, one element per epoch."""

    progress: Sequence[float]  # steps at the smallest batch size, summed up to the end of the epoch
    iterations: Sequence[float]  # steps up to the end of the epoch
    # in the epoch, in the units of `GradientEstimate`
    grad_sqr: Sequence[float]
    grad_var: Sequence[float]


StepTimes = Mapping[int, tuple[float, float]]
"""Local batch size -> (seconds of a step, of them seconds of communication)."""


@dataclass(frozen=True)
class ProfiledApplication:
    """An application whose step times and statistics are interpolated linearly between measurements."""

    name: str
    placements: Mapping[Placement, StepTimes]
    # (nodes, replicas) -> step times, for placements on more nodes than `placements` has
    scalability: Mapping[tuple[int, int], StepTimes]
    # global batch size -> the run at this size; the smallest is the `batch_size` of the bounds
    runs: Mapping[int, ValidationRun]
    bounds: BatchBounds  # the batch sizes that it allows
    epoch_ends: Sequence[float]  # the progress at the end of each epoch
    max_replicas: int | None = None  # the most replicas that it can use; None if the bounds decide
    pinned_batch_size: int | None = None  # the only global batch size that it uses; None if it is elastic
    min_replicas: int = 1  # the fewest replicas on which it runs
    slowdown: float = 1.0  # the factor of all step times
    _step_times: dict[tuple[bool, Placement, int], tuple[float, float]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _runs: dict[int, tuple[ValidationRun, ValidationRun, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def step_time(self, placement: Placement, local_bsz: int) -> tuple[float, float]:
        """Return the seconds of a step without accumulation, and the seconds of it that are communication."""
        table = self.placements.get(canonical(placement))
        # Placements that were not measured differ only in their numbers of nodes and of replicas.
        key = (len(placement), sum(placement)) if table is None else canonical(placement)
        known = self._step_times.get((table is None, key, local_bsz))
        if known is None:
            known = (
                self._between_placements(placement, local_bsz)
                if table is None
                else self._between_sizes(table, local_bsz)
            )
            known = known[0] * self.slowdown, known[1] * self.slowdown
            self._step_times[table is None, key, local_bsz] = known
        return known

    def _between_sizes(self, table: StepTimes, local_bsz: int) -> tuple[float, float]:
        sizes = sorted(table)
        if not self.bounds.lower <= local_bsz <= (self.bounds.upper or local_bsz):
            raise AdaScaleError(
                f"application {self.name} allows local batch sizes {self.bounds.lower} to "
                f"{self.bounds.upper}, not {local_bsz}: narrow the bounds of the job"
            )
        if local_bsz > sizes[-1] and len(sizes) > 1:
            # Measured with smaller sizes only, because the global batch was bounded.
            low, high = sizes[-2:]
        else:
            low, high = _neighbours(sizes, min(max(local_bsz, sizes[0]), sizes[-1]))
        return _mix(table[low], table[high], _share(low, high, local_bsz))

    def _between_placements(self, placement: Placement, local_bsz: int) -> tuple[float, float]:
        """Interpolate over nodes, then replicas per node, then the local batch size."""
        grid = self._grid
        node_counts = sorted(grid)
        nodes = min(max(len(placement), node_counts[0]), node_counts[-1])
        low, high = _neighbours(node_counts, nodes)
        density = sum(placement) / len(placement)
        near, far = (self._at_density(grid[count], density, local_bsz) for count in (low, high))
        return _mix(near, far, _share(low, high, nodes))

    def _at_density(
        self, row: Mapping[float, StepTimes], density: float, local_bsz: int
    ) -> tuple[float, float]:
        densities = sorted(row)
        density = min(max(density, densities[0]), densities[-1])
        low, high = _neighbours(densities, density)
        near, far = (self._between_sizes(row[side], local_bsz) for side in (low, high))
        return _mix(near, far, _share(low, high, density))

    @cached_property
    def _grid(self) -> dict[int, dict[float, StepTimes]]:
        """Return nodes -> replicas per node -> step times: means over placements, and `scalability`."""
        grouped: dict[tuple[int, int], list[StepTimes]] = {}
        for placement, table in self.placements.items():
            grouped.setdefault((len(placement), sum(placement)), []).append(table)
        means = {
            shape: {
                size: (
                    _mean([table[size][0] for table in tables]),
                    _mean([table[size][1] for table in tables]),
                )
                for size in tables[0]
            }
            for shape, tables in grouped.items()
        }
        grid: dict[int, dict[float, StepTimes]] = {}
        for (nodes, replicas), table in {**means, **self.scalability}.items():
            grid.setdefault(nodes, {})[replicas / nodes] = table
        return grid

    def estimate(self, global_bsz: int, epoch: int) -> GradientEstimate:
        """Return squared norm and variance of the gradient in an epoch at a batch size."""
        low, high, share = self._runs_around(global_bsz)
        return GradientEstimate(
            low.grad_sqr[epoch] + share * (high.grad_sqr[epoch] - low.grad_sqr[epoch]),
            low.grad_var[epoch] + share * (high.grad_var[epoch] - low.grad_var[epoch]),
        )

    def iterations(self, global_bsz: int, epoch: int) -> float:
        """Return the number of steps until the end of an epoch at a constant batch size."""
        low, high, share = self._runs_around(global_bsz)
        return low.iterations[epoch] + share * (high.iterations[epoch] - low.iterations[epoch])

    def _runs_around(self, global_bsz: int) -> tuple[ValidationRun, ValidationRun, float]:
        if global_bsz not in self._runs:
            sizes = sorted(self.runs)
            size = min(max(global_bsz, sizes[0]), sizes[-1])
            low, high = _neighbours(sizes, size)
            self._runs[global_bsz] = self.runs[low], self.runs[high], _share(low, high, size)
        return self._runs[global_bsz]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_Number = TypeVar("_Number", int, float)


def _neighbours(ascending: Sequence[_Number], value: float) -> tuple[_Number, _Number]:
    """Return the largest element that is at most `value`, and the smallest that is at least `value`."""
    return ascending[bisect_right(ascending, value) - 1], ascending[bisect_left(ascending, value)]


def _share(low: float, high: float, value: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0


def _mix(low: tuple[float, float], high: tuple[float, float], share: float) -> tuple[float, float]:
    return low[0] + share * (high[0] - low[0]), low[1] + share * (high[1] - low[1])


def packed(replicas: int, node: int) -> Placement:
    """Return the placement of replicas on as few nodes of a size as hold them."""
    full, rest = divmod(replicas, node)
    return (node,) * full + ((rest,) if rest else ())


def step_seconds(application: Application, placement: Placement, batch_size: int) -> float:
    """Return the true seconds of a step with a batch size."""
    plan = fixed_plan(application, sum(placement), batch_size)
    step, sync = application.step_time(placement, plan.local_bsz)
    return step + (step - sync) * (plan.accumulation - 1)


def profiled(application: Application) -> ProfiledApplication:
    """Return an application of a published workload, of which more is known."""
    assert isinstance(application, ProfiledApplication)
    return application


def training_seconds(application: Application, placement: Placement, batch_size: int) -> float:
    """Return the seconds of all steps with a batch size."""
    steps = profiled(application).iterations(batch_size, len(application.epoch_ends) - 1)
    return steps * step_seconds(application, placement, batch_size)


def nodes_of(cluster: str) -> tuple[list[int], list[str]]:
    """Return the size and the type of each node of a cluster, as in `aws=6x4,rtx=3x8`."""
    sizes: list[int] = []
    types: list[str] = []
    for part in cluster.split(","):
        match = re.fullmatch(r"([\w.-]{1,63})=([1-9][0-9]{0,4})x([1-9][0-9]{0,2})", part)
        if match is None or match[1] in types:
            raise argparse.ArgumentTypeError(
                f"each type must be named once, with its nodes and their GPUs, as in a100=2x8, got {part!r}"
            )
        sizes += [int(match[3])] * int(match[2])
        types += [match[1]] * int(match[2])
    return sizes, types


def tightness_of(deadlines: str) -> tuple[float, float]:
    """Return the least and the most tightness of `--deadlines`."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)-([0-9]{1,3}(?:\.[0-9]{1,6})?)", deadlines)
    least, most = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    if not 0 < least <= most:
        raise argparse.ArgumentTypeError(
            f"two positive numbers are needed, the smaller one first, as in 0.5-1.5, got {deadlines!r}"
        )
    return least, most
