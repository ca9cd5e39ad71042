"""One step of Hugging Face's Trainer made elastic, with any supported version of transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAM = """
import sys
from pathlib import Path
from transformers import Trainer
from adascale.huggingface import elastic
from adascale_frameworks.huggingface import private
from frameworks.huggingface_problem import Texts, arguments, language_model, require_equal, weights_of

assert private.missing() == []
data, trained = Texts(8), []
for makes in (lambda trainer: trainer, elastic):
    # One batch has all samples, so that their order does not matter up to rounding.
    options = {"max_steps": 2, "eval_strategy": "steps", "save_strategy": "steps"}
    options |= {"eval_steps": 1, "save_steps": 1}
    chosen = arguments(Path(sys.argv[1]), **options)
    trainer = makes(Trainer(language_model(), chosen, train_dataset=data, eval_dataset=Texts(5)))
    assert trainer.train().global_step == 2
    assert trainer.state.global_step == 2
    trained.append(weights_of(trainer.model))
for name, value in trained[0].items():
    assert (value - trained[1][name]).abs().max() < 1e-4, name
assert trainer.elastic.steps == 2
print("trained")
"""


def test_a_step_is_that_of_the_plain_trainer(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "trained" in run.stdout
