"""The cost of a step of an elastic framework, relative to the framework's own.

    OMP_NUM_THREADS=1 python bench/framework_overhead.py [frameworks ...] [--replicas 1 2] [--blocks 30]

The framework's own training and the elastic one run on the same replicas of this machine, in processes of
their own, with gloo and one thread each. They take turns in short runs of steps, in an order that changes
from block to block; between their turns they wait. Printed are the median over all blocks of the ratio of
step times with its 95% interval, the same of processor times, and the same for the framework's own against
itself again, which is the noise. Each process has one batch of 32 samples in each step, and the batch size of
the elastic job is 32, so on 2 replicas it measures the gain of a batch of 64. On 1 replica the batch is
fixed, so nothing is measured: what divided steps cost is in docs/adascale.md.

Then follow the counts of both per step that explain the ratio, by torch.profiler on rank 0: operators, reads
of numbers, which wait for a GPU, collective calls, and the bytes that these take from this replica.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import elastic_overhead
import torch
from overhead import READS
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from adascale_worker.scaling.statistics.steps import FIRST_STEPS, MAX_INTERVAL

LOCAL_BSZ = elastic_overhead.LOCAL_BSZ
PROFILED_STEPS = MAX_INTERVAL
WARM_UP = FIRST_STEPS + MAX_INTERVAL
"""Steps before the first turn."""
EPOCHS = 100_000
"""More than are trained: a process is killed after its last turn."""
ELEMENT_BYTES = {"float": 4, "double": 8, "long int": 8, "int": 4, "unsigned char": 1, "bool": 1}
"""Sizes of the types that the profiler names."""


# -- the processes that are measured ----------------------------------------------------------------------


class Turns:
    """Lets a process make steps when the parent requests them, and reports their time and counts."""

    def __init__(self) -> None:
        self._left = WARM_UP
        self._total = 0
        self._profiler: profile | None = None
        self._begin = self._begin_cpu = 0.0

    def step(self) -> None:
        """Count a step that the framework has made. After the last of a turn, wait for the next turn."""
        self._left -= 1
        if self._left:
            return
        answer: dict[str, Any] = {}
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            answer["counts"] = counts_of(self._profiler, self._total)
            self._profiler = None
        elif self._total:
            answer["seconds"] = (time.perf_counter() - self._begin) / self._total
            answer["processor"] = (time.process_time() - self._begin_cpu) / self._total
        print(json.dumps(answer), flush=True)
        request = sys.stdin.readline().split()
        self._left = self._total = int(request[1])
        if request[0] == "profile":
            self._profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self._profiler.__enter__()
        self._begin, self._begin_cpu = time.perf_counter(), time.process_time()


def counts_of(profiler: profile, steps: int) -> dict[str, float]:
    """Return what the profiler has seen, per step."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    calls = Counter(str(event.get("name")) for event in events)
    counts = {"operators": float(sum(number for name, number in calls.items() if name.startswith("aten::")))}
    counts |= {name: float(calls[name]) for name in READS}
    collectives: Counter[str] = Counter()
    for event in events:
        name, arguments = str(event.get("name")), event.get("args", {})
        if name.startswith("gloo:") and "Input Dims" in arguments:
            collectives[f"{name} calls"] += 1
            collectives[f"{name} bytes"] += sum(
                math.prod(shape) * ELEMENT_BYTES[kind]
                for shape, kind in zip(arguments["Input Dims"], arguments["Input type"], strict=True)
            )
    counts |= {name: float(number) for name, number in collectives.items()}
    return {name: number / steps for name, number in counts.items()}


Loop = Callable[[nn.Module, TensorDataset, Turns], None]
"""Trains a network without end, and calls `Turns.step` after each step."""


def plain_accelerate(model: nn.Module, data: TensorDataset, turns: Turns) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    train_with_accelerate(accelerator, range(EPOCHS), model, data, turns)


def elastic_accelerate(model: nn.Module, data: TensorDataset, turns: Turns) -> None:
    from adascale.accelerate import ElasticAccelerator

    replicas = int(os.environ["WORLD_SIZE"])
    accelerator = ElasticAccelerator(
        batch_size=LOCAL_BSZ,
        max_batch_size=replicas * LOCAL_BSZ,
        local_bsz_bounds=(LOCAL_BSZ, LOCAL_BSZ),
        cpu=True,
    )
    train_with_accelerate(accelerator, None, model, data, turns)


