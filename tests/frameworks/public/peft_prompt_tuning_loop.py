"""Fine-tunes a language model by tokens before the text, with a loop of its own.

After peft's examples/causal_language_modeling/peft_prompt_tuning_clm.ipynb.
"""

import torch
from peft import PromptTuningConfig, TaskType, get_peft_model
from stand_ins import language_model, record, tokenized, tokenizer
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, get_linear_schedule_with_warmup, set_seed

# elastic added: from adascale.accelerate import ElasticAccelerator as Accelerator

num_epochs = 3
set_seed(42)
collate_fn = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
train_dataset, eval_dataset = tokenized(64).remove_columns("labels"), tokenized(20).remove_columns("labels")
train_dataloader = DataLoader(train_dataset, shuffle=True, collate_fn=collate_fn, batch_size=8)
eval_dataloader = DataLoader(eval_dataset, collate_fn=collate_fn, batch_size=8)
peft_config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8)
model = get_peft_model(language_model(), peft_config)
model.print_trainable_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
lr_scheduler = get_linear_schedule_with_warmup(
    optimizer=optimizer, num_warmup_steps=0, num_training_steps=len(train_dataloader) * num_epochs
)
# elastic added: accelerator = Accelerator(batch_size=8, max_batch_size=32)
# elastic added: train_dataloader, *_ = accelerator.prepare(train_dataloader, model, optimizer, lr_scheduler)

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
    eval_loss = 0
    for batch in eval_dataloader:
        with torch.no_grad():
            eval_loss += model(**batch).loss.detach().float()
    print(f"{epoch=}: {total_loss / len(train_dataloader)} {eval_loss / len(eval_dataloader)}")
record(model, loss=eval_loss.item() / len(eval_dataloader))
