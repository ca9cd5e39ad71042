from snippets.problem import *

from adascale import ElasticTrainer

# PART 1
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer.program_reentry(model, optimizer)
for epoch in trainer.epochs(2):
    for x, y in trainer.dataloader(dataset):
        trainer.log(loss=make_step(model, optimizer, x, y))
require_end(trainer)
