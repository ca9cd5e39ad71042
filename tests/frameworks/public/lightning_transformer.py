"""Trains a language model with clipped gradients.

After Lightning's examples/pytorch/basics/transformer.py.
"""

import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from stand_ins import WORDS, record, text, tokenizer
from torch.utils.data import DataLoader, TensorDataset, random_split

# elastic added: from adascale.lightning import ElasticStrategy


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size):
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size, ninp=16, nhead=2, nhid=32, nlayers=1, dropout=0.0)

    def training_step(self, batch, batch_idx):
        return self._step(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        return self._step(batch, "val_loss")

    def test_step(self, batch, batch_idx):
        return self._step(batch, "test_loss")

    def _step(self, batch, name):
        tokens, target = batch
        output = self.model(tokens, target)
        loss = F.nll_loss(output, target.view(-1))
        self.log(name, loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


L.seed_everything(42)
tokens = torch.tensor(tokenizer()([text(number, 9) for number in range(104)])["input_ids"])
dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
train_dataset, val_dataset, test_dataset = random_split(dataset, [64, 20, 20])
train_dataloader = DataLoader(train_dataset, batch_size=8, shuffle=True)
val_dataloader = DataLoader(val_dataset, batch_size=8, shuffle=False)
test_dataloader = DataLoader(test_dataset, batch_size=8, shuffle=False)
model = LanguageModel(vocab_size=len(WORDS))
trainer = L.Trainer(
    default_root_dir=os.environ["OUTPUT"],
    accelerator="cpu",
    # elastic added: strategy=ElasticStrategy(max_batch_size=32, local_bsz_bounds=(4, 16)),
    gradient_clip_val=0.25,
    max_epochs=3,
)
trainer.fit(model, train_dataloader, val_dataloader)
(tested,) = trainer.test(model, test_dataloader)
record(model, loss=tested["test_loss"])
