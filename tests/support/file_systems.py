"""File systems that are small, or without file locks or shared memory.

For the latter, a library that is loaded before the C library refuses system calls for the files of a folder,
as the kernel does for such file systems. So the programs of a test, SQLite included, run unchanged.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("file_systems.c")


def limited_folder(
    folder: Path, build: Path, *, locks: bool = True, shared_memory: bool = True
) -> dict[str, str]:
    """Return the environment of processes for which a folder has no file locks, or no shared memory.

    Args:
        folder: the folder.
        build: a folder for the library, and for temporary files.
        locks: whether the folder has file locks.
        shared_memory: whether the files of the folder can be mapped into shared memory.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no C compiler (cc) is installed. Tests are not skipped in CI", pytrace=False)
        pytest.skip("no C compiler (cc) is installed")
    library = build / "file_systems.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
    environ = {"LD_PRELOAD": str(library), "TMPDIR": str(build)}
    if not locks:
        environ["NO_FILE_LOCKS"] = f"{folder}/"
    if not shared_memory:
        environ["NO_SHARED_MEMORY"] = f"{folder}/"
    return environ


@contextmanager
def small_disk(folder: Path, mebibytes: int = 24) -> Iterator[Path]:
    """Create a folder with a file system of this size; skip the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"this user cannot mount a file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def fill(disk: Path) -> Path:
    """Write a file that takes all the space."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler
