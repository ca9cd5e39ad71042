"""Fine-tunes a BERT to classify texts, and saves the state every ten steps and after each epoch.

After Accelerate's examples/by_feature/checkpointing.py.
"""

import os

import torch

# elastic instead: from adascale.accelerate import ElasticAccelerator as Accelerator
from accelerate import Accelerator
from stand_ins import collate, record, text_classifier, tokenized
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup, set_seed

num_epochs = 3
# elastic instead: accelerator = Accelerator(batch_size=8, max_batch_size=32)
accelerator = Accelerator()
set_seed(42)
train_set, eval_set = tokenized(64), tokenized(20)
train_dataloader = DataLoader(train_set, shuffle=True, collate_fn=collate, batch_size=8)
eval_dataloader = DataLoader(eval_set, shuffle=False, collate_fn=collate, batch_size=8)
model = text_classifier().to(accelerator.device)
optimizer = AdamW(params=model.parameters(), lr=1e-2)
lr_scheduler = get_linear_schedule_with_warmup(
    optimizer=optimizer, num_warmup_steps=10, num_training_steps=len(train_dataloader) * num_epochs
)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)

overall_step = 0
# elastic instead: for epoch in accelerator.epochs(num_epochs):
for epoch in range(num_epochs):
    model.train()
    for batch in train_dataloader:
        batch.to(accelerator.device)
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        overall_step += 1
        if overall_step % 10 == 0:
            accelerator.save_state(os.path.join(os.environ["OUTPUT"], f"step_{overall_step}"))

    model.eval()
    correct = 0
    for batch in eval_dataloader:
        batch.to(accelerator.device)
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        correct += (predictions == references).sum().item()
    accelerator.print(f"epoch {epoch}:", correct / len(eval_set))
    accelerator.save_state(os.path.join(os.environ["OUTPUT"], f"epoch_{epoch}"))
accelerator.end_training()
record(accelerator.unwrap_model(model), accuracy=correct / len(eval_set))
