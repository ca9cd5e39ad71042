"""The code blocks of the documents, and the whole programs that tests make of them.

A block has a comment above it that names its program: `<!-- snippet: batch -->`. `PROGRAMS` has the program,
or `FRAMEWORK_PROGRAMS` if it imports a framework. In it, a line `PART 1` stands for the block, or for its
part up to the first line `...`, `PART 2` for the part after it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "reference.md"
DOCUMENTS = sorted({ROOT / "README.md", ROOT / "DESCRIPTION.md", *(ROOT / "docs").glob("*.md")} - {GENERATED})

_BLOCK = re.compile(
    r"(?:^ *<!-- snippet: (?P<name>[\w-]+) -->\n)?"
    r"^ *```(?P<language>python|diff|yaml)\n(?P<code>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    """A code block of a document.

    Args:
        document: its file.
        line: the number of its first line.
        name: that of its program; empty if the document gives none.
        language: "python", "diff" or "yaml".
        code: without the indentation of the block.
    """

    document: Path
    line: int
    name: str
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"

    @property
    def program(self) -> str:
        """The whole program; for a diff, that which it makes."""
        code = after(self.code) if self.language == "diff" else self.code
        return complete({**PROGRAMS, **FRAMEWORK_PROGRAMS}[self.name], code)


def snippets(document: Path) -> Iterator[Snippet]:
    """Yield the code blocks of a document."""
    text = document.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        code = textwrap.dedent(match["code"])
        yield Snippet(document, line, match["name"] or "", match["language"], code)


def complete(program: str, code: str) -> str:
    """Return a program with the parts of a snippet in place of its lines `PART 1`, `PART 2`.

    Raises:
        ValueError: they have not the same number of parts.
    """
    parts = [textwrap.dedent(part) for part in re.split(r"^\.\.\.\n", code, flags=re.MULTILINE)]
    places = re.findall(r"^ *PART \d+$", program, re.MULTILINE)
    if len(places) != len(parts):
        raise ValueError(f"the snippet has {len(parts)} parts, and its program {len(places)} places for them")
    for number, part in enumerate(parts, 1):
        program = re.sub(
            rf"^( *)PART {number}$",
            lambda place, part=part: textwrap.indent(part.rstrip(), place[1]),  # type: ignore[misc]
            program,
            flags=re.MULTILINE,
        )
    return program


def before(diff: str) -> str:
    """Return the program that a diff changes."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in " -")


def after(diff: str) -> str:
    """Return the program that a diff makes."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in " +")


def apply(diff: str, program: str) -> str:
    """Return a program that a diff has changed.

    Raises:
        ValueError: the program does not have the lines of the diff, or has them several times.
    """
    found = program.count(before(diff))
    if found != 1:
        raise ValueError(f"the program has these lines {found} times, and not once:\n{before(diff)}")
    return program.replace(before(diff), after(diff))


IMPORTS = """\
import copy
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from adascale import ElasticTrainer

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.encoder(x).relu())


inputs = torch.randn(512, 8)
dataset = TensorDataset(inputs, inputs[:, :4].argmax(1))
test_set = TensorDataset(inputs[:50], dataset.tensors[1][:50])
criterion = cross_entropy
"""

_SCHEDULER = "scheduler = CosineAnnealingLR(optimizer, T_max=2 * len(dataset) // 32)\n"
_MODEL = (
    """\
trainer = ElasticTrainer(epochs=2)
model = Net().to(trainer.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + _SCHEDULER
)

_STEP = """\
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
"""

_REENTRY = "state = trainer.program_reentry(model, optimizer, scheduler)\n"
_LOOP = "for epoch in trainer.epochs():\n    for x, y in trainer.dataloader(dataset):\n"
_ENDS = "assert trainer.finished and trainer.steps >= 32, (trainer.finished, trainer.steps)\n"


def _training(
    batch: str,
    *,
    before: str = "",
    model: str = _MODEL,
    reentry: str = _REENTRY,
    loop: str = _LOOP,
    after: str = "",
) -> str:
    """Return a program that trains: what it does with a batch, and what differs from others."""
    return IMPORTS + before + model + reentry + loop + batch + after + _ENDS


