"""The server-sent events of a service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import urllib3


class Events:
    """The events of the service."""

    def __init__(self, port: int, token: str | None = None, address: str = "127.0.0.1") -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._pool = urllib3.PoolManager(retries=False, timeout=30, source_address=(address, 0))
        self.answer = self._pool.request(
            "GET", f"http://127.0.0.1:{port}/events", headers=headers, preload_content=False
        )
        self._events = self._parse()

    def _parse(self) -> Iterator[tuple[str, Any]]:
        text = ""
        for data in self.answer.stream(amt=None):
            text += data.decode()
            *events, text = text.split("\n\n")
            for event in events:
                fields = dict(line.split(": ", 1) for line in event.splitlines() if not line.startswith(":"))
                if "data" in fields:
                    yield fields["event"], json.loads(fields["data"])

    def next(self) -> tuple[str, Any]:
        """Return the kind and data of the next event."""
        return next(self._events)

    def of_job(self, job: str) -> Any:
        """Return the next summary of a job."""
        while True:
            _, data = self.next()
            for summary in data["jobs"]:
                if summary["id"] == job:
                    return summary

    def close(self) -> None:
        self.answer.close()
        self._pool.clear()
