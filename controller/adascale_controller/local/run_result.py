"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunResult:
    """Why a run ends."""

    message: str  # for the user; empty if the program has finished
    exit_code: int
    finished: bool = False
    log: str = ""  # the last lines of the program's output, if it failed
    permanent: bool = False  # whether it would fail again, so that the program or the job must be changed
    stopped_at: float = 0.0  # when the replicas were requested to save and to stop, in seconds since 1970

    @property
    def reason(self) -> str:
        """Why the run has failed; empty if it has not. An exit code above 128 is that of a signal."""
        return self.message if 0 < self.exit_code <= 128 else ""
