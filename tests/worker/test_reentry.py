"""Tests of re-entry with real processes: no step is lost or repeated, and weights do not depend on kills."""

import json
import random
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from support.launch import Journal, Replicas

FIXED = json.dumps({"batch_size": 12})
"""Not elastic, so batch sizes are equal in all runs. An epoch of 48 samples has four steps."""
ELASTIC = json.dumps({"batch_size": 8, "max_batch_size": 24, "local_bsz_bounds": [2, 8]})


def run_to_completion(count: int, folder: Path, **options: object) -> Journal:
    codes, output = Replicas(count, folder, **options).wait()
    assert codes == [0] * count, output
    return Journal(folder / "journal")


@pytest.mark.slow
def test_training_that_is_killed_repeatedly_ends_with_the_same_weights(tmp_path: Path) -> None:
    replicas = 3
    options = {"BOUNDS": FIXED, "EPOCHS": 6, "ADASCALE_CHECKPOINT_INTERVAL": 0}
    undisturbed = run_to_completion(replicas, create(tmp_path / "undisturbed"), **options)
    folder = create(tmp_path / "disturbed")
    journal = Journal(folder / "journal")
    chance = random.Random(replicas)
    for kill_at in sorted(chance.sample(range(2, 20), 2)):
        running = Replicas(replicas, folder, **options, STEP_SECONDS=0.01)
        running.reach(partial(has_saved, journal, folder, kill_at), f"step {kill_at}")
        running.kill()
        codes, output = running.wait()
        assert codes == [-signal.SIGKILL] * replicas, output
    disturbed = run_to_completion(replicas, folder, **options)
    assert disturbed.weights() == undisturbed.weights()
    assert len(disturbed.attempts()) == 3
    assert all(attempt.header["restored"] for attempt in disturbed.attempts()[1:])
    assert losses(disturbed) == losses(undisturbed)


def has_saved(journal: Journal, folder: Path, step: int) -> bool:
    """Return whether the step is made, and there is a checkpoint, which is written beside later steps."""
    return has_reached(journal, step) and any((folder / "checkpoints").glob("*.json"))


def has_reached(journal: Journal, step: int) -> bool:
    return journal.last_step() >= step


def create(folder: Path) -> Path:
    folder.mkdir()
    return folder


def losses(journal: Journal) -> dict[int, float]:
    return {step: records[0].loss for step, records in sorted(journal.effective().items())}


@pytest.mark.slow
def test_each_pass_contains_every_sample_once_at_changing_replica_counts(tmp_path: Path) -> None:
    counts = [1, 2, 4, 3, 1]
    journal = Journal(tmp_path / "journal")
    options = {"BOUNDS": ELASTIC, "EPOCHS": 12, "STEP_SECONDS": 0.02}
    chance = random.Random(7)
    for count in counts[:-1]:
        stop_at = journal.last_step() + chance.randint(1, 4)
        running = Replicas(count, tmp_path, **options)
        running.reach(partial(has_reached, journal, stop_at), f"step {stop_at}")
        signaled = chance.randrange(count)
        running.signal(signal.SIGTERM, rank=signaled)
        codes, output = running.wait()
        assert codes[signaled] == 128 + signal.SIGTERM, output
        assert all(code == 75 for rank, code in enumerate(codes) if rank != signaled), output
    run_to_completion(counts[-1], tmp_path, **{**options, "STEP_SECONDS": 0})
    steps = journal.effective()
    assert sorted(steps) == list(range(1, len(steps) + 1)), "every step exactly once"
    # In a step, the replicas share one section of the stream; the sections follow each other.
    stream: list[int] = []
    for number in sorted(steps):
        taken = [index for record in steps[number] for index in record.indices]
        stream += sorted(taken)
        assert len(taken) <= 24
    # A step can span two passes, so the samples of each pass are counted.
    passes, rest = divmod(len(stream), 48)
    assert passes >= 3
    counts_of = Counter(stream)
    assert all(passes <= counts_of[index] <= passes + 1 for index in range(48))
    assert sum(counts_of.values()) == passes * 48 + rest
