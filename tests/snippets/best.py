from snippets.problem import *

os.environ["ADASCALE_CHECKPOINT_DIR"] = "checkpoints"
trainer, model, optimizer, scheduler = enter()
# PART 1
for epoch in trainer.epochs():
    for x, y in trainer.dataloader(dataset):
        make_step(model, optimizer, x, y)
    model.eval()
    evaluation = trainer.evaluation(test_set, batch_size=32)
    for x, y in evaluation:
        evaluation.add(accuracy=(model(x).argmax(1) == y).sum())
    model.train()
    # PART 2
require_end(trainer)
trainer.close()
assert list(Path("checkpoints").rglob("best-*.safetensors"))
