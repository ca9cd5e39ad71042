from snippets.problem import *

from transformers import Trainer, TrainingArguments


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, inputs, labels):
        outputs = self.net(inputs)
        return {"loss": cross_entropy(outputs, labels), "logits": outputs}


model = Classifier()
train_set = [{"inputs": x, "labels": y} for x, y in dataset]
args = TrainingArguments("out", max_steps=20, per_device_train_batch_size=32, report_to=[], use_cpu=True)
# PART 1
assert trainer.state.global_step >= 20
