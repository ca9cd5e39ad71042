"""What an exit code of a trainer or an agent means."""

import signal

import pytest

from adascale_core.failures import (
    EXIT_CHECK_FAILED,
    EXIT_FINISHED,
    EXIT_PEER_LOST,
    EXIT_REENTRY,
    EXIT_REFUSED,
    EXIT_SERVICE_UNAVAILABLE,
    ExitClass,
    agent_exit_code,
    classify_exit,
    describe_exit,
    failure_cause,
    signal_number,
)


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
        (-signal.SIGKILL, ExitClass.KILLED),
        (-signal.SIGTERM, ExitClass.KILLED),
        (-signal.SIGINT, ExitClass.KILLED),
        (-signal.SIGHUP, ExitClass.KILLED),
        (-signal.SIGSEGV, ExitClass.PROGRAM_FAILURE),
        (-signal.SIGABRT, ExitClass.PROGRAM_FAILURE),
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


@pytest.mark.parametrize("number", sorted(signal.valid_signals() & set(range(1, 32))))
def test_a_described_signal_has_its_name_on_linux(number: int) -> None:
    phrase = describe_exit(-number)
    assert phrase in {f"killed by {signal.Signals(number).name}", f"killed by signal {number}"}


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
