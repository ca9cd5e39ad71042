from snippets.problem import *

trainer, model, optimizer, scheduler = begin()
# PART 1
for epoch in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        make_step(model, optimizer, x, y)
require_end(trainer)
