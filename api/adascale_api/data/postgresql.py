"""A PostgreSQL database, which several services may share."""

import logging
import threading
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql as psycopg_sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from adascale_api.data.backend import Connector, Failure, UnusableDatabaseError
from adascale_api.data.tables import TABLES

MIN_VERSION = 150000
"""PostgreSQL 15."""
CHANNEL = "adascale_jobs"
"""The channel on which services notify each other of changed jobs."""
SETTINGS = {
    "connect_timeout": "3",
    # Notice a server that vanished without closing its connections.
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "4000",
    "application_name": "adascale-api",
}
TIMEOUTS = {
    # Below the deadline of a request.
    "statement_timeout": 4000,
    "lock_timeout": 2000,
    "idle_in_transaction_session_timeout": 10000,
}
"""Timeouts of a session, in milliseconds."""
NOTIFY_TIMEOUT = 3.0
"""Seconds within which a notification arrives."""
LISTEN_TIMEOUT = 2.0
"""Seconds for which the listener waits for a notification before it looks whether it shall end."""
RECONNECT_INTERVAL = 0.5
"""Seconds between two attempts to listen again."""
LOCK_TABLES = 0x41646153
"""The number of the advisory lock that is held while tables are created."""

_FAILURES: dict[str, Failure] = {
    "53100": Failure.FULL,  # disk_full
    "55P03": Failure.BUSY,  # lock_not_available
    "57014": Failure.BUSY,  # query_canceled
    "40001": Failure.CONFLICT,  # serialization_failure
    "40P01": Failure.CONFLICT,  # deadlock_detected
    "25006": Failure.LOST,  # read_only_sql_transaction, on a standby
    "42P01": Failure.DAMAGED,  # undefined_table
    "42703": Failure.DAMAGED,  # undefined_column
    "XX001": Failure.DAMAGED,  # data_corrupted
    "XX002": Failure.DAMAGED,  # index_corrupted
}
_LOST_CLASSES = ("08", "57P", "53")
"""Connection exceptions, operator intervention, and insufficient resources such as too many connections."""

logger = logging.getLogger(__name__)


class PostgresqlConnector(Connector):
    """Opens connections to a PostgreSQL database."""

    error = psycopg.Error
    text = attrgetter("postgresql")
    is_shared = True
    key = "key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"

    def __init__(self, url: str) -> None:
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            raise UnusableDatabaseError(
                f"the database URL is not valid: {str(error).strip()}; use postgresql://USER:PASSWORD@HOST/NAME"
            ) from error
        self._conninfo = make_conninfo("", **{**SETTINGS, **given})
        self.url = f"postgresql://{given.get('host', '')}/{given.get('dbname', '')}"
        self._closed = threading.Event()
        self._listener: threading.Thread | None = None
        try:
            with self._open() as connection:
                self._create_tables(connection)
            self._require_notifications()
        except psycopg.Error as error:
            raise UnusableDatabaseError(
                f"database {self.url} can't be opened and written: {str(error).strip()}"
            ) from error

    # -- connections ----------------------------------------------------------------------------------------

    def connect(self, *, writes: bool) -> psycopg.Connection[Any]:
        """Open a connection."""
        connection = self._open()
        if not writes:
            connection.read_only = True
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return connection

    def _open(self, *, autocommit: bool = False) -> psycopg.Connection[Any]:
        connection = psycopg.connect(self._conninfo, autocommit=True)
        # Not by options at the start of the connection, which poolers refuse or drop. Those of the URL hold.
        connection.execute(
            "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS each (name, value) "
            "JOIN pg_settings USING (name) WHERE source <> 'client'",
            ([*TIMEOUTS], [*map(str, TIMEOUTS.values())]),
        )
        connection.autocommit = autocommit
        return connection

    def _require_notifications(self) -> None:
        """Refuse a pooler that gives each transaction another connection: no notification arrives then."""
        channel = f"adascale_probe_{uuid4().hex}"
        with self._open(autocommit=True) as listener, self._open(autocommit=True) as notifier:
            listener.execute(f"LISTEN {channel}".encode())
            notifier.execute("SELECT pg_notify(%s, '')", (channel,))
            arrived = any(True for _ in listener.notifies(timeout=NOTIFY_TIMEOUT, stop_after=1))
        if not arrived:
            raise UnusableDatabaseError(
                f"database {self.url} is behind a pooler in transaction mode, which passes no notifications "
                "on: give the address of PostgreSQL itself, or of a pool with pool_mode = session"
            )

    def commit(self, connection: psycopg.Connection[Any], changed: Mapping[str, int]) -> None:
        """Commit a transaction, and notify the other services of the jobs that it has changed."""
        if changed:
            payloads = [f"{job_id} {version}" for job_id, version in changed.items()]
            connection.execute(
                "SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) AS payload", (CHANNEL, payloads)
            )
        connection.commit()

    def close(self) -> None:
        """End the listener."""
        self._closed.set()
        if self._listener is not None:
            self._listener.join(LISTEN_TIMEOUT + 1)

    # -- health ---------------------------------------------------------------------------------------------

    def failure(self, error: Exception) -> Failure:
        """Return what an error means."""
        state = getattr(error, "sqlstate", None)
        if state is None:
            return Failure.LOST if isinstance(error, psycopg.OperationalError) else Failure.OTHER
        if state in _FAILURES:
            return _FAILURES[state]
        return Failure.LOST if state.startswith(_LOST_CLASSES) else Failure.OTHER

    def listen(self, on_change: Callable[[str, int], None], on_listening: Callable[[bool], None]) -> None:
        """Report the changes that services commit, this one's too, from a thread, until `close`."""
        self._listener = threading.Thread(
            target=self._listen, args=(on_change, on_listening), name="adascale-listener", daemon=True
        )
        self._listener.start()

    def _listen(self, on_change: Callable[[str, int], None], on_listening: Callable[[bool], None]) -> None:
        while not self._closed.is_set():
            try:
                with self._open(autocommit=True) as connection:
                    connection.execute(psycopg_sql.SQL("LISTEN {}").format(psycopg_sql.Identifier(CHANNEL)))
                    on_listening(True)
                    while not self._closed.is_set():
                        for notification in connection.notifies(timeout=LISTEN_TIMEOUT):
                            job_id, _, version = notification.payload.partition(" ")
                            on_change(job_id, int(version))
                        # A connection that is lost without a word is noticed by asking.
                        connection.execute("SELECT 1")
            # ValueError: an invalid notification, by another program.
            except (psycopg.Error, ValueError) as error:
                logger.warning("listens again for changes of jobs, because of an error: %s", error)
                on_listening(False)
                self._closed.wait(RECONNECT_INTERVAL)

    def _create_tables(self, connection: psycopg.Connection[Any]) -> None:
        if connection.info.server_version < MIN_VERSION:
            raise UnusableDatabaseError(
                f"database {self.url} is PostgreSQL {connection.info.server_version // 10000}, "
                f"this service needs version {MIN_VERSION // 10000} or newer"
            )
        # Services that start together create the tables one after another.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_TABLES,))
        self.prepare_tables(connection)

    def find_tables(self, connection: psycopg.Connection[Any]) -> set[str]:
        """Return the names of the tables that the database has, of those of a service."""
        rows = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = current_schema() AND tablename = ANY(%s)",
            (list(TABLES),),
        )
        return {name for (name,) in rows}
