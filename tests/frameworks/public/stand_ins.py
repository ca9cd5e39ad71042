"""What the programs have in place of downloads, small models without dropout and made data, and `record`."""

import os
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {"vocab_size": len(WORDS), "max_position_embeddings": 64, "pad_token_id": 0, **SIZES}
LLAMA = LlamaConfig(eos_token_id=1, bos_token_id=1, num_labels=1, **TEXT)
BERT = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **TEXT)
T5_SIZES = {"vocab_size": len(WORDS), "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
T5 = T5Config(dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **T5_SIZES)
VIT = ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_dropout_prob=0.0, num_labels=10, **SIZES)


def language_model():
    return LlamaForCausalLM(LLAMA)


def reward_model():
    return LlamaForSequenceClassification(LLAMA)


def text_classifier():
    return BertForSequenceClassification(BERT)


def token_classifier():
    return BertForTokenClassification(BERT)


def translation_model():
    return T5ForConditionalGeneration(T5)


def image_classifier():
    return ViTForImageClassification(VIT)


def tokenizer():
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, **special)


def text(start, length):
    """Return words, each of which follows from the one before."""
    return " ".join(WORDS[3 + (start * 7 + 3 * number) % 60] for number in range(length))


def sentences(count=64):
    """Return texts with their class, in an order of the classes that is not regular."""
    rows = [{"text": text(number, 4 + number % 5), "label": number * 7 % 60 // 30} for number in range(count)]
    return Dataset.from_list(rows)


def tokenized(count=64):
    """Return the tokens of `sentences`, and their class as `labels`."""
    data = sentences(count).map(lambda rows: tokenizer()(rows["text"]), batched=True, remove_columns="text")
    return data.rename_column("label", "labels")


def collate(rows):
    return tokenizer().pad(rows, padding="longest", return_tensors="pt")


def images(count=128):
    """Return handwritten digits of 8 by 8 pixels, and their classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.tensor(digits.images[:count], dtype=torch.float32).unsqueeze(1) / 16
    return pixels, torch.tensor(digits.target[:count])


def record(model, **metrics):
    """Print metrics, and write them with the weights to the folder RESULTS, in a file for each process."""
    print(metrics)
    if folder := os.environ.get("RESULTS"):
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        torch.save({"weights": weights, "metrics": metrics}, Path(folder, f"{os.getpid()}.pt"))
