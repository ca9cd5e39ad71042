"""A training program that records the samples of each step, and a digest of its final weights.

Environment: JOURNAL, the folder of the records; EPOCHS; BOUNDS, the trainer's arguments as JSON;
STEP_SECONDS, the minimum duration of a step; FAIL_AT, a step at which rank FAIL_RANK raises an error, once;
COMPARISON_INTERVAL, seconds between comparisons of the weights; FINISH_FILE, a file whose existence ends
training after the current epoch, for a job on a single replica; SNAPSHOT_SHARE, the share of the time that
copies in the memory of the agent may take, of which 1 is one after each step, from the first one on.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from adascale import ElasticTrainer
from adascale_worker.program import weight_checks
from adascale_worker.state import state as state_module

if "COMPARISON_INTERVAL" in os.environ:
    weight_checks.COMPARISON_INTERVAL = float(os.environ["COMPARISON_INTERVAL"])
if "SNAPSHOT_SHARE" in os.environ:
    state_module.SNAPSHOT_SHARE = float(os.environ["SNAPSHOT_SHARE"])
    state_module.SNAPSHOT_DELAY = 0.0
folder = Path(os.environ["JOURNAL"])
trainer = ElasticTrainer(**json.loads(os.environ.get("BOUNDS", '{"batch_size": 8}')))

torch.manual_seed(1)
samples = int(os.environ.get("SAMPLES", "48"))
features = torch.randn(samples, 6)
targets = (features.sum(1) > 0).long()
dataset = [(index, features[index], targets[index]) for index in range(samples)]

torch.manual_seed(2 + trainer.rank)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)).to(trainer.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)

state = trainer.program_reentry(model, optimizer, scheduler)
folder.mkdir(parents=True, exist_ok=True)


class Records:
    """The journal: a file for each generation that this process trains in."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._section: tuple[int, int, int] | None = None

    def begin(self, step: int, epoch: int, *, restored: bool) -> None:
        """Begin another file if this process trains in another generation than before."""
        section = (trainer.generation, trainer.rank, trainer.replicas)
        if section == self._section:
            return
        self._section = section
        attempt = len(list(folder.glob(f"rank{trainer.rank}-*.jsonl")))
        self._file = (folder / f"rank{trainer.rank}-{attempt:03d}.jsonl").open("w", buffering=1)
        self.write(
            {
                "step": step,
                "epoch": epoch,
                "restored": restored,
                "replicas": trainer.replicas,
                "generation": trainer.generation,
                "pid": os.getpid(),
                "replica": int(os.environ.get("ADASCALE_REPLICA", trainer.rank)),
            }
        )

    def write(self, record: dict[str, Any]) -> None:
        """Add a record."""
        assert self._file is not None
        self._file.write(json.dumps(record) + "\n")


records = Records()
records.begin(state.step, state.epoch, restored=state.restored)
finish_file = os.environ.get("FINISH_FILE")
for epoch in range(state.epoch, int(os.environ.get("EPOCHS", "2"))):
    if finish_file and Path(finish_file).exists():
        break
    indices: list[list[int]] = []
    for index, x, y in trainer.dataloader(dataset):
        before = trainer.steps
        records.begin(before, epoch, restored=True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(trainer.device)), y.to(trainer.device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        trainer.log(loss=loss)
        indices.append(index.tolist())
        step = trainer.steps
        # A step in which a replica is lost is discarded, and its samples are delivered again.
        if step > before:
            entry = {
                "step": step,
                "epoch": epoch,
                "indices": [each for batch in indices[-trainer.accumulation :] for each in batch],
                "progress": trainer.progress,
                "lr": optimizer.param_groups[0]["lr"],
                "local_bsz": trainer.get_local_bsz(),
                "loss": loss.item(),
            }
            records.write(entry)
            indices = []
            once = folder / f"failed-rank{trainer.rank}"
            due = step == int(os.environ.get("FAIL_AT", "-1")) and trainer.rank == int(
                os.environ.get("FAIL_RANK", "0")
            )
            if due and not once.exists():
                once.touch()
                raise ArithmeticError(f"made to fail at step {step}")
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
    trainer.step(epoch)

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
digest = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()
trainer.report_result(weights=digest)
(folder / f"weights-rank{trainer.rank}").write_text(digest)
