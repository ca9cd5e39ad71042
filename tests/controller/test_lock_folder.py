"""A state folder on a file system without file locks, with a real process."""

from pathlib import Path

from e2e.local_run import adascale, write_light_job
from support.file_systems import limited_folder


def test_a_folder_without_file_locks_is_refused(tmp_path: Path) -> None:
    job, state = write_light_job(tmp_path / "job.yaml", "exit", "0"), tmp_path / "state"
    environ = limited_folder(state, tmp_path, locks=False)
    refused = adascale("run", job, "--state-dir", state, "--port", 0, timeout=60, **environ)
    assert refused.returncode == 2
    assert "the file system of the state folder has no file locks (" in refused.stderr
    assert "use a folder on a local disk with --state-dir" in refused.stderr
