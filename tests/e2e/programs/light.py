"""A program that enters generations as a trainer does, but does not train, so that it starts fast.

light.py sleep          sleeps until its agent requests to save and exit
light.py stubborn       sleeps and ignores such requests
light.py exit CODE      exits; with code 0 as a program that has finished training
light.py crash          crashes with a segmentation fault
"""

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, cast

from adascale_core.messages.channel import Assignment, Finished, Holding, Ready, Release, Running
from adascale_worker.membership.links import AgentChannel
from adascale_worker.process import environment
from adascale_worker.process.environment import listen

if TYPE_CHECKING:
    from adascale_worker.membership.generations import Membership

descriptor = environment.take_agent_channel(os.environ)
assert descriptor is not None
channel = AgentChannel(descriptor)


class Receiver:
    def assign(self, assignment: Assignment) -> None:
        environment.apply_settings(os.environ, assignment.env)
        channel.send(Running(assignment.generation))

    def hold(self, generation: int) -> None:
        channel.send(Holding(generation, step=0))

    def terminate(self) -> None:
        if "stubborn" not in sys.argv:
            os._exit(75)


channel.start(cast("Membership", Receiver()))
listener = listen("127.0.0.1")
channel.send(Ready(listener.getsockname()[1]))
while channel.newest is None:
    channel.wait(1)
rank, replicas = os.environ["ADASCALE_RANK"], os.environ["ADASCALE_REPLICAS"]
print(f"replica {rank} of {replicas}, who: {os.environ.get('WHO')}", flush=True)

match sys.argv[1:]:
    case ["sleep"]:
        while not isinstance(channel.newest, Release):
            channel.wait(600)
        sys.exit(75)
    case ["stubborn"]:
        time.sleep(600)
    case ["exit", code]:
        print("[red]the last line", flush=True)
        if int(code) == 0:
            channel.send(Finished())
        sys.exit(int(code))
    case ["crash"]:
        os.kill(os.getpid(), signal.SIGSEGV)
