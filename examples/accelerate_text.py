"""A classifier of text with Accelerate and transformers, after Accelerate's nlp_example.py.

    adascale run examples/accelerate_text.yaml      an elastic job, whose replica count changes
    python examples/accelerate_text.py              one process, without a metrics service

Two lines differ from a program of plain Accelerate: the import, and the loop over epochs. A small BERT, with
random initial weights, tells lines of documentation from lines of source code, both of which scikit-learn
ships. The recipe was tuned for a batch size of 16.
"""

import argparse
from pathlib import Path

import sklearn
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed

from adascale.accelerate import ElasticAccelerator as Accelerator

BATCH_SIZE, MAX_LENGTH = 16, 64
PAD, CLS = 256, 257  # after the 256 bytes

Line = tuple[bytes, int]


def get_lines() -> tuple[list[Line], list[Line]]:
    """Return lines with their class, documentation or code, for training and for evaluation."""
    folder = Path(sklearn.__file__).parent
    files = [(file, 0) for file in sorted(folder.glob("datasets/descr/*.rst"))]
    files += [(file, 1) for file in sorted(folder.glob("linear_model/*.py"))]
    lines = [
        (text.encode()[:MAX_LENGTH], label)
        for file, label in files
        for text in map(str.strip, file.read_text(encoding="utf-8").splitlines())
        if len(text) > 20
    ]
    documentation = sum(label == 0 for _, label in lines)
    balanced = lines[: 2 * documentation]  # as many lines of code
    return [line for n, line in enumerate(balanced) if n % 5], balanced[::5]


def collate(lines: list[Line]) -> dict[str, Tensor]:
    """Pad a batch to its longest line."""
    ids = [torch.tensor([CLS, *text]) for text, _ in lines]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
    labels = torch.tensor([label for _, label in lines])
    return {"input_ids": padded, "attention_mask": (padded != PAD).long(), "labels": labels}


def get_dataloaders() -> tuple[DataLoader[Line], DataLoader[Line]]:
    train_lines, eval_lines = get_lines()
    return (
        DataLoader(train_lines, shuffle=True, collate_fn=collate, batch_size=BATCH_SIZE),  # type: ignore[arg-type]
        DataLoader(eval_lines, shuffle=False, collate_fn=collate, batch_size=64),  # type: ignore[arg-type]
    )


def training_function(args: argparse.Namespace) -> None:
    accelerator = Accelerator(
        batch_size=BATCH_SIZE,
        max_batch_size=256,
        local_bsz_bounds=(16, 128),
        mixed_precision=args.mixed_precision,
    )
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders()
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=258,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=MAX_LENGTH + 1,
            pad_token_id=PAD,
        )
    ).to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=5e-4)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=50,
        num_training_steps=len(train_dataloader) * args.num_epochs,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    accuracy = 0.0
    for epoch in accelerator.epochs(args.num_epochs):
        model.train()
        for batch in train_dataloader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            accelerator.trainer.log(loss=loss)
        model.eval()
        samples = correct = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            samples += len(references)
            correct += int((predictions == references).sum())
        accuracy = correct / samples
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.1%}")
    accelerator.end_training()
    if accelerator.is_main_process:
        accelerator.trainer.report_result(accuracy=accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--num_epochs", type=int, default=6)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
