"""Fine-tunes a T5 with LoRA, with Accelerate.

After peft's examples/conditional_generation/peft_lora_seq2seq_accelerate_fsdp.py.
"""

import os

import torch

# elastic instead: from adascale.accelerate import ElasticAccelerator as Accelerator
from accelerate import Accelerator
from peft import LoraConfig, TaskType, get_peft_model
from stand_ins import record, sentences, tokenizer, translation_model
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_linear_schedule_with_warmup, set_seed

num_epochs, max_length = 3, 12
# elastic instead: accelerator = Accelerator(batch_size=8, max_batch_size=32)
accelerator = Accelerator()
set_seed(42)
peft_config = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, inference_mode=False, r=8, lora_alpha=32)
model = get_peft_model(translation_model(), peft_config)
model.print_trainable_parameters()


def preprocess_function(examples):
    options = {"padding": "max_length", "truncation": True}
    model_inputs = tokenizer()(examples["text"], max_length=max_length, **options)
    labels = tokenizer()([f"w{label}" for label in examples["label"]], max_length=2, **options)["input_ids"]
    model_inputs["labels"] = [[-100 if token == 0 else token for token in row] for row in labels]
    return model_inputs


with accelerator.main_process_first():
    dataset = sentences(84).map(preprocess_function, batched=True, remove_columns=["text", "label"])
train_dataset, eval_dataset = dataset.select(range(64)), dataset.select(range(64, 84))
train_dataloader = DataLoader(train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=8)
eval_dataloader = DataLoader(eval_dataset, collate_fn=default_data_collator, batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
lr_scheduler = get_linear_schedule_with_warmup(
    optimizer=optimizer, num_warmup_steps=0, num_training_steps=len(train_dataloader) * num_epochs
)
model, train_dataloader, eval_dataloader, optimizer, lr_scheduler = accelerator.prepare(
    model, train_dataloader, eval_dataloader, optimizer, lr_scheduler
)

# elastic instead: for epoch in accelerator.epochs(num_epochs):
for epoch in range(num_epochs):
    model.train()
    total_loss = 0
    for batch in train_dataloader:
        loss = model(**batch).loss
        total_loss += loss.detach().float()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()

    model.eval()
    eval_preds = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        preds = accelerator.gather_for_metrics(torch.argmax(outputs.logits, -1)).detach().cpu().numpy()
        eval_preds.extend(tokenizer().batch_decode(preds, skip_special_tokens=True))
    true = tokenizer().batch_decode([row["labels"][:1] for row in eval_dataset])
    correct = sum(pred.split()[0] == label for pred, label in zip(eval_preds, true, strict=True) if pred)
    accelerator.print(f"{epoch=}: train_epoch_loss={total_loss / len(train_dataloader)} {correct=}")
    accelerator.wait_for_everyone()
    model.save_pretrained(os.environ["OUTPUT"])
    accelerator.wait_for_everyone()
record(model, accuracy=correct / len(eval_dataset))
