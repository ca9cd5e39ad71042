"""The cost of AdaScale: step time relative to plain DistributedDataParallel, and FairScale's.

    OMP_NUM_THREADS=1 python bench/overhead.py [--optimizer adamw] [--blocks 15] [--steps 8] [networks ...]

Two gloo ranks on this machine, one thread each. SGD with momentum 0.9, or AdamW (fused). All contenders are
in one process per rank and take turns in short runs of steps, in an order that changes from block to block.
Each turn is next to a turn of plain DDP, so that other load of the machine affects both in the same way.
Printed are the median over all turns of the ratio of step times, with its quartiles, and the median ratio of
processor times, which does not depend on other load.

Contenders: `adascale` (default settings with `model=ddp`, after its first 100 steps), `every step`
(`sample_every=1`), `without model` (default settings, without `model=`), `fairscale`, `hook` (a plain
communication hook in Python that reads each bucket before and after its all-reduce, for comparison), and
`plain again`, which shows the difference between two equal contenders.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.adascale import AdaScale
from adascale_worker.statistics.sampling import FIRST_STEPS, MAX_INTERVAL

Step = Callable[[], None]
Turn = tuple[float, float, float, float]
"""Seconds and processor seconds of a step of a contender, and of a plain step."""


def wide() -> tuple[nn.Module, Tensor, int]:
    model = nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1000)
    )
    return model, torch.randn(8, 1024), 1000


def deep() -> tuple[nn.Module, Tensor, int]:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(100)]
    return nn.Sequential(*blocks), torch.randn(32, 64), 64


def conv() -> tuple[nn.Module, Tensor, int]:
    layers: list[nn.Module] = []
    for inside, outside in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1, stride=1 if inside == 3 else 2), nn.ReLU()]
    return (
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)),
        torch.randn(32, 3, 32, 32),
        10,
    )


NETWORKS = {"wide": wide, "deep": deep, "conv": conv}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def fairscale(_: DistributedDataParallel, inner: torch.optim.Optimizer) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fairscale.optim import AdaScale as FairScale
    return FairScale(inner)


def with_hook(model: DistributedDataParallel, inner: torch.optim.Optimizer) -> Any:
    """The minimum that a communication hook has to do, without adding up what it reads."""

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(dist.get_world_size())
        torch.dot(buffer, buffer).item()
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None

        def averaged(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            mean = future.value()[0]
            torch.dot(mean, mean).item()
            return mean

        then: torch.futures.Future[Tensor] = work.get_future().then(averaged)
        return then

    model.register_comm_hook(None, hook)
    return inner


CONTENDERS: dict[str, Callable[[DistributedDataParallel, torch.optim.Optimizer], Any]] = {
    "plain": lambda _, inner: inner,
    "plain again": lambda _, inner: inner,
    "adascale": lambda model, inner: AdaScale(inner, model=model),
    "every step": lambda model, inner: AdaScale(inner, model=model, sample_every=1),
    "without model": lambda _, inner: AdaScale(inner),
    "hook": with_hook,
    "fairscale": fairscale,
}


def stepper(contender: str, network: str, optimizer_name: str) -> Step:
    torch.manual_seed(0)
    model, x, classes = NETWORKS[network]()
    y = torch.randint(classes, (x.shape[0],))
    wrapped = DistributedDataParallel(model)
    optimizer = CONTENDERS[contender](wrapped, OPTIMIZERS[optimizer_name](model.parameters()))
    loss_of = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(wrapped(x), y).backward()
        optimizer.step()

    return step


def measure(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = {}
    for network in options.networks:
        steps = {name: stepper(name, network, options.optimizer) for name in options.contenders}
        for name, step in steps.items():
            for _ in range(FIRST_STEPS + MAX_INTERVAL if name in ("adascale", "without model") else 8):
                step()
        turns: dict[str, list[Turn]] = {name: [] for name in steps if name != "plain"}
        order = random.Random(0)
        for _ in range(options.blocks):
            names = list(turns)
            order.shuffle(names)
            for name in names:
                pair = [(name, steps[name]), ("plain", steps["plain"])]
                order.shuffle(pair)
                taken = {which: take_turn(step, options.steps) for which, step in pair}
                turns[name].append(taken[name] + taken["plain"])
        results[network] = turns
        if rank == 0:
            show(network, turns)
    if rank == 0 and options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def take_turn(step: Step, count: int) -> tuple[float, float]:
    """Return seconds and processor seconds of a step; waits for the other rank before and after the turn."""
    dist.barrier()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    dist.barrier()
    return (time.perf_counter() - begin) / count, (time.process_time() - begin_cpu) / count


def show(network: str, turns: dict[str, list[Turn]]) -> None:
    plain = [turn for own in turns.values() for turn in own]
    print(
        f"{network}: plain step {1e3 * statistics.median(turn[2] for turn in plain):.2f} ms, "
        f"{1e3 * statistics.median(turn[3] for turn in plain):.2f} ms of processor time",
        flush=True,
    )
    for name, own in turns.items():
        low, middle, high = statistics.quantiles([turn[0] / turn[2] for turn in own], n=4)
        cpu = statistics.median(turn[1] / turn[3] for turn in own)
        print(f"  {name:14} {middle:.4f}  ({low:.4f} to {high:.4f})   processor {cpu:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help="any of " + ", ".join(NETWORKS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--optimizer", default="sgd", choices=list(OPTIMIZERS))
    parser.add_argument("--blocks", type=int, default=15, help="turns of each contender")
    parser.add_argument(
        "--steps",
        type=int,
        default=MAX_INTERVAL,
        help="steps of a turn; a multiple of the interval between measured steps",
    )
    parser.add_argument("--json", help="where to write all times")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (f"{folder}/store", options), nprocs=2)


if __name__ == "__main__":
    main()
