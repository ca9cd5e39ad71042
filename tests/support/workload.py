"""A small made-up workload and profile, in the files of published ones."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations_with_replacement, product
from pathlib import Path
from types import MappingProxyType

APPLICATIONS = {"small": (16, 4, 300.0), "large": (32, 20, 3000.0)}
"""name -> batch size, epochs, progress per epoch."""


def write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_profiles(folder: Path, types: Mapping[str, float] = MappingProxyType({"": 1.0})) -> None:
    """Write profiles: communication takes 10 ms on one node and 80 ms on several.

    Args:
        folder: where to write them.
        types: type of accelerator -> the factor of its step times.
    """
    for (name, (size, epochs, steps)), (kind, factor) in product(APPLICATIONS.items(), types.items()):
        rows = []
        for nodes in (1, 2, 3, 4):
            for placement in combinations_with_replacement(range(1, 5), nodes):
                sync = 0.0 if sum(placement) == 1 else 0.01 if nodes == 1 else 0.08
                rows += [
                    (
                        "".join(map(str, placement)),
                        local,
                        factor * (0.02 + 0.005 * local + sync),
                        factor * sync,
                    )
                    for local in (4, 8, 16, 32)
                ]
        file = f"placements-{kind}.csv" if kind else "placements.csv"
        write(folder / name / file, ("placement", "local_bsz", "step_time", "sync_time"), rows)
        for batch in (size, 4 * size, 16 * size):
            write(
                folder / name / f"validation-{batch}.csv",
                ("progress", "iteration", "metric", "grad_sqr", "grad_var"),
                [
                    (steps * (i + 1), steps * (i + 1) * size / batch * 1.2, 0, 1.0, 4.0 * (i + 1))
                    for i in range(epochs)
                ],
            )


def write_workload(path: Path) -> None:
    """Write a workload of eight small and large jobs."""
    write(
        path,
        ("name", "time", "application", "num_replicas", "batch_size"),
        [
            (f"job-{i}", 10 + 200 * i, "large" if i % 4 == 0 else "small", 4 if i % 4 == 0 else 2, 128)
            for i in range(8)
        ],
    )
