from snippets.problem import *

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_loader = DataLoader(dataset, batch_size=32, shuffle=True)
eval_loader = DataLoader(test_set, batch_size=10)
scheduler = CosineAnnealingLR(optimizer, T_max=2 * len(train_loader))
num_epochs = 2
# PART 1
assert accelerator.trainer.steps >= 2
