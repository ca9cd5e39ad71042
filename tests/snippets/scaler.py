from snippets.problem import *

trainer, model, optimizer, scheduler = begin()
# PART 1
for epoch in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        optimizer.zero_grad()
        with torch.autocast(trainer.device.type, dtype=torch.float16):
            loss = cross_entropy(model(x), y)
        # PART 2
        scheduler.step()
require_end(trainer)
