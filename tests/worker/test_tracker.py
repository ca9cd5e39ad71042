"""The recipe for a tracker in docs/training.md, with real trainers."""

from collections.abc import Callable
from pathlib import Path

from support.members import Members

TRACKS = Path(__file__).parents[1] / "support" / "programs" / "tracks.py"


def test_another_rank_0_continues_the_run_of_the_tracker(make_members: Callable[..., Members]) -> None:
    job = make_members(PROGRAM=TRACKS)
    first, second, third = job.start(3)
    job.activate([first, second])
    job.wait_step(5)
    first.kill()
    job.wait_holding([second])
    job.activate([second, third])
    job.wait_step(job.last_step() + 5)
    second.kill()
    job.wait_holding([third])
    job.activate([third])
    job.finish()
    assert len(list((job.folder / "journal").iterdir())) == 1
    records = job.records()
    assert list(dict.fromkeys(record["process"] for record in records)) == [first.pid, second.pid, third.pid]
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    assert steps[-1] == 40
    # A process may be killed between a step, which the others have made too, and its record.
    assert len(steps) >= 40 - 2
