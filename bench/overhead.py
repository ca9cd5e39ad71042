"""The cost of AdaScale: step time relative to plain DistributedDataParallel, and FairScale's.

    OMP_NUM_THREADS=1 python bench/overhead.py [--optimizer adamw] [--blocks 15] [--steps 8] [networks ...]
    python bench/overhead.py --device cuda [--profile] [--blocks 3] [networks ...]

Two gloo ranks on this machine, or `--ranks`, one thread each. SGD with momentum 0.9, or AdamW (fused). All
contenders are in one process per rank and take turns in short runs of steps, in an order that changes
from block to block.
Each turn is next to a turn of plain DDP, so that other load of the machine affects both in the same way.
Printed are the median over all turns of the ratio of step times, with its quartiles, and the median ratio of
processor times, which does not depend on other load.

Contenders: `adascale` (default settings with `model=ddp`, after its first 100 steps), `every step`
(`sample_every=1`), `without model` (default settings, without `model=`), `observe` (as `adascale`, but the
optimizer makes plain steps, and AdaScale only measures), `fairscale`, `hook` (a plain
communication hook in Python that reads each bucket before and after its all-reduce, for comparison), and
`plain again`, which shows the difference between two equal contenders.

With `--device cuda`, networks and data are on GPUs, and the ranks use NCCL if each has a GPU of its own.
Otherwise both use one GPU and exchange gradients with gloo through the memory of the host, which makes every
step longer. A turn begins and ends when the GPU has done all its work; between its steps nothing waits. The
processor time of a turn ends with the last launch: it includes waits for the GPU within steps, but not the
one at the end. The networks are `resnet18` and `transformer`, unless others are given. `transformer` needs
1.6 GB for each contender in each rank, with AdamW 2 GB, and memory for activations.

With `--profile`, counts per step are printed instead of times, by torch.profiler on rank 0: operators, also
those that other operators call, and of these `aten::item` and `aten::_local_scalar_dense`, which read a
number; on a GPU also kernels, copies, and the calls of CUDA that wait for the GPU. Operators are counted in
the threads of forward and backward passes, calls of CUDA in all threads.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import device_option
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import GradBucket
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from adascale_worker.adascale import AdaScale
from adascale_worker.membership.process_group import backend_of
from adascale_worker.process.device import select_device
from adascale_worker.scaling.statistics.steps import FIRST_STEPS, MAX_INTERVAL

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


class ResidualBlock(nn.Module):
    """Two convolutions, and a shortcut that has one if the shapes differ (He et al. 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet18() -> tuple[nn.Module, Tensor, int]:
    """ResNet-18 for images of 32x32: its first convolution is 3x3, and no pooling follows it."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inside = 64
    for outside in (64, 128, 256, 512):
        layers += [
            ResidualBlock(inside, outside, 1 if outside == 64 else 2),
            ResidualBlock(outside, outside, 1),
        ]
        inside = outside
    return (
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)),
        torch.randn(128, 3, 32, 32),
        10,
    )


class Transformer(nn.Module):
    """A decoder: 12 layers of causal attention and of width 768, as in GPT-2's smallest.

    Its input is the tokens of all sequences, one sequence after another, and its output the logits of each.
    """

    def __init__(self, vocabulary: int, length: int, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.length = length
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(12)
        )
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary)
        # Not a buffer, because DDP broadcasts buffers in each forward pass.
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x.view(-1, self.length)) + self.position.weight
        for layer in self.layers:
            h = layer(h, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.logits(self.norm(h).flatten(0, 1))
        return logits


def transformer() -> tuple[nn.Module, Tensor, int]:
    vocabulary, length, sequences = 10_000, 256, 8
    return (
        Transformer(vocabulary, length),
        torch.randint(vocabulary, (sequences * length,)),
        vocabulary,
    )


NETWORKS = {"wide": wide, "deep": deep, "conv": conv, "resnet18": resnet18, "transformer": transformer}
DEFAULT_NETWORKS = {"cpu": ("wide", "deep", "conv"), "cuda": ("resnet18", "transformer")}


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


def observed(model: DistributedDataParallel, inner: torch.optim.Optimizer) -> Any:
    AdaScale(inner, model=model, observe=lambda _: None)
    return inner


CONTENDERS: dict[str, Callable[[DistributedDataParallel, torch.optim.Optimizer], Any]] = {
    "plain": lambda _, inner: inner,
    "plain again": lambda _, inner: inner,
    "adascale": lambda model, inner: AdaScale(inner, model=model),
    "every step": lambda model, inner: AdaScale(inner, model=model, sample_every=1),
    "without model": lambda _, inner: AdaScale(inner),
    "observe": observed,
    "hook": with_hook,
    "fairscale": fairscale,
}


def stepper(contender: str, network: str, optimizer_name: str, device: torch.device) -> Step:
    torch.manual_seed(0)
    with device:
        model, x, classes = NETWORKS[network]()
        y = torch.randint(classes, (x.shape[0],))
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = CONTENDERS[contender](wrapped, OPTIMIZERS[optimizer_name](model.parameters()))
    loss_of = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(wrapped(x), y).backward()
        optimizer.step()

    return step


def measure(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    device = select_device(options.device, rank)
    backend = backend_of(device, share_a_gpu=torch.cuda.device_count() < options.ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if rank == 0:
            print(
                f"ranks: {options.ranks}, with {backend}; rank 0 uses {torch.cuda.get_device_name(device)}",
                flush=True,
            )
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    results: dict[str, Any] = {}
    for network in options.networks:
        steps = {name: stepper(name, network, options.optimizer, device) for name in options.contenders}
        for name, step in steps.items():
            for _ in range(
                FIRST_STEPS + MAX_INTERVAL if name in ("adascale", "without model", "observe") else 8
            ):
                step()
        if options.profile:
            counts = {
                name: profile_steps(step, options.steps, device, is_recorded=rank == 0)
                for name, step in steps.items()
            }
            results[network] = counts
            if rank == 0:
                show_counts(network, counts)
        else:
            turns = take_turns(steps, options, device)
            results[network] = turns
            if rank == 0:
                show(network, turns)
    if rank == 0 and options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def take_turns(
    steps: dict[str, Step], options: argparse.Namespace, device: torch.device
) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {name: [] for name in steps if name != "plain"}
    order = random.Random(0)
    for _ in range(options.blocks):
        names = list(turns)
        order.shuffle(names)
        for name in names:
            pair = [(name, steps[name]), ("plain", steps["plain"])]
            order.shuffle(pair)
            taken = {which: take_turn(step, options.steps, device) for which, step in pair}
            turns[name].append(taken[name] + taken["plain"])
    return turns


def meet(device: torch.device) -> None:
    """Wait for the work of this rank's GPU, and then for the other rank."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def take_turn(step: Step, count: int, device: torch.device) -> tuple[float, float]:
    """Return seconds and processor seconds of a step; waits for the other rank before and after the turn."""
    meet(device)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    end_cpu = time.process_time()
    meet(device)
    end = time.perf_counter()
    # A thread that waits for a GPU keeps its processor busy.
    if device.type != "cuda":
        end_cpu = time.process_time()
    return (end - begin) / count, (end_cpu - begin_cpu) / count


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls of CUDA that wait for the GPU, in the profiler's names."""
READS = ("aten::item", "aten::_local_scalar_dense")
"""Operators that read a number; on a GPU they wait for it."""


def profile_steps(step: Step, count: int, device: torch.device, *, is_recorded: bool) -> dict[str, float]:
    """Make steps and return counts per step of what the profiler saw in them; none if not recorded."""
    meet(device)
    if not is_recorded:
        for _ in range(count):
            step()
        return {}
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiled, record_function("all steps"):
        for _ in range(count):
            step()
    events = profiled.events()
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    # The profiler itself waits for the GPU after the last step.
    (span,) = [event.time_range for event in on_host if event.name == "all steps"]
    calls = Counter(event.name for event in on_host if span.start <= event.time_range.start <= span.end)
    counts = {"operators": sum(number for name, number in calls.items() if name.startswith("aten::"))}
    counts |= {name: calls[name] for name in READS}
    if device.type == "cuda":
        # The profiler also repeats ranges that a program named, such as "all steps", as events of the GPU.
        ranges = {event.name for event in on_host}
        on_device = [event.name for event in events if event.device_type == DeviceType.CUDA]
        copies = sum(name.startswith("Memcpy") for name in on_device)
        fills = sum(name.startswith("Memset") for name in on_device)
        named = sum(name in ranges for name in on_device)
        counts |= {"kernels": len(on_device) - copies - fills - named, "memcpys": copies}
        counts |= {name: calls[name] for name in WAITS}
    return {name: number / count for name, number in counts.items()}


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


def show_counts(network: str, counts: dict[str, dict[str, float]]) -> None:
    print(f"{network}: counts per step")
    for name, own in counts.items():
        print(
            f"  {name:14} " + "   ".join(f"{what} {number:.2f}" for what, number in own.items()), flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("networks", nargs="*", help="any of " + ", ".join(NETWORKS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--optimizer", default="sgd", choices=list(OPTIMIZERS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=15, help="turns of each contender")
    parser.add_argument(
        "--steps",
        type=int,
        default=MAX_INTERVAL,
        help="steps of a turn; a multiple of the interval between measured steps",
    )
    parser.add_argument("--profile", action="store_true", help="count operators and kernels instead of times")
    parser.add_argument("--json", help="where to write all times, or counts")
    device_option.add_to(parser)
    options = parser.parse_args()
    device_option.check(parser, options.device)
    options.networks = options.networks or DEFAULT_NETWORKS[options.device]
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (f"{folder}/store", options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
