"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunResult:
    """Why a run ends.

    Args:
        message: for the user; empty if the program has finished.
        exit_code: of the run.
        finished: whether the program has finished.
        log: the last lines of the program's output, if it failed.
        permanent: whether it would fail again, so that the program or the job must be changed.
        killed: whether replicas were killed before they had saved.
    """

    message: str
    exit_code: int
    finished: bool = False
    log: str = ""
    permanent: bool = False
    killed: bool = False
