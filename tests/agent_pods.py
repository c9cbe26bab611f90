"""Real agents in pods of their own, as a pytest plugin.

The test plays their operator. Agents are forked from the process that ranks are forked from, each with its first
zygote, so that none of them imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from control_folder import control_folder
from spottrain_agent import command, zygote
from spottrain_agent.processes import descendants
from spottrain_agent.zygote_process import StartedProcess, spawn_zygote
from spottrain_api.contract.assignments import (
    AgentPhase,
    AgentReport,
    Assignment,
    AssignmentAction,
    GenerationAssignment,
)
from spottrain_api.contract.configuration import DrainRequest, TrainerConfig
from spottrain_api.contract.names import PATH_ASSIGNMENT, PATH_NOTICE, PATH_REPORT
from spottrain_api.contract.notices import Notice, NoticeList, watcher_mark
from spottrain_api.settings.entrypoint import Entrypoint
from spottrain_api.settings.training import Batch

WAIT = Assignment(action=AssignmentAction.WAIT)
# Of the watcher.
PROOF = "proof"

GATHER = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    with open(sys.argv[1] + f"/{os.environ['GROUP_RANK']}", "w") as file:
        file.write(f"{int(total.item())} {__name__} {sys.argv[0]}")
"""

# A plain script, which drains on SIGTERM.
TRAIN_FOREVER = """
    import os, sys, time, signal, pathlib, torch, torch.distributed as dist
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    dist.init_process_group("gloo")
    out = pathlib.Path(sys.argv[1])
    step = 0
    while True:
        flag = torch.tensor([float(bool(stop))])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        step += 1
        if step == 1:
            (out / f"started-{os.environ['RANK']}").write_text(str(os.getpid()))
        if flag.item():
            (out / f"saved-{os.environ['RANK']}").write_text(os.environ["SPOTTRAIN_GRACE_SECONDS"])
            assert os.path.exists(os.environ["SPOTTRAIN_DRAIN_FILE"])
            break
        time.sleep(0.02)
"""


@dataclass
class FakeOperator:
    """An operator that hands out assignments by pod and keeps the newest reports.

    It also plays the watcher.
    """

    url: str = ""
    assignments: dict[str, Assignment] = field(default_factory=dict)
    reports: dict[str, AgentReport] = field(default_factory=dict)
    notices: NoticeList = field(default_factory=lambda: NoticeList(revision="0"))
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get(PATH_ASSIGNMENT, self._assignment)
        application.router.add_post(PATH_REPORT, self._report)
        application.router.add_get(PATH_NOTICE, self._notice)
        return application

    async def assign(self, assignments: dict[str, Assignment]) -> None:
        async with self.changed:
            self.assignments |= assignments
            self.changed.notify_all()

    async def announce(self, *notices: Notice) -> None:
        async with self.changed:
            self.notices = NoticeList(revision=str(int(self.notices.revision) + 1), notices=notices, proof=PROOF)
            self.changed.notify_all()

    async def wait_for(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds), self.changed:
            await self.changed.wait_for(condition)

    async def wait_for_phase(self, phase: AgentPhase, generation: int, pods: list[str], seconds: float = 60) -> None:
        def reached() -> bool:
            reports = [self.reports.get(pod) for pod in pods]
            return all(r is not None and r.generation == generation and r.phase is phase for r in reports)

        await self.wait_for(reached, seconds)

    async def _assignment(self, request: web.Request) -> web.Response:
        pod = request.headers["Authorization"].removeprefix("Bearer ")
        after = request.query["after"]
        try:
            async with asyncio.timeout(25), self.changed:
                await self.changed.wait_for(lambda: self._told(pod).revision != after)
        except TimeoutError:
            return web.Response(status=204)
        return web.Response(text=self._told(pod).to_json())

    def _told(self, pod: str) -> Assignment:
        return self.assignments.get(pod, WAIT).model_copy(update={"watcher": watcher_mark(PROOF)})

    async def _report(self, request: web.Request) -> web.Response:
        report = AgentReport.from_json(await request.read())
        async with self.changed:
            self.reports[report.pod] = report
            self.changed.notify_all()
        return web.Response(status=204)

    async def _notice(self, request: web.Request) -> web.Response:
        async with asyncio.timeout(25), self.changed:
            await self.changed.wait_for(lambda: self.notices.revision != request.query["after"])
        return web.Response(text=self.notices.to_json())


class ForkedZygote:
    """A zygote that is forked before its agent has threads."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            zygote.main(theirs.detach())
            os._exit(0)
        theirs.close()

    def spawn(self) -> tuple[StartedProcess, socket.socket]:
        """The zygote at the first call. Later ones are new interpreters."""
        if self._ours.fileno() == -1:
            return spawn_zygote()
        ours = self._ours.dup()
        self._ours.close()
        return self, ours


def run_agent(environment: dict[str, str]) -> None:
    """Be an agent, as `python -m spottrain_agent` is."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    first = ForkedZygote()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    sys.exit(command.main(first.spawn))


