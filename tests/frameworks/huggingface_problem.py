"""A small language model and a small classifier, with data that is made, for tests of the adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

VOCABULARY, LENGTH = 20, 8
MakeTrainer = Callable[..., Trainer]


class Texts(Dataset[dict[str, Tensor]]):
    """Sequences in which each token is the last one plus a number, with some labels left out.

    Args:
        count: how many.
        padded: whether the sequences have different numbers of valid tokens.
    """

    def __init__(self, count: int = 48, *, padded: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        starts = torch.randint(VOCABULARY, (count, 1), generator=generator)
        steps = torch.randint(1, 4, (count, 1), generator=generator)
        self.tokens = (starts + steps * torch.arange(LENGTH)) % VOCABULARY
        self.labels = self.tokens.clone()
        if padded:
            valid = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
            self.labels[torch.arange(LENGTH) >= valid] = -100
        self.requested: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.requested.append(index)
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Classes(Dataset[dict[str, Any]]):
    """Sequences of different lengths, with the class of their first token."""

    def __init__(self, count: int = 48) -> None:
        generator = torch.Generator().manual_seed(4)
        lengths = torch.randint(3, LENGTH + 1, (count,), generator=generator)
        self.items = [
            torch.randint(1, VOCABULARY, (int(length),), generator=generator).tolist() for length in lengths
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.items[index]
        return {
            "input_ids": tokens,
            "attention_mask": [1] * len(tokens),
            "labels": int(tokens[0] >= VOCABULARY // 2),
        }


def configuration(**options: Any) -> GPT2Config:
    """Return the configuration of a small model without dropout."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2Config(**{**sizes, **dropout, **tokens, **options})


def language_model() -> PreTrainedModel:
    """Return a model that always has the same initial weights."""
    torch.manual_seed(5)
    return GPT2LMHeadModel(configuration())


def classifier() -> PreTrainedModel:
    """Return a classifier that always has the same initial weights."""
    torch.manual_seed(6)
    return GPT2ForSequenceClassification(configuration(num_labels=2))


def arguments(folder: Path, kind: Any = TrainingArguments, **options: Any) -> TrainingArguments:
    """Return arguments for a short training on the CPU, of `TrainingArguments` or a subclass."""
    chosen = {
        "max_steps": 10,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        **options,
    }
    return kind(str(folder), **chosen)


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def require_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Check that two models have the same weights, bit for bit."""
    different = [name for name, value in left.items() if not torch.equal(value, right[name])]
    assert not different
    assert left.keys() == right.keys()


def require_close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Check that two models have the same weights up to rounding."""
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=tolerance, atol=tolerance, msg=name)
