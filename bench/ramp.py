"""Language models without a batch-size schedule: AdaScale beside schedules made by hand.

    OMP_NUM_THREADS=1 python bench/ramp.py train [--size 0.5M] [--tokens N] [--seeds 1] [--minutes 30]
    python bench/ramp.py times                  measure the steps of 1 to 8 replicas, for the simulated time
    python bench/ramp.py report                 write the table and the picture from the results
    python bench/ramp.py train --size 124M --device cuda

A GPT is trained with AdamW on the bytes of the sources and documents of the packages in `PACKAGES`, as they
are installed; one file of 50, chosen by the hash of its name, is held out. All contenders see the same
sequences in the same order, and all but one train for the same number of tokens. The lr at the small batch
is the best of `Size.lrs`, by the held-out loss at the end of the run; all contenders use it, with their own
scaling. With `train --lr` they use another one, and `report` has the best run of each. The lr's schedule is
a warm-up over 2% of the tokens and a cosine to 10%. A step at scale S has a batch of S times the small
batch; S is a power of two, at most `MAX_SCALE`:

- `small`: S = 1.
- `large, S = 2`, `4` and `8`: the lr is multiplied by the square root of S.
- `doubling`: S = 1, 2 and 4, doubled after 26% and 76% of the tokens, with the lr times the square root of S.
  So OLMo 1B was trained again (arXiv 2505.23971); these two places leave 57% of the steps, as there.
- `Seesaw`: where the cosine has halved the lr again, S doubles, and the lr is that of the warm-up's end over
  the square root of S (arXiv 2510.14717).
- `Euclidean noise`: S is at most the gradient noise scale (McCandlish et al., arXiv 1812.06162), from the
  gradients as they are; the lr times the square root of S.
- `AdaScale, 0.8`, `0.9` and `0.5`: S is the largest whose gain is at least this part of S
  (`efficiency_target`; 0.8 is the default for a length in samples). The optimizer is the worker's own, with
  its rule for AdamW.
- `AdaScale, 0.8, in steps`: the same, with a length in scale-invariant steps, as many as the small batch has.
  The lr's schedule follows the sum of gains, and training ends with that, so it takes more tokens.

With S = 1, those that measure divide each batch into two micro-gradients; otherwise a step has min(S, 8).

Training saves its state every half minute and at the end of `--minutes`, and continues there the next time.
Several processes of the same command divide the runs among them. Results are in bench/ramp.SIZE.json, and
states in build/ramp. `report` lists the steps, and the time that they would take on min(S, 8) replicas, from
the measured step times, to the loss that the small batch ends with.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import device_option
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from adascale_core.batch.gain import GradientEstimate
from adascale_worker.adascale import AdaScale

BENCH = Path(__file__).parent
PACKAGES = ("transformers", "sympy", "scipy", "scikit-learn", "numpy", "matplotlib", "networkx")
SUFFIXES = (".py", ".pyi", ".rst", ".md", ".txt")
MAX_SCALE = 32
MAX_REPLICAS = 8
WARM_UP = 0.02
LAST_LR = 0.1
EVALUATIONS = 40
"""Evaluations in a run, besides that of the end."""


@dataclass(frozen=True)
class Size:
    """A model, its small batch, and how long it is trained.

    Attributes:
        batch_size: B0, in sequences of `context` bytes.
        tokens: of a run.
        lrs: to choose from.
        held_out: sequences of an evaluation.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch_size: int
    tokens: int
    lrs: tuple[float, ...]
    held_out: int = 256


SIZES = {
    "tiny": Size(1, 16, 2, 16, 2, 2_048, (3e-3, 1e-2), 16),
    "0.5M": Size(4, 96, 4, 128, 4, 10_000_000, (1e-3, 2e-3, 4e-3)),
    "1M": Size(5, 128, 4, 128, 4, 20_000_000, (1e-3, 2e-3, 4e-3)),
    "124M": Size(12, 768, 12, 1024, 32, 2_500_000_000, (3e-4, 6e-4, 1.2e-3), 512),
}


