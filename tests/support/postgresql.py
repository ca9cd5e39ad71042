"""A PostgreSQL server for tests, in a temporary folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from support.file_systems import small_disk
from support.launch import free_port

FOLDERS = list(Path("/usr/lib/postgresql").glob("*/bin"))
MIN_VERSION = 15


class PostgresqlServer:
    """A server that a test may stop and start again.

    Args:
        binaries: the folder of `initdb` and `postgres`.
        folder: gets the data.
        user: the user that runs it, since it refuses to run as root; None for this one.
        primary: the server that it follows as a standby; None for a new one.
    """

    def __init__(
        self, binaries: Path, folder: Path, user: str | None, primary: PostgresqlServer | None = None
    ) -> None:
        self._binaries = binaries
        self._folder = folder
        self._user = user
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        command: list[str | Path] = [
            binaries / "initdb",
            "-D",
            folder / "data",
            "-U",
            "tests",
            "-A",
            "trust",
            "--no-sync",
        ]
        if primary is not None:
            place: list[str | Path] = ["-D", folder / "data", "-d", primary.url(), "--no-password"]
            command = [binaries / "pg_basebackup", *place, "-R", "-c", "fast", "--no-sync"]
        subprocess.run(command, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = ["-p", str(self.port), "-k", str(self._folder), "-c", "listen_addresses=127.0.0.1"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._folder / "data", *options, "-c", "fsync=off"],
                user=self._user,
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 30
        while True:
            try:
                self.execute("SELECT 1")
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self._folder / "log").read_text()
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """Stop it at once, as after a crash: it recovers when it is started again."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(30)
            self._process = None

    @contextmanager
    def standby(self) -> Iterator[PostgresqlServer]:
        """Run a server that follows this one; from then on this one answers a COMMIT once both have it."""
        folder = self._folder / "standby"
        folder.mkdir()
        if self._user is not None:
            shutil.chown(folder, self._user)
        server = PostgresqlServer(self._binaries, folder, self._user, primary=self)
        server.start()
        try:
            self.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            self.execute("SELECT pg_reload_conf()")
            yield server
        finally:
            server.stop()

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://tests@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Create a database, and return its URL."""
        name = f"tests_{uuid4().hex}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    @contextmanager
    def small_database(self) -> Iterator[tuple[str, Path]]:
        """Create a database on a disk of its own, of 24 MiB, and return its URL and the disk."""
        with small_disk(self._folder / "disk") as disk:
            if self._user is not None:
                shutil.chown(disk, self._user)
            self.execute(f"CREATE TABLESPACE small LOCATION '{disk}'")
            name = f"tests_{uuid4().hex}"
            self.execute(f"CREATE DATABASE {name} TABLESPACE small")
            try:
                yield self.url(name), disk
            finally:
                self.execute(f"DROP DATABASE {name} WITH (FORCE)")
                self.execute("DROP TABLESPACE small")

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.url(), autocommit=True, connect_timeout=5) as connection:
            connection.execute(statement.encode())

    def cut_connections(self) -> None:
        """End all connections of services."""
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'adascale-api'"
        )


@contextmanager
def postgresql_server() -> Iterator[PostgresqlServer]:
    """Run a server; skip the test where none is installed."""
    binaries = next((path for path in sorted(FOLDERS, reverse=True) if (path / "initdb").exists()), None)
    if binaries is None:
        found = shutil.which("initdb")
        binaries = Path(found).parent if found else None
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    version = subprocess.run([binaries / "postgres", "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.split()[2].split(".")[0]) < MIN_VERSION:
        pytest.skip(f"PostgreSQL {MIN_VERSION} or newer is not installed")
    user = "nobody" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="adascale-postgresql-") as folder:
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresqlServer(binaries, Path(folder), user)
        server.start()
        try:
            yield server
        finally:
            server.stop()
