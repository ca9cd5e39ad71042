"""Fine-tunes a BERT with LoRA to classify tokens.

After peft's examples/token_classification/peft_lora_token_cls.ipynb.
"""

import os

import numpy as np

# elastic added: from adascale.huggingface import elastic
from peft import LoraConfig, TaskType, get_peft_model
from stand_ins import record, sentences, token_classifier, tokenizer
from transformers import DataCollatorForTokenClassification, Trainer, TrainingArguments, set_seed

set_seed(42)


def tokenize_and_align_labels(examples):
    tokenized_inputs = tokenizer()(examples["text"], truncation=True)
    rows = tokenized_inputs["input_ids"]
    tokenized_inputs["labels"] = [[int(token > 32) for token in row] for row in rows]
    return tokenized_inputs


def compute_metrics(p):
    predictions, labels = p
    valid = labels != -100
    return {"accuracy": float((np.argmax(predictions, axis=2) == labels)[valid].mean())}


data = sentences(84).map(tokenize_and_align_labels, batched=True, remove_columns=["text", "label"])
peft_config = LoraConfig(task_type=TaskType.TOKEN_CLS, inference_mode=False, r=8, lora_alpha=16, bias="all")
model = get_peft_model(token_classifier(), peft_config)
model.print_trainable_parameters()
training_args = TrainingArguments(
    output_dir=os.environ["OUTPUT"],
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-2,
    train_sampling_strategy="random",
    report_to="none",
    use_cpu=True,
    weight_decay=0.01,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=data.select(range(64)),
    eval_dataset=data.select(range(64, 84)),
    processing_class=tokenizer(),
    data_collator=DataCollatorForTokenClassification(tokenizer=tokenizer()),
    compute_metrics=compute_metrics,
)
# elastic added: elastic(trainer, max_batch_size=32, local_bsz_bounds=(4, 16))
trainer.train()
metrics = trainer.evaluate()
record(model, loss=metrics["eval_loss"], accuracy=metrics["eval_accuracy"])
