"""Trains a language model on texts that are cut into blocks.

After transformers' examples/pytorch/language-modeling/run_clm.py.
"""

import math
import os
from itertools import chain

# elastic added: from adascale.huggingface import elastic
from stand_ins import language_model, record, sentences, tokenizer
from transformers import Trainer, TrainingArguments, default_data_collator, set_seed

block_size = 16
training_args = TrainingArguments(
    output_dir=os.environ["OUTPUT"],
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-2,
    train_sampling_strategy="random",
    report_to="none",
    use_cpu=True,
    lr_scheduler_type="cosine",
    logging_steps=5,
    save_steps=10,
    eval_strategy="steps",
    eval_steps=10,
)
set_seed(training_args.seed)


def group_texts(examples):
    concatenated = {name: list(chain(*examples[name])) for name in ("input_ids", "attention_mask")}
    total_length = len(concatenated["input_ids"]) // block_size * block_size
    result = {
        name: [tokens[start : start + block_size] for start in range(0, total_length, block_size)]
        for name, tokens in concatenated.items()
    }
    result["labels"] = result["input_ids"].copy()
    return result


tokenized = sentences(400).map(lambda rows: tokenizer()(rows["text"]), batched=True)
lm_datasets = tokenized.map(group_texts, batched=True, remove_columns=tokenized.column_names)


def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(dim=-1)


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    return {"accuracy": float((preds[:, :-1] == labels[:, 1:]).mean())}


trainer = Trainer(
    model=language_model(),
    args=training_args,
    train_dataset=lm_datasets.select(range(64)),
    eval_dataset=lm_datasets.select(range(64, 80)),
    processing_class=tokenizer(),
    data_collator=default_data_collator,
    compute_metrics=compute_metrics,
    preprocess_logits_for_metrics=preprocess_logits_for_metrics,
)
# elastic added: elastic(trainer, max_batch_size=32, local_bsz_bounds=(4, 16))
train_result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", train_result.metrics)
trainer.save_metrics("train", train_result.metrics)
trainer.save_state()
metrics = trainer.evaluate()
metrics["perplexity"] = math.exp(metrics["eval_loss"])
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
record(trainer.model, loss=metrics["eval_loss"], accuracy=metrics["eval_accuracy"])