# -- data ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and the sequences that are held out."""

    train: Tensor
    held_out: Tensor
    description: dict[str, Any]


def read_text(context: int, packages: tuple[str, ...] = PACKAGES) -> Text:
    """Return the text of the packages, and held-out sequences of `context` + 1 bytes."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    versions = {}
    for package in packages:
        installed = distribution(package)
        versions[package] = installed.version
        for name in sorted(str(file) for file in installed.files or () if file.suffix in SUFFIXES):
            path = Path(str(installed.locate_file(name)))
            if path.is_file():
                is_held_out = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 50 == 0
                parts[is_held_out].append(path.read_bytes() + b"\0")
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    description = {
        "packages": versions,
        "files": [len(part) for part in parts],
        "bytes": [len(train), len(held_out)],
        "sha256": hashlib.sha256(train.numpy().tobytes() + held_out.numpy().tobytes()).hexdigest(),
    }
    return Text(train, held_out.unfold(0, context + 1, context + 1), description)


class Sequences:
    """The sequences of a run, the same for all contenders: number i begins at a place drawn from the seed."""

    def __init__(self, text: Text, context: int, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._starts = torch.randint(len(text.train) - context - 1, (count,), generator=generator)
        self._train, self._span = text.train, torch.arange(context + 1)

    def at(self, first: int, count: int) -> Tensor:
        return self._train[self._starts[first : first + count, None] + self._span].long()


# -- model --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(-2))
        result: Tensor = h + self.mlp(self.norms[1](h))
        return result


class Gpt(nn.Module):
    """Logits of the next byte at each place."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.letter = nn.Embedding(256, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.get_parameter("weight"), std=0.02)
        for block in self.blocks:
            for name in ("out.weight", "mlp.2.weight"):
                nn.init.normal_(block.get_parameter(name), std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.letter(x) + self.place.weight)))
        return logits


