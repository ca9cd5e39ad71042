"""The last line of a local run."""

import io

import pytest
from rich.console import Console

from adascale_controller.local.control_loop import RunResult
from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.run_report import print_summary
from support.manifests import make_manifest

SAVED_AT = make_manifest().saved_at


@pytest.mark.parametrize(
    ("result", "begin"),
    [
        (RunResult("", 130, stopped_at=SAVED_AT - 0.5), "Saved at step 9, progress 12"),
        (RunResult("", 130, stopped_at=SAVED_AT + 0.5), "The last checkpoint is of step 9, progress 12"),
        (
            RunResult("", 1, log="an error", stopped_at=SAVED_AT + 0.5),
            "The last checkpoint is of step 9, progress 12",
        ),
    ],
    ids=["saved", "not saved", "failed"],
)
def test_the_last_line_says_saved_only_if_the_end_of_the_run_has_saved(result: RunResult, begin: str) -> None:
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=200))
    print_summary(display, result, [], make_manifest(progress=12.0), 12.0, 3.0)
    assert output.getvalue().splitlines()[-1].split("  ")[-1] == f"{begin}; run the same command to resume"


def test_the_last_line_says_what_is_lost() -> None:
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=200))
    result = RunResult("", 130, stopped_at=SAVED_AT + 0.5)
    print_summary(display, result, [], make_manifest(progress=12.0), 3040.0, 3.0)
    assert "is of step 9, progress 12, and the training after it, up to progress 3,040, is lost; run" in (
        output.getvalue()
    )
