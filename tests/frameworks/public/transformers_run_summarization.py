"""Fine-tunes a T5 to shorten texts, and evaluates what it generates.

After transformers' examples/pytorch/summarization/run_summarization.py.
"""

import os

import numpy as np

# elastic added: from adascale.huggingface import elastic
from stand_ins import record, sentences, tokenizer, translation_model
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

training_args = Seq2SeqTrainingArguments(
    output_dir=os.environ["OUTPUT"],
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-2,
    train_sampling_strategy="random",
    report_to="none",
    use_cpu=True,
    lr_scheduler_type="constant",
    predict_with_generate=True,
    generation_max_length=4,
    label_smoothing_factor=0.1,
    eval_strategy="epoch",
    save_strategy="no",
)
set_seed(training_args.seed)


def preprocess_function(examples):
    model_inputs = tokenizer()(examples["text"], max_length=16, truncation=True)
    summaries = [" ".join(text.split()[:2]) + " <eos>" for text in examples["text"]]
    model_inputs["labels"] = tokenizer()(text_target=summaries, max_length=4, truncation=True)["input_ids"]
    return model_inputs


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    decoded = tokenizer().batch_decode(np.where(preds != -100, preds, 0), skip_special_tokens=True)
    expected = tokenizer().batch_decode(np.where(labels != -100, labels, 0), skip_special_tokens=True)
    return {"exact": float(np.mean([pred == label for pred, label in zip(decoded, expected, strict=True)]))}


data = sentences(84).map(preprocess_function, batched=True, remove_columns=["text", "label"])
model = translation_model()
trainer = Seq2SeqTrainer(
    model=model,
    args=training_args,
    train_dataset=data.select(range(64)),
    eval_dataset=data.select(range(64, 84)),
    processing_class=tokenizer(),
    data_collator=DataCollatorForSeq2Seq(tokenizer(), model=model, label_pad_token_id=-100),
    compute_metrics=compute_metrics,
)
# elastic added: elastic(trainer, max_batch_size=32, local_bsz_bounds=(4, 16))
train_result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", train_result.metrics)
trainer.save_metrics("train", train_result.metrics)
trainer.save_state()
metrics = trainer.evaluate()
record(trainer.model, loss=metrics["eval_loss"], exact=metrics["eval_exact"])
