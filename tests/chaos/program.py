"""The training program of the fault harness: its state counts how often each sample has changed the weights.

The parameter `seen` has an element per sample and starts each step as zeros. Its gradient is proportional to
how often each sample is in the step, so after the step it shows which samples, of all replicas, the optimizer
has seen. `Ledger` adds them up, as a registered object: it is saved, restored and transferred with the rest
of the state, and compares itself with the order of the samples after every step.

Environment: CHAOS_FOLDER, the folder of the journals and results; PACE, the seconds that a sample takes;
CHAOS_BUG, if set, trains no gradient of one sample of a step, which the harness must find; CHAOS_DATA, what
the data set is: `items` by index, a `stream`, a `stream with states`, or `shards`; CHAOS_LOOP, who has the
training loop: `plain`, or `accelerate` with a data set of items. In a replica of several processes the model
is sharded over them.
"""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from adascale import ElasticTrainer
from adascale_worker.batches import stream
from adascale_worker.batches.order import shuffled

SAMPLES = 96
BUGGY_STEP = 40
WIDTH = 600


kind = os.environ.get("CHAOS_DATA", "items")
stream.SAVE_INTERVAL = 10


def streams() -> Any:
    """Return the data sets that are no sequences. On a cluster, the program is alone in its folder."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support import streams

    return streams


class Ledger:
    """How often each sample has changed the weights.

    Attributes:
        counts: shape (SAMPLES,).
        steps: optimizer steps.
        generations: [generation, replicas] in the order of training.
        problems: what is wrong, at most two.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(SAMPLES, dtype=torch.int64)
        self.steps = 0
        self.generations: list[list[int]] = []
        self.problems: list[str] = []
        self._sequence = shuffled(SAMPLES, 0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": self.counts.clone(),
            "steps": self.steps,
            "generations": [list(each) for each in self.generations],
            "problems": list(self.problems),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"].clone()
        self.steps = int(state["steps"])
        self.generations = [list(each) for each in state["generations"]]
        self.problems = list(state["problems"])

    def add(self, change: Tensor, generation: int, replicas: int) -> None:
        """Add the samples of a step.

        Args:
            change: a multiple of how often each sample was in the step: shape (SAMPLES,). Zeros for a
                micro-batch that is no step, and for a step that was discarded.
        """
        if not change.any():
            return
        quotient = change / change[change > 0].min()
        times = quotient.round()
        if not torch.allclose(quotient, times, atol=0.01):
            self._report(f"step {self.steps + 1} weighs its samples unequally: {quotient.tolist()}")
        self.counts += times.long()
        self.steps += 1
        if not self.generations or self.generations[-1][0] != generation:
            if self.generations and self.generations[-1][0] > generation:
                self._report(f"generation {generation} after {self.generations[-1][0]}")
            self.generations.append([generation, replicas])
        total = int(self.counts.sum())
        passes, rest = divmod(total, SAMPLES)
        if kind == "items":
            begun = self._sequence[passes * SAMPLES : passes * SAMPLES + rest]
        elif kind == "shards":
            # Their order depends on the replicas.
            begun = (self.counts > passes).nonzero().flatten().tolist()
        else:
            order = list(range(SAMPLES)) if kind == "stream" else streams().WithState(SAMPLES).order(passes)
            begun = order[:rest]
        expected = passes + torch.bincount(torch.tensor(begun, dtype=torch.int64), minlength=SAMPLES)
        if not torch.equal(self.counts, expected):
            wrong = (self.counts - expected).nonzero().flatten().tolist()
            self._report(
                f"after step {self.steps} in generation {generation}, pass {passes}: "
                + ", ".join(f"sample {i} {self.counts[i]} times, not {expected[i]}" for i in wrong[:8])
            )

    def _report(self, problem: str) -> None:
        if len(self.problems) < 2:
            self.problems.append(problem)


class Network(nn.Module):
    """A small classifier with a buffer, random draws and the parameter `seen`."""

    def __init__(self) -> None:
        super().__init__()
        # Large enough that a replica which has followed the others gets no parameter again.
        self.first, self.norm = nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH)
        self.last = nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, 2))
        self.seen = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, index: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.norm(self.first(x))), self.seen[index]


