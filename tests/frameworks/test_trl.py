"""TRL's trainers are elastic as `Trainer` is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOTrainer, SFTConfig, SFTTrainer

from adascale.errors import WorkerError
from adascale.huggingface import elastic
from frameworks.huggingface_problem import arguments, require_equal, weights_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and datasets

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]


def text(start: int, length: int) -> str:
    return " ".join(WORDS[3 + (start * 7 + 3 * number) % 60] for number in range(length))


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes, **tokens))


def texts(count: int = 48) -> Dataset:
    return Dataset.from_list([{"text": text(number, 4 + number % 9)} for number in range(count)])


def completions() -> Dataset:
    rows = [{"prompt": text(n, 3), "completion": " " + text(n + 1, 2 + n % 6)} for n in range(48)]
    return Dataset.from_list(rows)


def preferences() -> Dataset:
    rows = [
        {"prompt": text(n, 3), "chosen": " " + text(n + 1, 3), "rejected": " " + text(n + 2, 4)}
        for n in range(48)
    ]
    return Dataset.from_list(rows)


def test_a_trainer_that_generates_is_refused() -> None:
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    with pytest.raises(WorkerError, match="GRPOTrainer generates"):
        elastic(trainer)


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("kind", "data", "options", "adapter"),
    [
        (SFTTrainer, completions, {}, LORA),
        # 48 packs, a multiple of the batch.
        (SFTTrainer, lambda: texts(79), {"packing": True, "max_length": 16}, None),
        (SFTTrainer, lambda: texts().to_iterable_dataset(), {}, None),
        (DPOTrainer, preferences, {}, LORA),
    ],
    ids=["completions, LoRA", "packing", "stream", "DPO, LoRA"],
)
def test_the_weights_and_losses_are_those_of_the_plain_trainer(
    train_both: Callable[..., tuple[Any, Any]],
    tmp_path: Path,
    kind: Any,
    data: Callable[[], Any],
    options: dict[str, Any],
    adapter: LoraConfig | None,
) -> None:
    def make(name: str) -> Any:
        chosen = arguments(
            tmp_path / name,
            SFTConfig if kind is SFTTrainer else DPOConfig,
            max_steps=9,
            logging_steps=3,
            bf16=False,
            train_sampling_strategy="sequential",
            **options,
        )
        torch.manual_seed(1)
        made = kind(
            llama(), args=chosen, train_dataset=data(), processing_class=tokenizer(), peft_config=adapter
        )
        if options:
            assert len(made.train_dataset) % 8 == 0
        return made

    plain, ours = train_both(make)
    require_equal(weights_of(plain.model), weights_of(ours.model))
    losses = [[logs["loss"] for logs in each.state.log_history if "loss" in logs] for each in (plain, ours)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
