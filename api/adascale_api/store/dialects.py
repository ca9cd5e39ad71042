"""Statements that SQLAlchemy builds differently for each database."""

from typing import Any

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite

_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


def insert_into(table: Table, dialect: str) -> Any:
    """Return an INSERT that supports ON CONFLICT."""
    return _INSERTS[dialect](table)