def loss_of(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the mean loss in nats. On a GPU, the model computes in bfloat16."""
    with torch.autocast(sequences.device.type, torch.bfloat16, enabled=sequences.is_cuda):
        logits = model(sequences[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW as language models use it: no weight decay for norms and embeddings."""
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 and "blocks" in name]
    others = [p for p in model.parameters() if not any(p is each for each in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


# -- contenders ---------------------------------------------------------------------------------------------


def cosine(share: float) -> float:
    """Return the lr over its maximum after this share of the tokens."""
    if share < WARM_UP:
        return share / WARM_UP
    passed = (share - WARM_UP) / (1 - WARM_UP)
    return LAST_LR + (1 - LAST_LR) * math.cos(math.pi / 2 * passed) ** 2


def power_of_two(limit: float) -> int:
    """Return the largest scale that is not above `limit`."""
    return int(2 ** math.floor(math.log2(min(max(limit, 1.0), MAX_SCALE))))


class Contender:
    """A rule for the scale and the lr of a step.

    Args:
        model, lr: of the small batch.
        parameter: of the rule.
    """

    measures = False
    counts_gains = False
    """Whether a run is as long as the steps of the small batch by the sum of gains, and not by its tokens."""

    def __init__(self, model: nn.Module, lr: float, parameter: float) -> None:
        self.lr, self.parameter, self.scale = lr, parameter, 1
        self.optimizer: torch.optim.Optimizer = adamw(model, lr)

    @property
    def micro_gradients(self) -> int:
        return min(max(self.scale, 2 if self.measures else 1), MAX_REPLICAS)

    def begin(self, share: float) -> None:
        """Choose scale and lr of the next step."""
        self.scale = self.scale_at(share)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.factor(share)

    def scale_at(self, share: float, /) -> int:  # noqa: ARG002
        return int(self.parameter)

    def factor(self, share: float, /) -> float:
        return cosine(share) * math.sqrt(self.scale)

    def step(self) -> float:
        """Make the step, and return its progress."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(self.scale)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]
        self.optimizer.load_state_dict(state["optimizer"])


class Doubling(Contender):
    def scale_at(self, share: float, /) -> int:
        return 1 if share < 0.26 else 2 if share < 0.76 else 4


class Seesaw(Contender):
    def scale_at(self, share: float, /) -> int:
        return 1 if share < WARM_UP else power_of_two(1 / cosine(share))

    def factor(self, share: float, /) -> float:
        return cosine(share) if share < WARM_UP else 1 / math.sqrt(self.scale)


class EuclideanNoise(Contender):
    """Measures with an SGD beside AdamW, whose lr is 0."""

    measures = True

    def __init__(self, model: nn.Module, lr: float, parameter: float) -> None:
        super().__init__(model, lr, parameter)
        self.meter = measured(torch.optim.SGD(model.parameters(), lr=0.0))

    def scale_at(self, _: float, /) -> int:
        estimate = self.meter.estimate
        noise = 1.0 if estimate is None else estimate.grad_var / max(estimate.grad_sqr, 1e-30)
        scale = power_of_two(noise)
        use_scale(self.meter, scale)
        return scale

    def step(self) -> float:
        self.meter.step()
        return super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "meter": self.meter.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        use_scale(self.meter, self.scale)
        self.meter.load_state_dict(state["meter"])


class Ours(Contender):
    measures = True

    def __init__(self, model: nn.Module, lr: float, parameter: float) -> None:
        super().__init__(model, lr, parameter)
        self.optimizer: AdaScale = measured(self.optimizer)

    def scale_at(self, _: float, /) -> int:
        scale = scale_of(self.optimizer.estimate, self.parameter)
        use_scale(self.optimizer, scale)
        return scale

    def factor(self, share: float, /) -> float:
        return cosine(share)

    def step(self) -> float:
        gain = self.optimizer.gain()
        super().step()
        return gain

    def load_state_dict(self, state: dict[str, Any]) -> None:
        use_scale(self.optimizer, state["scale"])
        super().load_state_dict(state)


class OursInSteps(Ours):
    counts_gains = True


def measured(optimizer: torch.optim.Optimizer) -> AdaScale:
    return AdaScale(optimizer, world_size=1, scale=1.0, num_gradients_to_accumulate=2)


def use_scale(optimizer: AdaScale, scale: int) -> None:
    if optimizer.scale != scale:
        optimizer.set_scale(float(scale))
        optimizer.set_num_gradients_to_accumulate(min(max(scale, 2), MAX_REPLICAS))


def scale_of(estimate: GradientEstimate | None, efficiency: float) -> int:
    """Return the largest scale with this efficiency, by the gain that the trainer would choose it by."""
    if estimate is None:
        return 1
    scale = 1
    while 2 * scale <= MAX_SCALE and estimate.cautious.efficiency(2.0 * scale) >= efficiency:
        scale *= 2
    return scale


CONTENDERS: dict[str, tuple[type[Contender], float]] = {
    "small": (Contender, 1),
    "AdaScale, 0.8": (Ours, 0.8),
    "AdaScale, 0.8, in steps": (OursInSteps, 0.8),
    "doubling": (Doubling, 0),
    "Seesaw": (Seesaw, 0),
    "Euclidean noise": (EuclideanNoise, 0),
    "large, S = 2": (Contender, 2),
    "AdaScale, 0.9": (Ours, 0.9),
    "AdaScale, 0.5": (Ours, 0.5),
    "large, S = 4": (Contender, 4),
    "large, S = 8": (Contender, 8),
}


# -- training -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A place on the way of a run.

    Attributes:
        steps: so far, by scale.
        progress: the sum of the gains; of contenders that measure none, of the scales.
        loss: on the held-out sequences, in bits per byte.
    """

    tokens: int
    steps: dict[str, int]
    progress: float
    loss: float


@dataclass
class Run:
    contender: str
    lr: float
    seed: int
    tokens: int
    finished: bool = False
    points: list[Point] = field(default_factory=list)

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Run:
        return cls(**{**members, "points": [Point(**point) for point in members["points"]]})


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor) -> float:
    nats = sum(loss_of(model, part.long()).item() * len(part) for part in held_out.split(64))
    return nats / len(held_out) / math.log(2)


class Trainer:
    """Trains one run in pieces.

    Args:
        size: of the model.
        text: to train on.
        run: to train; gets its points.
        path: of the saved state.
        device: of the model.
    """

    def __init__(self, size: Size, text: Text, run: Run, path: Path, device: torch.device) -> None:
        self.size, self.run, self.path, self.device = size, run, path, device
        torch.manual_seed(run.seed)
        self.model = Gpt(size).to(device)
        kind, parameter = CONTENDERS[run.contender]
        self.contender = kind(self.model, run.lr, parameter)
        self.total = run.tokens // size.context
        longest = self.total * 2 if self.contender.counts_gains else self.total
        self.sequences = Sequences(text, size.context, longest + MAX_SCALE * size.batch_size, run.seed)
        every = len(text.held_out) // size.held_out
        self.held_out = text.held_out[::every][: size.held_out].to(device)
        self.position, self.progress, self.steps = 0, 0.0, dict[str, int]()
        if path.exists():
            state = torch.load(path, weights_only=True, map_location=device)
            self.model.load_state_dict(state["model"])
            self.contender.load_state_dict(state["contender"])
            self.position, self.progress, self.steps = state["position"], state["progress"], state["steps"]
            run.points[:] = [Point(**point) for point in state["points"]]

    def train(self, deadline: float) -> None:
        """Train until the run is finished, or until `deadline`; save the state."""
        saved_at = time.monotonic()
        while self.share < 1:
            if self.share * EVALUATIONS >= len(self.run.points):
                self._evaluate()
            if time.monotonic() > min(deadline, saved_at + 30):
                self._save()
                saved_at = time.monotonic()
                if saved_at > deadline:
                    return
            self._step()
        self._evaluate()
        self.run.finished = True
        self._save()

    @property
    def share(self) -> float:
        """The part of the run that is done."""
        if self.contender.counts_gains:
            return self.progress * self.size.batch_size / self.total
        return self.position / self.total

    def _step(self) -> None:
        contender = self.contender
        contender.begin(self.share)
        count = contender.scale * self.size.batch_size
        batch = self.sequences.at(self.position, count).to(self.device)
        micro = contender.micro_gradients
        for part in batch.chunk(micro):
            (loss_of(self.model, part) / micro).backward()
        self.progress += contender.step()
        self.steps[str(contender.scale)] = self.steps.get(str(contender.scale), 0) + 1
        self.position += count

    def _evaluate(self) -> None:
        loss = evaluate(self.model, self.held_out)
        tokens = self.position * self.size.context
        self.run.points.append(Point(tokens, dict(self.steps), self.progress, loss))

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "contender": self.contender.state_dict(),
            "position": self.position,
            "progress": self.progress,
            "steps": self.steps,
            "points": [asdict(point) for point in self.run.points],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)


