"""Accelerate's cv_example.py on the digits of scikit-learn; two lines differ from plain Accelerate.

Environment: EPOCHS; STEP_SECONDS, the minimum duration of a batch.
"""

import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from adascale.accelerate import ElasticAccelerator as Accelerator

num_epochs, lr, batch_size = int(os.environ.get("EPOCHS", "3")), 3e-2, 64


class Digits(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, *, train: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        chosen = [n for n in range(len(labels)) if (n % 5 > 0) == train]
        self.images = torch.tensor(images[chosen], dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels = torch.tensor(labels[chosen])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


accelerator = Accelerator(
    mixed_precision="bf16", batch_size=64, max_batch_size=256, local_bsz_bounds=(16, 64)
)
train_dataloader = DataLoader(Digits(train=True), shuffle=True, batch_size=batch_size, num_workers=1)
eval_dataloader = DataLoader(Digits(train=False), shuffle=False, batch_size=batch_size, num_workers=1)
torch.manual_seed(42)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(576, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
model = model.to(accelerator.device)
for param in model[0].parameters():
    param.requires_grad = False
mean = torch.tensor(5.0).to(accelerator.device)
std = torch.tensor(6.0).to(accelerator.device)
optimizer = torch.optim.Adam(params=model.parameters(), lr=lr / 25)
lr_scheduler = OneCycleLR(
    optimizer=optimizer, max_lr=lr, epochs=num_epochs, steps_per_epoch=len(train_dataloader)
)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
for epoch in accelerator.epochs(num_epochs):
    model.train()
    for batch in train_dataloader:
        batch = {k: v.to(accelerator.device) for k, v in batch.items()}
        inputs = (batch["image"] - mean) / std
        outputs = model(inputs)
        loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
    model.eval()
    accurate = torch.tensor(0)
    num_elems = 0
    for batch in eval_dataloader:
        batch = {k: v.to(accelerator.device) for k, v in batch.items()}
        inputs = (batch["image"] - mean) / std
        with torch.no_grad():
            outputs = model(inputs)
        predictions = outputs.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
        accurate_preds = predictions == references
        num_elems += accurate_preds.shape[0]
        accurate += accurate_preds.long().sum()
    accelerator.print(f"epoch {epoch}: {100 * accurate.item() / num_elems:.2f} of {num_elems}", flush=True)
accelerator.end_training()
