"""A trainer without torch: it does what its agent says, and what a test writes to `<SCRIPTED>/<pid>.todo`.

It appends the messages of its agent to `<SCRIPTED>/<pid>.seen`. Each line of the other file is a message that
it sends, or {"exit": code}. With AUTOMATIC=1 it runs each generation to which it is assigned at once. With
LISTENS=0 others cannot connect to it.
"""

import json
import os
import socket
import threading
import time
from pathlib import Path

folder = Path(os.environ["SCRIPTED"])
todo, seen = folder / f"{os.getpid()}.todo", folder / f"{os.getpid()}.seen"
environ = {
    name: os.environ.get(name)
    for name in ("ADASCALE_RANK", "ADASCALE_REPLICAS", "ADASCALE_REPLICA", "RANK", "WORLD_SIZE")
}
channel = socket.socket(socket.AF_UNIX)
channel.connect(os.environ["ADASCALE_AGENT_SOCKET"])


def send(message: dict[str, object]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def receive() -> None:
    step = 0
    for line in channel.makefile("r", encoding="utf-8"):
        with seen.open("a") as log:
            log.write(line)
        message = json.loads(line)
        if message["type"] == "terminate":
            os._exit(75)
        if os.environ.get("AUTOMATIC") != "1":
            continue
        generation = message.get("generation")
        if message["type"] == "assign":
            step += 1
            send({"type": "running", "generation": generation})
            send({"type": "stepped", "generation": generation, "step": step})
        elif message["type"] == "hold":
            send({"type": "holding", "generation": generation, "step": step, "lost": []})
        elif message["type"] != "follow":
            os._exit(75)


with seen.open("a") as log:
    log.write(json.dumps({"type": "started", "time": time.monotonic_ns(), **environ}) + "\n")
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
if os.environ.get("LISTENS") == "0":
    listener.close()
send({"type": "ready", "port": port, "pid": os.getpid()})
threading.Thread(target=receive, daemon=True).start()
done = 0
while True:
    lines = todo.read_text().splitlines() if todo.exists() else []
    for line in lines[done:]:
        message = json.loads(line)
        if "exit" in message:
            os._exit(message["exit"])
        send(message)
    done = len(lines)
    time.sleep(0.01)