PROGRAMS = {
    # A program that trains.
    "program": IMPORTS
    + "PART 1\n"
    + "assert trainer.finished and trainer.steps >= 160\n"
    + "assert cross_entropy(model(inputs), dataset.tensors[1]) < 0.9\n",
    "statement": IMPORTS + "PART 1\n",
    "batch": _training("        PART 1\n        scheduler.step()\n", after="assert norm > 0\n"),
    "weighted": _training(
        "        optimizer.zero_grad()\n        valid_tokens = (y != -1).sum()\n        PART 1\n"
        "        optimizer.step()\n        scheduler.step()\n",
        before="dataset = TensorDataset(inputs, "
        "torch.where(torch.arange(512) % 3 == 0, -1, dataset.tensors[1]))\n",
    ),
    "after-step": _training(_STEP + "        norm = 1.0\n        PART 1\n"),
    "learning-rate": _training(
        "        PART 1\n" + _STEP.replace("        scheduler.step()\n", ""),
        before="def learning_rate(step):\n    return 0.1 / (1 + step)\n",
        model=_MODEL.replace(_SCHEDULER, ""),
        reentry="trainer.program_reentry(model, optimizer)\n",
        after="assert optimizer.param_groups[0]['lr'] == learning_rate(31)\n",
    ),
    "generation": _training(
        _STEP
        + "        value = torch.ones(())\n        dist.all_reduce(value, group=group)\n"
        + "        assert value == trainer.replicas\n",
        loop="PART 1\nfor epoch in trainer.epochs():\n    PART 2\n",
    ),
    "order": _training(
        _STEP,
        before="weights = torch.rand(len(dataset))\n",
        loop="for epoch in trainer.epochs():\n    PART 1\n",
    ),
    "stream": _training(
        _STEP,
        before="""\


class Records(IterableDataset):
    def __iter__(self):
        yield from range(512)


stream, decode = Records(), dataset.__getitem__
""",
        loop="PART 1\n",
    ),
    "shards": _training(
        _STEP,
        before="""\
def read_shard(index):
    return range(2 * index, 2 * index + 2)


decode = dataset.__getitem__
""",
        loop="for epoch in trainer.epochs():\n    PART 1\n",
    ),
    "download": IMPORTS
    + """\


class CIFAR10(TensorDataset):
    def __init__(self, folder, download):
        assert download
        (Path(folder) / "batches.bin").touch()
        super().__init__(*dataset.tensors)


trainer = ElasticTrainer(epochs=2)
PART 1
assert len(dataset) == 512 and Path("data/batches.bin").is_file()
""",
    "average": _training(
        "        optimizer.zero_grad()\n        cross_entropy(model(x), y).backward()\n        PART 2\n",
        reentry="PART 1\n",
        after="assert ema.n_averaged == trainer.steps\n",
    ),
    "frozen": IMPORTS
    + "epochs = 5\ntrainer = ElasticTrainer(epochs=epochs)\nscheduler = None\nmodel = Net()\n"
    + "frozen = copy.deepcopy(model.encoder)\n"
    + "PART 1\n"
    + _STEP.replace("        scheduler.step()\n", "")
    + "        if trainer.made_step:\n"
    + "            assert (epoch < 3) == torch.equal(model.encoder.weight, frozen.weight)\n"
    + _ENDS,
    "compile": _training(_STEP, reentry="PART 1\n"),
    "scaler": _training(
        "        optimizer.zero_grad()\n"
        "        with torch.autocast(trainer.device.type, dtype=torch.float16):\n"
        "            loss = cross_entropy(model(x), y)\n"
        "        PART 2\n        scheduler.step()\n",
        reentry="PART 1\n",
    ),
    "evaluation": _training(
        _STEP,
        after="PART 1\n"
        "correct = model(inputs[:50]).argmax(1) == dataset.tensors[1][:50]\n"
        "assert evaluation.means['correct'] == correct.float().mean()\n",
    ),
    "best": _training(
        _STEP,
        before="os.environ['ADASCALE_CHECKPOINT_DIR'] = 'checkpoints'\n",
        reentry=_REENTRY + "PART 1\n",
        after="    model.eval()\n"
        "    evaluation = trainer.evaluation(test_set, batch_size=32)\n"
        "    for x, y in evaluation:\n        evaluation.add(accuracy=(model(x).argmax(1) == y).sum())\n"
        "    model.train()\n"
        "    PART 2\n",
    )
    + "trainer.close()\n"
    + "assert list(Path('checkpoints').rglob('best-*.safetensors'))\n",
    "several": IMPORTS
    + """\
trainer = ElasticTrainer(epochs=2)
discriminator, generator = nn.Linear(8, 1), nn.Linear(3, 8)
optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.01)
optimizer_g = torch.optim.SGD(generator.parameters(), lr=0.01)
scheduler_d, scheduler_g = (CosineAnnealingLR(each, T_max=32) for each in (optimizer_d, optimizer_g))


def loss(output, target):
    return nn.functional.binary_cross_entropy_with_logits(output, torch.full_like(output, target))


PART 1
for epoch in trainer.epochs():
    for real, _ in trainer.dataloader(dataset):
        noise = torch.randn(len(real), 3)
        PART 2
        scheduler_d.step()
        scheduler_g.step()
"""
    + _ENDS,
    "tracker": IMPORTS
    + "PART 1\n"
    + "model = Net()\n"
    + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    + "scheduler = CosineAnnealingLR(optimizer, T_max=32)\n"
    + _REENTRY
    + "for epoch in trainer.epochs(2):\n    for x, y in trainer.dataloader(dataset):\n"
    + _STEP
    + "        trainer.log(loss=loss)\n"
    + "assert trainer.steps >= 32\n",
    "adascale-alone": """\
import os
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
torch.distributed.init_process_group("gloo")
model, progress = nn.Linear(4, 1), 0.0
PART 1
for _ in range(10):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    PART 2
assert progress == 10, progress
torch.distributed.destroy_process_group()
""",
    "adascale-observe": IMPORTS
    + """\
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
PART 1
for _ in range(200):
    optimizer.zero_grad()
    x, y = next(iter(DataLoader(dataset, batch_size=16)))
    criterion(model(x), y).backward()
    optimizer.step()
assert len(open("gain.csv").readlines()) == 3
""",
    "data-alone": IMPORTS
    + """\
if __name__ == "__main__":
    state = {"data": {"position": 0, "samples": len(dataset)}}
    PART 1
        assert len(x) == len(y) == 32
        PART 2
        if loader.position == 320:
            break
    assert state["data"] == {"position": 320, "samples": len(dataset)}
""",
    "train-samples": IMPORTS
    + """\
PART 1
assert trainer.train_samples == 10_000_000_000 // 1024
assert steps == -(-trainer.train_samples // trainer.batch_size)
""",
    "fairscale": IMPORTS
    + """\
PART 1
model = Net()
optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), world_size=1, num_gradients_to_accumulate=2)
for number, (x, y) in enumerate(DataLoader(dataset, batch_size=16), 1):
    (criterion(model(x), y) / 2).backward()
    if number % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
assert 1 <= optimizer.gain() <= 2
""",
    "own-optimizer": _training(
        _STEP,
        before="""\
PART 1
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01, "beta": 0.9})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("v", torch.zeros_like(parameter))
                mean.mul_(group["beta"]).addcmul_(parameter.grad, parameter.grad, value=1 - group["beta"])
                parameter.addcdiv_(parameter.grad, mean.sqrt() + 1e-8, value=-group["lr"])


""",
        model=_MODEL.replace(
            "torch.optim.SGD(model.parameters(), lr=0.1)", "MyOptimizer(model.parameters())"
        ),
    ),
}

