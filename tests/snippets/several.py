from snippets.problem import *

def loss(output, target):
    return nn.functional.binary_cross_entropy_with_logits(output, torch.full_like(output, target))


trainer, *_ = begin()
discriminator, generator = nn.Linear(8, 1), nn.Linear(3, 8)
optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.01)
optimizer_g = torch.optim.SGD(generator.parameters(), lr=0.01)
scheduler_d, scheduler_g = (CosineAnnealingLR(each, T_max=32) for each in (optimizer_d, optimizer_g))
# PART 1
for epoch in trainer.epochs():
    for real, _ in trainer.dataloader(dataset):
        noise = torch.randn(len(real), 3)
        # PART 2
        scheduler_d.step()
        scheduler_g.step()
require_end(trainer)
