"""Programs after the public examples of the frameworks run elastic, with at most three lines changed.

A program of `public/` is the plain one. `# elastic instead: LINE` is the next line in the elastic program,
and `# elastic added: LINE` a line that it has besides. `docs/frameworks.md` lists the programs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from support.fast_python import FastPython
from support.launch import run_python

PUBLIC = Path(__file__).parent / "public"
PYTHON = FastPython(
    *(
        "accelerate",
        "frameworks.public.stand_ins",
        "lightning.pytorch",
        "peft",
        "sklearn.datasets",
        "torchmetrics",
    ),
    *(f"trl.trainer.{kind}_trainer" for kind in ("dpo", "kto", "reward", "sft")),
    "transformers.trainer_seq2seq",
)
PROGRAMS = sorted({path.stem for path in PUBLIC.glob("*_*.py")} - {"stand_ins"})
QUICK = (
    "accelerate_checkpointing",
    "lightning_autoencoder",
    "peft_olora",
    "transformers_run_glue",
    "trl_sft",
)
"""One of each package; `make test-slow` runs the others."""
OTHER_SAMPLES = {
    "accelerate_early_stopping": "the steps of an epoch that it leaves by break are made in a later epoch",
    "lightning_gan": "its noise has other random numbers",
}
"""The programs that train on other samples or numbers than the plain program, with the reason."""

_ADDED = re.compile(r"^( *)# elastic added: (.*)", re.MULTILINE)
_INSTEAD = re.compile(r"^( *)# elastic instead: (.*)\n.*", re.MULTILINE)


def read(name: str, *, in_order: bool) -> tuple[str, str, int]:
    """Return a program, the elastic one, and the number of lines that differ."""
    source = (PUBLIC / f"{name}.py").read_text()
    if in_order:
        source = source.replace("shuffle=True", "shuffle=False").replace('="random"', '="sequential"')
    elastic, added = _ADDED.subn(r"\1\2", source)
    elastic, replaced = _INSTEAD.subn(r"\1\2", elastic)
    return source, elastic, added + replaced


def train(folder: Path, source: str, **options: Any) -> list[dict[str, Any]]:
    """Run a program in a folder of its own, and return the results of each of its processes."""
    folder.mkdir()
    (folder / "program.py").write_text(source)
    environ: dict[str, Any] = {
        "PYTHONPATH": f"{PUBLIC.parents[1]}:{PUBLIC}",
        "RESULTS": folder,
        "OUTPUT": folder,
        "ADASCALE_CHECKPOINT_DIR": folder / "state",
    }
    run_python(folder / "program.py", python=PYTHON, **environ, **options)
    return [torch.load(path) for path in folder.glob("*.pt")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_document_lists_a_program_with_its_lines(name: str) -> None:
    source, _, lines = read(name, in_order=False)
    example = re.search(r"^After .*?(\w+)\.(py|ipynb)", source, re.MULTILINE)
    assert example is not None
    document = Path(__file__).parents[2] / "docs" / "frameworks.md"
    rows = re.findall(rf"^\|.*`{example[1]}`.*", document.read_text(), re.MULTILINE)
    assert rows
    assert rows[0].split(" | ")[1] == str(lines)
    assert 1 <= lines <= 3


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in PROGRAMS]
)
def test_on_one_replica_a_program_trains_as_the_plain_one(name: str, tmp_path: Path) -> None:
    source, changed, _ = read(name, in_order=True)
    (plain,) = train(tmp_path / "plain", source)
    (elastic,) = train(tmp_path / "elastic", changed, ADASCALE_BATCH_SIZE=8)
    assert (tmp_path / "elastic" / "state").exists()
    if name not in OTHER_SAMPLES:
        # Adam makes steps of rounding errors where the gradient is zero.
        tolerance = 1e-3 if name == "accelerate_gradient_accumulation" else 0.0
        torch.testing.assert_close(elastic["weights"], plain["weights"], rtol=tolerance, atol=tolerance)
        assert elastic["metrics"] == pytest.approx(plain["metrics"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_replicas_end_with_the_same_weights_and_metrics(name: str, tmp_path: Path) -> None:
    source, changed, _ = read(name, in_order=False)
    (plain,) = train(tmp_path / "plain", source)
    first, second = train(tmp_path / "elastic", changed, replicas=2)
    assert (tmp_path / "elastic" / "state").exists()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first["metrics"] == pytest.approx(plain["metrics"], abs=0.5)
