"""Measures what the loss of a process costs if a replica has several, beside torchft and FSDP2 alone.

    .venv/bin/python bench/sharded_recovery.py [--gb 1] [--rounds 3] [--processes 2] [--torchft PYTHON]

Two replicas of `--processes` processes train a model with `fully_shard`, whose weights and moments of AdamW
are `--gb` GB together, with agents and a metrics service. When both train, a process of the second is killed
(SIGKILL): in round r the one with index r mod `--processes`. In seconds:

- next: from the kill to the next step of the other replica; a usual step of it is a part of it;
- repeated steps: steps that were made twice; lost samples: those that the program was given and that are in
  no step that was made, without the last batch of each process; repeated samples: those in several steps;
- still: the longest time between two steps while the replacement joins, less a usual step. The bar is twice
  that of `broadcast`: as many broadcasts at the same time as a replica has processes, each of a process's
  part of the state to one other process, with gloo.

Peaks of resident memory of the largest process, less what it had after its imports:

- training: of FSDP2 alone, of one replica and of two, in a few steps; the bar is FSDP2's and a tenth of a
  process's part of the state. The first replica saves a checkpoint after its first step, and keeps the memory
  of the copy. The peak of its first process is given separately;
- join: until `program_reentry` of the joining replica returns, in parts of the state; the bar is 2.

With --torchft, the same with torchft's manager, two replica groups of as many processes, and a heartbeat
timeout of one second: `sharded_recovery_torchft.py`. A group is ended when one of its processes is lost, as
torchrun does, and started again once the other has made some steps alone.
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import launch
import rescale
import sharded_recovery_model as shared
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "sharded_recovery_program.py"
TORCHFT_PROGRAM = FOLDER / "sharded_recovery_torchft.py"
LINGER = 7
"""Steps of each replica before a change."""

Values = Iterator[tuple[str, float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torchft", type=Path, metavar="PYTHON", help="the Python of an environment with it")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends the processes, too.
    os.environ["BENCH_GB"] = str(arguments.gb)
    results: dict[str, dict[str, list[float]]] = {}
    processes = arguments.processes
    for number in range(arguments.rounds):
        victim = number % processes
        contenders: dict[str, Callable[[Path], Values]] = {
            "adascale": partial(by_agents, processes=processes, victim=victim),
            "FSDP2": partial(by_fsdp, processes=processes),
            "broadcast": partial(broadcast, processes=processes, gigabytes=arguments.gb),
        }
        if arguments.torchft:
            contenders["torchft"] = partial(
                by_torchft, python=arguments.torchft, processes=processes, victim=victim
            )
        for name, measure in contenders.items():
            with tempfile.TemporaryDirectory() as path:
                folder = Path(path)
                try:
                    for what, value in measure(folder):
                        results.setdefault(name, {}).setdefault(what, []).append(value)
                        print(f"[{number}] {name}: {what} {value:.3f}", file=sys.stderr, flush=True)
                except (TimeoutError, launch.EndedError) as error:
                    log = (folder / "log").read_text(errors="replace")[-3000:]
                    sys.exit(f"{name}: {error}. The end of the output of its processes:\n{log}")
    print(f"{arguments.gb:g} GB, replicas of {arguments.processes} processes; load {os.getloadavg()[1]:.0f}")
    print(rescale.table(results, arguments.rounds))


# -- what the records show --------------------------------------------------------------------------------


def peaks(folder: Path, name: str, pids: Sequence[int] | None = None) -> dict[int, float]:
    """Return the greatest peak of the processes with each index, less what they had after their imports."""
    found: dict[int, float] = {}
    for file in folder.glob("memory-*"):
        recorded = json.loads(file.read_text())
        if name in recorded and (pids is None or int(file.name.split("-")[1]) in pids):
            process, peak = int(recorded["process"]), recorded[name] - recorded["imported"]
            found[process] = max(peak, found.get(process, 0.0))
    return found


def replica_pids(folder: Path, rank: int, since: float) -> dict[int, int]:
    """Return the process ids of a replica by the index of the process, as their steps show them."""
    found: dict[int, int] = {}
    for file in [*folder.glob("steps-*"), *folder.glob("others-*")]:
        pid = int(file.name.split("-")[1])
        lines = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines and float(lines[-1][0]) > since and int(lines[-1][4]) == rank:
            memory = json.loads((folder / f"memory-{pid}").read_text())
            found[int(memory["process"])] = pid
    return found


def samples(folder: Path) -> Values:
    """Yield how many samples were lost and repeated, until some steps before the last."""
    made: Counter[int] = Counter()
    drawn: list[int] = []
    for file in folder.glob("samples-*"):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                made.update(json.loads(line)[1])
    for file in folder.glob("drawn-*"):
        lines = file.read_text().splitlines(keepends=True)
        # The last ones may be in steps that are being made.
        drawn += [index for line in lines[:-1] if line.endswith("\n") for index in json.loads(line)]
    yield "kill: lost samples", sum(index not in made for index in set(drawn))
    yield "kill: repeated samples", sum(times > 1 for times in made.values())


# -- contenders -------------------------------------------------------------------------------------------


def by_agents(folder: Path, processes: int, victim: int) -> Values:
    """Kill a process of two replicas with agents."""
    size = shared.LOCAL_BSZ
    spec = {
        "batch_size": size,
        "max_batch_size": 2 * size,
        "local_bsz_bounds": [size, size],
        "max_replicas": 2,
        "processes_per_replica": processes,
    }
    agents: dict[int, subprocess.Popen[bytes]] = {}

    def require_agents() -> None:
        for replica, agent in agents.items():
            if (code := agent.poll()) is not None:
                raise launch.EndedError(f"the agent of replica {replica} has ended with exit code {code}")

    recorded = folder / "steps"
    steps = rescale.Steps(recorded, require_agents)
    with launch.service(folder, lambda _: spec) as (environ, allocate):
        try:
            for generation, count in enumerate([1, 2], start=1):
                decided = time.time()
                allocate(generation, count)
                agents[count - 1] = launch.start(
                    [sys.executable, "-m", "adascale_worker.agent", "--", sys.executable, str(PROGRAM)],
                    folder,
                    {
                        **environ,
                        **launch.settings(spec),
                        "ADASCALE_PROCESSES_PER_REPLICA": str(processes),
                        "CUDA_VISIBLE_DEVICES": "",
                        "BENCH_FOLDER": str(recorded),
                        "ADASCALE_REPLICA": str(count - 1),
                    },
                )
                settled = steps.wait_for(count, LINGER, decided)
                if count == 1:
                    first, *others_of_replica = (
                        peak for _, peak in sorted(peaks(recorded, "training").items())
                    )
                    yield "training: first process, MB", first
                    yield "training: one replica, MB", max(others_of_replica, default=first)
            usual = rescale.step_time(settled)
            yield "a usual step of two replicas", usual
            pids = replica_pids(recorded, 1, decided)
            others = set(replica_pids(recorded, 0, decided).values())
            yield "training: two replicas, MB", max(peaks(recorded, "training", list(pids.values())).values())
            yield "join: parts of the state", part_of_state(recorded, list(pids.values()), processes)
            kill_at = time.time()
            os.kill(pids[victim], signal.SIGKILL)
            yield from rescale.killed(steps, kill_at, pids[0])
            settled = steps.wait_for(2, LINGER, time.time())
            yield from rescale.usual_after(steps, kill_at, pids[0])
            joined = [each for each in steps.read(kill_at) if each.time < settled[0].time]
            if joined and joined[-1].replicas != 2:
                yield from rescale.changed(steps, "joins again", joined[0].time, settled)
            new = [pid for pid in replica_pids(recorded, 1, kill_at).values() if pid not in others]
            yield "join: parts of the state", part_of_state(recorded, new, processes)
            yield from samples(recorded)
        finally:
            for agent in agents.values():
                agent.kill()
                agent.wait()


def part_of_state(folder: Path, pids: Sequence[int], processes: int) -> float:
    """Return the greatest memory of a join as a multiple of a process's part of the state."""
    return max(peaks(folder, "joined", pids).values()) / (float(os.environ["BENCH_GB"]) * 1000 / processes)


