"""Keeps what goes wrong with one job from the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from adascale_client import ServiceError
from adascale_controller.operator.cluster import ClusterError

logger = logging.getLogger(__name__)


class Apart:
    """What goes wrong with a job is told once, and ends there."""

    def __init__(self) -> None:
        self._complaints: dict[str, str] = {}
        self.stale = False
        """Whether the API server had something else than what was seen."""

    @contextmanager
    def job(self, name: str) -> Iterator[None]:
        """Deal with one job; what it raises is told of, and goes no further."""
        try:
            yield
        except (ClusterError, ServiceError) as error:
            if self._is_new(name, str(error)):
                logger.warning("%s: %s; trying again", name, error)
            self.stale |= isinstance(error, ClusterError) and error.status in {404, 409}
        except Exception as error:
            # Broad, since it stands for what nobody foresaw: an object of a shape that no schema rules out,
            # or a fault of ours. One job that can't be dealt with must not end the operator for all others.
            if self._is_new(name, repr(error)):
                logger.exception("%s: nothing can be done about it", name)

    def went_well(self, name: str) -> None:
        """Nothing is wrong with a job any more: tell again what goes wrong with it next."""
        self._complaints.pop(name, None)

    def forget_all_but(self, names: set[str]) -> None:
        """Forget jobs that are gone."""
        for name in self._complaints.keys() - names:
            del self._complaints[name]

    def _is_new(self, name: str, complaint: str) -> bool:
        before = self._complaints.get(name)
        self._complaints[name] = complaint
        return complaint != before
