"""Job ids are checked, and names that must differ do."""

import re
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core import names
from adascale_core.errors import AdaScaleError, InvalidJobError
from adascale_core.names import InvalidJobIdError, job_id, parse_job_id

labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("digits", "default.digits"),
        ("team.digits", "team.digits"),
        ("a.b", "a.b"),
        ("0-0", "default.0-0"),
        ("x" * 63, "default." + "x" * 63),
    ],
)
def test_a_bare_name_means_the_default_namespace(text: str, full: str) -> None:
    assert parse_job_id(text) == full


@given(labels, labels)
def test_a_full_id_is_read_as_it_is_written(name: str, namespace: str) -> None:
    assert parse_job_id(job_id(name, namespace)) == job_id(name, namespace) == f"{namespace}.{name}"


@pytest.mark.parametrize(
    ("text", "offending"),
    [
        ("", "name ''"),
        ("Digits", "name 'Digits'"),
        ("digits_2", "name 'digits_2'"),
        ("-digits", "name '-digits'"),
        ("digits-", "name 'digits-'"),
        ("digits\n", r"name 'digits\n'"),
        ("team.", "name ''"),
        (".digits", "namespace ''"),
        ("a.b.c", "namespace 'a.b'"),
        ("../digits", "namespace '.'"),
        ("team/x", "name 'team/x'"),
        ("x" * 64, "name 'xxxx"),
        ("éa", "name 'éa'"),
    ],
)
def test_a_bad_id_is_refused_and_named(text: str, offending: str) -> None:
    with pytest.raises(InvalidJobIdError, match=re.escape(offending)):
        parse_job_id(text)


@given(st.text())
def test_any_text_is_either_an_id_or_refused(text: str) -> None:
    try:
        full = parse_job_id(text)
    except InvalidJobIdError:
        return
    assert parse_job_id(full) == full


def values(prefix: str) -> list[object]:
    return [value for name, value in vars(names).items() if name.startswith(prefix)]


def test_every_variable_of_the_environment_has_a_name_of_its_own() -> None:
    variables = values("ENV_")
    assert len(set(variables)) == len(variables) > 10
    assert all(re.fullmatch("ADASCALE_[A-Z_]+", str(name)) for name in variables)


def test_exit_codes_of_a_trainer_differ_from_each_other_and_from_what_python_and_shells_use() -> None:
    codes = values("EXIT_")
    assert len(set(codes)) == len(codes) == 4
    taken = {1, 2, 126, 127, *(128 + number for number in signal.valid_signals())}
    assert not taken & set(codes)


def test_a_trainer_has_time_to_leave_before_its_agent_counts_as_lost() -> None:
    assert names.REPORT_INTERVAL < names.HEARTBEAT_INTERVAL
    assert 3 * names.HEARTBEAT_INTERVAL < names.HEARTBEAT_TIMEOUT
    assert names.LEAVE_GRACE < names.HEARTBEAT_TIMEOUT


def test_a_refused_job_has_an_exit_code_other_than_a_failure() -> None:
    assert issubclass(InvalidJobError, AdaScaleError)
    assert issubclass(InvalidJobIdError, AdaScaleError)
    assert InvalidJobError.exit_code == InvalidJobIdError.exit_code == 2 != AdaScaleError.exit_code
