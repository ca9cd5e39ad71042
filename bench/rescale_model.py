"""The models of `bench/rescale.py`, without AdaScale, so that torchft's program can import them."""

import torch
from torch import nn

FEATURES = {"tiny": 32, "1GB": 8192, "0.1GB": 2048, "0.4GB": 2048, "1.5GB": 2048}
LAYERS = {"0.1GB": 2, "0.4GB": 8, "1.5GB": 30}
"""Of 2048 x 2048, with AdamW. The others have two layers, with SGD and momentum."""
LOCAL_BSZ = 8


def make(state: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, and its optimizer, whose state has this size together."""
    torch.manual_seed(0)
    size = FEATURES[state]
    if state in LAYERS:
        with torch.device("cpu"):
            deep = nn.Sequential(*(nn.Linear(size, size) for _ in range(LAYERS[state])))
        return deep, torch.optim.AdamW(deep.parameters(), lr=1e-4)
    with torch.device("cpu"):
        last = 2 if state == "tiny" else size
        model = nn.Sequential(
            nn.Linear(size, 64 if state == "tiny" else size),
            nn.ReLU(),
            nn.Linear(64 if state == "tiny" else size, last),
        )
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def samples(state: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random features and classes: shapes (samples, features) and (samples,)."""
    count = 4096 if state == "tiny" else 512
    features = torch.randn(count, FEATURES[state], generator=torch.Generator().manual_seed(0))
    return features, (features.sum(1) > 0).long()
