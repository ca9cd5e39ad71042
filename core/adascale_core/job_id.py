"""Job ids: `<namespace>.<name>`, where a bare name is in the namespace `default`."""

from __future__ import annotations

import re
from typing import Final

from adascale_core.errors import AdaScaleError
from adascale_core.names import DEFAULT_NAMESPACE

_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class InvalidJobIdError(AdaScaleError):
    """A job id that is neither `<namespace>.<name>` nor a bare name."""

    exit_code = 2


def job_id(name: str, namespace: str = DEFAULT_NAMESPACE) -> str:
    """Return the id of the job `name` in `namespace`."""
    for part, text in (("namespace", namespace), ("name", name)):
        if not _DNS_LABEL.fullmatch(text):
            raise InvalidJobIdError(
                f"job {part} {text!r} is not valid: use lower case letters, digits and '-', "
                "beginning and ending with a letter or digit, at most 63 of them"
            )
    return f"{namespace}.{name}"


def parse_job_id(text: str) -> str:
    """Return the full id for `text`, which may be the bare name of a job in the namespace `default`."""
    namespace, dot, name = text.rpartition(".")
    return job_id(name, namespace if dot else DEFAULT_NAMESPACE)


def short_id(full_id: str) -> str:
    """Return a full job id without the namespace `default`, as commands accept it."""
    return full_id.removeprefix(f"{DEFAULT_NAMESPACE}.")


def namespace_of(full_id: str) -> str:
    """Return the namespace of a full job id."""
    return full_id.partition(".")[0]
