from snippets.problem import *

def learning_rate(step):
    return 0.1 / (1 + step)


trainer, model, *_ = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer.program_reentry(model, optimizer)
for epoch in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        # PART 1
        make_step(model, optimizer, x, y)
require_end(trainer)
assert optimizer.param_groups[0]["lr"] == learning_rate(31)
