"""Training that goes on with more data, on several replicas."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from support.members import Members


def test_replicas_that_resume_and_one_that_joins_later_share_the_longer_data_set(
    make_members: Callable[..., Members], tmp_path: Path
) -> None:
    bounds = {"batch_size": 12, "checkpoint_dir": f"{tmp_path}/checkpoints", "checkpoint_interval": 0}
    job = make_members(BOUNDS=json.dumps(bounds), EPOCHS=6, STEP_SECONDS=0.01)
    before = job.start(2)
    job.activate(before)
    job.wait_step(6)
    for trainer in before:
        trainer.kill()
    job.options |= {"SAMPLES": 60, "LOADER": json.dumps({"allow_other_length": True})}
    first, second, third = job.start(3)
    job.activate([first, second])
    job.wait(lambda: any(record["generation"] == 2 for record in job.records()), "a step with more data")
    step = job.last_step()
    job.activate([first, second, third])
    job.wait_step(step + 5)
    assert len(job.finish()) == 1

    resumed = [record for record in job.records() if record["generation"] > 1]
    assert max(record["replicas"] for record in resumed) == 3
    begin = min(record["samples"][0] for record in resumed)
    epochs = 6 - min(record["epoch"] for record in resumed)
    assert max(record["samples"][1] for record in resumed) == begin + 60 * epochs
    passes: dict[int, Counter[int]] = {}
    for record in resumed:
        passes.setdefault((record["samples"][0] - begin) // 60, Counter()).update(record["indices"])
    assert passes == {number: Counter(range(60)) for number in range(epochs)}
