"""Measures how long training stands still when the number of replicas changes, and when a replica is killed.

    .venv/bin/python bench/rescale.py [--state tiny|1GB] [--rounds 3] [--torchft PYTHON] [--torchrun]
    .venv/bin/python bench/rescale.py --state 0.1GB|0.4GB|1.5GB --compute 0.5 --counts 1,2,1,2
    .venv/bin/python bench/rescale.py --program FILE [--spec JSON] [--counts 1,2,1] [--kill RANK] [--json]
    .venv/bin/python bench/rescale.py --device cuda [options as above]

A program runs through replica counts with agents and a metrics service, as `adascale run` and the operator
start them. When the largest count is reached for the first time, the trainer of a rank is killed (SIGKILL).
Without --program it is a classifier with SGD and momentum: `tiny`, or two Linear(8192, 8192), whose weights
and momentum are 1 GB. Its replicas have one batch of 8 samples in each step, at any count, as torchft's do:
with a declaration that leaves a choice, some steps would have several, and take several times as long. A
change that the run has made before is named `again`. For each change the output has, in seconds:

- still: the longest time between two steps, of any replicas, around the first at the new count, until all
  replicas have made steps at it, less the median time of a step at the count of the second of the two;
- slowest: the longest of the steps from the decision on, less the median, also those during which a replica
  that joins gets the state; extra: what all of them took longer than the median, together;
- undisturbed: the same for as many steps before the decision. So much of `still` can be noise;
- decision: from the decision to the first step at the new count, which for a larger count includes the start
  of processes;
- after a kill, next: from the kill to the first step of the others in another generation, what a usual step
  of theirs takes then, which is a part of it, and the steps made twice; still: as above, when the replacement
  joins.

Beside it run: with --torchft, the same model with torchft (`rescale_torchft.py` has its environment), one
replica group of size 1 for each replica, on gloo, with a heartbeat timeout of --heartbeat-timeout-ms; with
--torchrun, the same program, terminated and started again by torchrun; and with 1GB, a broadcast of tensors
of the size of the state among as many processes, with gloo. All use the huge pages that an agent chooses.

With `--device cuda`, each replica has a GPU of its own, and all use NCCL. With fewer GPUs than replicas,
AdaScale's and the broadcast share them and use gloo; torchft needs enough. A step then ends when the GPU has
made it. With the default, no process sees a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import device_option
import overhead
import rescale_model
import torch
import torch.distributed as dist
from launch import TIMEOUT, EndedError, Spec, service, settings, start, start_lighthouse, wait_until
from torch.multiprocessing.spawn import spawn

from adascale_worker.membership.process_group import backend_of
from adascale_worker.process.device import select_device

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "rescale_program.py"
TORCHFT_PROGRAM = FOLDER / "rescale_torchft.py"
STATE_TENSORS = [(8192, 8192)] * 4
LINGER = {"tiny": 50, "1GB": 8, "0.1GB": 8, "0.4GB": 8, "1.5GB": 8}
"""Steps of each replica at a count before the next change. The first steps of a process map its memory."""

Measured = dict[str, list[float]]
"""What was measured -> its values."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", choices=list(LINGER), default="tiny")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds for which each step waits")
    parser.add_argument("--program", type=Path, help="a training program, instead of the one of --state")
    parser.add_argument(
        "--spec", type=json.loads, help="its declaration: the body of PUT /jobs/<id>; default: see above"
    )
    parser.add_argument("--counts", default="1,2,4,2,1", help="replica counts, in order")
    parser.add_argument("--kill", type=int, metavar="RANK", help="the rank to kill at the largest count")
    parser.add_argument("--steps", type=int, help="steps of each replica at a count before the next change")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torchft", type=Path, metavar="PYTHON", help="the Python of an environment with it")
    parser.add_argument(
        "--heartbeat-timeout-ms", type=int, default=1000, help="of torchft; its default is 5000"
    )
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--json", action="store_true", help="print all values as JSON")
    device_option.add_to(parser)
    arguments = parser.parse_args()
    device_option.check(parser, arguments.device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends the processes, too.
    counts = [int(count) for count in arguments.counts.split(",")]
    if arguments.kill is not None and not 0 <= arguments.kill < max(counts):
        parser.error(
            f"--kill must be a rank of the largest count, 0 to {max(counts) - 1}, got {arguments.kill}"
        )
    linger, device = arguments.steps or LINGER[arguments.state], arguments.device
    os.environ["BENCH_STATE"], os.environ["BENCH_COMPUTE"] = arguments.state, str(arguments.compute)
    command = [sys.executable, str(arguments.program or PROGRAM)]
    spec: Spec = (lambda _: arguments.spec) if arguments.spec is not None else one_batch_each
    contenders: dict[str, Callable[[Path], Iterator[tuple[str, float]]]] = {
        "adascale": lambda folder: by_agents(folder, command, spec, counts, arguments.kill, linger, device)
    }
    if arguments.torchft:
        contenders["torchft"] = lambda folder: by_torchft(
            folder, arguments.torchft, counts, arguments.kill, linger, arguments.heartbeat_timeout_ms, device
        )
    if arguments.torchrun:
        contenders["torchrun"] = lambda folder: by_torchrun(folder, command, spec, counts, linger, device)
    if arguments.state == "1GB":
        contenders["broadcast"] = lambda folder: broadcast(folder, sorted(set(counts) - {1}), device)
    results: dict[str, Measured] = {name: {} for name in contenders}
    for _ in range(arguments.rounds):
        for name, measure in contenders.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    for what, seconds in measure(Path(folder)):
                        results[name].setdefault(what, []).append(seconds)
                except (TimeoutError, EndedError) as error:
                    log = (Path(folder) / "log").read_text(errors="replace")[-3000:]
                    sys.exit(f"{name}: {error}. The end of the output of its processes:\n{log}")
    if arguments.json:
        print(
            json.dumps({"rounds": arguments.rounds, "state": arguments.state, "seconds": results}, indent=2)
        )
    else:
        print(table(results, arguments.rounds))


def table(results: dict[str, Measured], rounds: int) -> str:
    """Return the medians as text."""
    rows = list(dict.fromkeys(what for measured in results.values() for what in measured))
    lines = [f"median of {rounds} rounds, seconds", " " * 34 + "".join(f"{name:>12}" for name in results)]
    for row in rows:
        values = [measured.get(row) for measured in results.values()]
        lines.append(f"{row:34}" + "".join(f"{median(v):12.3f}" if v else " " * 12 for v in values))
    return "\n".join(lines)


# -- steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A step of one replica."""

    time: float
    step: int
    generation: int
    replicas: int
    rank: int
    pid: int

    @property
    def era(self) -> tuple[int, int]:
        """What changes when the replicas change."""
        return self.generation, self.replicas


class Steps:
    """The steps that all replicas have recorded in a folder."""

    def __init__(self, folder: Path, require_processes: Callable[[], None] = lambda: None) -> None:
        self._folder = folder
        self._require_processes = require_processes
        folder.mkdir(exist_ok=True)

    def read(self, since: float = 0.0) -> list[Step]:
        """Return the steps after a moment, in order of time."""
        steps = []
        for file in self._folder.glob("steps-*"):
            pid = int(file.name.split("-")[1])
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    moment, step, generation, replicas, rank = line.split()
                    if float(moment) > since:
                        steps.append(
                            Step(float(moment), int(step), int(generation), int(replicas), int(rank), pid)
                        )
        return sorted(steps, key=lambda step: step.time)

    def wait_for(self, replicas: int, linger: int, since: float) -> list[Step]:
        """Wait until each of the replicas has made steps at their number; return these steps."""

        def settled() -> list[Step]:
            self._require_processes()
            steps = [step for step in self.read(since) if step.replicas == replicas]
            steps = [step for step in steps if step.era == steps[-1].era]
            by_rank: dict[int, int] = {}
            for step in steps:
                by_rank[step.rank] = by_rank.get(step.rank, 0) + 1
            enough = sum(number >= linger for number in by_rank.values())
            return steps if enough == replicas else []

        return wait_until(settled, f"training on {replicas} replicas")


def step_time(steps: Sequence[Step]) -> float:
    """Return the median time between two steps of a rank; 0 if there are not two."""
    by_rank: dict[int, list[float]] = {}
    for step in steps:
        by_rank.setdefault(step.rank, []).append(step.time)
    times = [later - earlier for moments in by_rank.values() for earlier, later in pairwise(moments)]
    return median(times) if times else 0.0


def changed(steps: Steps, name: str, decided: float, settled: Sequence[Step]) -> Iterator[tuple[str, float]]:
    """Yield what a change took, from the moment of its decision to the steps after it."""
    before = [step for step in steps.read() if step.time <= decided]
    window = [*before[-1:], *steps.read(decided)]
    usual = {settled[-1].replicas: step_time(settled)}
    if before:
        # Also later steps: after a kill, the decision is made at the first.
        at_old_count = [step for step in steps.read() if step.era == before[-1].era]
        usual[before[-1].replicas] = step_time(at_old_count)
    # The first steps of all replicas, and some more.
    ranks = {step.rank for step in settled}
    firsts = [[step for step in settled if step.rank == rank][:3] for rank in ranks]
    end = max(steps_of_rank[-1].time for steps_of_rank in firsts)
    pairs = [(earlier, later) for earlier, later in pairwise(window) if later.time <= end]
    # Also the step before the first at the new count: torchft counts a new replica one step later. A replica
    # records that step too.
    members = {step.pid for step in before[-20:]}
    change = next(
        index
        for index, (_, later) in enumerate(pairs)
        if later.time >= settled[0].time or later.pid not in members
    )
    yield f"{name}: still", longest_wait(pairs[max(change - 1, 0) :], usual)
    yield f"{name}: slowest", longest_wait(pairs, usual)
    yield f"{name}: extra", sum(max(longest_wait([pair], usual), 0.0) for pair in pairs)
    last = [step for step in before if step.era == before[-1].era][-4 * before[-1].replicas - 1 :]
    if len(last) > 1:
        yield f"{name}: undisturbed", longest_wait(list(pairwise(last)), usual)
    yield f"{name}: decision", settled[0].time - decided


def next_name(names: set[str], before: int, count: int) -> str:
    """Return the name of a change, which tells the first one of its kind, and add it to the names."""
    name = f"{before} to {count}"
    if name in names:
        return f"{name}, again"
    names.add(name)
    return name


def longest_wait(pairs: Sequence[tuple[Step, Step]], usual: dict[int, float]) -> float:
    """Return the longest time between two steps, less the usual time of a step at the count of the second."""
    return max(
        [0.0, *(later.time - earlier.time - usual.get(later.replicas, 0.0) for earlier, later in pairs)]
    )


def killed(steps: Steps, kill_at: float, victim: int) -> Iterator[tuple[str, float]]:
    """Yield how long after a kill the others made their next step, and the steps made twice."""
    before = [step for step in steps.read() if step.time <= kill_at]
    era = before[-1].era

    def recovered() -> list[Step]:
        return [step for step in steps.read(kill_at) if step.pid != victim and step.era != era]

    first = wait_until(recovered, "a step after the kill")[0]
    furthest = max(step.step for step in steps.read() if step.time < first.time)
    yield "kill: next", first.time - kill_at
    yield "kill: repeated steps", max(furthest - first.step + 1, 0)


def usual_after(steps: Steps, kill_at: float, victim: int) -> Iterator[tuple[str, float]]:
    """Yield the usual time of a step of those that train on after a kill, if they do."""
    before = [step for step in steps.read() if step.time <= kill_at]
    after = [step for step in steps.read(kill_at) if step.pid != victim and step.era != before[-1].era]
    if usual := step_time([step for step in after if step.era == after[0].era]):
        yield "kill: a usual step then", usual


def one_batch_each(replicas: int) -> dict[str, Any]:
    """Declare a job whose replicas have one batch of the same size in each step, at this number of them."""
    size = rescale_model.LOCAL_BSZ
    return {
        "batch_size": size,
        "max_batch_size": replicas * size,
        "local_bsz_bounds": [size, size],
        "max_replicas": 8,
    }


# -- contenders -------------------------------------------------------------------------------------------


def by_agents(
    folder: Path,
    command: list[str],
    spec: Spec,
    counts: list[int],
    kill: int | None,
    linger: int,
    device: str,
) -> Iterator[tuple[str, float]]:
    """Change the replicas of a program with agents."""
    agents: dict[int, subprocess.Popen[bytes]] = {}

    def require_agents() -> None:
        for replica, agent in agents.items():
            if (code := agent.poll()) is not None:
                raise EndedError(f"the agent of replica {replica} has ended with exit code {code}")

    steps = Steps(folder / "steps", require_agents)
    recorded = [sys.executable, str(FOLDER / "step_times.py"), str(folder / "steps"), *command[1:]]
    with service(folder, spec) as (environ, allocate):
        try:
            before, names = 0, set[str]()
            for generation, count in enumerate(counts, start=1):
                decided = time.time()
                allocate(generation, count)
                for replica in set(range(count)) - set(agents):
                    agents[replica] = start(
                        [sys.executable, "-m", "adascale_worker.agent", "--", *recorded],
                        folder,
                        {
                            **environ,
                            **settings(spec(count)),
                            **device_option.environment(device, replica),
                            "ADASCALE_REPLICA": str(replica),
                        },
                    )
                settled = steps.wait_for(count, linger, decided)
                if before:
                    yield from changed(steps, next_name(names, before, count), decided, settled)
                if kill is not None and count == max(counts):
                    victim = next(step.pid for step in reversed(settled) if step.rank == kill)
                    kill_at = time.time()
                    os.kill(victim, signal.SIGKILL)
                    yield from killed(steps, kill_at, victim)
                    settled = steps.wait_for(count, linger, time.time())
                    yield from usual_after(steps, kill_at, victim)
                    first = settled[0].time
                    joined = [each for each in steps.read(kill_at) if each.time < first]
                    if joined and joined[-1].replicas != count:
                        yield from changed(steps, "kill, joins again", joined[0].time, settled)
                    kill = None
                for replica in [replica for replica in agents if replica >= count]:
                    agents.pop(replica).terminate()
                before = count
        finally:
            for agent in agents.values():
                agent.kill()
                agent.wait()


def by_torchft(
    folder: Path,
    python: Path,
    counts: list[int],
    kill: int | None,
    linger: int,
    heartbeat_ms: int,
    device: str,
) -> Iterator[tuple[str, float]]:
    """Change the replica groups of torchft; a group that leaves is terminated."""
    steps = Steps(folder / "steps")
    lighthouse, address = start_lighthouse(folder, python, heartbeat_ms)
    groups: dict[int, subprocess.Popen[bytes]] = {}
    environ = {
        "BENCH_FOLDER": str(folder / "steps"),
        "TORCHFT_LIGHTHOUSE": address,
        "PYTHONPATH": str(FOLDER),
    }

    def start_group(replica: int) -> None:
        groups[replica] = start(
            [str(python), str(TORCHFT_PROGRAM)],
            folder,
            {**environ, **device_option.environment(device, replica), "REPLICA": str(replica)},
        )

    try:
        before, names = 0, set[str]()
        for count in counts:
            decided = time.time()
            for replica in [replica for replica in groups if replica >= count]:
                groups.pop(replica).terminate()
            for replica in set(range(count)) - set(groups):
                start_group(replica)
            settled = steps.wait_for(count, linger, decided)
            if before:
                yield from changed(steps, next_name(names, before, count), decided, settled)
            if kill is not None and count == max(counts):
                kill_at = time.time()
                victim = groups.pop(kill)
                victim.kill()
                victim.wait()
                yield from killed(steps, kill_at, victim.pid)
                steps.wait_for(count - 1, linger, time.time())
                yield from usual_after(steps, kill_at, victim.pid)
                decided = time.time()
                start_group(kill)
                settled = steps.wait_for(count, linger, decided)
                yield from changed(steps, "kill, joins again", decided, settled)
                kill = None
            before = count
    finally:
        for process in [*groups.values(), lighthouse]:
            process.kill()
            process.wait()


def by_torchrun(
    folder: Path, command: list[str], spec: Spec, counts: list[int], linger: int, device: str
) -> Iterator[tuple[str, float]]:
    """Change the replicas by restarting torchrun, with SIGTERM, so that the program saves."""
    steps = Steps(folder / "steps")
    before, names = 0, set[str]()
    run: subprocess.Popen[bytes] | None = None
    try:
        for count in counts:
            decided = time.time()
            if run is not None:
                run.terminate()
                run.wait(TIMEOUT)
            run = start(
                [
                    *(
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        "--standalone",
                        "--nproc-per-node",
                        str(count),
                    ),
                    *(str(FOLDER / "step_times.py"), str(folder / "steps"), *command[1:]),
                ],
                folder,
                {**settings(spec(count)), **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})},
            )
            settled = steps.wait_for(count, linger, decided)
            if before:
                yield from changed(steps, next_name(names, before, count), decided, settled)
            before = count
    finally:
        if run is not None:
            run.terminate()
            run.wait(TIMEOUT)


def broadcast(folder: Path, counts: Sequence[int], device: str) -> Iterator[tuple[str, float]]:
    """Broadcast tensors of the size of the state among processes."""
    for count in counts:
        store = folder / f"store-{count}"
        spawn(_broadcast_rank, (str(store), count, device), nprocs=count)
        yield f"broadcast of the state among {count}", float(store.with_suffix(".seconds").read_text())


def _broadcast_rank(rank: int, store: str, count: int, device_type: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = select_device(device_type, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = backend_of(device, share_a_gpu=torch.cuda.device_count() < count)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    tensors = [torch.ones(shape, device=device) for shape in STATE_TENSORS]
    rounds = []
    for _ in range(3):
        overhead.meet(device)
        begun = time.perf_counter()
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
        overhead.meet(device)
        rounds.append(time.perf_counter() - begun)
    if rank == 0:
        Path(store).with_suffix(".seconds").write_text(str(median(rounds)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