FRAMEWORK_PROGRAMS = {
    "huggingface": IMPORTS
    + """\
from transformers import Trainer, TrainingArguments


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, inputs, labels):
        outputs = self.net(inputs)
        return {"loss": cross_entropy(outputs, labels), "logits": outputs}


model = Classifier()
train_set = [{"inputs": x, "labels": y} for x, y in dataset]
args = TrainingArguments("out", max_steps=20, per_device_train_batch_size=32, report_to=[], use_cpu=True)
PART 1
assert trainer.state.global_step >= 20
""",
    "accelerate": IMPORTS
    + """\
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_loader = DataLoader(dataset, batch_size=32, shuffle=True)
eval_loader = DataLoader(test_set, batch_size=10)
scheduler = CosineAnnealingLR(optimizer, T_max=2 * len(train_loader))
num_epochs = 2
PART 1
assert accelerator.trainer.steps >= 2
""",
    "lightning": IMPORTS
    + """\
from lightning.pytorch import LightningModule, Trainer


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(dataset, batch_size=32, shuffle=True)


module, datamodule = Module(), None
PART 1
assert trainer.global_step >= 1_000
""",
    "adascale-lightning": IMPORTS
    + """\
from adascale import AdaScale
from lightning.pytorch import LightningModule, Trainer


PART 1

    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        x, y = batch
        return cross_entropy(self.net(x), y)


program = Program()
trainer = Trainer(max_epochs=2, accumulate_grad_batches=2, accelerator="cpu", logger=False)
trainer.fit(program, DataLoader(dataset, batch_size=16, shuffle=True))
assert program.progress >= 32, program.progress
""",
    "adascale-accelerate": IMPORTS
    + """\
from accelerate import Accelerator
from adascale import AdaScale

model, progress = Net(), 0.0
loader = DataLoader(dataset, batch_size=16, shuffle=True)
PART 1
for x, y in loader:
    PART 2
assert progress >= 16, progress
""",
}
"""Programs that import a framework."""
