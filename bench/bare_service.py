"""A FastAPI application that parses gain reports and keeps nothing, for `reports_per_second.py`."""

import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from adascale_api.bodies import GainReportBody

Report: Any = GainReportBody


class Stored(BaseModel):
    stored: int
    repeated: int
    allocation: dict[str, int]


app = FastAPI()


@app.post("/jobs/{job}/gain")
async def post_gain(job: str, body: Report | list[Report]) -> Stored:  # noqa: ARG001
    return Stored(stored=len(body) if isinstance(body, list) else 1, repeated=0, allocation={"version": 1})


def main() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Path(sys.argv[1]).write_text(str(listener.getsockname()[1]))
        config = uvicorn.Config(
            app, loop="uvloop", http="httptools", ws="none", log_config=None, access_log=False
        )
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
