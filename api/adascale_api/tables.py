"""The tables of the database.

A job is known inside by its `key`, which is never given again, so that rows of a deleted job can't be
taken for those of a later job of the same id.
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

SCHEMA_VERSION = 1
"""Raised whenever a table changes, so that a service never works on tables it does not know."""

metadata = MetaData()

_KEY = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers a key by itself only if it is INTEGER


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
    Column("state", Text, nullable=False),
    sqlite_autoincrement=True,
)

former_jobs = Table(
    "former_jobs",
    metadata,
    Column("id", String(127), primary_key=True),
    Column("version", BigInteger, nullable=False),
)
"""The last version of each deleted job: one created anew under its id counts on from there."""

heartbeats = Table(
    "heartbeats",
    metadata,
    _job_key(),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("seen_at", Double, nullable=False),
    Column("due_at", Double),  # when its silence means that it is lost; none: never
    Index("heartbeats_by_due_at", "due_at"),
)

reports = Table(
    "reports",
    metadata,
    _job_key(),
    # Counts the job's reports in order of arrival, without gaps: evenly spaced ones are found without a scan.
    Column("n", BigInteger, primary_key=True, autoincrement=False),
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
    UniqueConstraint("job_key", "generation", "step", name="reports_count_once"),
    sqlite_with_rowid=False,
)

# No step is faster; a smaller number is no measurement, and its inverse might be beyond all numbers.
# Written out, not bound: only then SQLite knows that the index below has what a query asks for.
measured = reports.c.step_time >= literal_column("1e-9")
Index(
    "reports_by_plan",
    reports.c.job_key,
    reports.c.replicas,
    reports.c.local_bsz,
    reports.c.accumulation,
    reports.c.n.desc(),
    sqlite_where=measured,
    postgresql_where=measured,
)
