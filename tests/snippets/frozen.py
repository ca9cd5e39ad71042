from snippets.problem import *

from adascale import ElasticTrainer

epochs, scheduler = 5, None
trainer = ElasticTrainer(epochs=epochs)
model = Net()
frozen = copy.deepcopy(model.encoder)
# PART 1
        make_step(model, optimizer, x, y)
        if trainer.made_step:
            assert (epoch < 3) == torch.equal(model.encoder.weight, frozen.weight)
require_end(trainer)
