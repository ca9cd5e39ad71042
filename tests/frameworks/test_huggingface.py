"""Hugging Face's Trainer made elastic, on one replica, compared with the plain Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
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
from adascale_core.names import ENV_CHECKPOINT_DIR
from adascale_worker.errors import DatasetError, UnsupportedOptimizerError, WorkerError
from frameworks.huggingface_problem import (
    VOCABULARY,
    Classes,
    Texts,
    arguments,
    classifier,
    language_model,
    require_close,
    require_equal,
    weights_of,
)
from support.streams import Items

MakeElastic = Callable[..., Any]
TrainBoth = Callable[..., tuple[Any, Any]]

pytestmark = pytest.mark.filterwarnings(
    # Of transformers and accelerate themselves, with a plain Trainer too.
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:.*lr_scheduler.step.*:UserWarning",
)
_TIMES = ("_runtime", "_per_second", "_time")
SEQUENTIAL = {"train_sampling_strategy": "sequential"}


class Calls(TrainerCallback):  # type: ignore[misc]
    """Records the calls of the loop."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("end", state.global_step))

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
        pytest.param(
            dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "epoch"), id="AdamW, epochs"
        ),
        pytest.param(
            {"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 3, "bf16": True},
            id="SGD, cosine, bfloat16",
        ),
        pytest.param(
            {
                "max_steps": -1,
                "num_train_epochs": 2.5,
                "max_grad_norm": 0.1,
                "gradient_checkpointing": True,
                "label_smoothing_factor": 0.1,
            },
            id="part of an epoch, clipping, gradient checkpointing, label smoothing",
        ),
    ],
)
def test_the_weights_and_the_logs_are_those_of_the_plain_trainer(
    train_both: TrainBoth, tmp_path: Path, options: dict[str, Any]
) -> None:
    def make(name: str) -> Trainer:
        data, held_out = Texts(48, padded=True), Texts(20, padded=True)
        chosen = sequential(tmp_path / name, **options)
        return Trainer(language_model(), chosen, train_dataset=data, eval_dataset=held_out)

    plain, ours = train_both(make)
    require_equal(weights_of(plain.model), weights_of(ours.model))
    require_same_history(plain, ours)
    assert ours.state.max_steps == plain.state.max_steps == ours.state.global_step
    assert ours.state.num_train_epochs == plain.state.num_train_epochs
    folders = [sorted(path.name for path in (tmp_path / name).glob("*/*")) for name in ("plain", "elastic")]
    assert folders[0] == folders[1]
    assert all(hasattr(plain, name) for name in ("_globalstep_last_logged", "current_flos"))


def test_another_training_of_the_same_trainer_goes_on_with_its_model_and_optimizer(
    make_elastic: MakeElastic, tmp_path: Path
) -> None:
    """Also with the folder of the one before, for more steps."""

    def make(name: str) -> Trainer:
        chosen = sequential(tmp_path / name, max_steps=6, save_strategy="steps", save_steps=3)
        return Trainer(language_model(), chosen, train_dataset=Texts(24))

    plain, ours = make("plain"), make_elastic(make("elastic"), checkpoint_dir=tmp_path / "job")
    for steps, again in ((6, None), (3, None), (8, True)):
        for trainer in (plain, ours):
            trainer.args.max_steps = steps
            trainer.train(again)
        require_equal(weights_of(plain.model), weights_of(ours.model))
        require_same_history(plain, ours)
        assert ours.state.global_step == ours.elastic.steps == steps


def test_a_training_may_follow_one_that_has_failed(make_elastic: MakeElastic, tmp_path: Path) -> None:
    chosen = arguments(tmp_path, max_steps=2)
    ours = make_elastic(Trainer(language_model(), chosen, train_dataset=Texts(24)))
    with pytest.raises(WorkerError, match="resume_from_checkpoint=True"):
        ours.train(True)
    ours.train()
    assert ours.state.global_step == 2


