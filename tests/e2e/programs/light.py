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

from adascale_core.messages.channel import (
    AgentMessage,
    Assignment,
    Finished,
    Hold,
    Holding,
    Ready,
    Release,
    Running,
    Terminate,
)
from adascale_worker.membership.links import AgentChannel
from adascale_worker.process import environment
from adascale_worker.process.environment import listen

descriptor = environment.take_agent_access(os.environ).channel
assert descriptor is not None
channel = AgentChannel(descriptor)


newest: list[Assignment | Release] = []


def handle(message: AgentMessage) -> None:
    match message:
        case Assignment():
            environment.apply_settings(os.environ, message.env)
            newest.append(message)
            channel.send(Running(message.generation))
        case Release():
            newest.append(message)
        case Hold():
            channel.send(Holding(message.generation, step=0))
        case Terminate() if "stubborn" not in sys.argv:
            os._exit(75)


channel.start(handle)
listener = listen("127.0.0.1")
channel.send(Ready(listener.getsockname()[1]))
while not newest:
    channel.wait(1)
rank, replicas = os.environ["ADASCALE_RANK"], os.environ["ADASCALE_REPLICAS"]
print(f"replica {rank} of {replicas}, who: {os.environ.get('WHO')}", flush=True)

match sys.argv[1:]:
    case ["sleep"]:
        while not isinstance(newest[-1], Release):
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
