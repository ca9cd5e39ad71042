from snippets.problem import *

trainer, model, optimizer, scheduler = enter()
for epoch in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        loss, norm = make_step(model, optimizer, x, y), 1.0
        # PART 1
require_end(trainer)