def test_another_training_in_a_job_is_refused(
    make_elastic: MakeElastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_CHECKPOINT_DIR, str(tmp_path / "job"))
    chosen = arguments(tmp_path, max_steps=2)
    ours = make_elastic(Trainer(language_model(), chosen, train_dataset=Texts(24)))
    ours.train()
    with pytest.raises(WorkerError, match=r"train\(\) was called again, in a job .*: use a job for each"):
        ours.train()


def test_the_data_may_be_a_stream_which_is_begun_again(train_both: TrainBoth, tmp_path: Path) -> None:
    def make(name: str) -> Trainer:
        chosen = sequential(tmp_path / name, max_steps=11, logging_steps=3)
        return Trainer(language_model(), chosen, train_dataset=Items(Texts(24)))

    plain, ours = train_both(make)
    require_equal(weights_of(plain.model), weights_of(ours.model))
    for trainer in (plain, ours):  # The framework counts passes, and in each the share of all steps.
        for logs in trainer.state.log_history:
            del logs["epoch"]
    require_same_history(plain, ours)
    assert (ours.state.global_step, ours.state.epoch) == (11, 1.0)


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


@pytest.mark.parametrize("kind", [Trainer, OwnTrainer])
def test_the_mean_over_tokens_does_not_depend_on_the_division_into_micro_batches(
    train_both: TrainBoth, tmp_path: Path, kind: type[Trainer]
) -> None:
    """Also if a micro-batch has no valid tokens, so that the mean over them would be NaN."""

    def make(name: str) -> Trainer:
        data = Texts(48, padded=True)
        data.labels[:2] = -100
        chosen = sequential(tmp_path / name, optim="sgd", learning_rate=0.1)
        return kind(language_model(), chosen, train_dataset=data)

    plain, ours = train_both(make, local_bsz_bounds=(2, 2))
    assert isinstance(ours, kind)
    require_close(weights_of(plain.model), weights_of(ours.model))
    require_same_history(plain, ours)


def test_a_step_that_is_divided_counts_once_in_the_mean_loss(train_both: TrainBoth, tmp_path: Path) -> None:
    accumulations = set()

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            accumulations.add(made["elastic"].elastic.accumulation)

    made: dict[str, Any] = {}

    def make(name: str) -> Trainer:
        chosen = sequential(tmp_path / name, max_steps=20, logging_steps=4, optim="sgd", learning_rate=0.0)
        trainer = Trainer(language_model(), chosen, train_dataset=Texts(48))
        # Its loss is a mean over the samples of the batch.
        trainer.model_accepts_loss_kwargs = False
        made[name] = trainer
        if name == "elastic":
            trainer.add_callback(Steps())
        return trainer

    plain, ours = train_both(make, max_batch_size=16, local_bsz_bounds=(8, 8))
    assert accumulations == {1, 2}
    assert [logs.get("loss") for logs in history(ours)] == pytest.approx(
        [logs.get("loss") for logs in history(plain)]
    )
    assert history(ours)[-1]["train_loss"] == pytest.approx(history(plain)[-1]["train_loss"])


def test_gradient_accumulation_of_the_framework_becomes_the_trainers(
    train_both: TrainBoth, tmp_path: Path
) -> None:
    def make(name: str) -> Trainer:
        batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        chosen = sequential(tmp_path / name, **batches, optim="sgd")
        return Trainer(language_model(), chosen, train_dataset=Texts(48, padded=True))

    plain, ours = train_both(make)
    assert ours.args.gradient_accumulation_steps == 2, "what the program has set"
    assert ours.elastic.accumulation == 1, "8 samples fit into a micro-batch, as there are no bounds"
    require_close(weights_of(plain.model), weights_of(ours.model))
    assert ours.state.global_step == plain.state.global_step == 10


