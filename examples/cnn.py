"""Elastic training of a convolutional network with AdamW and bfloat16.

    adascale run examples/cnn.yaml                  an elastic job, whose replica count changes
    python examples/cnn.py                          one process, without a metrics service
    torchrun --nproc-per-node 2 examples/cnn.py

The handwritten digits of scikit-learn, 1,797 images of 8x8 pixels, a fifth of which is held out for the test.
The recipe was tuned for a batch size of 16.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer

images, labels = load_digits(return_X_y=True)
split = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
train_x, test_x = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) for part in split[:2])
train_y, test_y = (torch.tensor(part) for part in split[2:])
dataset = TensorDataset(train_x, train_y)

trainer = ElasticTrainer(
    batch_size=16, max_batch_size=512, local_bsz_bounds=(16, 128), scale_invariant_steps=3_000
)
steps = trainer.scale_invariant_steps or 3_000

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1, stride=2),
    nn.GroupNorm(4, 32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 16, 10),
).to(trainer.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

trainer.program_reentry(model, optimizer, scheduler)
for _ in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        optimizer.zero_grad()
        with torch.autocast(trainer.device.type, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x.to(trainer.device)), y.to(trainer.device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        trainer.log(loss=loss)

model.eval()
with torch.no_grad():
    evaluation = trainer.evaluation(TensorDataset(test_x, test_y), batch_size=128)
    for x, y in evaluation:
        evaluation.add(correct=(model(x.to(trainer.device)).argmax(1).cpu() == y).sum())
if trainer.is_main:
    accuracy = evaluation.means["correct"]
    trainer.report_result(accuracy=accuracy)
    print(f"test accuracy {accuracy:.1%} after {trainer.progress:.0f} steps at batch size 16", flush=True)