def train_with_accelerate(
    accelerator: Any, epochs: range | None, model: nn.Module, data: TensorDataset, turns: Turns
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batches = DataLoader(data, batch_size=LOCAL_BSZ, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(batches))
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    loss_of = nn.CrossEntropyLoss()
    for _ in accelerator.epochs(EPOCHS) if epochs is None else epochs:
        x: Tensor
        for x, y in batches:
            accelerator.backward(loss_of(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            turns.step()


def plain_huggingface(model: nn.Module, data: TensorDataset, turns: Turns) -> None:
    huggingface_trainer(model, data, turns).train()


def elastic_huggingface(model: nn.Module, data: TensorDataset, turns: Turns) -> None:
    from adascale.huggingface import elastic

    replicas = int(os.environ["WORLD_SIZE"])
    elastic(
        huggingface_trainer(model, data, turns),
        max_batch_size=replicas * LOCAL_BSZ,
        local_bsz_bounds=(LOCAL_BSZ, LOCAL_BSZ),
    ).train()


def huggingface_trainer(model: nn.Module, data: TensorDataset, turns: Turns) -> Any:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Classifier(nn.Module):
        """Returns the loss, as models of transformers do."""

        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.network(x), labels)}

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            turns.step()

    def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        x, labels = zip(*samples, strict=True)
        return {"x": torch.stack(x), "labels": torch.stack(labels)}

    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=EPOCHS * 10,
        per_device_train_batch_size=LOCAL_BSZ,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(Classifier(), arguments, train_dataset=data, data_collator=collate, callbacks=[Steps()])
    trainer.remove_callback(PrinterCallback)
    return trainer


def plain_lightning(model: nn.Module, data: TensorDataset, turns: Turns) -> None:
    replicas = int(os.environ.get("WORLD_SIZE", "1"))
    plain = {"strategy": "ddp", "devices": replicas} if replicas > 1 else {"devices": 1}
    train_with_lightning(plain, model, data, turns)


def elastic_lightning(model: nn.Module, data: TensorDataset, turns: Turns) -> None:
    from adascale.lightning import ElasticStrategy

    replicas = int(os.environ["WORLD_SIZE"])
    strategy = ElasticStrategy(max_batch_size=replicas * LOCAL_BSZ, local_bsz_bounds=(LOCAL_BSZ, LOCAL_BSZ))
    train_with_lightning({"strategy": strategy}, model, data, turns)


def train_with_lightning(
    options: dict[str, Any], model: nn.Module, data: TensorDataset, turns: Turns
) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Program(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * 10)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Steps(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            turns.step()

    trainer = Trainer(
        max_steps=EPOCHS * 10,
        accelerator="cpu",
        gradient_clip_val=1.0,
        callbacks=[Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Program(), DataLoader(data, batch_size=LOCAL_BSZ, shuffle=True))


FRAMEWORKS: dict[str, tuple[Loop, Loop]] = {
    "huggingface": (plain_huggingface, elastic_huggingface),
    "accelerate": (plain_accelerate, elastic_accelerate),
    "lightning": (plain_lightning, elastic_lightning),
}
"""The framework's own training, and the elastic one."""
NETWORK = "deep"
"""Which of the networks of `bench/overhead.py` they train."""
OWN, ELASTIC, AGAIN = "own", "elastic", "own again"


def work(framework: str, contender: str) -> None:
    """Train in this process, as one replica of a contender."""
    torch.set_num_threads(1)
    model, data = elastic_overhead.network_of(NETWORK)
    FRAMEWORKS[framework][contender == ELASTIC](model, data, Turns())


# -- the parent -------------------------------------------------------------------------------------------


class Contender:
    """The processes of one contender.

    Args:
        framework: its name.
        name: of the contender.
        replicas: processes.
    """

    def __init__(self, framework: str, name: str, replicas: int) -> None:
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # gloo listens on the loopback interface, whatever the name of this machine resolves to.
        environ = {
            **{each: value for each, value in os.environ.items() if not each.startswith("ADASCALE_")},
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "WORLD_SIZE": str(replicas),
            "LOCAL_WORLD_SIZE": str(replicas),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if replicas == 1 and name != ELASTIC:
            environ = {each: value for each, value in environ.items() if each != "WORLD_SIZE"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, framework, "--work", name],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)} if replicas > 1 else environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(replicas)
        ]

    def wait(self) -> list[dict[str, Any]]:
        """Wait until all replicas have made their steps, and return what each reports."""
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("{")), None)
            if line is None:
                raise SystemExit(f"{self.name} has ended")
            answers.append(json.loads(line))
        return answers

    def turn(self, kind: str, steps: int) -> list[dict[str, Any]]:
        """Let all replicas make steps: a "turn" that is timed, or to "profile" them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{kind} {steps}\n")
            process.stdin.flush()
        return self.wait()

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the median, and the order statistics between which that of the distribution is.

    The number of values below it has the binomial distribution with probability 1/2.
    """
    ordered, count = sorted(values), len(values)
    below, left = 0, 0.0
    while (left := left + math.comb(count, below) / 2**count) <= (1 - confidence) / 2:
        below += 1
    low = max(below - 1, 0)
    return ordered[low], statistics.median(ordered), ordered[count - 1 - low]


