"""The cost per step of what makes a job elastic: processor time relative to the same trainer without agents.

    OMP_NUM_THREADS=1 python bench/elastic_overhead.py [--blocks 30] [--steps 32] [networks ...]
    python bench/elastic_overhead.py --device cuda [--blocks 30] [--steps 32] [networks ...]

Two replicas on this machine, or `--replicas`, with gloo and one thread each, in processes of their own for
each contender. All take turns in short runs of steps, in an order that changes from block to block, and wait
between their turns. Printed are the medians over all blocks of the ratio of processor times per step of all
replicas, with its quartiles, and the processor time itself.

Contenders: `plain` (DistributedDataParallel and SGD with momentum), `plain again`, which shows the difference
between two equal contenders, `trainer` (ElasticTrainer without agents), and `elastic` (ElasticTrainer with
agents and a metrics service). All load the same samples with DataLoader.

With `--device cuda`, networks are on GPUs, and the time of a step is measured instead of processor time,
until the GPU has made it. The replicas use NCCL if each has a GPU of its own; otherwise they share one, with
gloo.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import device_option
import launch
import overhead
import rescale_model
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from adascale import ElasticTrainer
from adascale_worker.membership.process_group import backend_of
from adascale_worker.process.device import select_device
from adascale_worker.scaling.statistics.steps import FIRST_STEPS, MAX_INTERVAL

CONTENDERS = ("plain", "plain again", "trainer", "elastic")
NETWORKS = ("tiny", "wide", "deep", "conv", "resnet18")
DEFAULT_NETWORKS = {"cpu": ("tiny", "wide", "deep", "conv"), "cuda": ("tiny", "resnet18")}
LOCAL_BSZ = 32
SAMPLES = 64 * LOCAL_BSZ
WARM_UP = FIRST_STEPS + MAX_INTERVAL
"""Steps before the first turn."""
POLL = 0.002


def spec_of(replicas: int) -> dict[str, Any]:
    """Declare a job that always has so many replicas, with one batch of the same size each."""
    return {
        "batch_size": LOCAL_BSZ,
        "max_batch_size": replicas * LOCAL_BSZ,
        "local_bsz_bounds": [LOCAL_BSZ, LOCAL_BSZ],
        "min_replicas": replicas,
        "max_replicas": replicas,
    }


# -- the processes that are measured ----------------------------------------------------------------------


def network_of(name: str) -> tuple[nn.Module, TensorDataset]:
    """Return a network, and samples for it."""
    torch.manual_seed(0)
    if name == "tiny":
        model, _ = rescale_model.make("tiny")
        shape, classes = torch.Size([rescale_model.FEATURES["tiny"]]), 2
    else:
        model, x, classes = overhead.NETWORKS[name]()
        shape = x.shape[1:]
    return model, TensorDataset(torch.randn(SAMPLES, *shape), torch.randint(classes, (SAMPLES,)))


class Turns:
    """Waits for the turns of a process, and records its processor time per step, or on a GPU the time."""

    def __init__(self, folder: Path, contender: str, steps: int, device: torch.device) -> None:
        self._device = device
        self._folder = folder
        self._contender = contender
        self._steps = steps
        self._made = -WARM_UP
        self._turn = 0
        self._begin = 0.0

    def step(self) -> None:
        """Count a step. Between two turns, wait."""
        self._made += 1
        if self._made >= 0 and self._made % self._steps == 0:
            if self._made:
                seconds = (self._now() - self._begin) / self._steps
                self._write(f"{self._turn} {seconds}")
            else:
                self._write("ready")
            self._turn += 1
            self._wait()
            self._begin = self._now()

    def _now(self) -> float:
        if self._device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _write(self, line: str) -> None:
        with (self._folder / f"{self._contender}-{os.getpid()}").open("a") as file:
            file.write(line + "\n")

    def _wait(self) -> None:
        gate = self._folder / f"{self._contender}.{self._turn}"
        while not gate.exists():
            time.sleep(POLL)


def run(contender: str, network: str, folder: Path, steps: int, device_type: str, replicas: int) -> None:
    """Train as a contender, until the process is killed."""
    torch.set_num_threads(1)
    device = select_device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
    model, dataset = network_of(network)
    model.to(device)
    turns = Turns(folder, contender, steps, device)
    loss_of = nn.CrossEntropyLoss()

    def train(batches: Iterator[list[Tensor]], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            turns.step()

    if contender.startswith("plain"):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend_of(device, share_a_gpu=torch.cuda.device_count() < replicas))
        parallel = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        optimizer = overhead.sgd(model.parameters())
        while True:
            train(iter(DataLoader(dataset, batch_size=LOCAL_BSZ, shuffle=True)), parallel, optimizer)
    trainer = ElasticTrainer(
        batch_size=LOCAL_BSZ,
        max_batch_size=replicas * LOCAL_BSZ,
        local_bsz_bounds=(LOCAL_BSZ, LOCAL_BSZ),
        device=device,
    )
    optimizer = overhead.sgd(model.parameters())
    state = trainer.program_reentry(model, optimizer)
    for epoch in itertools.count(state.epoch):
        train(iter(trainer.dataloader(dataset)), model, optimizer)
        trainer.step(epoch)


# -- the measurement --------------------------------------------------------------------------------------


def start(
    contender: str, network: str, folder: Path, steps: int, device: str, replicas: int, stack: ExitStack
) -> None:
    """Start the processes of a contender."""
    program = [sys.executable, __file__, "--run", contender, "--folder", str(folder), "--steps", str(steps)]
    program += ["--device", device, "--replicas", str(replicas), network]
    environ = {"OMP_NUM_THREADS": "1"}

    def begin(command: list[str], own: dict[str, str]) -> None:
        own_folder = folder / f"logs-{contender}"
        own_folder.mkdir(exist_ok=True)
        process = launch.start(command, own_folder, {**environ, **own})
        stack.callback(process.wait)
        stack.callback(process.kill)

    if contender == "elastic":
        (folder / "service").mkdir()
        service, allocate = stack.enter_context(launch.service(folder / "service", spec_of))
        allocate(1, replicas)
        for replica in range(replicas):
            command = [sys.executable, "-m", "adascale_worker.agent", "--", *program]
            begin(
                command,
                {**service, **device_option.environment(device, replica), "ADASCALE_REPLICA": str(replica)},
            )
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for rank in range(replicas):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(replicas)}
        local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(replicas)}
        begin(program, {**ranks, **local, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})


def lines_of(folder: Path, contender: str, number: int, replicas: int) -> list[str]:
    """Return line `number` of each process of a contender, once all have written it."""

    def written() -> list[str]:
        files = [
            path
            for path in folder.glob(f"{contender}-*")
            if path.name.removeprefix(f"{contender}-").isdigit()
        ]
        lines = [path.read_text().splitlines(keepends=True) for path in files]
        complete = [each[number] for each in lines if len(each) > number and each[number].endswith("\n")]
        return complete if len(complete) == replicas else []

    return launch.wait_until(written, f"{contender}, turn {number}")


def measure(network: str, blocks: int, steps: int, device: str, replicas: int) -> dict[str, list[float]]:
    """Return the seconds per step of all replicas of each contender, by block: of processors, or on GPUs."""
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        for contender in CONTENDERS:
            start(contender, network, folder, steps, device, replicas, stack)
            lines_of(folder, contender, 0, replicas)
        for block in range(1, blocks + 1):
            for contender in order.sample(CONTENDERS, len(CONTENDERS)):
                (folder / f"{contender}.{block}").touch()
                lines = lines_of(folder, contender, block, replicas)
                found[contender].append(sum(float(line.split()[1]) for line in lines))
    return found


def show(network: str, found: dict[str, list[float]], device: str) -> None:
    """Print the ratios of a network."""
    measured = "processor time" if device == "cpu" else "time"
    print(f"{network}: milliseconds of {measured} of a step of all replicas, median")
    for name, seconds in found.items():
        print(f"  {name:24} {1e3 * statistics.median(seconds):8.3f}")
    print("  ratio")
    for above, below in (
        ("plain again", "plain"),
        ("trainer", "plain"),
        ("elastic", "plain"),
        ("elastic", "trainer"),
    ):
        ratios = [x / y for x, y in zip(found[above], found[below], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"  {above + ' / ' + below:24} {middle:8.3f}  ({low:.3f} to {high:.3f})", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("networks", nargs="*", help="any of " + ", ".join(NETWORKS))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=30, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=MAX_INTERVAL, help="steps of a turn")
    parser.add_argument("--json", type=Path, help="where to write all times")
    parser.add_argument("--run", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    device_option.add_to(parser)
    options = parser.parse_args()
    device_option.check(parser, options.device)
    if options.run:
        run(options.run, options.networks[0], options.folder, options.steps, options.device, options.replicas)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends the processes, too.
    results = {
        network: measure(network, options.blocks, options.steps, options.device, options.replicas)
        for network in options.networks or DEFAULT_NETWORKS[options.device]
    }
    for network, found in results.items():
        show(network, found, options.device)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
