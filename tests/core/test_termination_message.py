"""Last words: read as they were written, and never longer than Kubernetes takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.termination_message import LIMIT, TerminationMessage

texts = st.text(st.characters(codec="utf-8"), max_size=200)
words = st.builds(
    TerminationMessage, generation=st.integers(0, 10**9), exit_code=st.integers(0, 255), log=texts
)


@given(words)
def test_a_short_message_is_parsed_as_it_was_written(said: TerminationMessage) -> None:
    assert TerminationMessage.parse(said.to_text()) == said


@given(words, st.integers(60, 400))
def test_a_long_message_keeps_its_first_line_and_its_end(said: TerminationMessage, limit: int) -> None:
    text = said.to_text(limit)
    assert len(text.encode()) <= limit
    read = TerminationMessage.parse(text)
    assert read is not None
    assert (read.generation, read.exit_code) == (said.generation, said.exit_code)
    assert said.log.endswith(read.log)
    whole = read.log == said.log or said.log[: -len(read.log) or None].endswith("\n")
    assert whole or "\n" not in read.log.rstrip("\n"), "lines are whole, but for a last one that is too long"


@pytest.mark.parametrize(
    ("said", "first"),
    [
        (TerminationMessage(7, 1), "generation 7: exit code 1"),
        (TerminationMessage(0, 1), "before any generation: exit code 1"),
        (TerminationMessage(0, 127), "before any generation: exit code 127"),
        (TerminationMessage(7, 139), "generation 7: exit code 139 (SIGSEGV)"),
        (TerminationMessage(12, 134, "what(): no"), "generation 12: exit code 134 (SIGABRT)\nwhat(): no"),
        (TerminationMessage(1, 200), "generation 1: exit code 200"),
    ],
)
def test_the_message_is_plain_text(said: TerminationMessage, first: str) -> None:
    assert said.to_text() == first


def test_a_long_log_keeps_its_last_whole_lines() -> None:
    log = "\n".join(f"line {number}: żółć" for number in range(1000))
    lines = TerminationMessage(3, 1, log).to_text().split("\n")
    assert lines[0] == "generation 3: exit code 1"
    assert lines[-1] == "line 999: żółć"
    assert lines[1:] == log.split("\n")[-len(lines) + 1 :]
    assert LIMIT - 20 < len("\n".join(lines).encode()) <= LIMIT


def test_the_end_of_a_line_that_is_too_long_is_kept() -> None:
    said = TerminationMessage(1, 1, "first\n" + 5000 * "é" + "!")
    assert said.to_text(40) == f"generation 1: exit code 1\n{6 * 'é'}!"


def test_unpaired_surrogates_leave_the_message_valid() -> None:
    text = TerminationMessage(1, 1, "half a \ud83d pair").to_text()
    assert text.encode() == b"generation 1: exit code 1\nhalf a ? pair"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "Traceback (most recent call last):\n  File ...",
        "epoch 3: loss 0.1\ngeneration 7: exit code 1",  # the end of a log: taken where nothing was said
        "generation 7",
        "generation 0: exit code 1",
        "generation 7: exit code one",
        "generation \u0667: exit code 1",
        "generation 7: exit code 1 and more",
        " generation 7: exit code 1",
        "generation -7: exit code 1",
        "OOMKilled",
    ],
)
def test_other_text_is_parsed_to_none(text: str) -> None:
    assert TerminationMessage.parse(text) is None