def by_fsdp(folder: Path, processes: int) -> Values:
    """Train with FSDP2 alone."""
    recorded = folder / "steps"
    steps = rescale.Steps(recorded)
    running = start_group(
        [sys.executable, str(PROGRAM), "--plain"], folder, processes, {"BENCH_FOLDER": str(recorded)}
    )
    try:
        settled = steps.wait_for(1, LINGER, 0.0)
        yield "training: one replica, MB", max(peaks(recorded, "training").values())
        yield "a usual step of one replica", rescale.step_time(settled)
    finally:
        end(running)


def by_torchft(folder: Path, python: Path, processes: int, victim: int) -> Values:
    """Kill a process of two replica groups of torchft."""
    recorded = folder / "steps"
    steps = rescale.Steps(recorded)
    lighthouse, address = launch.start_lighthouse(folder, python, heartbeat_ms=1000)
    groups: dict[int, list[subprocess.Popen[bytes]]] = {}

    def start(group: int) -> None:
        environ = {
            "BENCH_FOLDER": str(recorded),
            "BENCH_GROUPS": "2",
            "REPLICA": str(group),
            "TORCHFT_LIGHTHOUSE": address,
            "PYTHONPATH": str(FOLDER),
        }
        groups[group] = start_group([str(python), str(TORCHFT_PROGRAM)], folder, processes, environ)

    try:
        start(0)
        start(1)
        settled = steps.wait_for(2, LINGER, 0.0)
        yield "a usual step of two replicas", rescale.step_time(settled)
        kill_at = time.time()
        lost = groups.pop(1)
        lost[victim].kill()
        end(lost)
        yield from rescale.killed(steps, kill_at, lost[0].pid)
        steps.wait_for(1, 3, time.time())
        yield from rescale.usual_after(steps, kill_at, lost[0].pid)
        decided = time.time()
        start(1)
        settled = steps.wait_for(2, LINGER, decided)
        yield from rescale.changed(steps, "joins again", decided, settled)
        yield from samples(recorded)
    finally:
        end([*(process for group in groups.values() for process in group), lighthouse])


