"""The tables of the database.

Rows refer to a job by its `key`, which is never reused: rows of a deleted job can't belong to a later job
with the same id.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    literal_column,
)

SCHEMA_VERSION = 4
"""Raised with every change of a table, so that a service refuses a database of another version."""

metadata = MetaData()

_KEY = BigInteger().with_variant(Integer, "sqlite")  # SQLite generates keys only for INTEGER columns


def _job_key() -> Column[int]:
    return Column(
        "job_key", _KEY, ForeignKey("jobs.key", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )


schema = Table(
    "adascale_schema",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("key", _KEY, primary_key=True),
    Column("id", String(127), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("spec", JSON(none_as_null=True)),
    Column("rendezvous", Text, nullable=False),
    sqlite_autoincrement=True,
)

deleted_jobs = Table(
    "deleted_jobs",
    metadata,
    Column("id", String(127), primary_key=True),
    Column("version", BigInteger, nullable=False),
)
"""The last version of each deleted job. A new job with the same id continues from this version."""

heartbeats = Table(
    "heartbeats",
    metadata,
    _job_key(),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("received_at", Double, nullable=False),
    Column("expires_at", Double),  # NULL if the heartbeat does not expire
    Index("heartbeats_by_expires_at", "expires_at"),
)

reports = Table(
    "reports",
    metadata,
    _job_key(),
    # Numbers the job's reports in order of arrival, without gaps: evenly spaced reports are found without a
    # scan.
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("generation", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("progress", Double, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("replicas", Integer, nullable=False),
    Column("local_bsz", Integer, nullable=False),
    Column("accumulation", Integer, nullable=False),
    Column("scale", Double, nullable=False),
    Column("gain", Double, nullable=False),
    Column("grad_sqr", Double, nullable=False),
    Column("grad_var", Double, nullable=False),
    Column("step_time", Double, nullable=False),
    Column("time", Double, nullable=False),
    Column("loss", Double),
    Column("target", Double),
    Column("nodes", Integer, nullable=False),
    UniqueConstraint("job_key", "generation", "step", name="reports_count_once"),
    sqlite_with_rowid=False,
)

# A shorter step time is not a measurement, and its inverse may overflow. The value is a literal, not a bound
# parameter, because SQLite uses a partial index only if it can see that the query implies the index's
# condition.
has_step_time = reports.c.step_time >= literal_column("1e-9")
Index(
    "reports_by_plan",
    reports.c.job_key,
    reports.c.replicas,
    reports.c.local_bsz,
    reports.c.accumulation,
    reports.c.nodes,
    reports.c.number.desc(),
    sqlite_where=has_step_time,
    postgresql_where=has_step_time,
)
