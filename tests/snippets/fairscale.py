from snippets.problem import *

# PART 1
model = Net()
optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), world_size=1, num_gradients_to_accumulate=2)
for number, (x, y) in enumerate(DataLoader(dataset, batch_size=16), 1):
    (criterion(model(x), y) / 2).backward()
    if number % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
assert 1 <= optimizer.gain() <= 2
