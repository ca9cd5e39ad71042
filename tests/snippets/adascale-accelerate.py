from snippets.problem import *

from accelerate import Accelerator
from adascale import AdaScale

model, progress = Net(), 0.0
loader = DataLoader(dataset, batch_size=16, shuffle=True)
# PART 1
for x, y in loader:
    # PART 2
assert progress >= 16, progress
