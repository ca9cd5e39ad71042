"""The option `--fairness` of the operator and the simulator."""

from __future__ import annotations

from typing import Annotated

import typer

from adascale_core.names import DEFAULT_FAIRNESS, DEFAULT_FAIRNESS_ACROSS_TYPES


def _require_fairness(fairness: float | None) -> float | None:
    # Not a range of the option, which would allow nan.
    if fairness is not None and not 0 <= fairness <= 1:
        raise typer.BadParameter(f"a number from 0 to 1 is needed, got {fairness}")
    return fairness


Fairness = Annotated[
    float | None,
    typer.Option(
        "--fairness",
        metavar="X",
        callback=_require_fairness,
        help="0: short jobs first, for the lowest mean completion time. 1: equal weights of all jobs.",
        show_default=f"{DEFAULT_FAIRNESS:g}; {DEFAULT_FAIRNESS_ACROSS_TYPES:g} across types of accelerators",
    ),
]