def tokenizer() -> PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    words = {str(number): number for number in range(VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="0")


def test_a_classifier_with_padded_batches_is_trained_and_evaluated(
    train_both: TrainBoth, tmp_path: Path
) -> None:
    trained = train_both(
        lambda name: Trainer(
            classifier(),
            sequential(tmp_path / name, eval_strategy="steps", eval_steps=3),
            train_dataset=Classes(48),
            eval_dataset=Classes(21),
            data_collator=DataCollatorWithPadding(tokenizer()),
            compute_metrics=accuracy,
        )
    )
    require_equal(*(weights_of(trainer.model) for trainer in trained))
    require_same_history(*trained)
    predictions = [trainer.predict(Classes(13)) for trainer in trained]
    assert (predictions[0].predictions == predictions[1].predictions).all()
    assert predictions[0].metrics["test_accuracy"] == predictions[1].metrics["test_accuracy"]


def test_adapters_of_peft_are_trained(train_both: TrainBoth, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    before: dict[str, Tensor] = {}

    def make(name: str) -> Trainer:
        torch.manual_seed(7)
        model = peft.get_peft_model(
            language_model(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )
        chosen = sequential(tmp_path / name, save_strategy="steps", save_steps=5, learning_rate=0.1)
        trainer = Trainer(model, chosen, train_dataset=Texts(48))
        before.update(weights_of(trainer.model))
        return trainer

    plain, ours = (weights_of(trainer.model) for trainer in train_both(make))
    require_equal(plain, ours)
    changed = {name for name, value in ours.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in ours if "lora_" in name}
    files = {path.name for path in (tmp_path / "elastic" / "checkpoint-10").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files


def test_a_sequence_to_sequence_trainer_generates_in_its_evaluation(
    train_both: TrainBoth, tmp_path: Path
) -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}

    def make(name: str) -> Trainer:
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
        return Seq2SeqTrainer(
            model,
            chosen,
            train_dataset=Texts(48, padded=True),
            eval_dataset=Texts(20),
            compute_metrics=lambda found: {"tokens": float(found.predictions.size)},
        )

    trained = train_both(make)
    require_equal(*(weights_of(trainer.model) for trainer in trained))
    metrics = [trainer.evaluate() for trainer in trained]
    assert metrics[0]["eval_tokens"] == metrics[1]["eval_tokens"] > 0
    assert metrics[0]["eval_loss"] == metrics[1]["eval_loss"]
    assert isinstance(trained[1], Seq2SeqTrainer)


# -- steps at the initial batch size -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "job", "steps", "epochs"),
    [
        ({"max_steps": 7}, {}, 7, 2),
        ({"max_steps": -1, "num_train_epochs": 1.5}, {}, 9, 2),
        # An epoch has 6.25 steps of 8 samples, and no shorter last batch.
        ({"max_steps": -1, "num_train_epochs": 2, "count": 50}, {}, 12, 2),
        ({"max_steps": 100, "train_samples": 50}, {}, 7, 2),
        ({"max_steps": 100}, {"TRAIN_SAMPLES": 50}, 7, 2),
        ({"max_steps": 100}, {"BATCH_SIZE": 12, "SCALE_INVARIANT_STEPS": 9}, 9, 3),
    ],
)
def test_the_number_of_steps_follows_from_the_arguments_and_the_job(
    make_elastic: MakeElastic,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    job: dict[str, int],
    steps: int,
    epochs: int,
) -> None:
    for name, value in job.items():
        monkeypatch.setenv(f"ADASCALE_{name}", str(value))
    calls, options = Calls(), dict(options)
    count, samples = options.pop("count", 48), options.pop("train_samples", None)
    trainer = Trainer(
        language_model(), arguments(tmp_path, **options), train_dataset=Texts(count), callbacks=[calls]
    )
    made = make_elastic(trainer, train_samples=samples)
    output = made.train()
    assert output.global_step == made.state.max_steps == made.elastic.steps == steps
    assert made.lr_scheduler.last_epoch == steps
    assert made.elastic.samples == steps * job.get("BATCH_SIZE", 8)
    assert len(calls.of("epoch")) == made.state.num_train_epochs == epochs


# -- the end -------------------------------------------------------------------------------------------------


def test_early_stopping_ends_training_with_the_best_model(train_both: TrainBoth, tmp_path: Path) -> None:
    def make(name: str) -> Trainer:
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
        stops = EarlyStoppingCallback(early_stopping_patience=2)
        data, held_out = Texts(48), Texts(20)
        return Trainer(language_model(), chosen, train_dataset=data, eval_dataset=held_out, callbacks=[stops])

    plain, ours = train_both(make)
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


class Stops(TrainerCallback):  # type: ignore[misc]
    """Ends training after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 7


@pytest.mark.usefixtures("durable_checkpoints")
def test_a_job_without_a_state_begins_with_the_folder_of_a_plain_trainer(
    make_elastic: MakeElastic, tmp_path: Path
) -> None:
    def make(folder: str, *callbacks: TrainerCallback, **options: Any) -> Any:
        chosen = sequential(tmp_path / folder, max_steps=12, **options)
        return Trainer(language_model(), chosen, train_dataset=Texts(48), callbacks=[*callbacks])

    whole = make("whole")
    whole.train()
    make("parts", Stops(), save_strategy="steps", save_steps=7).train()
    job = {"checkpoint_dir": tmp_path / "state", "checkpoint_interval": 0.0}
    failing = make_elastic(make("parts", Fails(10), calls := Calls()), **job)
    with pytest.raises(RuntimeError, match="on purpose"):
        failing.train(resume_from_checkpoint=True)
    failing.elastic.close()
    assert calls.of("begin")[0] == 7
    resumed = make_elastic(make("parts", calls := Calls()), **job)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-7"))
    assert calls.of("begin") == [*range(calls.of("begin")[0], 12)]
    assert calls.of("begin")[0] >= 9, "the state of the job is later"
    require_equal(weights_of(whole.model), weights_of(resumed.model))
    assert (resumed.elastic.steps, resumed.state.global_step, resumed.state.epoch) == (12, 12, 2.0)


class Counter(TrainerCallback):  # type: ignore[misc]
    """A callback with a state of its own."""

    count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.usefixtures("durable_checkpoints")
def test_training_continues_from_the_checkpoint_of_the_job(make_elastic: MakeElastic, tmp_path: Path) -> None:
    def make(folder: str, *callbacks: TrainerCallback) -> Any:
        options = {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4, "logging_steps": 3}
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
    failing = make("parts", Fails(7))
    with pytest.raises(RuntimeError, match="on purpose"):
        failing.train()
    failing.elastic.close()
    resumed = make("parts", calls := Calls())
    resumed.train()
    assert calls.of("end")[0] > 3, "it has continued"
    assert calls.of("end")[-1] == 12
    require_equal(weights_of(whole.model), weights_of(resumed.model))
    # Only the mean loss since the last log is that of the steps since the checkpoint.
    evaluated = [[logs for logs in history(each) if "eval_loss" in logs] for each in (whole, resumed)]
    assert evaluated[0] == evaluated[1]
    assert [logs["step"] for logs in history(whole)] == [logs["step"] for logs in history(resumed)]
    counters = [each.count for each in resumed.callback_handler.callbacks if isinstance(each, Counter)]
    assert counters == [12]

    resumed.elastic.close()
    again = make("parts", calls := Calls())
    output = again.train()
    assert output.global_step == 12
    assert calls.calls == [], "nothing is left to do"
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
        return torch.utils.data.SubsetRandomSampler(range(8))


def test_a_sampler_of_the_program_is_refused_and_an_order_is_taken(
    make_elastic: MakeElastic, tmp_path: Path
) -> None:
    trainer = OwnOrder(language_model(), arguments(tmp_path), train_dataset=Texts(48))
    refused = make_elastic(trainer)
    with pytest.raises(DatasetError, match=r"sampler=SubsetRandomSampler.* elastic\(trainer, order="):
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


def test_the_learning_rate_follows_the_evaluation(train_both: TrainBoth, tmp_path: Path) -> None:
    def make(name: str) -> Trainer:
        chosen = sequential(
            tmp_path / name,
            max_steps=20,
            learning_rate=0.5,
            lr_scheduler_type="reduce_lr_on_plateau",
            lr_scheduler_kwargs={"patience": 0},
            eval_strategy="steps",
            eval_steps=2,
        )
        chosen.metric_for_best_model = "loss"
        return Trainer(language_model(), chosen, train_dataset=Texts(48), eval_dataset=Texts(20))

    trained = train_both(make)
    rates = [trainer.optimizer.param_groups[0]["lr"] for trainer in trained]
    assert rates[0] == rates[1] < 0.5
    require_equal(*(weights_of(trainer.model) for trainer in trained))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("regional", ["0", "1"])
def test_the_model_is_compiled_once_for_all_batch_sizes(
    make_elastic: MakeElastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, regional: str
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", regional)
    # Another size than the length, which torch would take for the same number.
    options: dict[str, Any] = {"max_steps": 12, "per_device_train_batch_size": 6}
    plain = Trainer(language_model(), sequential(tmp_path, **options), train_dataset=Texts(48))
    plain.train()
    graphs = []
    for largest in (6, 24):  # With the larger one, some steps have two batches.
        torch.compiler.reset()
        counters.clear()
        chosen = sequential(tmp_path, torch_compile=True, torch_compile_backend="eager", **options)
        trainer = Trainer(language_model(), chosen, train_dataset=Texts(48))
        ours = make_elastic(trainer, max_batch_size=largest, local_bsz_bounds=(6, 6))
        ours.train()
        graphs.append(counters["stats"]["unique_graphs"])
        block = ours.model.transformer.h[0]
        compiled = [each._compiled_call_impl is not None for each in (ours.model, block)]
        assert compiled == ([False, True] if regional == "1" else [True, False])
        found, expected = weights_of(ours.model), weights_of(plain.model)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5)
    assert graphs[0] == graphs[1] > 0


def test_a_step_whose_gradients_overflow_is_made_with_the_next_batch(
    make_elastic: MakeElastic, tmp_path: Path
) -> None:
    """As with fp16, with a scaler that accelerate makes on GPUs only."""

    class Overflows(Trainer):  # type: ignore[misc]
        calls = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().compute_loss(*args, **kwargs) * (float("inf") if self.calls == 2 else 1.0)

    trainer = Overflows(language_model(), sequential(tmp_path, max_steps=6), train_dataset=Texts(48))
    ours = make_elastic(trainer, local_bsz_bounds=(8, 8), max_batch_size=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=6)
    ours.accelerator.scaler = scaler
    ours.train()
    assert (ours.calls, ours.elastic.steps, ours.state.global_step) == (7, 6, 6)
    assert scaler.get_scale() == 32.0
    assert all(bool(weight.isfinite().all()) for weight in weights_of(ours.model).values())


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_find_batch_size": True}, r"auto_find_batch_size=True .* local_bsz_bounds=\(4, \"auto\"\)"),
        ({"save_on_each_node": True}, "save_on_each_node=True .* folder that the replicas share"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type='greedy' .* use reduce_lr_on_plateau"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint=True .* leave it out"),
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
    trainer.train_dataset = Texts(48)
    with pytest.raises(InvalidJobError, match=r"single_replica_gain must be .*, got 'never'"):
        make_elastic(trainer, single_replica_gain="never")
    with pytest.raises(InvalidJobError, match="max_gain must be a finite number above 1, got 0"):
        make_elastic(trainer, max_gain=0)
    with pytest.raises(InvalidBoundsError, match="max_batch_size 4 is less than batch_size 8"):
        make_elastic(trainer, max_batch_size=4)
    another = make_elastic(Trainer(language_model(), arguments(tmp_path), train_dataset=Texts(48)))
    made = make_elastic(trainer)
    with pytest.raises(WorkerError, match="elastic already"):
        make_elastic(made)
    with pytest.raises(WorkerError, match=r"resume_from_checkpoint='a', .* trainer_state\.json"):
        another.train(resume_from_checkpoint="a")
    with pytest.raises(WorkerError, match="hyperparameter_search"):
        made.train(None, {"lr": 1.0})


def test_an_optimizer_without_a_rule_is_refused(make_elastic: MakeElastic, tmp_path: Path) -> None:
    trainer = Trainer(language_model(), arguments(tmp_path, optim="adafactor"), train_dataset=Texts(48))
    with pytest.raises(UnsupportedOptimizerError):
        make_elastic(trainer).train()
