from snippets.problem import *

from adascale import ElasticTrainer

# PART 1
assert trainer.train_samples == 10_000_000_000 // 1024
assert steps == -(-trainer.train_samples // trainer.batch_size)
