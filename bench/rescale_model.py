"""The models of `bench/rescale.py`, without AdaScale, so that torchft's program can import them."""

import torch
from torch import nn

FEATURES = {"tiny": 32, "1GB": 8192}
LOCAL_BSZ = 8


def make(state: str) -> tuple[nn.Module, torch.optim.SGD]:
    """Return a model, and its optimizer, whose state has this size together: `tiny`, or `1GB`."""
    torch.manual_seed(0)
    size = FEATURES[state]
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
