"""The batches of a program with its own trainer, on changing numbers of ranks."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from adascale.data import ElasticDataLoader
from adascale.errors import DatasetError
from support.launch import PROGRAMS, wait_until

SAMPLES = 97
RUNS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.booleans()), min_size=1, max_size=5)
"""Numbers of ranks, of complete steps, and whether a further step is lost."""


class Stream(IterableDataset[int]):
    """A stream with a state, in a new order in each pass."""

    def __init__(self, *, has_state: bool) -> None:
        self.number, self.next = 0, 0
        if has_state:
            self.state_dict = lambda: {"number": self.number, "next": self.next}
            self.load_state_dict = lambda state: self.__dict__.update(state)

    def set_epoch(self, number: int) -> None:
        self.number, self.next = number, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < SAMPLES:
            self.next += 1
            yield (self.next * 7 + self.number) % SAMPLES
        self.next = 0


def trained(data: Any, runs: list[tuple[int, int, bool]], **options: Any) -> list[int]:
    """Train with one number of ranks after another, each from the state that the last has saved."""
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for ranks, steps, loses in runs:
        loaders = [
            ElasticDataLoader(data(), 3, rank=rank, world_size=ranks, seed=5, **options)
            for rank in range(ranks)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(steps):
            for iterator in iterators:
                seen += next(iterator).tolist()
            state = loaders[-1].state_dict()
            assert {loader.position for loader in loaders} == {len(seen)}
        if loses:
            next(iterators[0])
    return seen


def require_each_once(seen: list[int]) -> None:
    for start in range(0, len(seen), SAMPLES):
        counts = Counter(seen[start : start + SAMPLES])
        assert set(counts.values()) == {1}
    assert len(seen) < SAMPLES or set(seen) == set(range(SAMPLES))


@given(runs=RUNS, shuffle=st.booleans())
def test_each_sample_is_trained_once_per_pass(runs: list[tuple[int, int, bool]], *, shuffle: bool) -> None:
    seen = trained(lambda: list(range(SAMPLES)), runs, shuffle=shuffle)
    if seen:
        require_each_once(seen)


@given(runs=RUNS, has_state=st.booleans(), shuffle_buffer=st.sampled_from([0, 10]))
def test_each_record_of_a_stream_is_trained_once_per_pass(
    runs: list[tuple[int, int, bool]], *, has_state: bool, shuffle_buffer: int
) -> None:
    seen = trained(lambda: Stream(has_state=has_state), runs, shuffle_buffer=shuffle_buffer)
    if seen:
        require_each_once(seen)


def kill_all(process: int) -> None:
    """Kill a process and those that it has started."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in path.read_text().split():
            kill_all(int(child))
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_processes_of_torchrun_that_are_killed_train_each_sample_once(tmp_path: Path) -> None:
    lines = tmp_path / "steps"
    lines.touch()
    for ranks in (1, 3, 2, 5):
        before = len(lines.read_text().splitlines())
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        torchrun = subprocess.Popen([sys.executable, *command, PROGRAMS / "own_trainer.py", lines])
        try:
            wait_until(lambda: len(lines.read_text().splitlines()) > before + 30, f"steps of {ranks}")  # noqa: B023
        finally:
            kill_all(torchrun.pid)
            torchrun.wait()
        # A line that is not complete was not committed.
        text = lines.read_text()
        lines.write_text(text[: text.rfind("\n") + 1])
    seen = [number for line in lines.read_text().splitlines() for number in json.loads(line)["samples"]]
    assert len(seen) > 300
    assert set(Counter(seen[:1000]).values()) == {1}


def test_groups_of_similar_length_do_not_depend_on_the_batch_size() -> None:
    data, lengths = list(range(96)), [(7 * number) % 50 for number in range(96)]
    first = ElasticDataLoader(data, 4, lengths=lengths, group_size=8)
    seen = [number for batch in islice(first, 6) for number in batch.tolist()]
    second = ElasticDataLoader(data, 8, lengths=lengths, group_size=8)
    second.load_state_dict(first.state_dict())
    seen += [number for batch in islice(second, 9) for number in batch.tolist()]
    assert sorted(seen) == data


def test_worker_processes_load_ahead_of_the_position() -> None:
    runs = [(2, 9, True), (1, 20, False)]
    data = list(range(SAMPLES))
    assert trained(lambda: data, runs, num_workers=2) == trained(lambda: data, runs)


def test_a_position_is_all_that_a_data_set_needs() -> None:
    data = list(range(SAMPLES))
    first = ElasticDataLoader(data, 3, seed=5)
    seen = [batch.tolist() for batch in islice(first, 4)]
    second = ElasticDataLoader(data, 3, seed=5, position=6)
    assert [batch.tolist() for batch in islice(second, 2)] == seen[2:]
    assert [batch.tolist() for batch in islice(first, 1)] == [batch.tolist() for batch in islice(second, 1)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "got batch_size=0: it must be an integer of at least 1"),
        (
            {"batch_size": 2, "position": -1},
            ValueError,
            "got position=-1: it must be an integer of at least 0",
        ),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, ValueError, "got rank=2: .* from 0 to 1"),
        ({"batch_size": 2, "rank": 0}, ValueError, "got rank=0 and world_size=None: pass both, or neither"),
        ({"batch_size": 2, "drop_last": True}, DatasetError, "ElasticDataLoader got drop_last"),
        ({"batch_size": 2, "in_order": False}, DatasetError, "ElasticDataLoader got in_order"),
        ({"batch_size": 2, "dataset": []}, DatasetError, "has 0 samples"),
        (
            {"batch_size": 2, "dataset": Stream(has_state=True), "position": 4},
            DatasetError,
            "load_state_dict",
        ),
        ({"batch_size": 2, "dataset": iter([1])}, DatasetError, "got an iterator"),
    ],
    ids=[
        "batch size",
        "position",
        "rank",
        "rank alone",
        "drop_last",
        "in_order",
        "no samples",
        "place of a stream",
        "iterator",
    ],
)
def test_what_cannot_be_divided_is_an_error(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ElasticDataLoader(**{"dataset": list(range(SAMPLES)), **arguments})


@pytest.mark.parametrize(
    ("saved", "data", "message"),
    [
        (list(range(5)), list(range(6)), "has 6 samples in a pass, but the state is of 5 samples in a pass"),
        (Stream(has_state=True), list(range(6)), "has 6 samples in a pass, but the state is of a stream"),
        (list(range(5)), Stream(has_state=True), "has a stream, but the state is of 5 samples in a pass"),
    ],
    ids=["length", "stream", "samples"],
)
def test_the_state_of_other_data_is_an_error(saved: Any, data: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        ElasticDataLoader(data, 2).load_state_dict(ElasticDataLoader(saved, 2).state_dict())
