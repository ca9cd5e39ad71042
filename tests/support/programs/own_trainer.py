"""Trains under torchrun with a loop of its own, and commits each step as a line."""

import json
import sys
from itertools import chain
from pathlib import Path

import torch.distributed as dist

from adascale.data import ElasticDataLoader

dist.init_process_group("gloo")
lines = Path(sys.argv[1])
loader = ElasticDataLoader(list(range(1000)), batch_size=3, seed=5, num_workers=2)
committed = [line for line in lines.read_text().splitlines(keepends=True) if line.endswith("\n")]
if committed:
    loader.load_state_dict(json.loads(committed[-1])["state"])
for batch in loader:
    gathered: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, batch.tolist())
    if dist.get_rank() == 0:
        with lines.open("a") as file:
            file.write(json.dumps({"samples": [*chain(*gathered)], "state": loader.state_dict()}) + "\n")
