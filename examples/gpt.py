"""Elastic training of a small GPT with AdamW and bfloat16.

    adascale run examples/gpt.yaml                  an elastic job, whose replica count changes
    adascale run examples/gpt_sharded.yaml          the same, each replica of two processes with FSDP2
    python examples/gpt.py                          one process, without a metrics service
    torchrun --nproc-per-node 2 examples/gpt.py

It predicts the characters of texts that are in scikit-learn, the descriptions of its data sets; every tenth
block is held out for the test. The recipe was tuned for batches of 4 sequences of 64 characters.
"""

import math
import sys
from pathlib import Path

import sklearn.datasets
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import Dataset, Subset

from adascale import ElasticTrainer

CONTEXT, BLOCK, WIDTH, HEADS, LAYERS = 64, 1024, 64, 4, 2

folder = Path(sklearn.datasets.__file__).parent / "descr"
text = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.rst"))).lower()
letters = sorted(set(text) & set(map(chr, range(128))))
number = {letter: index for index, letter in enumerate(letters)}
codes = torch.tensor([number.get(letter, 0) for letter in text])
blocks = codes[: len(codes) // BLOCK * BLOCK].view(-1, BLOCK)
is_test = torch.arange(len(blocks)) % 10 == 9


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """All sequences of CONTEXT characters in blocks of text, and the characters that follow."""

    def __init__(self, blocks: Tensor) -> None:
        self.windows = blocks.unfold(1, CONTEXT + 1, 1).flatten(0, 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.windows[index, :-1], self.windows[index, 1:]


class Block(nn.Module):
    """Causal attention and a network of two layers, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](h)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(-2))
        result: Tensor = h + self.mlp(self.norms[1](h))
        return result


class Gpt(nn.Module):
    """Returns the logits of the next character at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.letter = nn.Embedding(len(letters), WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(letters), bias=False))
        for embedding in (self.letter, self.place):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.letter(x) + self.place.weight))
        return logits


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(trainer.device.type, dtype=torch.bfloat16):
        logits = model(x.to(trainer.device))
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), y.to(trainer.device).flatten())


trainer = ElasticTrainer(
    batch_size=4, max_batch_size=128, local_bsz_bounds=(4, "auto"), scale_invariant_steps=2_000
)
steps = trainer.scale_invariant_steps or 2_000

torch.manual_seed(0)
model = Gpt().to(trainer.device)
if "--shard" in sys.argv:
    # Over the processes of a replica; the trainer averages the gradients over the replicas.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=trainer.mesh, mp_policy=policy)
    fully_shard(model, mesh=trainer.mesh, mp_policy=policy)
# The usual groups of a GPT: no weight decay for biases, norms and embeddings.
decayed = [
    p for name, p in model.named_parameters() if p.dim() > 1 and "letter" not in name and "place" not in name
]
others = [p for p in model.parameters() if not any(p is each for each in decayed)]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=3e-3,
    betas=(0.9, 0.99),
)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=100)
decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(steps - 100, 1), eta_min=3e-5)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[100])

trainer.program_reentry(model, optimizer, scheduler)
for _ in trainer.epochs():
    for x, y in trainer.dataloader(Sequences(blocks[~is_test])):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        trainer.log(loss=loss)

model.eval()
held_out = Sequences(blocks[is_test])
windows = Subset(held_out, range(0, len(held_out), 31))
with torch.no_grad():
    evaluation = trainer.evaluation(windows, batch_size=64)
    for x, y in evaluation:
        evaluation.add(bits=len(x) * loss_of(model, x, y) / math.log(2))
if trainer.is_main:
    bits = evaluation.means["bits"]
    trainer.report_result(bits=bits)
    print(
        f"test loss {bits:.2f} bits per character after {trainer.progress:.0f} steps at batch size 4",
        flush=True,
    )
