"""Termination messages: a round trip through text, within the length that Kubernetes accepts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.failures import MESSAGE_LIMIT, TerminationMessage

texts = st.text(st.characters(codec="utf-8"), max_size=200)
messages = st.builds(
    TerminationMessage, generation=st.integers(0, 10**9), exit_code=st.integers(0, 255), log=texts
)


@given(messages)
def test_a_short_message_is_equal_after_a_round_trip_through_text(message: TerminationMessage) -> None:
    assert TerminationMessage.parse(message.to_text()) == message


@given(messages, st.integers(60, 400))
def test_a_long_message_keeps_its_first_line_and_its_end(message: TerminationMessage, limit: int) -> None:
    text = message.to_text(limit)
    assert len(text.encode()) <= limit
    parsed = TerminationMessage.parse(text)
    assert parsed is not None
    assert (parsed.generation, parsed.exit_code) == (message.generation, message.exit_code)
    assert message.log.endswith(parsed.log)
    complete_lines = parsed.log == message.log or message.log[: -len(parsed.log) or None].endswith("\n")
    assert complete_lines or "\n" not in parsed.log.rstrip("\n"), (
        "only complete lines, or the end of a last line that is too long"
    )


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (TerminationMessage(7, 1), "generation 7: exit code 1"),
        (TerminationMessage(0, 1), "before any generation: exit code 1"),
        (TerminationMessage(0, 127), "before any generation: exit code 127"),
        (TerminationMessage(7, 139), "generation 7: exit code 139 (SIGSEGV)"),
        (TerminationMessage(12, 134, "what(): no"), "generation 12: exit code 134 (SIGABRT)\nwhat(): no"),
        (TerminationMessage(1, 200), "generation 1: exit code 200"),
    ],
)
def test_the_message_is_plain_text(message: TerminationMessage, text: str) -> None:
    assert message.to_text() == text


def test_a_long_log_keeps_its_last_complete_lines() -> None:
    log = "\n".join(f"line {number}: żółć" for number in range(1000))
    lines = TerminationMessage(3, 1, log).to_text().split("\n")
    assert lines[0] == "generation 3: exit code 1"
    assert lines[-1] == "line 999: żółć"
    assert lines[1:] == log.split("\n")[-len(lines) + 1 :]
    assert MESSAGE_LIMIT - 20 < len("\n".join(lines).encode()) <= MESSAGE_LIMIT


def test_the_end_of_a_line_that_is_too_long_is_kept() -> None:
    message = TerminationMessage(1, 1, "first\n" + 5000 * "é" + "!")
    assert message.to_text(40) == f"generation 1: exit code 1\n{6 * 'é'}!"


def test_unpaired_surrogates_leave_the_message_valid() -> None:
    text = TerminationMessage(1, 1, "half a \ud83d pair").to_text()
    assert text.encode() == b"generation 1: exit code 1\nhalf a ? pair"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "Traceback (most recent call last):\n  File ...",
        "epoch 3: loss 0.1\ngeneration 7: exit code 1",  # the end of a log without a termination message
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
