"""Fine-tunes a language model with LoRA on completions that are good or bad.

After TRL's examples/scripts/kto.py (trl/scripts/kto.py).
"""

import os

# elastic added: from adascale.huggingface import elastic
from datasets import Dataset
from peft import LoraConfig
from stand_ins import language_model, record, text, tokenizer
from transformers import set_seed
from trl import KTOConfig, KTOTrainer

set_seed(42)
training_args = KTOConfig(
    output_dir=os.environ["OUTPUT"],
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-2,
    train_sampling_strategy="sequential",
    report_to="none",
    use_cpu=True,
    eval_strategy="epoch",
    logging_steps=5,
    bf16=False,
)
dataset = Dataset.from_list(
    [{"prompt": text(n, 3), "completion": " " + text(n + n % 2, 3), "label": n % 2 == 0} for n in range(80)]
)
peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = KTOTrainer(
    model=language_model(),
    args=training_args,
    train_dataset=dataset.select(range(64)),
    eval_dataset=dataset.select(range(64, 80)),
    processing_class=tokenizer(),
    peft_config=peft_config,
)
# elastic added: elastic(trainer, max_batch_size=32, local_bsz_bounds=(4, 16))
trainer.train()
trainer.accelerator.print("Training completed.")
trainer.save_model(training_args.output_dir)
trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
record(trainer.model, loss=trainer.evaluate()["eval_loss"])
