"""Fine-tunes a language model with OLoRA, and keeps the best weights.

After peft's examples/olora_finetuning/olora_finetuning.py.
"""

import os

import transformers

# elastic added: from adascale.huggingface import elastic
from peft import LoraConfig, get_peft_model
from stand_ins import language_model, record, sentences, tokenizer

transformers.set_seed(42)
config = LoraConfig(
    r=4,
    lora_alpha=16,
    target_modules=["q_proj", "v_proj"],
    bias="none",
    task_type="CAUSAL_LM",
    init_lora_weights="olora",
)
model = get_peft_model(language_model(), config)


def tokenize(example):
    result = tokenizer()(example["text"] + " <eos>", truncation=True, max_length=16)
    result["labels"] = result["input_ids"].copy()
    return result


train_val = sentences(84).map(tokenize, remove_columns=["text", "label"])
trainer = transformers.Trainer(
    model=model,
    train_dataset=train_val.select(range(64)),
    eval_dataset=train_val.select(range(64, 84)),
    args=transformers.TrainingArguments(
        output_dir=os.environ["OUTPUT"],
        per_device_train_batch_size=8,
        num_train_epochs=3,
        learning_rate=1e-2,
        train_sampling_strategy="random",
        report_to="none",
        use_cpu=True,
        warmup_steps=4,
        logging_steps=5,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=6,
        save_steps=6,
        save_total_limit=3,
        load_best_model_at_end=True,
    ),
    data_collator=transformers.DataCollatorForSeq2Seq(
        tokenizer(), pad_to_multiple_of=8, return_tensors="pt", padding=True
    ),
)
# elastic added: elastic(trainer, max_batch_size=32, local_bsz_bounds=(4, 16))
trainer.train()
model.save_pretrained(os.environ["OUTPUT"])
record(model, loss=trainer.evaluate()["eval_loss"])
