"""The runs on one machine, as `adascale ui` lists them for the metrics service that shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from adascale_core.messages.message import Message
from adascale_core.views.job_state_name import JobStateName


@dataclass(frozen=True)
class RunView(Message):
    """What is known of the runs of a state folder besides what their metrics service has stored.

    Args:
        folder: the state folder.
        url: the address of the metrics service of the run; None if it does not run.
        began_at: when the first run began, in seconds since 1970.
        ended_at: when the last run ended, in seconds since 1970; None if it runs, or if that is not known.
        reason: why the last run has failed; empty if it has not.
        result: what the program has reported as its result.
        versions: of the packages that matter for a run, by name.
    """

    folder: str
    url: str | None
    began_at: float
    ended_at: float | None = None
    reason: str = ""
    result: Mapping[str, float | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunEntry(Message):
    """A state folder in the list of runs.

    Args:
        id: distinguishes it from others on this machine: `<job id>~<digest of the folder>`.
        job: the id of its job.
        database: the SQLite file of its metrics service.
        logs: the folder with the output of its replicas.
        state: what the job does if it does not run; None if it runs.
        began_at: when its last run began, in seconds since 1970.
        run: what else is known of it.
    """

    id: str
    job: str
    database: str
    logs: str
    state: JobStateName | None
    began_at: float
    run: RunView

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the entry of a JSON object's members."""
        state = members["state"]
        return super().from_json(
            {
                **members,
                "state": None if state is None else JobStateName(state),
                "run": RunView.from_json(members["run"]),
            }
        )
