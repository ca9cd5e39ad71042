"""Trains a ViT to classify images.

After transformers' examples/pytorch/image-classification/run_image_classification.py.
"""

import os

import numpy as np
import torch

# elastic added: from adascale.huggingface import elastic
from datasets import Dataset
from stand_ins import image_classifier, images, record
from transformers import Trainer, TrainingArguments, set_seed

training_args = TrainingArguments(
    output_dir=os.environ["OUTPUT"],
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=2e-3,
    train_sampling_strategy="random",
    report_to="none",
    use_cpu=True,
    remove_unused_columns=False,
    dataloader_num_workers=1,
    logging_strategy="steps",
    logging_steps=10,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=3,
    load_best_model_at_end=True,
)
set_seed(training_args.seed)
pixels, classes = images()
dataset = Dataset.from_dict({"image": pixels.numpy(), "label": classes.numpy()})


def transforms(example_batch):
    example_batch["pixel_values"] = [torch.tensor(image) * 2 - 1 for image in example_batch["image"]]
    return example_batch


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": pixel_values, "labels": torch.tensor([example["label"] for example in examples])}


def compute_metrics(p):
    return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}


dataset.set_transform(transforms)
trainer = Trainer(
    model=image_classifier(),
    args=training_args,
    train_dataset=dataset.select(range(96)),
    eval_dataset=dataset.select(range(96, 128)),
    compute_metrics=compute_metrics,
    data_collator=collate_fn,
)
# elastic added: elastic(trainer, max_batch_size=32, local_bsz_bounds=(4, 16))
train_result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", train_result.metrics)
trainer.save_metrics("train", train_result.metrics)
trainer.save_state()
metrics = trainer.evaluate()
record(trainer.model, loss=metrics["eval_loss"], accuracy=metrics["eval_accuracy"])
