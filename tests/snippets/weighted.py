from snippets.problem import *

dataset = TensorDataset(inputs, torch.where(torch.arange(512) % 3 == 0, -1, dataset.tensors[1]))
trainer, model, optimizer, scheduler = enter()
for epoch in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        optimizer.zero_grad()
        valid_tokens = (y != -1).sum()
        # PART 1
        optimizer.step()
        scheduler.step()
require_end(trainer)
