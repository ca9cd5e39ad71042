"""The tables of the database, with the names that PostgreSQL has for types; SQLite accepts all.

Rows refer to a job by its `key`, which is never reused: rows of a deleted job can't belong to a later job
with the same id.
"""

from collections.abc import Mapping
from typing import Any, get_type_hints

from adascale_core.messages.replica_seconds import Cause
from adascale_core.messages.reports import GainReport

SCHEMA_VERSION = 20
"""Raised with every change of a table, or of a document in one."""

RELEASED_VERSION = 13
"""The version of release 0.1.0, whose tables are changed by `MIGRATION`."""

READABLE_FROM = 20
"""The oldest version whose service can use these tables too, as when only columns with a default were added.
A service refuses tables that are readable from a later version than its own."""

SCHEMA = "adascale_schema"
"""The table with the schema's version."""

_COLUMNS: dict[Any, str] = {
    bool: "INTEGER NOT NULL DEFAULT 0",
    int: "INTEGER NOT NULL",
    int | None: "INTEGER",
    float: "DOUBLE PRECISION NOT NULL",
    float | None: "DOUBLE PRECISION",
    str: "TEXT NOT NULL",
    Mapping[str, float]: "TEXT NOT NULL",
}
_REPORT = ", ".join(
    f"{name} {'BIGINT NOT NULL' if name == 'step' else _COLUMNS[hint]}"
    for name, hint in get_type_hints(GainReport).items()
)
"""The columns of a report, which are its fields: a new field needs a migration."""

SECONDS = [f"{cause}_seconds" for cause in Cause]
"""The columns with the seconds of replicas by cause."""
_SECONDS = ", ".join(f"{name} DOUBLE PRECISION NOT NULL" for name in SECONDS)
_ADDED = {"replica_seconds", "goodput_history"}
"""Tables that release 0.1.0 does not have."""

OF_A_JOB: dict[str, tuple[str, str]] = {
    # The newest report of a job by generation and step, and how many were received and are kept.
    "measurements": (
        "job_key",
        """
        generation INTEGER NOT NULL,
        step BIGINT NOT NULL,
        received BIGINT NOT NULL,
        kept INTEGER NOT NULL,
        reported_at DOUBLE PRECISION NOT NULL
        """,
    ),
    "reports": ("job_key, generation, step", _REPORT),
    # The latest step times of a batch plan on a number of nodes and a type of accelerator, and their latest
    # sync times, as doubles. They outlive the reports.
    "step_times": (
        "job_key, replicas, local_bsz, accumulation, nodes, accelerator",
        """
        replicas INTEGER NOT NULL,
        local_bsz INTEGER NOT NULL,
        accumulation INTEGER NOT NULL,
        nodes INTEGER NOT NULL,
        accelerator TEXT NOT NULL,
        seconds BYTEA NOT NULL,
        sync_seconds BYTEA NOT NULL,
        received BIGINT NOT NULL
        """,
    ),
    # Counts the heartbeats that any service has received, where several share the database.
    "heartbeats": (
        "job_key, replica",
        "replica INTEGER NOT NULL, instance TEXT NOT NULL, beats BIGINT NOT NULL",
    ),
    # The generations that were active, with the counts of the job when each began.
    "generations": (
        "job_key, generation",
        """
        generation INTEGER NOT NULL,
        replicas INTEGER NOT NULL,
        started_at DOUBLE PRECISION NOT NULL,
        ended_at DOUBLE PRECISION,
        disruptions INTEGER NOT NULL,
        failures INTEGER NOT NULL
        """,
    ),
    "logs": (
        "job_key, replica",
        """
        replica INTEGER NOT NULL,
        instance TEXT NOT NULL,
        log TEXT NOT NULL,
        stored_at DOUBLE PRECISION NOT NULL
        """,
    ),
    # The last explained decision about a job, as JSON.
    "decisions": ("job_key", "decision TEXT NOT NULL"),
    # The seconds of each agent; those of the agent '' are of several, and of the job 0 of deleted jobs.
    "replica_seconds": (
        "job_key, agent",
        f"agent TEXT NOT NULL, changed_at DOUBLE PRECISION NOT NULL, {_SECONDS}",
    ),
    "goodput_history": ("job_key, time", f"time DOUBLE PRECISION NOT NULL, {_SECONDS}"),
}
"""The primary keys and the other columns of the tables whose rows belong to a job."""

TABLES: dict[str, str] = {
    SCHEMA: "version INTEGER PRIMARY KEY, readable_from INTEGER NOT NULL",
    "jobs": """
        {key},
        id TEXT UNIQUE,
        created_at DOUBLE PRECISION NOT NULL,
        changed_at DOUBLE PRECISION NOT NULL,
        version BIGINT NOT NULL,
        complete INTEGER NOT NULL,
        spec TEXT,
        rendezvous TEXT NOT NULL
    """,
    # The last version of each deleted job. A new job with the same id continues from this version.
    "deleted_jobs": "id TEXT PRIMARY KEY, version BIGINT NOT NULL, deleted_at DOUBLE PRECISION NOT NULL",
    **{
        name: f"job_key BIGINT NOT NULL, {columns}, PRIMARY KEY ({key})"
        for name, (key, columns) in OF_A_JOB.items()
    },
}

MIGRATION: tuple[str, ...] = (
    "ALTER TABLE reports ADD COLUMN goodput DOUBLE PRECISION",
    "ALTER TABLE reports ADD COLUMN lr DOUBLE PRECISION",
    "ALTER TABLE reports ADD COLUMN grad_sqr_error DOUBLE PRECISION NOT NULL DEFAULT 0",
    "ALTER TABLE reports ADD COLUMN gpu_use DOUBLE PRECISION",
    "ALTER TABLE reports ADD COLUMN gpu_memory DOUBLE PRECISION",
    "ALTER TABLE reports ADD COLUMN counts_samples INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE reports ADD COLUMN slow_replica INTEGER",
    "ALTER TABLE reports ADD COLUMN slow_factor DOUBLE PRECISION",
    # Explained decisions are made again within seconds.
    "DELETE FROM decisions",
    # Those of deleted jobs, whose rows are removed with the job since.
    *(
        f"DELETE FROM {name} WHERE job_key IN (SELECT key FROM jobs WHERE id IS NULL)"
        for name in OF_A_JOB
        if name not in _ADDED
    ),
    "DELETE FROM jobs WHERE id IS NULL",
    f"ALTER TABLE {SCHEMA} ADD COLUMN readable_from INTEGER NOT NULL DEFAULT {READABLE_FROM}",
    f"UPDATE {SCHEMA} SET version = {SCHEMA_VERSION}",
)
"""The statements that change the tables of `RELEASED_VERSION` to those of `SCHEMA_VERSION`."""
