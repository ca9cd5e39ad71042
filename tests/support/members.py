"""Trainers as processes, and one scripted agent for all of them that speaks the protocol of the channel."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adascale_core.failures import EXIT_OUT_OF_MEMORY, EXIT_PEER_LOST, EXIT_REENTRY
from adascale_core.names import LEAVE_GRACE
from adascale_worker.agent.trainer_process import TrainerSocket
from support.fast_python import Program
from support.launch import read_records, wait_until

SAMPLES = 48
"""Length of the program's data set."""
PROGRAM = Path(__file__).parent / "programs" / "members.py"


REPLACED_CODES = (EXIT_REENTRY, EXIT_PEER_LOST)
"""Exit codes after which an agent starts another trainer."""
EXPECTED_CODES = (None, 0, *REPLACED_CODES, EXIT_OUT_OF_MEMORY, -signal.SIGKILL)


class Trainer:
    """A trainer process, and its end of the channel."""

    def __init__(self, replica: int, folder: Path, options: dict[str, object]) -> None:
        self.replica = replica
        self.messages: list[dict[str, Any]] = []
        self.channel: socket.socket | None = None
        self._socket = TrainerSocket()
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ADASCALE_")},
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "JOURNAL": str(folder / "journal"),
            "REPLICA": str(replica),
            **{name: str(value) for name, value in options.items()},
        }
        self.output = folder / f"output-{replica}"
        program = str(environ.pop("PROGRAM", PROGRAM))
        processes = environ.get("ADASCALE_PROCESSES_PER_REPLICA")
        if processes is not None:
            environ["ADASCALE_REPLICA_STORE"] = self._socket.path_beside("processes")
        self._program = Program(
            [program], {**environ, "ADASCALE_AGENT_SOCKET": self._socket.path}, self.output
        )
        self._followers = [
            Program([program], {**environ, "ADASCALE_LOCAL_RANK": str(process)}, self.output)
            for process in range(1, int(processes or 1))
        ]
        threading.Thread(target=self._receive, daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._program.pid is not None, self.output.read_text()
        return self._program.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None until it has exited. All processes of a replica end with one that fails."""
        codes = [each.code for each in (self._program, *self._followers)]
        if any(code not in (None, 0) for code in codes):
            for process in (process for process, code in enumerate(codes) if code is None):
                self.kill(process=process)
        return codes[0]

    def _receive(self) -> None:
        # One that is killed before it has read all messages resets the connection, or it never connects.
        with contextlib.suppress(OSError):
            self.channel, _ = self._socket.accept()
            with self.channel.makefile("r") as lines:
                for line in lines:
                    self.messages.append(json.loads(line))

    def send(self, **message: object) -> None:
        assert self.channel is not None, "it is ready"
        with contextlib.suppress(OSError):  # it was killed
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def has_sent(self, kind: str, generation: int | None = None) -> bool:
        return any(
            m["type"] == kind and (generation is None or m["generation"] == generation) for m in self.messages
        )

    @property
    def state(self) -> dict[str, Any]:
        """Its last message that says where it is, and not what it spends its time on."""
        return next(m for m in reversed(self.messages) if m["type"] not in ("spent", "stalled"))

    @property
    def described(self) -> dict[str, Any]:
        """The member that it is."""
        ready = next(m for m in self.messages if m["type"] == "ready")
        ports = {name: ready[name] for name in ("port", "state_port")}
        return {"replica": self.replica, "instance": f"i{self.replica}", "address": "127.0.0.1", **ports}

    def kill(self, number: int = signal.SIGKILL, process: int = 0) -> None:
        """Send a signal to one of its processes."""
        pid = self.pid if process == 0 else self._followers[process - 1].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, number)

    def close(self) -> None:
        """Kill it if it runs."""
        for each in (self._program, *self._followers):
            each.close()
        self._socket.close()
        if self.channel is not None:
            self.channel.close()


class Members:
    """A job whose generations the test decides on."""

    def __init__(self, folder: Path, **options: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.options = options
        self.generation = 0
        self.active: list[Trainer] = []
        self.started: list[Trainer] = []
        self._replicas = 0

    def start(self, count: int = 1) -> list[Trainer]:
        """Start trainers, and wait until they are ready."""
        trainers = []
        for _ in range(count):
            trainers.append(Trainer(self._replicas, self.folder, self.options))
            self._replicas += 1
        self.started += trainers
        self.wait(lambda: all(t.has_sent("ready") for t in trainers), "trainers are ready")
        return trainers

    def wait(self, condition: Any, what: str) -> None:
        def check() -> bool:
            failed = [t for t in self.started if t.code not in EXPECTED_CODES]
            assert not failed, self.output()
            return bool(condition())

        try:
            wait_until(check, what, patience=150)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None

    def activate(
        self, members: Sequence[Trainer], *, wait: bool = True, env: dict[str, str] | None = None
    ) -> None:
        """Make a generation of these members active, with `env` from the service.

        Those of the last generation come first.
        """
        self.generation += 1
        released = [t for t in self.active if t not in members and t.code is None]
        for rank, trainer in enumerate(members):
            trainer.send(
                type="assign",
                generation=self.generation,
                rank=rank,
                members=[each.described for each in members],
                secret="secret",
                env={"ADASCALE_RANK": str(rank), "ADASCALE_REPLICAS": str(len(members)), **(env or {})},
            )
        for trainer in released:
            trainer.send(type="release", generation=self.generation)
        self.active = list(members)
        if wait:
            self.wait_running()

    def follow(self, spare: Trainer) -> None:
        """Let a trainer that waits follow the present generation."""
        source, instance = self.active[0].described, f"i{spare.replica}"
        spare.send(type="follow", source=source, instance=instance, secret="secret")

    def replace_by_spare(self, lost: int) -> Trainer:
        """Kill one of two members while a spare follows, which takes its place; return the spare."""
        *members, spare = self.start(3)
        self.train(members, 1)
        self.follow(spare)
        self.wait_step(self.last_step() + 8)
        members.pop(lost).kill()
        self.wait_holding(members)
        self.activate([*members, spare])
        return spare

    def train(self, members: Sequence[Trainer], steps: int) -> None:
        """Make a generation of these members active, and wait until it has made some steps."""
        self.activate(members)
        self.wait_step(self.last_step() + steps)

    def complete(self, count: int) -> set[str]:
        """Train on this number of replicas from the start to the end, see `finish`."""
        self.activate(self.start(count))
        return self.finish()

    def wait_running(self) -> None:
        generation = self.generation
        self.wait(
            lambda: all(t.has_sent("running", generation) for t in self.active), f"generation {generation}"
        )

    def wait_step(self, step: int) -> None:
        self.wait(lambda: self.last_step() >= step, f"step {step}")

    def wait_holding(self, trainers: Sequence[Trainer]) -> None:
        """Wait until these trainers hold; a collective call that cannot be freed ends a process instead."""
        generation = self.generation
        self.wait(
            lambda: all(t.has_sent("holding", generation) or t.code in REPLACED_CODES for t in trainers),
            "members hold",
        )

    def last_step(self) -> int:
        return max((record["step"] for record in self.records()), default=0)

    def records(self) -> list[dict[str, Any]]:
        """Return the records of all processes."""
        return read_records(self.folder / "journal")

    def release(self, trainer: Trainer) -> None:
        """Release a member that was taken for lost, and kill it if it does not exit, as its agent does.

        Gloo may lose a message whose permission to be sent arrives at a connection that is shut down already.
        Nothing ends a collective that waits for it.
        """
        trainer.send(type="release", generation=self.generation)
        deadline = time.monotonic() + LEAVE_GRACE

        def has_left() -> bool:
            if trainer.code is None and time.monotonic() > deadline:
                trainer.kill()
            return trainer.code is not None

        self.wait(has_left, "a released member leaves")

    def finish(self) -> set[str]:
        """Wait until the members have finished, and return the digests of their weights.

        Members that could not form their generation get another one, as from the service, with others for
        those whose processes have ended.
        """

        def have_ended() -> bool:
            rest = [t for t in self.active if t.code not in REPLACED_CODES]
            last = [t.state for t in rest]
            if all(m["type"] == "holding" and m["generation"] == self.generation for m in last):
                rest.sort(key=lambda t: t.state["step"] is None)
                self.activate([*rest, *self.start(len(self.active) - len(rest))], wait=False)
            return all(t.code is not None for t in self.active)

        self.wait(have_ended, "training ends")
        assert [t.code for t in self.active] == [0] * len(self.active), self.output()
        return {path.read_text() for path in (self.folder / "journal").glob("weights-*")}

    def output(self) -> str:
        """Return messages and output of all trainers."""
        return "\n".join(
            f"--- {t.replica} {t.code} {t.messages}\n{t.output.read_text()}" for t in self.started
        )

    def close(self) -> None:
        for trainer in self.started:
            trainer.close()

    def require_complete_stream(self) -> int:
        """Check that the steps share out the stream without a gap or a repetition; return the steps.

        A step that only killed members had finished is made again, in another generation. No process makes
        a step twice.
        """
        sections: dict[int, set[tuple[int, int]]] = {}
        shares: dict[int, list[int]] = {}
        last: dict[str, int] = {}
        kept: dict[int, int] = {}
        records = self.records()
        for record in records:
            kept[record["step"]] = max(kept.get(record["step"], 0), record["generation"])
        for record in records:
            assert record["step"] > last.get(record["file"], 0), record
            last[record["file"]] = record["step"]
            if record["generation"] == kept[record["step"]]:
                sections.setdefault(record["step"], set()).add(tuple(record["samples"]))
                shares.setdefault(record["step"], []).extend(record["indices"])
        position = 0
        for step in range(1, max(sections) + 1):
            assert len(sections.get(step, ())) == 1, (step, sections.get(step))
            ((start, end),) = sections[step]
            assert start == position, (step, start, position)
            position = end
            # A member that was killed may have recorded nothing. No sample of a pass is in two shares.
            assert len(shares[step]) <= end - start, step
            if start // SAMPLES == (end - 1) // SAMPLES:
                assert len(shares[step]) == len(set(shares[step])), step
        return max(sections)
