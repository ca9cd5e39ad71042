from snippets.problem import *

from adascale import AdaScale
from lightning.pytorch import LightningModule, Trainer


# PART 1

    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        x, y = batch
        return cross_entropy(self.net(x), y)


program = Program()
trainer = Trainer(max_epochs=2, accumulate_grad_batches=2, accelerator="cpu", logger=False)
trainer.fit(program, DataLoader(dataset, batch_size=16, shuffle=True))
assert program.progress >= 32, program.progress
