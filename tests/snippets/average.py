from snippets.problem import *

trainer, model, optimizer, scheduler = begin()
# PART 1
for epoch in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        # PART 2
require_end(trainer)
assert ema.n_averaged == trainer.steps