@dataclass
class Results:
    """What `train` and `times` have measured, as a file."""

    path: Path
    text: dict[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    times: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Results:
        if not path.exists():
            return cls(path)
        members = json.loads(path.read_text())
        return cls(path, members["text"], [Run.from_json(run) for run in members["runs"]], members["times"])

    def write(self) -> None:
        """Write the file; what other processes have written since is kept."""
        with locked(self.path.with_suffix(".lock")):
            self._read_again()
            members = {"text": self.text, "runs": [asdict(run) for run in self.runs], "times": self.times}
            self.path.write_text(json.dumps(members, indent=1) + "\n")

    def _read_again(self) -> None:
        for theirs in Results.read(self.path).runs:
            ours = self.run(theirs.contender, theirs.lr, theirs.seed, theirs.tokens)
            if len(theirs.points) > len(ours.points):
                ours.points, ours.finished = theirs.points, theirs.finished

    def run(self, contender: str, lr: float, seed: int, tokens: int) -> Run:
        wanted = Run(contender, lr, seed, tokens)
        for run in self.runs:
            if (run.contender, run.lr, run.seed, run.tokens) == (contender, lr, seed, tokens):
                return run
        self.runs.append(wanted)
        return wanted

    def best_lr(self, tokens: int) -> float:
        """Return the lr with the lowest loss of the small batch, of the first seed."""
        tuned = [
            run
            for run in self.runs
            if run.finished and (run.contender, run.seed, run.tokens) == ("small", 0, tokens)
        ]
        return min(tuned, key=lambda run: run.points[-1].loss).lr


def train_all(options: argparse.Namespace, results: Results) -> None:
    size: Size = SIZES[options.size]
    tokens, deadline = options.tokens or size.tokens, time.monotonic() + 60 * options.minutes
    text = read_text(size.context)
    if results.text and results.text != text.description:
        raise SystemExit(f"{results.path} has results with another text; move it away to begin again")
    results.text = text.description

    def train(wanted: list[tuple[str, float, int]]) -> bool:
        """Train these runs; first those that no other process trains."""
        for wait in (False, True):
            for contender, lr, seed in wanted:
                name = f"{contender.replace(' ', '_')}-{lr:g}-{seed}-{tokens}.pt"
                path: Path = options.states / options.size / name
                with locked(path.with_suffix(".lock"), wait) as is_ours:
                    if not is_ours:
                        continue
                    results.write()
                    run = results.run(contender, lr, seed, tokens)
                    if not run.finished:
                        train_one(run, path)
                    if not run.finished:
                        return False
        return True

    def train_one(run: Run, path: Path) -> None:
        began = time.monotonic()
        Trainer(size, text, run, path, torch.device(options.device)).train(deadline)
        results.write()
        point = run.points[-1]
        print(
            f"{run.contender:16} lr {run.lr:g} seed {run.seed}: "
            f"{point.loss:.4f} bits at {point.tokens:,} tokens, "
            f"{sum(point.steps.values()):,} steps {point.steps}, progress {point.progress:,.0f} "
            f"({time.monotonic() - began:.0f} s)",
            flush=True,
        )

    if options.lr or train([("small", lr, 0) for lr in size.lrs]):
        lr = options.lr or results.best_lr(tokens)
        train([(name, lr, seed) for seed in range(options.seeds) for name in options.contenders])


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of this file; without `wait`, False if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


# -- step times ---------------------------------------------------------------------------------------------


def compute_seconds(size: Size, batch_size: int, device: torch.device, steps: int = 12) -> float:
    """Return the shortest time of a step of one replica with this batch."""
    model = Gpt(size).to(device)
    optimizer = adamw(model, 1e-3)
    batch = torch.randint(256, (batch_size, size.context + 1), device=device)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def all_reduce(rank: int, replicas: int, numbers: int, folder: str, result: Any) -> None:
    """Measure in one of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=replicas)
    gradients, times = torch.ones(numbers), []
    for _ in range(12):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(gradients)
        times.append(time.perf_counter() - began)
    if rank == 0:
        result.value = min(times)
    dist.destroy_process_group()


def measure_times(options: argparse.Namespace, results: Results) -> None:
    """Measure the compute of a local batch, and the all-reduce of the gradients over gloo on this machine."""
    size = SIZES[options.size]
    numbers = sum(p.numel() for p in Gpt(size).parameters())
    exchange = {"1": 0.0}
    for replicas in (2, 4, 8):
        result = multiprocessing.get_context("fork").Value("d", 0.0)
        with TemporaryDirectory() as folder:
            # Forked before anything is computed, so they import nothing again.
            arguments = (replicas, numbers, folder, result)
            start_processes(all_reduce, arguments, nprocs=replicas, start_method="fork")
        exchange[str(replicas)] = result.value
    compute = {
        str(scale): compute_seconds(size, scale * size.batch_size, torch.device(options.device))
        for scale in (1, 2, 4)
    }
    results.times = {"compute": compute, "all-reduce": exchange}
    results.write()
    print(json.dumps(results.times, indent=1))


def seconds(steps: dict[str, float], times: dict[str, dict[str, float]]) -> float:
    """Return the time of steps by scale, each on min(S, 8) replicas."""
    total = 0.0
    for scale, count in steps.items():
        replicas = min(int(scale), MAX_REPLICAS)
        step = times["compute"][str(int(scale) // replicas)] + times["all-reduce"][str(replicas)]
        total += count * step
    return total


# -- report -------------------------------------------------------------------------------------------------


def steps_to(run: Run, loss: float) -> dict[str, float] | None:
    """Return the steps by scale until a loss, between two evaluations; None if the run does not reach it."""
    for before, after in pairwise(run.points):
        if after.loss <= loss:
            part = (before.loss - loss) / (before.loss - after.loss)
            return {
                scale: before.steps.get(scale, 0) + part * (count - before.steps.get(scale, 0))
                for scale, count in after.steps.items()
            }
    return None


def best_of_each(runs: list[Run]) -> list[Run]:
    """Return the run with the lowest loss of each contender and seed, of all lrs."""
    best: dict[tuple[str, int], Run] = {}
    for run in sorted(runs, key=lambda run: run.points[-1].loss):
        best.setdefault((run.contender, run.seed), run)
    return list(best.values())


def table(runs: list[Run], times: dict[str, dict[str, float]]) -> str:
    """Return what each contender has reached, beside the small batch of the same seeds."""
    lines = [
        "| contender | lr | seeds | bits per byte | beside small | tokens | steps | steps of small "
        "| progress | largest S | steps to the loss of small | time to it |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    small = {run.seed: run for run in runs if run.contender == "small"}
    for name in CONTENDERS:
        own = [run for run in runs if run.contender == name and run.seed in small]
        if not own:
            continue
        columns: dict[str, list[float]] = {}
        for run in own:
            last, base = run.points[-1], small[run.seed].points[-1]
            steps, base_steps = sum(last.steps.values()), sum(base.steps.values())
            reached = steps_to(run, base.loss)
            values = {
                "loss": last.loss,
                "more": last.loss - base.loss,
                "tokens": last.tokens / base.tokens,
                "steps": steps,
                "share": steps / base_steps,
                "progress": last.progress / base.progress,
                "reached": math.inf if reached is None else sum(reached.values()) / base_steps,
            }
            if times:
                whole = seconds(dict(base.steps), times)
                values["time"] = math.inf if reached is None else seconds(reached, times) / whole
            for column, value in values.items():
                columns.setdefault(column, []).append(value)
        means = {column: sum(each) / len(each) for column, each in columns.items()}
        lrs = ", ".join(sorted({f"{run.lr:g}" for run in own}))
        largest = max(int(scale) for run in own for scale in run.points[-1].steps)
        more = "" if name == "small" else f"{means['more']:+.4f}{_spread(columns['more'])}"
        lines.append(
            f"| {name} | {lrs} | {len(own)} | {means['loss']:.4f}{_spread(columns['loss'])} | {more} "
            f"| {means['tokens']:.0%} | {means['steps']:,.0f} | {means['share']:.0%} "
            f"| {means['progress']:.0%} | {largest} | {_reached(columns['reached'])} "
            f"| {_reached(columns.get('time', []))} |"
        )
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    """Return the standard deviation over the seeds."""
    return f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""


def _reached(values: list[float]) -> str:
    """Return the mean over the seeds that reach the loss, and how many do."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "not reached" if values else ""
    some = "" if len(finite) == len(values) else f" ({len(finite)} of {len(values)} seeds)"
    return f"{sum(finite) / len(finite):.0%}{some}"


# Wong, "Points of view: Color blindness", Nature Methods 2011.
STYLES = {
    "small": ("#000000", "-"),
    "AdaScale, 0.8, in steps": ("#D55E00", "-"),
    "AdaScale, 0.8": ("#E69F00", "-"),
    "AdaScale, 0.9": ("#E69F00", "-."),
    "AdaScale, 0.5": ("#E69F00", ":"),
    "doubling": ("#0072B2", "--"),
    "Seesaw": ("#009E73", "--"),
    "Euclidean noise": ("#CC79A7", "-."),
    "large, S = 2": ("#777777", "--"),
    "large, S = 4": ("#777777", "-."),
    "large, S = 8": ("#777777", ":"),
}


LABELS = {
    "small": "small batch",
    "AdaScale, 0.8, in steps": "AdaScale, length in steps",
    "AdaScale, 0.8": "AdaScale, length in tokens",
    "doubling": "doubling by hand",
    "Euclidean noise": "Euclidean noise scale",
    "large, S = 2": "2 times the batch",
    "large, S = 4": "4 times the batch",
}
"""The contenders in the picture."""


def plot(runs: list[Run], size: Size, path: Path) -> None:
    """Plot the loss over tokens and steps, and the scale over tokens, of the first seed."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "adascale", "svg.fonttype": "none"})
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 5.5), layout="constrained")
    best = min(point.loss for run in runs for point in run.points)
    unit = size.batch_size * size.context / 1e6
    order = list(CONTENDERS)
    for run in sorted(runs, key=lambda run: order.index(run.contender)):
        if run.seed != 0:
            continue
        colour, line = STYLES[run.contender]
        style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.3}
        style["label"] = LABELS.get(run.contender, run.contender)
        tokens = [point.tokens / 1e6 for point in run.points]
        steps = [sum(point.steps.values()) / 1e3 for point in run.points]
        losses = [point.loss for point in run.points]
        panels[0].plot(tokens, losses, **style)
        panels[1].plot(steps, losses, **style)
        made = [after - before for before, after in pairwise(steps)]
        fresh = [after - before for before, after in pairwise(tokens)]
        scales = [part / count / unit / 1e3 for part, count in zip(fresh, made, strict=True)]
        panels[2].step(tokens, [*scales, scales[-1]], where="post", **style)
    titles = ("Loss at equal tokens", "Loss at equal steps", "Batch size")
    for axes, title, label in zip(
        panels, titles, ("tokens (millions)", "steps (thousands)", "tokens (millions)"), strict=True
    ):
        axes.set_title(title)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    for axes in panels[:2]:
        axes.set_ylabel("held-out loss (bits per byte)")
        axes.set_ylim(best - 0.02, best + 0.5)
    # Before that, the lines are the same.
    panels[0].set_xlim(left=0.35 * max(point.tokens for run in runs for point in run.points) / 1e6)
    panels[2].set_ylabel("scale S (batch size / small batch size)")
    panels[2].set_yscale("log", base=2)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def report(options: argparse.Namespace, results: Results) -> None:
    """Write the table and the picture of the runs with the most tokens, of each contender the best."""
    finished = [run for run in results.runs if run.finished]
    if not finished:
        raise SystemExit(f"{results.path} has no finished run: train first, with the same --size and --out")
    tokens = options.tokens or max(run.tokens for run in finished)
    runs = best_of_each([run for run in finished if run.tokens == tokens])
    text = (
        f"{options.size}, {tokens:,} tokens, small batch: lr of "
        f"{', '.join(f'{each:g}' for each in SIZES[options.size].lrs)}, "
        f"{len({run.seed for run in runs})} seed(s)\n\n{table(runs, results.times)}"
    )
    print(text)
    results.path.with_suffix(".md").write_text(text)
    plot(runs, SIZES[options.size], results.path.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=("train", "times", "report"))
    parser.add_argument("--size", default="0.5M", choices=list(SIZES))
    parser.add_argument("--tokens", type=int, help="of a run; default: those of the size")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--lr", type=float, help="of the contenders; default: the best of the small batch")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which training is interrupted")
    parser.add_argument("--out", type=Path, default=BENCH, help="folder of the results")
    parser.add_argument("--states", type=Path, default=BENCH.parent / "build/ramp", help="folder of states")
    device_option.add_to(parser)
    options = parser.parse_args()
    device_option.check(parser, options.device)
    if options.device == "cpu":
        torch.set_num_threads(1)
    results = Results.read(options.out / f"ramp.{options.size}.json")
    {"train": train_all, "times": measure_times, "report": report}[options.command](options, results)


if __name__ == "__main__":
    main()
