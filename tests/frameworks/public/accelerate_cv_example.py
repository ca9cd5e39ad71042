"""Trains the last layer of an image classifier.

After Accelerate's examples/cv_example.py.
"""

import torch

# elastic instead: from adascale.accelerate import ElasticAccelerator as Accelerator
from accelerate import Accelerator
from stand_ins import images, record
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import set_seed

num_epochs = 3
# elastic instead: accelerator = Accelerator(batch_size=8, max_batch_size=32)
accelerator = Accelerator()
set_seed(42)
pixels, labels = images()
train_set, eval_set = TensorDataset(pixels[:96], labels[:96]), TensorDataset(pixels[96:], labels[96:])
train_dataloader = DataLoader(train_set, shuffle=True, batch_size=8, num_workers=1)
eval_dataloader = DataLoader(eval_set, shuffle=False, batch_size=8)
backbone = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
model = nn.Sequential(backbone, nn.Linear(576, 10)).to(accelerator.device)
for param in backbone.parameters():
    param.requires_grad = False
mean, std = pixels[:96].mean().to(accelerator.device), pixels[:96].std().to(accelerator.device)
optimizer = torch.optim.Adam(params=model.parameters(), lr=0.02 / 25)
lr_scheduler = OneCycleLR(
    optimizer=optimizer, max_lr=0.02, epochs=num_epochs, steps_per_epoch=len(train_dataloader)
)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)

# elastic instead: for epoch in accelerator.epochs(num_epochs):
for epoch in range(num_epochs):
    model.train()
    for image, label in train_dataloader:
        loss = nn.functional.cross_entropy(model((image - mean) / std), label)
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()

    model.eval()
    accurate, num_elems = 0, 0
    for image, label in eval_dataloader:
        with torch.no_grad():
            outputs = model((image - mean) / std)
        predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), label))
        num_elems += predictions.shape[0]
        accurate += (predictions == references).long().sum().item()
    accelerator.print(f"epoch {epoch}: {100 * accurate / num_elems:.2f}")
accelerator.end_training()
record(accelerator.unwrap_model(model), accuracy=accurate / num_elems)
