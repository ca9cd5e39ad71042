"""Fine-tunes a BERT to classify texts, and predicts.

After transformers' examples/pytorch/text-classification/run_glue.py.
"""

import os

import numpy as np

# elastic added: from adascale.huggingface import elastic
from stand_ins import record, text_classifier, tokenized, tokenizer
from transformers import (
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

training_args = TrainingArguments(
    output_dir=os.environ["OUTPUT"],
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-2,
    train_sampling_strategy="random",
    report_to="none",
    use_cpu=True,
    warmup_steps=6,
    metric_for_best_model="accuracy",
    load_best_model_at_end=True,
    eval_strategy="epoch",
    save_strategy="epoch",
)
set_seed(training_args.seed)


def compute_metrics(p):
    return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}


data = tokenized(104)
trainer = Trainer(
    model=text_classifier(),
    args=training_args,
    train_dataset=data.select(range(64)),
    eval_dataset=data.select(range(64, 84)),
    compute_metrics=compute_metrics,
    processing_class=tokenizer(),
    data_collator=DataCollatorWithPadding(tokenizer()),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
# elastic added: elastic(trainer, max_batch_size=32, local_bsz_bounds=(4, 16))
train_result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", train_result.metrics)
trainer.save_metrics("train", train_result.metrics)
trainer.save_state()
metrics = trainer.evaluate()
predictions = trainer.predict(data.select(range(84, 104)).remove_columns("labels")).predictions
output_predict_file = os.path.join(training_args.output_dir, "predict_results.txt")
if trainer.is_world_process_zero():
    np.savetxt(output_predict_file, np.argmax(predictions, axis=1), fmt="%d")
record(
    trainer.model,
    loss=metrics["eval_loss"],
    accuracy=metrics["eval_accuracy"],
    mean=float(predictions.mean()),
)
