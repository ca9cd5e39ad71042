from snippets.problem import *

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
# PART 1
for _ in range(200):
    x, y = next(iter(DataLoader(dataset, batch_size=16)))
    make_step(model, optimizer, x, y)
assert len(open("gain.csv").readlines()) == 3
