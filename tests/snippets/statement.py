from snippets.problem import *

from adascale import ElasticTrainer

# PART 1
