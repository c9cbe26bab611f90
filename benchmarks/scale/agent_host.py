"""Processes that hold the simulated agents.

A process may have only so many open files. All agents of a job are in one process. The driver and a process send each
other lines of JSON, each a list whose first element says what the others are.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, astuple, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.scale.agents import NUM_STEPS, PACE, CallingAgent, be_patient, keep_training
from benchmarks.scale.kubelets import RunningPod
from spottrain_agent.routes import IDLE_SECONDS
from spottrain_api.contract.assignments import AgentPhase
from spottrain_runtime.processes import die_with_parent
from spottrain_simulator.ranks import Training

# At rest, three, both ends of its connection to the relay included. More while jobs start or move: 4.5 were measured
# when a tenth of the nodes had a notice.
FILES_PER_AGENT = 5

Send = Callable[..., None]
"""Sends one message, the elements of its list."""


def num_hosts(num_agents: int, limit: int) -> int:
    """The processes that so many agents need if each may have `limit` open files."""
    if limit == resource.RLIM_INFINITY:
        return 1
    return math.ceil(num_agents * FILES_PER_AGENT / limit)


def open_session(number: int) -> aiohttp.ClientSession:
    """Open a client with its own address, as nodes have: the limit is per address."""
    address = (f"127.77.0.{number + 1}", 0)
    connector = aiohttp.TCPConnector(limit=0, local_addr=address, keepalive_timeout=IDLE_SECONDS)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """What the driver has to know of an agent.

    `drained_at` is by the monotonic clock, which all processes of a machine share.
    """

    phase: AgentPhase = AgentPhase.IDLE
    trains: bool = False
    node_rank: int | None = None
    drained_at: float | None = None


class HostedAgent:
    """An agent in another process. `status` is the newest that has come from there."""

    def __init__(self, pod: RunningPod, send: Send) -> None:
        self.pod = pod
        self.status = AgentStatus()
        self._send = send

    def stop(self) -> None:
        self._send("stop", self.pod.uid)

    def take_notice(self, deadline: datetime) -> None:
        self._send("take notice", self.pod.uid, deadline.isoformat())

    def forget_drain(self) -> None:
        """Have the next drain noted. The status keeps the last one until then."""
        self._send("forget drain", self.pod.uid)


class AgentHost:
    """A process of agents, as the driver sees it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._writer = writer
        self._agents: dict[str, HostedAgent] = {}
        self._counted: asyncio.Future[int]
        self._following = asyncio.create_task(self._follow(reader))

    def start_agent(self, pod: RunningPod) -> HostedAgent:
        agent = self._agents[pod.uid] = HostedAgent(pod, self._send)
        self._send("start", asdict(pod))
        return agent

    async def num_reports(self) -> int:
        """The reports that its agents have sent so far."""
        self._counted = asyncio.get_running_loop().create_future()
        self._send("count reports")
        either: list[asyncio.Future[Any]] = [self._counted, self._following]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        self.check()
        return self._counted.result()

    def check(self) -> None:
        """Check that the process runs.

        Raises:
            RuntimeError: It has ended.
        """
        if self._following.done():
            raise RuntimeError(f"Process {self.pid} of simulated agents has ended by itself; see above.")

    def close(self) -> None:
        self._following.cancel()
        self._writer.close()

    def _send(self, *message: object) -> None:
        _write(self._writer, message)

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            match json.loads(line):
                case ["status", uid, phase, *others]:
                    self._agents[uid].status = AgentStatus(AgentPhase(phase), *others)
                case ["reports", number]:
                    self._counted.set_result(number)


@asynccontextmanager
async def agent_host(address: Path, folder: Path, sources: Iterable[int]) -> AsyncIterator[AgentHost]:
    """Run a process of agents. It ends with this one, however that ends.

    Args:
        address: The folder with the operator's address.
        folder: For the agents' tokens.
        sources: Numbers of the addresses from which its agents call, in turn.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = (sys.executable, "-m", __name__, str(address), str(folder), *map(str, sources))
        # Ctrl-C in the terminal is for this process alone.
        process = await asyncio.create_subprocess_exec(*command, stdin=theirs.fileno(), start_new_session=True)
    host = AgentHost(process.pid, *await asyncio.open_unix_connection(sock=ours))
    try:
        yield host
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        host.close()
        await process.wait()


class _TellingAgent(CallingAgent):
    """Tells the driver of each change."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        address: Path,
        folder: Path,
        pod: RunningPod,
        training: Training,
        send: Send,
    ) -> None:
        super().__init__(session, address, folder, pod, training)
        self._send = send
        self._told = AgentStatus()

    def changed(self) -> None:
        status = AgentStatus(self.phase, self.trains, self.node_rank, self.drained_at)
        if status != self._told:
            self._told = status
            self._send("status", self.uid, *astuple(status))


async def _serve(address: Path, folder: Path, sources: list[int]) -> None:
    """Do what the driver says, until it ends."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=sys.stdin.fileno()))
    agents: dict[str, _TellingAgent] = {}
    trainings: dict[str, Training] = {}

    def send(*message: object) -> None:
        _write(writer, message)

    async with AsyncExitStack() as stack:
        stack.callback(asyncio.create_task(keep_training(trainings.values)).cancel)
        sessions = itertools.cycle([await stack.enter_async_context(open_session(number)) for number in sources])
        async for line in reader:
            match json.loads(line):
                case ["start", fields]:
                    pod = RunningPod(**fields)
                    training = trainings.setdefault(pod.job, Training(total_steps=NUM_STEPS, pace=PACE))
                    agents[pod.uid] = _TellingAgent(next(sessions), address, folder, pod, training, send)
                case ["stop", uid]:
                    agents.pop(uid).stop()
                case ["take notice", uid, deadline]:
                    agents[uid].take_notice(datetime.fromisoformat(deadline))
                case ["forget drain", uid]:
                    agents[uid].drained_at = None
                case ["count reports"]:
                    send("reports", sum(agent.num_reports for agent in agents.values()))


def _write(writer: asyncio.StreamWriter, message: Iterable[object]) -> None:
    """Queue a message: nobody waits for the other process."""
    writer.write(json.dumps(list(message)).encode() + b"\n")


def main() -> None:
    die_with_parent()
    logging.basicConfig(level=logging.ERROR)
    be_patient()
    address, folder, *sources = sys.argv[1:]
    asyncio.run(_serve(Path(address), Path(folder), [int(number) for number in sources]))


if __name__ == "__main__":
    main()
