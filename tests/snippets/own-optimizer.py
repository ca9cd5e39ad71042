from snippets.problem import *

# PART 1
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01, "beta": 0.9})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("v", torch.zeros_like(parameter))
                mean.mul_(group["beta"]).addcmul_(parameter.grad, parameter.grad, value=1 - group["beta"])
                parameter.addcdiv_(parameter.grad, mean.sqrt() + 1e-8, value=-group["lr"])


trainer, model, *_ = begin()
optimizer = MyOptimizer(model.parameters())
trainer.program_reentry(model, optimizer)
for epoch in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        make_step(model, optimizer, x, y)
require_end(trainer)