def measure(framework: str, replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """Let the contenders of a framework take turns, and return their times and counts."""
    order = random.Random(0)
    turns: dict[str, list[dict[str, float]]] = {ELASTIC: [], AGAIN: []}
    with ExitStack() as stack:
        contenders = {name: Contender(framework, name, replicas) for name in (OWN, ELASTIC, AGAIN)}
        for contender in contenders.values():
            stack.callback(contender.close)
        for contender in contenders.values():
            contender.wait()

        def take_turn(name: str) -> tuple[float, float]:
            answers = contenders[name].turn("turn", options.steps)
            return max(each["seconds"] for each in answers), sum(each["processor"] for each in answers)

        for _ in range(options.blocks):
            names = list(turns)
            order.shuffle(names)
            for name in names:
                pair = [name, OWN]
                order.shuffle(pair)
                taken = {each: take_turn(each) for each in pair}
                (seconds, processor), (own_seconds, own_processor) = taken[name], taken[OWN]
                turns[name].append(
                    {
                        "seconds": seconds,
                        "own_seconds": own_seconds,
                        "processor": processor,
                        "own_processor": own_processor,
                    }
                )
        counts = {
            name: contenders[name].turn("profile", PROFILED_STEPS)[0]["counts"] for name in (OWN, ELASTIC)
        }
    return {"turns": turns, "counts": counts}


def show(framework: str, replicas: int, result: dict[str, Any]) -> None:
    turns, counts = result["turns"], result["counts"]
    own = statistics.median(turn["own_seconds"] for name in turns for turn in turns[name])
    print(f"{framework}, {replicas} replicas: own step {1e3 * own:.2f} ms", flush=True)
    for name, taken in turns.items():
        for what in ("seconds", "processor"):
            low, middle, high = median_interval([turn[what] / turn[f"own_{what}"] for turn in taken])
            print(f"  {name:10} {what:10} {middle:.4f}  ({low:.4f} to {high:.4f})", flush=True)
    for name in sorted({*counts[OWN], *counts[ELASTIC]}):
        numbers = "   ".join(f"{each} {counts[each].get(name, 0.0):.2f}" for each in (OWN, ELASTIC))
        print(f"  {name:40} {numbers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("frameworks", nargs="*", help="any of " + ", ".join(FRAMEWORKS))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, default=30, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=MAX_INTERVAL, help="steps of a turn")
    parser.add_argument("--json", type=Path, help="where to write all times and counts")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    frameworks = options.frameworks or list(FRAMEWORKS)
    if unknown := set(frameworks) - set(FRAMEWORKS):
        parser.error(f"unknown frameworks {', '.join(sorted(unknown))}: choose from {', '.join(FRAMEWORKS)}")
    if options.work:
        work(frameworks[0], options.work)
        return
    results: dict[str, Any] = {}
    for framework in frameworks:
        for replicas in options.replicas:
            result = results[f"{framework} {replicas}"] = measure(framework, replicas, options)
            show(framework, replicas, result)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
