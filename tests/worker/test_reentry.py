"""Re-entry, with real processes: nothing is lost or repeated, and a kill leaves no trace in the weights."""

import json
import random
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from support.launch import Journal, Replicas

FIXED = json.dumps({"batch_size": 12})
"""Not elastic, so the batch sizes are the same in every run; four steps make an epoch of 48 samples."""
ELASTIC = json.dumps({"batch_size": 8, "max_batch_size": 24, "local_bsz_bounds": [2, 8]})


def run_to_the_end(count: int, folder: Path, **options: object) -> Journal:
    codes, output = Replicas(count, folder, **options).wait()
    assert codes == [0] * count, output
    return Journal(folder / "journal")


@pytest.mark.parametrize(
    "replicas", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_killed_again_and_again_training_ends_with_the_very_same_weights(
    tmp_path: Path, replicas: int
) -> None:
    options = {"BOUNDS": FIXED, "EPOCHS": 6, "ADASCALE_CHECKPOINT_INTERVAL": 0}
    undisturbed = run_to_the_end(replicas, make(tmp_path / "undisturbed"), **options)
    folder = make(tmp_path / "disturbed")
    journal = Journal(folder / "journal")
    chance = random.Random(replicas)
    for kill_at in sorted(chance.sample(range(2, 20), 2)):
        running = Replicas(replicas, folder, **options, STEP_SECONDS=0.01)
        running.reach(partial(has_reached, journal, kill_at), f"step {kill_at}")
        running.kill()
        codes, output = running.wait()
        assert codes == [-signal.SIGKILL] * replicas, output
    disturbed = run_to_the_end(replicas, folder, **options)
    assert disturbed.weights() == undisturbed.weights()
    assert len(disturbed.attempts()) == 3
    assert all(attempt.header["restored"] for attempt in disturbed.attempts()[1:])
    assert losses(disturbed) == losses(undisturbed)


def has_reached(journal: Journal, step: int) -> bool:
    return journal.last_step() >= step


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def losses(journal: Journal) -> dict[int, float]:
    return {step: told[0].loss for step, told in sorted(journal.effective().items())}


@pytest.mark.parametrize(
    "counts",
    [[1, 2, 1], pytest.param([1, 2, 4, 3, 1], marks=pytest.mark.slow)],
    ids=lambda counts: "-".join(map(str, counts)),
)
def test_each_pass_has_every_sample_exactly_once_at_changing_replica_counts(
    tmp_path: Path, counts: list[int]
) -> None:
    journal = Journal(tmp_path / "journal")
    options = {"BOUNDS": ELASTIC, "EPOCHS": 12, "STEP_SECONDS": 0.02}
    chance = random.Random(7)
    for count in counts[:-1]:
        stop_at = journal.last_step() + chance.randint(1, 4)
        running = Replicas(count, tmp_path, **options)
        running.reach(partial(has_reached, journal, stop_at), f"step {stop_at}")
        leaver = chance.randrange(count)
        running.signal(signal.SIGTERM, rank=leaver)
        codes, output = running.wait()
        assert codes[leaver] == 128 + signal.SIGTERM, output
        assert all(code == 75 for rank, code in enumerate(codes) if rank != leaver), output
    run_to_the_end(counts[-1], tmp_path, **{**options, "STEP_SECONDS": 0})
    steps = journal.effective()
    assert sorted(steps) == list(range(1, len(steps) + 1)), "every step was made, and made once"
    # Within a step replicas share out a stretch of the stream; the stretches follow each other.
    stream: list[int] = []
    for number in sorted(steps):
        taken = [index for told in steps[number] for index in told.indices]
        stream += sorted(taken)
        assert len(taken) <= 24
    # Where a step spans two passes its samples are told apart by counting: pass after pass, each once.
    passes, rest = divmod(len(stream), 48)
    assert passes >= 3
    counts_of = Counter(stream)
    assert all(passes <= counts_of[index] <= passes + 1 for index in range(48))
    assert sum(counts_of.values()) == passes * 48 + rest


def test_a_job_that_has_finished_has_nothing_left_to_do(tmp_path: Path) -> None:
    options = {"BOUNDS": FIXED, "EPOCHS": 50, "ADASCALE_SCALE_INVARIANT_STEPS": 10}
    first = run_to_the_end(1, tmp_path, **options)
    again = run_to_the_end(1, tmp_path, **options)
    assert [len(attempt.steps) for attempt in again.attempts()] == [10, 0]
    assert again.weights() == first.weights()
