"""Fine-tunes a BERT to classify texts by tokens before the text, with Accelerate.

After peft's examples/sequence_classification/peft_no_lora_accelerate.py.
"""

import os

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

# elastic added: from adascale.accelerate import ElasticAccelerator as Accelerator
from peft import PromptTuningConfig, get_peft_model
from stand_ins import collate, record, text_classifier, tokenized
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup, set_seed

num_epochs = 3
ddp_scaler = DistributedDataParallelKwargs(find_unused_parameters=True)
# elastic instead: accelerator = Accelerator(kwargs_handlers=[ddp_scaler], batch_size=8, max_batch_size=32)
accelerator = Accelerator(kwargs_handlers=[ddp_scaler])
set_seed(42)
train_set, eval_set = tokenized(64), tokenized(20)
train_dataloader = DataLoader(train_set, shuffle=True, collate_fn=collate, batch_size=8)
eval_dataloader = DataLoader(eval_set, shuffle=False, collate_fn=collate, batch_size=8)
peft_config = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
model = get_peft_model(text_classifier(), peft_config)
model.print_trainable_parameters()
optimizer = AdamW(params=model.parameters(), lr=1e-2)
lr_scheduler = get_linear_schedule_with_warmup(
    optimizer=optimizer, num_warmup_steps=10, num_training_steps=len(train_dataloader) * num_epochs
)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)

# elastic instead: for epoch in accelerator.epochs(num_epochs):
for epoch in range(num_epochs):
    model.train()
    for batch in train_dataloader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()

    model.eval()
    correct, samples_seen = 0, 0
    for step, batch in enumerate(eval_dataloader):
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        predictions, references = accelerator.gather((predictions, batch["labels"]))
        # The last batch of several processes repeats samples.
        if accelerator.num_processes > 1:
            if step == len(eval_dataloader) - 1:
                predictions = predictions[: len(eval_dataloader.dataset) - samples_seen]
                references = references[: len(eval_dataloader.dataset) - samples_seen]
            else:
                samples_seen += references.shape[0]
        correct += (predictions == references).sum().item()
    accelerator.print(f"epoch {epoch}:", correct / len(eval_set))
accelerator.wait_for_everyone()
unwrapped_model = accelerator.unwrap_model(model)
unwrapped_model.save_pretrained(os.environ["OUTPUT"], state_dict=accelerator.get_state_dict(model))
record(unwrapped_model, accuracy=correct / len(eval_set))
