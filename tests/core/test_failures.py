"""Exit codes of trainers and agents, termination messages, and how failures are counted."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.failures import (
    EXIT_CHECK_FAILED,
    EXIT_FINISHED,
    EXIT_PEER_LOST,
    EXIT_REENTRY,
    EXIT_REFUSED,
    EXIT_SERVICE_UNAVAILABLE,
    ExitClass,
    FailureCount,
    TerminationMessage,
    agent_exit_code,
    classify_exit,
    describe_end,
    describe_exit,
    failure_cause,
    signal_number,
)

# -- exit codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("", ""),
        ("epoch 3\nbye", ""),
        ("adascale: got no gradients (train.py, line 4)\n", "got no gradients (train.py, line 4)"),
        (
            'Traceback (most recent call last):\n  File "/home/me/train.py", line 50, in <module>\n'
            '  File "/venv/lib/site-packages/torch/nn.py", line 9, in f\nValueError: bad shape\n',
            "ValueError: bad shape, at train.py:50",
        ),
        ("torch.cuda.OutOfMemoryError: tried 2 GiB\nexiting", "torch.cuda.OutOfMemoryError: tried 2 GiB"),
    ],
)
def test_the_cause_of_a_failure_is_the_error_in_the_output(log: str, cause: str) -> None:
    assert failure_cause(log) == cause


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, ExitClass.FINISHED),
        (1, ExitClass.PROGRAM_FAILURE),
        (2, ExitClass.PROGRAM_FAILURE),
        (69, ExitClass.SERVICE_UNAVAILABLE),
        (75, ExitClass.REENTRY),
        (76, ExitClass.PEER_LOST),
        (79, ExitClass.OUT_OF_MEMORY),
        (80, ExitClass.REFUSED),
        (81, ExitClass.CHECK_FAILED),
        (126, ExitClass.PROGRAM_FAILURE),
        (127, ExitClass.COMMAND_NOT_FOUND),
        (128, ExitClass.PROGRAM_FAILURE),
        (129, ExitClass.KILLED),
        (130, ExitClass.KILLED),
        (134, ExitClass.PROGRAM_FAILURE),
        (137, ExitClass.KILLED),
        (139, ExitClass.PROGRAM_FAILURE),
        (143, ExitClass.KILLED),
        (255, ExitClass.PROGRAM_FAILURE),
    ],
)
def test_the_class_of_an_exit_code(code: int, expected: ExitClass) -> None:
    assert classify_exit(code) is expected


@pytest.mark.parametrize("code", [1, 75, 137])
def test_out_of_memory_overrides_the_exit_code(code: int) -> None:
    assert classify_exit(code, out_of_memory=True) is ExitClass.OUT_OF_MEMORY


def test_only_failures_of_the_program_and_a_missing_command_count_as_failures() -> None:
    counted = {exit_class for exit_class in ExitClass if exit_class.is_failure}
    failures = {
        ExitClass.PROGRAM_FAILURE,
        ExitClass.INVALID_PROGRAM,
        ExitClass.SINGLE_REPLICA_PROGRAM,
        ExitClass.COMMAND_NOT_FOUND,
    }
    assert counted == failures


@pytest.mark.parametrize("number", range(1, 32))
def test_both_notations_of_a_signal_have_the_same_class_and_signal(number: int) -> None:
    assert classify_exit(-number) is classify_exit(128 + number)
    assert signal_number(-number) == signal_number(128 + number) == number


@pytest.mark.parametrize("code", [0, 1, 75, 127, 128])
def test_other_exit_codes_have_no_signal(code: int) -> None:
    assert signal_number(code) is None


@pytest.mark.parametrize(
    ("trainer", "agent"),
    [(1, 1), (3, 3), (127, 127), (69, 1), (-signal.SIGSEGV, 139), (-signal.SIGABRT, 134)],
)
def test_an_agent_reports_a_failure_with_an_exit_code_that_counts(trainer: int, agent: int) -> None:
    assert agent_exit_code(trainer) == agent
    assert classify_exit(agent).is_failure


def test_some_exit_codes_other_than_0_are_no_failure() -> None:
    codes = [code for code in range(1, 256) if not classify_exit(code).is_failure]
    assert codes == [69, 75, 76, 79, 80, 81, 129, 130, 137, 143]


@pytest.mark.parametrize(
    ("code", "phrase"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (137, "killed by SIGKILL"),
        (-250, "killed by signal 250"),
        (250, "exit code 250"),
    ],
)
def test_an_exit_code_is_described(code: int, phrase: str) -> None:
    assert describe_exit(code) == phrase
    assert describe_end(code).endswith(f" ({phrase})")


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (0, "has finished"),
        (3, "has failed"),
        (75, "has saved its state, and was released"),
        (80, "was refused"),
        (-9, "was lost"),
    ],
)
def test_the_end_of_a_replica_is_described(code: int, end: str) -> None:
    assert describe_end(code).startswith(f"{end} (")


def test_the_projects_own_exit_codes_differ_from_those_of_python_and_shells() -> None:
    own = [
        EXIT_CHECK_FAILED,
        EXIT_FINISHED,
        EXIT_PEER_LOST,
        EXIT_REENTRY,
        EXIT_REFUSED,
        EXIT_SERVICE_UNAVAILABLE,
    ]
    taken = {1, 2, 126, 127, *(128 + number for number in signal.valid_signals())}
    assert len(set(own)) == len(own)
    assert not taken & set(own)


# -- termination messages: a round trip through text, within the length that Kubernetes accepts -------

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


# -- counts of failures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "generations", "expected"),
    [
        (FailureCount(), [], FailureCount()),
        (FailureCount(), [3], FailureCount(1, 3)),
        (FailureCount(), [3, 3], FailureCount(1, 3)),
        (FailureCount(), [3, 4], FailureCount(2, 4)),
        (FailureCount(1, 3), [3], FailureCount(1, 3)),
        (FailureCount(1, 3), [2], FailureCount(1, 3)),
        (FailureCount(1, 3), [3, 5], FailureCount(2, 5)),
        (FailureCount(), [0], FailureCount()),
        (FailureCount(2, 0, 2), [1], FailureCount(3, 1, 2)),
    ],
    ids=str,
)
def test_each_generation_counts_once(
    before: FailureCount, generations: list[int], expected: FailureCount
) -> None:
    assert before.with_generations(generations) == expected


@pytest.mark.parametrize(
    ("before", "starts", "expected"),
    [
        (FailureCount(), [], FailureCount()),
        (FailureCount(), [1, 1, 1], FailureCount(1, 0, 1)),
        (FailureCount(), [2, 1], FailureCount(2, 0, 2)),
        (FailureCount(2, 0, 2), [2], FailureCount(2, 0, 2)),
        (FailureCount(2, 0, 2), [3, 2], FailureCount(3, 0, 3)),
        (FailureCount(2, 0, 2), [], FailureCount(2, 0, 0)),
        (FailureCount(2, 0, 0), [1], FailureCount(3, 0, 1)),
        (FailureCount(1, 4), [1], FailureCount(2, 4, 1)),
    ],
    ids=str,
)
def test_each_round_of_starts_counts_once(
    before: FailureCount, starts: list[int], expected: FailureCount
) -> None:
    assert before.with_false_starts(starts) == expected


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_a_counted_failure_does_not_count_again(generations: list[int], starts: list[int]) -> None:
    counted = FailureCount().with_generations(generations).with_false_starts(starts)
    assert counted.with_generations(generations).with_false_starts(starts) == counted


def test_the_limit_itself_is_not_exceeded() -> None:
    assert [FailureCount(count).exceeds(3) for count in (0, 3, 4)] == [False, False, True]