class ForkedAgent:
    """An agent's process, with the methods of a `Popen`."""

    def __init__(self, fork: Any, environment: dict[str, str]) -> None:
        self._process = fork.Process(target=run_agent, args=(environment,))
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code. None if the agent still runs after these seconds."""
        self._process.join(timeout)
        return self.poll()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass
class Pods:
    """Starts agents as a kubelet would, and ends all they leave behind."""

    folder: Path
    operator: FakeOperator
    fork: Any
    processes: dict[str, subprocess.Popen[bytes] | ForkedAgent] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    def start(self, *names: str, control_url: str | None = None, cold: bool = False, **environ: str) -> None:
        """Start an agent in each of these pods.

        `cold`: as a new interpreter, whose zygote imports torch. It writes to the test's own standard error.
        """
        for name in names:
            token = self.folder / f"token-{name}"
            token.write_text(name)
            self.addresses[name] = f"127.9.{os.getpid() % 200}.{len(self.processes) + 2}"
            control = control_folder(self.folder / f"control-{name}", control_url or self.operator.url)
            environment = {
                "PATH": os.environ["PATH"],
                "SPOTTRAIN_CONTROL_DIR": str(control),
                "SPOTTRAIN_TOKEN_FILE": str(token),
                "SPOTTRAIN_POD_NAME": name,
                "SPOTTRAIN_POD_UID": f"uid-{name}",
                "SPOTTRAIN_POD_IP": self.addresses[name],
                "SPOTTRAIN_NODE_NAME": f"node-{name}",
                "SPOTTRAIN_RUN_ROOT": str(self.folder / f"run-{name}"),
                "SPOTTRAIN_GRACE_SECONDS": "20",
                "OUT": str(self.folder),
            }
            environment |= environ
            if cold:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "spottrain_agent"], env=environment, start_new_session=True
                )
            else:
                self.processes[name] = ForkedAgent(self.fork, environment)

    def script(self, text: str) -> Entrypoint:
        path = self.folder / "train.py"
        path.write_text(textwrap.dedent(text))
        return Entrypoint(script=str(path), args=(str(self.folder),))

    async def warm(self) -> None:
        def all_warm() -> bool:
            reports = [self.operator.reports.get(name) for name in self.processes]
            return all(report is not None and report.warm for report in reports)

        await self.operator.wait_for(all_warm)

    def generation(
        self, number: int, entrypoint: Entrypoint, names: list[str], processes_per_node: int = 1
    ) -> dict[str, Assignment]:
        """RUN for each of the members; the first hosts the store."""
        port = self.operator.reports[names[0]].rendezvous_port
        trainer = TrainerConfig(
            job="job", generation=number, attempt_id=f"g{number}", batch=Batch(global_=1)
        ).to_dict()
        return {
            name: Assignment(
                action=AssignmentAction.RUN,
                generation=GenerationAssignment(
                    number=number,
                    rendezvous_id=f"g{number}",
                    rendezvous_endpoint=f"{self.addresses[names[0]]}:{port}",
                    node_rank=rank,
                    num_nodes=len(names),
                    processes_per_node=processes_per_node,
                    entrypoint=entrypoint,
                    trainer=trainer,
                ),
            )
            for rank, name in enumerate(names)
        }

    def kill(self, name: str) -> None:
        """The node vanishes: every process of the pod at once, without notice."""
        process = self.processes[name]
        if process.poll() is not None:
            return
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):  # some die with the agent
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for name, process in self.processes.items():
            self.kill(name)
            process.wait()


@pytest.fixture
async def operator() -> AsyncIterator[FakeOperator]:
    fake = FakeOperator()
    runner = web.AppRunner(fake.application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest.fixture
async def pods(tmp_path: Path, operator: FakeOperator, fork: Any) -> AsyncIterator[Pods]:
    started = Pods(folder=tmp_path, operator=operator, fork=fork)
    yield started
    started.end()


async def becomes_true(condition: Callable[[], bool], seconds: float) -> None:
    """Polls, for what tells nobody when it changes: files and processes."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def appears(path: Path, seconds: float = 60) -> None:
    await becomes_true(path.exists, seconds)


async def said(path: Path, seconds: float = 60) -> str:
    """What a script writes to a file in one go, once it is there."""
    await becomes_true(lambda: path.exists() and bool(path.read_text()), seconds)
    return path.read_text()


def drain(assignment: Assignment, seconds: float = 15) -> Assignment:
    now = datetime.now(UTC)
    request = DrainRequest(reason="test", deadline=now + timedelta(seconds=seconds), requested_at=now)
    return assignment.model_copy(update={"action": AssignmentAction.DRAIN, "drain": request})
