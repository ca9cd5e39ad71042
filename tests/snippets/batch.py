from snippets.problem import *

trainer, model, optimizer, scheduler = enter()
for epoch in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        # PART 1
        scheduler.step()
require_end(trainer)
assert norm > 0
