from snippets.problem import *

weights = torch.rand(len(dataset))
trainer, model, optimizer, scheduler = enter()
for epoch in trainer.epochs():
    # PART 1
        make_step(model, optimizer, x, y)
require_end(trainer)
