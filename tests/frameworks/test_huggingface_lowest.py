"""Steps of Hugging Face's Trainer made elastic, with any supported version of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from frameworks.huggingface_problem import Texts, arguments, language_model, require_close, weights_of


@pytest.mark.filterwarnings("ignore")
def test_steps_are_those_of_the_plain_trainer(make_elastic: Callable[..., Any], tmp_path: Path) -> None:
    data, trained = Texts(8), []
    made: tuple[Callable[[Any], Any], ...] = (lambda trainer: trainer, make_elastic)
    for makes in made:
        # One batch has all samples, so that their order does not matter up to rounding.
        options = {"max_steps": 2, "eval_strategy": "steps", "save_strategy": "steps"}
        chosen = arguments(tmp_path, **options, eval_steps=1, save_steps=1)
        trainer = makes(Trainer(language_model(), chosen, train_dataset=data, eval_dataset=Texts(5)))
        assert trainer.train().global_step == 2
        assert trainer.state.global_step == 2
        trained.append(weights_of(trainer.model))
    require_close(trained[0], trained[1], tolerance=1e-4)
    assert trainer.elastic.steps == 2
