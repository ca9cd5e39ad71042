from snippets.problem import *

def read_shard(index):
    return range(2 * index, 2 * index + 2)


decode = dataset.__getitem__
trainer, model, optimizer, scheduler = enter()
for epoch in trainer.epochs():
    # PART 1
        make_step(model, optimizer, x, y)
require_end(trainer)
