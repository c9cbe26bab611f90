"""Simulated agents in two processes, with a real control API."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from benchmarks.scale.agent_host import AgentHost, HostedAgent, agent_host, num_hosts
from benchmarks.scale.kubelets import RunningPod

from control_api_setup import JOB, POD, WAIT, Setup, running, served
from control_folder import control_folder
from spottrain_api.contract.assignments import AgentPhase, AgentReport, Assignment

PODS = [POD, *(replace(POD, pod=f"gpt-{number}", uid=f"uid-{number}") for number in (2, 3, 4))]


@dataclass(frozen=True)
class Hosted:
    """Two processes, with the agents of two pods each."""

    setup: Setup
    hosts: list[AgentHost]
    agents: list[HostedAgent]

    def publish(self, assignments: list[Assignment]) -> None:
        self.setup.board.publish(JOB, {pod.uid: each for pod, each in zip(PODS, assignments, strict=True)})

    def reports(self, pods: list[int]) -> list[AgentReport]:
        """The newest reports of these pods."""
        views = self.setup.reports.of(frozenset(PODS[number].uid for number in pods))
        return [view.report for view in views.values()]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                for host in self.hosts:
                    host.check()
                await asyncio.sleep(0.01)


@pytest.fixture
async def hosted(tmp_path: Path) -> AsyncIterator[Hosted]:
    async with served(*PODS[1:]) as setup, AsyncExitStack() as stack:
        address = control_folder(tmp_path / "control", setup.client.make_url(""))
        hosts = [await stack.enter_async_context(agent_host(address, tmp_path, [number])) for number in range(2)]
        agents = [
            hosts[number // 2].start_agent(
                RunningPod(name=pod.pod, uid=pod.uid, node=f"n{number}", token=setup.tokens[pod.uid])
            )
            for number, pod in enumerate(PODS)
        ]
        yield Hosted(setup, hosts, agents)


def run_in(process: int, rank: int) -> Assignment:
    """RUN for a member of a generation with two, whose agents are in one process."""
    told = running(1, rank)
    assert told.generation is not None
    generation = told.generation.model_copy(update={"num_nodes": 2, "rendezvous_id": f"process-{process}"})
    return told.model_copy(update={"generation": generation})


async def test_a_run_with_a_notice(hosted: Hosted) -> None:
    hosted.publish([run_in(0, 0), WAIT, run_in(1, 0), WAIT])
    await hosted.until(lambda: [agent.status.phase for agent in hosted.agents].count(AgentPhase.STARTING) == 2)
    assert not any(agent.status.trains for agent in hosted.agents), "the first step takes all members"
    hosted.publish([run_in(process, rank) for process in range(2) for rank in range(2)])
    await hosted.until(lambda: all(agent.status.trains for agent in hosted.agents))
    assert [agent.status.node_rank for agent in hosted.agents] == [0, 1, 0, 1]
    assert {agent.status.phase for agent in hosted.agents} == {AgentPhase.RUNNING}
    for agent in hosted.agents:
        agent.forget_drain()
    noticed_at = time.monotonic()
    hosted.agents[3].take_notice(datetime.now(UTC) + timedelta(seconds=120))
    await hosted.until(lambda: any(report.notices for report in hosted.reports([3])))
    assert not any(report.notices for report in hosted.reports([0, 1, 2]))
    assert not any((agent.status.drained_at or 0.0) > noticed_at for agent in hosted.agents)
    hosted.publish([WAIT] * 4)
    await hosted.until(lambda: all((agent.status.drained_at or 0.0) > noticed_at for agent in hosted.agents))
    assert all((agent.status.drained_at or 0.0) < time.monotonic() for agent in hosted.agents)


async def test_reports_are_counted_and_an_agent_can_end(hosted: Hosted) -> None:
    hosted.publish([WAIT] * 4)
    await hosted.until(lambda: len(hosted.reports([0, 1, 2, 3])) == 4 and hosted.setup.reports.num_present == 4)
    for host, pods in zip(hosted.hosts, ([0, 1], [2, 3]), strict=True):
        assert await host.num_reports() >= sum(report.number for report in hosted.reports(pods)) >= 2
    hosted.agents[0].stop()
    await hosted.until(lambda: hosted.setup.reports.num_present == 3)


async def test_a_process_that_ends_is_noticed(hosted: Hosted) -> None:
    psutil.Process(hosted.hosts[0].pid).kill()
    with pytest.raises(RuntimeError, match="has ended by itself"):
        await hosted.until(lambda: False)
    with pytest.raises(RuntimeError, match="has ended by itself"):
        await hosted.hosts[0].num_reports()
    assert await hosted.hosts[1].num_reports() >= 0


PARENT = """
import asyncio, sys
from pathlib import Path
from benchmarks.scale.agent_host import agent_host

async def main():
    async with agent_host(Path(sys.argv[1]), Path(sys.argv[1]), [0]) as host:
        assert await host.num_reports() == 0
        print(host.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_it_ends_with_a_killed_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout
            child = psutil.Process(int(parent.stdout.readline()))
        finally:
            parent.kill()
    child.wait(timeout=5)


@pytest.mark.parametrize(
    ("num_agents", "limit", "expected"),
    [(8, 1024, 1), (4_000, 20_000, 1), (8_000, 20_000, 2), (8_000, resource.RLIM_INFINITY, 1)],
)
def test_as_many_processes_as_open_files_need(num_agents: int, limit: int, expected: int) -> None:
    assert num_hosts(num_agents, limit) == expected
