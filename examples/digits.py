"""Elastic training on handwritten digits.

    adascale run deploy/adascalejob.yaml            an elastic job, whose replica count changes
    python examples/digits.py                       one process, without a metrics service
    torchrun --nproc-per-node 2 examples/digits.py

The data set has 1,797 images of 8x8 pixels, the last quarter of which is held out for the test. They are the
test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, 1998, CC BY 4.0), shuffled so that both parts have the same share of each digit. The recipe was
tuned for a batch size of 4: SGD without momentum, with a learning rate that decays from 0.1 to 0.001.
AdaScale adapts the learning rate to the batch size that the job uses.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Return each image shifted by up to one pixel in each direction, as data augmentation."""
    padded = nn.functional.pad(x.view(-1, 8, 8), (1, 1, 1, 1))
    images, pixels = torch.arange(len(x)), torch.arange(8)
    rows, columns = (torch.randint(0, 3, (len(x), 1)) + pixels for _ in range(2))
    return padded[images[:, None, None], rows[:, :, None], columns[:, None, :]].reshape(len(x), 64)


# On a change of the replica count, the code before the trainer runs while the previous replicas still train.
data = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")
images, labels = torch.tensor(data[:, :64] / 16, dtype=torch.float32), torch.tensor(data[:, 64].astype(int))
train_x, test_x = images[:1347], images[1347:]
train_y, test_y = labels[:1347], labels[1347:]
dataset = TensorDataset(train_x, train_y)

trainer = ElasticTrainer(
    batch_size=4, max_batch_size=256, local_bsz_bounds=(4, 64), scale_invariant_steps=20_000
)
steps = trainer.scale_invariant_steps or 20_000

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(trainer.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.01 ** (step / steps))

trainer.program_reentry(model, optimizer, scheduler)
for _ in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(shifted(x).to(trainer.device)), y.to(trainer.device))
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
    print(f"test accuracy {accuracy:.1%} after {trainer.progress:.0f} steps at batch size 4", flush=True)
