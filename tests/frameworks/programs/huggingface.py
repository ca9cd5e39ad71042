"""A program with Hugging Face's Trainer that records its steps and the calls of its callbacks.

Environment: JOURNAL, the folder of the records; OUTPUT, that of the Trainer; REPLICA, a name for its file;
ARGUMENTS, of TrainingArguments, and ELASTIC, of elastic(), as JSON; STEP_SECONDS, the minimum duration of a
step; those of `accelerate launch`; COUNT, the samples; STREAM, whether they are a stream; STOPS, the replicas
that request the end of training at the step STOP_AT.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, EvalPrediction, Trainer, TrainerCallback

from adascale.huggingface import elastic
from frameworks.huggingface_problem import Texts, arguments, language_model
from support.records import digest
from support.streams import Numbers

folder = Path(os.environ["JOURNAL"])
folder.mkdir(parents=True, exist_ok=True)
replica = os.environ.get("REPLICA", "0")
journal = (folder / f"{replica}-{os.getpid()}.jsonl").open("w", buffering=1)
calls = (folder / f"calls-{replica}-{os.getpid()}").open("w", buffering=1)
options = json.loads(os.environ.get("ARGUMENTS", "{}"))
processes = int(os.environ.get("ADASCALE_PROCESSES_PER_REPLICA", "1"))
dataset = Texts(int(os.environ.get("COUNT", "48")), padded=True)
held_out = Texts(20, padded=True)


class Journal(TrainerCallback):  # type: ignore[misc]
    """Records steps, and what the loop calls."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.samples = trainer.elastic.samples
        self.progress = trainer.elastic.progress

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        inner = trainer.elastic
        count = (inner.samples - self.samples) // (inner.replicas * processes)
        record = {
            "step": inner.steps,
            "samples": [self.samples, inner.samples],
            "indices": dataset.requested[-count:],
            "rank": inner.rank,
            "replicas": inner.replicas,
            "generation": inner.generation,
            "progress": [self.progress, inner.progress],
            "lr": trainer.optimizer.param_groups[0]["lr"],
        }
        journal.write(json.dumps(record) + "\n")
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % 4 == 0:
            self._call("multiple of 4", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        kept = {name: value for name, value in logs.items() if "runtime" not in name and "_per_" not in name}
        self._call("log", state, **kept)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._call("evaluate", state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._call("save", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._call("epoch", state)

    def _call(self, event: str, state: Any, **values: Any) -> None:
        inner = trainer.elastic
        call = {"event": event, "global_step": state.global_step, "step": inner.steps, **values}
        call |= {"is_main": state.is_world_process_zero, "rank": trainer.args.process_index}
        calls.write(json.dumps(call) + "\n")


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    right = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "samples": float(len(right))}


class Stops(TrainerCallback):  # type: ignore[misc]
    """Requests the end of training at a step, on some of the replicas."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == int(os.environ["STOP_AT"]) and replica in os.environ["STOPS"]:
            control.should_training_stop = True


callbacks: list[TrainerCallback] = [Journal()]
if "STOPS" in os.environ:
    callbacks.append(Stops())
if options.get("metric_for_best_model"):
    callbacks.append(EarlyStoppingCallback(early_stopping_patience=3))
elastic_options = json.loads(os.environ.get("ELASTIC", "{}"))
if "STREAM" in os.environ:
    # Each replica reads the numbers of all samples.
    elastic_options["map"] = dataset.__getitem__
trainer: Any = elastic(
    Trainer(
        language_model(),
        arguments(Path(os.environ["OUTPUT"]), **options),
        train_dataset=Numbers(len(dataset)) if "STREAM" in os.environ else dataset,
        eval_dataset=held_out,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
        callbacks=callbacks,
    ),
    **elastic_options,
)
output = trainer.train()
metrics = trainer.evaluate()
state = trainer.state
result = {"global_step": output.global_step, "best": state.best_global_step, "loss": output.training_loss}
result |= {"eval_loss": metrics["eval_loss"], "history": len(state.log_history)}
(folder / f"result-{replica}-{os.getpid()}").write_text(json.dumps(result))
weights = [getattr(each, "full_tensor", lambda each=each: each)() for each in trainer.model.parameters()]
(folder / f"weights-{replica}-{os.getpid()}").write_text(digest(weights))
