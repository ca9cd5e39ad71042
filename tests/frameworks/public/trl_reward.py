"""Trains a reward model on preferences.

After TRL's examples/scripts/reward_modeling.py (trl/scripts/reward.py).
"""

import os

# elastic added: from adascale.huggingface import elastic
from datasets import Dataset
from stand_ins import record, reward_model, text, tokenizer
from transformers import set_seed
from trl import RewardConfig, RewardTrainer

set_seed(42)
training_args = RewardConfig(
    output_dir=os.environ["OUTPUT"],
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-2,
    train_sampling_strategy="random",
    report_to="none",
    use_cpu=True,
    eval_strategy="epoch",
    logging_steps=5,
    bf16=False,
)
dataset = Dataset.from_list([{"chosen": text(n, 5), "rejected": text(n, 2 + n % 2)} for n in range(80)])
trainer = RewardTrainer(
    model=reward_model(),
    args=training_args,
    train_dataset=dataset.select(range(64)),
    eval_dataset=dataset.select(range(64, 80)),
    processing_class=tokenizer(),
)
# elastic added: elastic(trainer, max_batch_size=32, local_bsz_bounds=(4, 16))
trainer.train()
trainer.accelerator.print("Training completed.")
trainer.save_model(training_args.output_dir)
trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
record(trainer.model, loss=trainer.evaluate()["eval_loss"])