def start_group(
    command: list[str], folder: Path, processes: int, environ: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a group with the variables of torchrun."""
    port = str(launch.free_port())
    variables = {
        **environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(processes),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return [
        launch.start(command, folder, {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def broadcast(folder: Path, processes: int, gigabytes: float) -> Values:
    """Broadcast the parts of the state at the same time, each to one other process."""
    spawn(_broadcast, (str(folder / "store"), processes, gigabytes), nprocs=2 * processes)
    yield "joins again: still", float((folder / "seconds").read_text())


def _broadcast(rank: int, store: str, processes: int, gigabytes: float) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2 * processes)
    lanes: list[Any] = [dist.new_group([lane, processes + lane]) for lane in range(processes)]
    lane = rank % processes
    blocks = round(gigabytes * shared.BLOCKS_PER_GB)
    tensors = [torch.ones(shared.WIDTH // processes, shared.WIDTH) for _ in range(3 * blocks)]
    times = []
    for _ in range(3):
        dist.barrier()
        begun = time.perf_counter()
        for tensor in tensors:
            dist.broadcast(tensor, src=lane, group=lanes[lane])
        dist.barrier()
        times.append(time.perf_counter() - begun)
    if rank == 0:
        (Path(store).parent / "seconds").write_text(str(median(times)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