faulthandler.enable()  # A crash of torch shows where it was.
faulthandler.register(signal.SIGUSR1, all_threads=True)  # The harness asks a hanging run where it is.
folder = Path(os.environ["CHAOS_FOLDER"])
pace = float(os.environ["PACE"])
has_bug = bool(os.environ.get("CHAOS_BUG"))

accelerator: Any = None
if os.environ.get("CHAOS_LOOP") == "accelerate":
    from adascale.accelerate import ElasticAccelerator

    accelerator = ElasticAccelerator(cpu=True)
trainer = ElasticTrainer() if accelerator is None else accelerator.trainer
torch.manual_seed(1)
features = torch.randn(SAMPLES, 6)
# Noise in the labels makes larger batches worthwhile.
targets = ((features.sum(1) + 3 * torch.randn(SAMPLES)) > 0).long()
dataset = [(index, features[index], targets[index]) for index in range(SAMPLES)]
data: Any = dataset
match kind:
    case "stream":
        data = streams().Numbers(SAMPLES)
    case "stream with states":
        data = streams().WithState(SAMPLES)
    case "shards":
        data = streams().Sharded(SAMPLES, 7)
reading: dict[str, Any] = {} if kind == "items" else {"map": dataset.__getitem__}
network = Network()
if "ADASCALE_PROCESSES_PER_REPLICA" in os.environ:
    fully_shard(network.first, mesh=trainer.mesh)
    fully_shard(network, mesh=trainer.mesh)
rest = [parameter for parameter in network.parameters() if parameter is not network.seen]
optimizer = torch.optim.SGD(
    [{"params": rest, "lr": 0.05, "momentum": 0.9}, {"params": [network.seen], "lr": 1.0, "momentum": 0.0}]
)
ledger = Ledger()
loader: Any = None
if accelerator is None:
    trainer.program_reentry(network, optimizer, register={"ledger": ledger})
    epochs = trainer.epochs()
else:
    loader = DataLoader(data, batch_size=trainer.batch_size, shuffle=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    accelerator.register_for_checkpointing(ledger)
    epochs = accelerator.epochs()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor without its gradient; a collective call of the replica if it is sharded."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def train() -> None:
    with (folder / f"journal-{time.time():.3f}-{os.getpid()}.jsonl").open("w", buffering=1) as journal:
        for _ in epochs:
            for index, x, y in trainer.dataloader(data, **reading) if loader is None else loader:
                optimizer.zero_grad()
                logits, seen = network(index, x)
                weights = torch.ones(len(index))
                if has_bug and ledger.steps == BUGGY_STEP and trainer.is_main:
                    weights[0] = 0.0
                loss = nn.functional.cross_entropy(logits, y)
                (loss + (seen * weights).mean() / 64).backward()
                optimizer.step()
                trainer.log(loss=loss)
                ledger.add(-whole(network.seen), trainer.generation, trainer.replicas)
                with torch.no_grad():
                    network.seen.zero_()
                entry = {
                    "time": time.time(),
                    "step": ledger.steps,
                    "progress": trainer.progress,
                    "generation": trainer.generation,
                    "rank": trainer.rank,
                    "replicas": trainer.replicas,
                }
                journal.write(json.dumps(entry) + "\n")
                time.sleep(pace * len(index))


train()


def digest(tensors: Iterable[Tensor]) -> str:
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()


weights = [whole(parameter) for parameter in rest]
result = {
    "weights": digest(weights),
    "finite": all(bool(each.isfinite().all()) for each in (*weights, *network.buffers())),
    "samples": int(ledger.counts.sum()),
    "steps": ledger.steps,
    "progress": trainer.progress,
    "generations": ledger.generations,
    "problems": ledger.problems,
}
draft = folder / f"draft-{os.getpid()}"
draft.write_text(json.dumps(result))
draft.rename(folder / f"result-{os.getpid()}.json")
print(f"chaos result: {json.dumps(result)}", flush=True)
trainer.report_result(weights=digest(weights))
