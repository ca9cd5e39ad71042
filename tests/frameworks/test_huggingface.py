"""Hugging Face's Trainer made elastic, on one replica, compared with the plain Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

from adascale.huggingface import elastic
from adascale_core.batch.plans import InvalidBoundsError
from adascale_core.errors import InvalidJobError
from adascale_core.names import LAUNCHER_VARIABLES
from adascale_frameworks.huggingface import private
from adascale_worker.errors import DatasetError, UnsupportedOptimizerError, WorkerError
from adascale_worker.process import exit as shutdown
from adascale_worker.state.checkpoints.writer import CheckpointWriter
from frameworks.huggingface_problem import (
    VOCABULARY,
    Classes,
    Texts,
    arguments,
    classifier,
    configuration,
    language_model,
    require_close,
    require_equal,
    weights_of,
)

MakeElastic = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings(
    # Of transformers and accelerate themselves, with a plain Trainer too.
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:.*lr_scheduler.step.*:UserWarning",
)
_TIMES = ("_runtime", "_per_second", "_time")
SEQUENTIAL = {"train_sampling_strategy": "sequential"}


@pytest.fixture
def make_elastic(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeElastic]:
    """Makes trainers elastic, and closes them after the test."""
    for name in list(os.environ):
        if name.startswith("ADASCALE_") or name in LAUNCHER_VARIABLES:
            monkeypatch.delenv(name)
    # The exit functions of trainers would end pytest's own process.
    monkeypatch.setattr(shutdown, "atexit", SimpleNamespace(register=lambda _: None))
    monkeypatch.setattr("sys.excepthook", __import__("sys").excepthook)
    made: list[Any] = []

    def make(trainer: Trainer, **options: Any) -> Any:
        made.append(elastic(trainer, **options))
        return made[-1]

    yield make
    for trainer in reversed(made):
        trainer.elastic.close()


class Calls(TrainerCallback):  # type: ignore[misc]
    """Records the calls of the loop."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("begin", state.global_step))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("optimizer", state.global_step))

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("substep", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("end", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("log", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("save", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("epoch", state.global_step))

    def of(self, event: str) -> list[int]:
        return [step for name, step in self.calls if name == event]


def history(trainer: Any) -> list[dict[str, float]]:
    """Return what was logged, without times."""
    return [
        {name: value for name, value in logs.items() if not name.endswith(_TIMES)}
        for logs in trainer.state.log_history
    ]


def require_same_history(left: Any, right: Any) -> None:
    """Check that two trainers have logged the same, up to the rounding of means."""
    assert len(history(left)) == len(history(right))
    for one, other in zip(history(left), history(right), strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def sequential(folder: Path, **options: Any) -> Any:
    return arguments(folder, **{**SEQUENTIAL, **options})


# -- the same as the plain Trainer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="AdamW"),
        pytest.param({"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 3}, id="SGD, cosine"),
        pytest.param({"bf16": True}, id="bfloat16"),
        pytest.param({"gradient_checkpointing": True}, id="gradient checkpointing", marks=pytest.mark.slow),
        pytest.param({"max_steps": -1, "num_train_epochs": 2.5, "max_grad_norm": 0.1}, id="epochs, clipping"),
        pytest.param({"label_smoothing_factor": 0.1}, id="label smoothing", marks=pytest.mark.slow),
        pytest.param(
            dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "epoch"), id="epoch"
        ),
    ],
)
def test_the_weights_and_the_logs_are_those_of_the_plain_trainer(
    make_elastic: MakeElastic, tmp_path: Path, options: dict[str, Any]
) -> None:
    trained = []
    for name in ("plain", "elastic"):
        trainer = Trainer(
            language_model(),
            sequential(tmp_path / name, **options),
            train_dataset=Texts(48, padded=True),
            eval_dataset=Texts(20, padded=True),
        )
        trained.append(make_elastic(trainer) if name == "elastic" else trainer)
        output = trained[-1].train()
        assert output.training_loss == pytest.approx(trained[0].state.log_history[-1]["train_loss"])
    plain, ours = trained
    require_equal(weights_of(plain.model), weights_of(ours.model))
    require_same_history(plain, ours)
    assert ours.state.max_steps == plain.state.max_steps == ours.state.global_step
    assert ours.state.num_train_epochs == plain.state.num_train_epochs
    folders = [sorted(path.name for path in (tmp_path / name).glob("*/*")) for name in ("plain", "elastic")]
    assert folders[0] == folders[1]


@pytest.mark.parametrize("is_padded", [False, True])
def test_the_mean_over_tokens_does_not_depend_on_the_division_into_micro_batches(
    make_elastic: MakeElastic, tmp_path: Path, *, is_padded: bool
) -> None:
    trained = []
    for bounds in (None, (2, 2)):
        trainer = Trainer(
            language_model(),
            sequential(tmp_path, optim="sgd", learning_rate=0.1),
            train_dataset=Texts(48, padded=is_padded),
        )
        if bounds is not None:
            trainer = make_elastic(trainer, local_bsz_bounds=bounds)
        trainer.train()
        trained.append(trainer)
    require_close(weights_of(trained[0].model), weights_of(trained[1].model))
    require_same_history(*trained)


def test_a_step_that_is_divided_counts_once_in_the_mean_loss(
    make_elastic: MakeElastic, tmp_path: Path
) -> None:
    trained, accumulations = [], set()
    for name in ("plain", "elastic"):
        chosen = sequential(tmp_path / name, max_steps=20, logging_steps=4, optim="sgd", learning_rate=0.0)
        trainer = Trainer(language_model(), chosen, train_dataset=Texts(48))
        # Its loss is a mean over the samples of the batch.
        trainer.model_accepts_loss_kwargs = False
        trained.append(
            make_elastic(trainer, max_batch_size=16, local_bsz_bounds=(8, 8))
            if name == "elastic"
            else trainer
        )
        if name == "elastic":

            class Steps(TrainerCallback):  # type: ignore[misc]
                def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                    accumulations.add(trained[1].elastic.accumulation)

            trainer.add_callback(Steps())
        trained[-1].train()
    assert accumulations == {1, 2}
    plain, ours = ([logs.get("loss") for logs in history(each)] for each in trained)
    assert ours == pytest.approx(plain)
    assert history(trained[1])[-1]["train_loss"] == pytest.approx(history(trained[0])[-1]["train_loss"])


@pytest.mark.slow
def test_gradient_accumulation_of_the_framework_becomes_the_trainers(
    make_elastic: MakeElastic, tmp_path: Path
) -> None:
    trained = []
    for name in ("plain", "elastic"):
        batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        chosen = sequential(tmp_path, **batches, optim="sgd")
        trainer = Trainer(language_model(), chosen, train_dataset=Texts(48, padded=True))
        trained.append(make_elastic(trainer) if name == "elastic" else trainer)
        trained[-1].train()
        assert chosen.gradient_accumulation_steps == 2, "what the program has set"
    plain, ours = trained
    assert ours.elastic.accumulation == 1, "8 samples fit into a micro-batch, as there are no bounds"
    require_close(weights_of(plain.model), weights_of(ours.model))
    assert ours.state.global_step == plain.state.global_step == 10


def tokenizer() -> PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    words = {str(number): number for number in range(VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="0")


def test_a_classifier_with_padded_batches_is_trained_and_evaluated(
    make_elastic: MakeElastic, tmp_path: Path
) -> None:
    trained = []
    for name in ("plain", "elastic"):
        trainer = Trainer(
            classifier(),
            sequential(tmp_path / name, eval_strategy="steps", eval_steps=3),
            train_dataset=Classes(48),
            eval_dataset=Classes(21),
            data_collator=DataCollatorWithPadding(tokenizer()),
            compute_metrics=accuracy,
        )
        trained.append(make_elastic(trainer) if name == "elastic" else trainer)
        trained[-1].train()
    require_equal(*(weights_of(trainer.model) for trainer in trained))
    require_same_history(*trained)
    predictions = [trainer.predict(Classes(13)) for trainer in trained]
    assert (predictions[0].predictions == predictions[1].predictions).all()
    assert predictions[0].metrics["test_accuracy"] == predictions[1].metrics["test_accuracy"]


def test_adapters_of_peft_are_trained(make_elastic: MakeElastic, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trained = []
    for name in ("plain", "elastic"):
        torch.manual_seed(7)
        model = peft.get_peft_model(
            language_model(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )
        trainer = Trainer(
            model,
            sequential(tmp_path / name, save_strategy="steps", save_steps=5, learning_rate=0.1),
            train_dataset=Texts(48),
        )
        before = weights_of(trainer.model)
        trained.append(make_elastic(trainer) if name == "elastic" else trainer)
        trained[-1].train()
    plain, ours = (weights_of(trainer.model) for trainer in trained)
    require_equal(plain, ours)
    changed = {name for name, value in ours.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in ours if "lora_" in name}
    files = {path.name for path in (tmp_path / "elastic" / "checkpoint-10").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files


@pytest.mark.slow
def test_a_sequence_to_sequence_trainer_generates_in_its_evaluation(
    make_elastic: MakeElastic, tmp_path: Path
) -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    trained = []
    for name in ("plain", "elastic"):
        torch.manual_seed(8)
        model = T5ForConditionalGeneration(
            T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
        )
        plain = sequential(tmp_path / name)
        kept = ("max_steps", "per_device_train_batch_size", "report_to", "use_cpu", "disable_tqdm")
        chosen = Seq2SeqTrainingArguments(
            str(tmp_path / name),
            **{each: getattr(plain, each) for each in kept},
            **SEQUENTIAL,
            predict_with_generate=True,
            generation_max_length=5,
            dataloader_pin_memory=False,
        )
        trainer = Seq2SeqTrainer(
            model,
            chosen,
            train_dataset=Texts(48, padded=True),
            eval_dataset=Texts(20),
            compute_metrics=lambda found: {"tokens": float(found.predictions.size)},
        )
        trained.append(make_elastic(trainer) if name == "elastic" else trainer)
        trained[-1].train()
    require_equal(*(weights_of(trainer.model) for trainer in trained))
    metrics = [trainer.evaluate() for trainer in trained]
    assert metrics[0]["eval_tokens"] == metrics[1]["eval_tokens"] > 0
    assert metrics[0]["eval_loss"] == metrics[1]["eval_loss"]
    assert isinstance(trained[1], Seq2SeqTrainer)


class OwnTrainer(Trainer):  # type: ignore[misc]
    """A trainer of the program's own, with its own loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = 2.0 * losses / count
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_a_subclass_with_a_loss_of_its_own_is_weighted_too(make_elastic: MakeElastic, tmp_path: Path) -> None:
    trained: list[Any] = []
    for bounds in (None, (8, 8), (2, 2)):
        trainer = OwnTrainer(
            language_model(), sequential(tmp_path, optim="sgd"), train_dataset=Texts(48, padded=True)
        )
        trained.append(
            make_elastic(trainer, max_batch_size=8, local_bsz_bounds=bounds) if bounds else trainer
        )
        trained[-1].train()
    plain, whole, divided = (weights_of(trainer.model) for trainer in trained)
    require_equal(plain, whole)
    require_close(plain, divided)
    require_same_history(trained[0], trained[2])


# -- steps at the initial batch size -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({"max_steps": 7}, 7, 2),
        ({"max_steps": -1, "num_train_epochs": 1}, 6, 1),
        ({"max_steps": -1, "num_train_epochs": 1.5}, 9, 2),
        # An epoch has 6.25 steps of 8 samples, and no shorter last batch.
        ({"max_steps": -1, "num_train_epochs": 4, "count": 50}, 25, 4),
    ],
)
def test_the_number_of_steps_follows_from_the_arguments(
    make_elastic: MakeElastic, tmp_path: Path, options: dict[str, Any], steps: int, epochs: int
) -> None:
    calls, count = Calls(), options.pop("count", 48)
    trainer = Trainer(
        language_model(), arguments(tmp_path, **options), train_dataset=Texts(count), callbacks=[calls]
    )
    made = make_elastic(trainer)
    output = made.train()
    assert output.global_step == made.state.max_steps == made.elastic.steps == steps
    assert len(calls.of("epoch")) == made.state.num_train_epochs == epochs


def test_the_job_decides_the_batch_size_and_the_number_of_steps(
    make_elastic: MakeElastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADASCALE_BATCH_SIZE", "12")
    monkeypatch.setenv("ADASCALE_SCALE_INVARIANT_STEPS", "9")
    trainer = Trainer(language_model(), arguments(tmp_path, max_steps=100), train_dataset=Texts(48))
    made = make_elastic(trainer)
    made.train()
    assert made.state.max_steps == made.elastic.steps == 9
    assert made.elastic.samples == 9 * 12
    assert made.state.num_train_epochs == 3


@pytest.mark.parametrize("sets", ["program", "job"])
def test_training_may_end_by_samples(
    make_elastic: MakeElastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: str
) -> None:
    options = {"train_samples": 100}
    if sets == "job":
        monkeypatch.setenv("ADASCALE_TRAIN_SAMPLES", "100")
        options = {}
    trainer = Trainer(language_model(), arguments(tmp_path, max_steps=100), train_dataset=Texts(48))
    made = make_elastic(trainer, **options)
    made.train()
    size = made.elastic.batch_size
    steps = -(-100 // size)
    assert made.state.max_steps == made.state.global_step == made.elastic.steps == steps
    assert made.elastic.samples == steps * size
    assert made.lr_scheduler.last_epoch == steps


# -- the end -------------------------------------------------------------------------------------------------


def test_early_stopping_ends_training_with_the_best_model(make_elastic: MakeElastic, tmp_path: Path) -> None:
    trained = []
    for name in ("plain", "elastic"):
        chosen = sequential(
            tmp_path / name,
            max_steps=100,
            learning_rate=0.5,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="steps",
            save_steps=3,
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
        )
        trainer = Trainer(
            language_model(),
            chosen,
            train_dataset=Texts(48),
            eval_dataset=Texts(20),
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        )
        trained.append(make_elastic(trainer) if name == "elastic" else trainer)
        trained[-1].train()
    plain, ours = trained
    assert ours.state.global_step == plain.state.global_step < 100
    assert ours.state.best_global_step == plain.state.best_global_step
    require_equal(weights_of(plain.model), weights_of(ours.model))
    assert ours.elastic.finished


class Fails(TrainerCallback):  # type: ignore[misc]
    """Raises an error after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("this program fails on purpose")


class Counter(TrainerCallback):  # type: ignore[misc]
    """A callback with a state of its own."""

    count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_training_continues_from_the_checkpoint_of_the_job(
    make_elastic: MakeElastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = CheckpointWriter.start

    def start_and_wait(writer: CheckpointWriter, *values: Any) -> None:
        start(writer, *values)
        writer.wait()

    monkeypatch.setattr(CheckpointWriter, "start", start_and_wait)

    def make(folder: str, *callbacks: TrainerCallback) -> Any:
        options = {"max_steps": 20, "eval_strategy": "steps", "eval_steps": 6, "logging_steps": 4}
        trainer = Trainer(
            language_model(),
            arguments(tmp_path / folder, **options),
            train_dataset=Texts(48, padded=True),
            eval_dataset=Texts(20),
            callbacks=[Counter(), EarlyStoppingCallback(early_stopping_patience=9), *callbacks],
        )
        trainer.args.metric_for_best_model = "loss"
        return make_elastic(trainer, checkpoint_dir=tmp_path / f"state-{folder}", checkpoint_interval=0.0)

    whole = make("whole")
    whole.train()
    failing = make("parts", Fails(11))
    with pytest.raises(RuntimeError, match="on purpose"):
        failing.train()
    failing.elastic.close()
    resumed = make("parts", calls := Calls())
    resumed.train()
    assert calls.of("end")[0] > 5, "it has continued"
    assert calls.of("end")[-1] == 20
    require_equal(weights_of(whole.model), weights_of(resumed.model))
    # Only the mean loss since the last log is that of the steps since the checkpoint.
    evaluated = [[logs for logs in history(each) if "eval_loss" in logs] for each in (whole, resumed)]
    assert evaluated[0] == evaluated[1]
    assert [logs["step"] for logs in history(whole)] == [logs["step"] for logs in history(resumed)]
    counters = [each.count for each in resumed.callback_handler.callbacks if isinstance(each, Counter)]
    assert counters == [20]

    resumed.elastic.close()
    again = make("parts", calls := Calls())
    output = again.train()
    assert output.global_step == 20
    assert [event for event, _ in calls.calls if event != "log"] == [], "nothing is left to do"
    require_equal(weights_of(whole.model), weights_of(again.model))


# -- order, files and trackers -------------------------------------------------------------------------------


def test_samples_of_similar_length_are_grouped(make_elastic: MakeElastic, tmp_path: Path) -> None:
    data = Classes(48)
    batches: list[list[int]] = []

    def collate(samples: list[dict[str, Any]]) -> Any:
        batches.append([len(sample["input_ids"]) for sample in samples])
        return DataCollatorWithPadding(tokenizer())(samples)

    trainer = Trainer(
        classifier(),
        arguments(tmp_path, train_sampling_strategy="group_by_length", max_steps=6),
        train_dataset=data,
        data_collator=collate,
        processing_class=tokenizer(),
    )
    make_elastic(trainer).train()
    assert len(batches) == 6
    assert sorted(length for batch in batches for length in batch) == sorted(map(len, data.items))
    assert sum(max(batch) - min(batch) for batch in batches) <= 6


class OwnOrder(Trainer):  # type: ignore[misc]
    """A trainer with a sampler of its own."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.WeightedRandomSampler([1.0] * 48, 48)


def test_a_sampler_of_the_program_is_refused_and_an_order_is_taken(
    make_elastic: MakeElastic, tmp_path: Path
) -> None:
    trainer = OwnOrder(language_model(), arguments(tmp_path), train_dataset=Texts(48))
    refused = make_elastic(trainer)
    with pytest.raises(DatasetError, match=r"a WeightedRandomSampler, but .* elastic\(trainer, order="):
        refused.train()
    refused.elastic.close()
    data = Texts(48)
    trainer = OwnOrder(language_model(), arguments(tmp_path, max_steps=6), train_dataset=data)
    make_elastic(trainer, order=lambda number, seed: list(reversed(range(48)))).train()
    assert data.requested == [*reversed(range(48))]


def test_what_is_logged_is_written_for_tensorboard(
    make_elastic: MakeElastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    trainer = Trainer(language_model(), arguments(tmp_path, report_to="tensorboard"), train_dataset=Texts(48))
    make_elastic(trainer).train()
    events = accumulator.EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [5, 10]


@pytest.mark.slow
def test_the_learning_rate_follows_the_evaluation(make_elastic: MakeElastic, tmp_path: Path) -> None:
    trained = []
    for name in ("plain", "elastic"):
        chosen = sequential(
            tmp_path,
            max_steps=20,
            learning_rate=0.5,
            lr_scheduler_type="reduce_lr_on_plateau",
            lr_scheduler_kwargs={"patience": 0},
            eval_strategy="steps",
            eval_steps=2,
        )
        chosen.metric_for_best_model = "loss"
        trainer = Trainer(language_model(), chosen, train_dataset=Texts(48), eval_dataset=Texts(20))
        trained.append(make_elastic(trainer) if name == "elastic" else trainer)
        trained[-1].train()
    rates = [trainer.optimizer.param_groups[0]["lr"] for trainer in trained]
    assert rates[0] == rates[1] < 0.5
    require_equal(*(weights_of(trainer.model) for trainer in trained))


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_find_batch_size": True}, r"auto_find_batch_size .* local_bsz_bounds=\(4, \"auto\"\)"),
        ({"torch_compile": True}, r"torch_compile .* model\.compile\(dynamic=True\)"),
        ({"save_on_each_node": True}, "save_on_each_node .* folder that the replicas share"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type='greedy' .* use reduce_lr_on_plateau"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint .* leave it out"),
    ],
)
def test_arguments_that_are_not_supported_are_refused(
    make_elastic: MakeElastic, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    trainer = Trainer(language_model(), arguments(tmp_path), train_dataset=Texts(48))
    for name, value in options.items():
        setattr(trainer.args, name, value)
    with pytest.raises(WorkerError, match=message):
        make_elastic(trainer)


def test_wrong_uses_are_refused(make_elastic: MakeElastic, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"got GPT2LMHeadModel: pass a transformers\.Trainer"):
        elastic(language_model())
    trainer = Trainer(language_model(), arguments(tmp_path))
    with pytest.raises(DatasetError, match="without train_dataset"):
        make_elastic(trainer)
    trainer.train_dataset = iter([1])
    with pytest.raises(DatasetError, match="has no length"):
        make_elastic(trainer)
    trainer.train_dataset = Texts(48)
    with pytest.raises(InvalidJobError, match=r"single_replica_gain must be .*, got 'never'"):
        make_elastic(trainer, single_replica_gain="never")
    with pytest.raises(InvalidJobError, match="max_gain must be a finite number above 1, got 0"):
        make_elastic(trainer, max_gain=0)
    with pytest.raises(InvalidBoundsError, match="max_batch_size 4 is less than batch_size 8"):
        make_elastic(trainer, max_batch_size=4)
    made = make_elastic(trainer)
    with pytest.raises(WorkerError, match="elastic already"):
        make_elastic(made)
    with pytest.raises(WorkerError, match=r"resume_from_checkpoint='a'.* by itself .* from_pretrained"):
        made.train(resume_from_checkpoint="a")
    with pytest.raises(WorkerError, match="hyperparameter_search"):
        made.train(None, {"lr": 1.0})
    made.train()
    with pytest.raises(WorkerError, match=r"train\(\) was called before"):
        made.train()


def test_an_optimizer_without_a_rule_is_refused(make_elastic: MakeElastic, tmp_path: Path) -> None:
    trainer = Trainer(language_model(), arguments(tmp_path, optim="adafactor"), train_dataset=Texts(48))
    with pytest.raises(UnsupportedOptimizerError):
        make_elastic(trainer).train()


# -- private parts ------------------------------------------------------------------------------------------


def test_the_private_parts_of_transformers_are_there() -> None:
    assert private.missing() == []


def test_a_part_that_is_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Trainer, "_maybe_log_save_evaluate")
    assert private.missing() == ["Trainer._maybe_log_save_evaluate"]


def test_the_loop_sets_the_attributes_that_are_restored(tmp_path: Path) -> None:
    trainer = Trainer(language_model(), arguments(tmp_path, max_steps=1), train_dataset=Texts(48))
    trainer.train()
    assert all(hasattr(trainer, name) for name in private.TRAINER_ATTRIBUTES)


def test_a_loss_without_items_is_zero(make_elastic: MakeElastic, tmp_path: Path) -> None:
    """A micro-batch has no valid tokens, so the mean over them would be NaN."""
    data = Texts(48, padded=True)
    data.labels[:2] = -100
    trainer = Trainer(language_model(), sequential(tmp_path, optim="sgd", max_steps=6), train_dataset=data)
    plain = Trainer(language_model(), sequential(tmp_path, optim="sgd", max_steps=6), train_dataset=data)
    plain.train()
    made = make_elastic(trainer, local_bsz_bounds=(2, 2))
    made.train()
    weights: dict[str, Tensor] = weights_of(made.model)
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())
    require_close(weights_of(plain.model), weights)
    assert configuration().vocab_size == VOCABULARY
