from snippets.problem import *

from torch.nn.parallel import DistributedDataParallel

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo")
model, progress = nn.Linear(4, 1), 0.0
# PART 1
for _ in range(10):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    # PART 2
assert progress == 10, progress
dist.destroy_process_group()
