"""A GAN with two optimizers that records its steps, for tests of membership.

Environment: JOURNAL, the folder of the records; EPOCHS; BOUNDS, arguments of the trainer as JSON;
STEP_SECONDS, the minimum duration of a step; REPLICA, a name for its files; LOOP, see `Gan.learn`; NORM, for
a generator with BatchNorm; PLAIN_NOISE, for noise that depends on the samples alone; STOP_REPLICA, which
stops between its two optimizer steps at step STOP_AT until it is killed; BATCHES, after which the program
leaves the loop of an epoch; SHORT_REPLICA, on which more than FITS samples do not fit into the generator's
loss from step SHORT_AT; FAILS_AT, the step between whose two parts the program itself lacks memory for more
than 4 samples.
"""

import json
import os
import time

import torch
from torch import Tensor

from adascale import ElasticTrainer
from support.gan import Gan, noise_of
from support.records import StepRecords
from support.training import samples

replica = os.environ["REPLICA"]
trainer = ElasticTrainer(**json.loads(os.environ.get("BOUNDS", '{"batch_size": 12}')))
# Different initial weights, which the members have to agree on: those of the first.
gan = Gan(norm="NORM" in os.environ, seed=2 + int(replica))
average = torch.optim.swa_utils.AveragedModel(
    gan.generator, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
)


class Memory(torch.nn.Module):
    """Raises an error for batches that do not fit."""

    def forward(self, logits: Tensor) -> Tensor:
        short = replica == os.environ.get("SHORT_REPLICA") and is_second
        if short and trainer.steps >= int(os.environ["SHORT_AT"]) and len(logits) > int(os.environ["FITS"]):
            raise torch.OutOfMemoryError(f"{len(logits)} samples do not fit")
        return logits


gan.discriminator.layers.append(Memory())
is_second = False


def between() -> None:
    """Called between the steps of the two optimizers."""
    global is_second
    is_second = True
    if trainer.steps == int(os.environ.get("FAILS_AT", "-1")) and trainer.get_local_bsz() > 4:
        raise torch.OutOfMemoryError("the loss does not fit")
    if replica == os.environ.get("STOP_REPLICA") and trainer.steps == int(os.environ["STOP_AT"]):
        (records.folder / "stopped").touch()
        while True:
            time.sleep(1)


state = gan.enter(trainer, register={"average": average})
records = StepRecords(trainer)
for epoch in range(state.epoch, int(os.environ.get("EPOCHS", "6"))):
    for batch, (index, x, _) in enumerate(records.of(trainer.dataloader(samples())), 1):
        is_second = False
        # A part of the noise comes from the generators that the trainer seeds.
        noise = noise_of(index) + (0.0 if "PLAIN_NOISE" in os.environ else 0.01) * torch.rand(1)
        gan.learn(x, noise, loop=os.environ.get("LOOP", "alternating"), between=between)
        gan.step_schedulers()
        if trainer.made_step:
            average.update_parameters(gan.generator)
        records.add(index)
        if batch == int(os.environ.get("BATCHES", "0")):
            break
    trainer.step(epoch)
records.finish([*gan.parameters(), *average.parameters()])
torch.save(gan.parameters(), records.folder / "parameters.pt")
