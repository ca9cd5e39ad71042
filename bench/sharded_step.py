"""The cost of a step of a replica of several processes, relative to FSDP2 alone.

    ADASCALE_PROCESSES_PER_REPLICA=2 torchrun --nproc-per-node 2 bench/sharded_step.py
    ADASCALE_PROCESSES_PER_REPLICA=2 torchrun --nproc-per-node 4 bench/sharded_step.py [--steps 6]

Both contenders are in the same processes and take turns in short runs of steps, in an order that changes
from block to block, after the first 100 steps, each of which AdaScale measures. The contender is a plain loop
with the same model, `fully_shard` and AdamW. With several replicas it averages the reduce-scattered gradients
over the replicas in FSDP's all-reduce hook, where torch's own HSDP does so. Printed are the median over all
blocks of the ratio of step times, and the 95% interval of this median; and the same for the processor time of
the processes of a replica, which other programs on the machine change less. Then the collective calls of a
process in a step and their bytes, means of 20 steps, which depend on nothing but the programs.
"""

import argparse
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer

WARM_UP = 105
"""Steps before the first block; AdaScale measures the first 100."""


def network(mesh: Any, width: int, layers: int) -> nn.Sequential:
    """Return a network of residual width `width`, each of whose layers is sharded."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(layers)
    ]
    model = nn.Sequential(*blocks, nn.Linear(width, 16))
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Make one step."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def plain_step(trainer: ElasticTrainer, arguments: argparse.Namespace, batch: int) -> Callable[[], None]:
    """Return a function that makes a step of FSDP2 alone."""
    model: Any = network(trainer.mesh, arguments.width, arguments.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    group, replicas = trainer.replica_group, trainer.replicas

    def average(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient, group=group)
        gradient.div_(replicas)

    if replicas > 1:
        for module in model.modules():
            if hasattr(module, "set_all_reduce_hook"):
                module.set_all_reduce_hook(average)
    x, y = torch.randn(batch, arguments.width), torch.randint(16, (batch,))
    return lambda: learn(model, optimizer, x, y)


def elastic_step(trainer: ElasticTrainer, arguments: argparse.Namespace) -> Callable[[], None]:
    """Return a function that makes a step of the trainer."""
    model = network(trainer.mesh, arguments.width, arguments.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer.program_reentry(model, optimizer)
    dataset = TensorDataset(torch.randn(1024, arguments.width), torch.randint(16, (1024,)))

    def batches() -> Iterator[list[torch.Tensor]]:
        for _ in trainer.epochs(10**6):
            yield from trainer.dataloader(dataset)

    loaded = batches()
    return lambda: learn(model, optimizer, *next(loaded))


def measure(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Return the seconds of `steps` steps, and the processor seconds of the processes of this replica."""
    dist.barrier()
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    processor = torch.tensor([time.process_time() - used], dtype=torch.float64)
    dist.barrier()
    seconds = time.perf_counter() - begun
    dist.all_reduce(processor)
    return seconds, float(processor)


def describe_ratios(ratios: list[float]) -> str:
    """Return the median of ratios, and its 95% interval."""
    ratios = sorted(ratios)
    # The order statistics between which the median is with 95%, from the binomial distribution.
    margin = round(0.98 * len(ratios) ** 0.5)
    low, high = ratios[len(ratios) // 2 - margin], ratios[min(len(ratios) // 2 + margin, len(ratios) - 1)]
    return f"median ratio {statistics.median(ratios):.3f}, 95% interval {low:.3f} to {high:.3f}"


class Collectives(TorchDispatchMode):
    """Counts collective calls of this process, and the bytes of their whole tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call, and make it."""
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::").strip("_")
            parts = [[each for each in tree_leaves(part) if isinstance(each, torch.Tensor)] for part in args]
            self.calls[name] += 1
            # A gather has the whole tensor as output, and a scatter as input.
            self.bytes[name] += max(sum(each.nbytes for each in part) for part in parts)
        return func(*args, **(kwargs or {}))


def describe_collectives(step: Callable[[], None], steps: int = 20) -> str:
    """Return the mean collective calls of a step."""
    with Collectives() as found:
        for _ in range(steps):
            step()
    return ", ".join(
        f"{found.calls[name] / steps:g} {name} ({found.bytes[name] / steps / 1e6:.3f} MB)"
        for name in sorted(found.calls)
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="samples of a process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trainer = ElasticTrainer(batch_size=arguments.batch * int(os.environ["WORLD_SIZE"]))
    contenders = [elastic_step(trainer, arguments), plain_step(trainer, arguments, arguments.batch)]
    for step in contenders:
        measure(step, WARM_UP)
    ratios: tuple[list[float], list[float]] = ([], [])
    order = random.Random(0)
    for _ in range(arguments.blocks):
        turns = order.sample([0, 1], 2)
        measured = {turn: measure(contenders[turn], arguments.steps) for turn in turns}
        for kind, values in enumerate(ratios):
            values.append(measured[0][kind] / measured[1][kind])
    if trainer.is_main:
        milliseconds = measured[1][0] / arguments.steps * 1000
        print(
            f"{trainer.replicas} replicas: {milliseconds:.0f} ms per plain step; "
            f"load {os.getloadavg()[0]:.0f}"
        )
        print(f"time: {describe_ratios(ratios[0])}")
        print(f"processor time: {describe_ratios(ratios[1])}")
    for name, step in zip(("AdaScale", "FSDP2"), contenders, strict=True):
        described = describe_collectives(step)
        if trainer.is_main:
            print(f"{name}: {described}")
    trainer.finish("measured")


if __name__ == "__main__":
    main()
