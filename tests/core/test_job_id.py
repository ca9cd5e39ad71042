"""Job ids are parsed and validated."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.job_id import InvalidJobIdError, job_id, parse_job_id

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
def test_a_full_id_is_parsed_unchanged(name: str, namespace: str) -> None:
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
def test_an_invalid_id_is_rejected_by_name(text: str, offending: str) -> None:
    with pytest.raises(InvalidJobIdError, match=re.escape(offending)):
        parse_job_id(text)


@given(st.text())
def test_any_text_is_either_an_id_or_rejected(text: str) -> None:
    try:
        full = parse_job_id(text)
    except InvalidJobIdError:
        return
    assert parse_job_id(full) == full
