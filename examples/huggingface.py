"""Elastic training of a small GPT-2 with Hugging Face's Trainer.

    adascale run examples/huggingface.yaml                  an elastic job, whose replica count changes
    python examples/huggingface.py                          one process, without a metrics service
    torchrun --nproc-per-node 2 examples/huggingface.py

It predicts the characters of texts that are in scikit-learn, the descriptions of its data sets; every tenth
block is held out for the evaluation. The arguments were tuned for batches of 8 sequences of 64 characters.
"""

import math
from pathlib import Path

import sklearn.datasets
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from adascale.huggingface import elastic

CONTEXT, BLOCK = 64, 1024

folder = Path(sklearn.datasets.__file__).parent / "descr"
text = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.rst"))).lower()
letters = sorted(set(text) & set(map(chr, range(128))))
number = {letter: index for index, letter in enumerate(letters)}
codes = torch.tensor([number.get(letter, 0) for letter in text])
blocks = codes[: len(codes) // BLOCK * BLOCK].view(-1, BLOCK)
is_held_out = torch.arange(len(blocks)) % 10 == 9


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of CONTEXT characters, each of which predicts the next one."""

    def __init__(self, blocks: torch.Tensor, stride: int) -> None:
        self.windows = blocks.unfold(1, CONTEXT, stride).flatten(0, 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=len(letters),
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
)
arguments = TrainingArguments(
    output_dir=".adascale/huggingface",
    per_device_train_batch_size=8,
    per_device_eval_batch_size=64,
    max_steps=1500,
    learning_rate=3e-3,
    warmup_steps=100,
    lr_scheduler_type="cosine",
    logging_steps=100,
    eval_strategy="steps",
    eval_steps=500,
    save_strategy="no",
    report_to="none",
)
trainer = elastic(
    Trainer(
        model,
        arguments,
        train_dataset=Sequences(blocks[~is_held_out], 1),
        eval_dataset=Sequences(blocks[is_held_out], CONTEXT),
    ),
    max_batch_size=256,
    local_bsz_bounds=(8, 64),
)
trainer.train()
bits = trainer.evaluate()["eval_loss"] / math.log(2)
if trainer.is_world_process_zero():
    trainer.elastic.report_result(bits=bits)
    print(f"bits per character {bits:.2f} at step {trainer.state.global_step}", flush=True)
