"""The SQLite database on file systems that lack what SQLite uses, in real processes."""

import os
import subprocess
import sys
from pathlib import Path

from support.file_systems import limited_folder

OPEN = """
import sys
from adascale_api.data.backend import UnusableDatabaseError
from adascale_api.data.sqlite import SqliteConnector
try:
    connector = SqliteConnector(sys.argv[1])
except UnusableDatabaseError as error:
    sys.exit(str(error))
writer, reader = connector.connect(writes=True), connector.connect(writes=False)
print(*writer.execute("PRAGMA journal_mode").fetchone())
writer.execute("BEGIN IMMEDIATE")
writer.execute("CREATE TABLE numbers (number)")
writer.execute("COMMIT")
for number in range(3):
    connector.begin(writer, writes=True)
    writer.execute("INSERT INTO numbers VALUES (?)", [number])
    connector.begin(reader, writes=False)
    print(*reader.execute("SELECT count(*) FROM numbers").fetchone())  # while the writer writes
    reader.execute("COMMIT")
    connector.commit(writer, {})
"""


def run(folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", OPEN, f"sqlite:///{folder}/a%20b.sqlite"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_shared_memory_readers_still_read_while_the_writer_writes(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    completed = run(folder, limited_folder(folder, tmp_path, shared_memory=False))
    assert completed.stdout.split() == ["wal", "0", "1", "2"], completed.stderr


def test_without_file_locks_the_error_names_the_folder_and_the_ways_out(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    completed = run(folder, limited_folder(folder, tmp_path, locks=False))
    assert f"the file system of {folder} has no file locks, which SQLite needs" in completed.stderr
    assert "Use a file on a local disk" in completed.stderr
    assert "Traceback" not in completed.stderr
