"""Train a short job on two replicas at an address: python two_replicas.py FOLDER ADDRESS.

Prints the exit codes of the agents and the steps of their trainers.
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.launch import AgentProcess, Journal
from support.service import Service

folder, address = Path(sys.argv[1]), sys.argv[2]
service = Service(folder, address=address)
agents: list[AgentProcess] = []
try:
    service.allocate(1, 2)
    agents += [
        AgentProcess(rank, folder, service.environ, ADASCALE_ADDRESS=address, EPOCHS=2) for rank in range(2)
    ]
    codes = [agent.wait() for agent in agents]
    print(codes, [len(Journal(folder / "journal").attempts(rank)[-1].steps) for rank in range(2)])
finally:
    for agent in agents:
        print(agent.log.read_text(), file=sys.stderr)
        agent.end()
    service.stop(signal.SIGKILL)


sys.exit(0 if codes == [0, 0] else 1)
