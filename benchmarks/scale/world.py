"""Many jobs whose simulated agents train, and what they cost the operator.

A real API server with etcd, the operator as a process, simulated kubelets, and agents in processes of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.scale.agent_host import AgentHost, HostedAgent, agent_host, num_hosts, open_session
from benchmarks.scale.agents import PACE
from benchmarks.scale.api_server import JOBS_PATH, ApiServer, api_server
from benchmarks.scale.jobs import finished_status, job
from benchmarks.scale.kubelets import Kubelets, RunningPod
from benchmarks.scale.operator_process import OperatorProcess

SEED = 20261122
NOTICE_SECONDS = 120.0
SHARE_NOTICED = 0.1
PATIENCE_SECONDS = 400.0
# At the start: a flood of a thousand new jobs is another benchmark.
JOBS_AT_ONCE = 100
SAMPLE_SECONDS = 1.0
NUM_SOURCES = 200
Result = dict[str, Any]


class Bench:
    """The jobs, and the agents of their pods.

    Each host has all agents of its jobs.
    """

    def __init__(
        self,
        server: ApiServer,
        operator: OperatorProcess,
        sessions: list[aiohttp.ClientSession],
        hosts: list[AgentHost],
    ) -> None:
        self.server = server
        self.operator = operator
        self.agents: dict[str, HostedAgent] = {}
        self._sessions = sessions
        self._hosts = hosts
        self._host_of: dict[str, AgentHost] = {}
        self.kubelets = Kubelets(server, self._started, self._ended)

    def _started(self, pod: RunningPod) -> None:
        host = self._host_of.setdefault(pod.job, self._hosts[len(self._host_of) % len(self._hosts)])
        self.agents[pod.uid] = host.start_agent(pod)

    def _ended(self, uid: str) -> None:
        agent = self.agents.pop(uid, None)
        if agent is not None:
            agent.stop()

    async def start_jobs(self, num_jobs: int, num_members: int) -> None:
        """Create jobs, a hundred at a time, and wait until all train."""
        for first in range(0, num_jobs, JOBS_AT_ONCE):
            numbers = range(first, min(first + JOBS_AT_ONCE, num_jobs))
            for number in numbers:
                await self.server.client.create(JOBS_PATH, job(f"job{number}", num_members))
            await self.until_all_train(numbers.stop * num_members)
            say(f"{numbers.stop} jobs of {num_members} members train")

    async def create_finished(self, num_jobs: int) -> None:
        """Jobs that have succeeded, with as much history as one of 8 members has."""
        status = finished_status()
        for number in range(num_jobs):
            name = f"old{number}"
            made = await self.server.client.create(JOBS_PATH, job(name, 8))
            body = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "status": status}
            path = f"{JOBS_PATH}/{name}/status"
            await self.server.client.request("PATCH", path, body=body, content_type="application/merge-patch+json")

    async def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for a condition. Returns the seconds that it took."""
        begun = time.monotonic()
        while not condition():
            for host in self._hosts:
                host.check()
            if time.monotonic() - begun > PATIENCE_SECONDS:
                states = Counter((agent.status.phase, agent.status.trains) for agent in self.agents.values())
                raise TimeoutError(
                    f"not within {PATIENCE_SECONDS:.0f} s: {what}; {states}; {self.kubelets.errors[-3:]}"
                )
            await asyncio.sleep(0.05)
        return time.monotonic() - begun

    async def until_all_train(self, num_members: int) -> float:
        return await self.until(
            lambda: sum(agent.status.trains for agent in self.agents.values()) == num_members,
            f"{num_members} members train",
        )

    async def _num_reports(self) -> int:
        return sum(await asyncio.gather(*(host.num_reports() for host in self._hosts)))

    async def rest(self, seconds: float, num_jobs: int) -> Result:
        """Costs while nothing happens."""
        reports = await self._num_reports()
        requests = await self.server.requests()
        begun, processor, _ = self.operator.cost()
        await asyncio.sleep(seconds)
        ended, processor_later, resident = self.operator.cost()
        passed = ended - begun
        asked = await self.server.requests() - requests
        num_reports = await self._num_reports() - reports
        leases = sum(count for (_, resource), count in asked.items() if resource == "leases")
        return {
            "requestsPerJobHour": (asked.total() - leases) * 3600 / passed / num_jobs,
            "leaseRequestsPerSecond": leases / passed,
            "byKind": {" ".join(which): count for which, count in asked.most_common()},
            "cores": (processor_later - processor) / passed,
            "mebibytes": resident / 2**20,
            "reportsPerSecond": num_reports / passed,
        }

    async def notices(self) -> Result:
        """Seconds from the notices to the assignments that follow from them."""
        noticed = random.Random(SEED).sample(
            sorted(self.agents, key=lambda uid: self.agents[uid].pod.name),
            max(1, int(SHARE_NOTICED * len(self.agents))),
        )
        jobs = {self.agents[uid].pod.job for uid in noticed}
        waiting = [agent for agent in self.agents.values() if agent.pod.job in jobs]
        deadline = datetime.now(UTC) + timedelta(seconds=NOTICE_SECONDS)
        for agent in waiting:
            agent.forget_drain()
        begun, num_members = time.monotonic(), len(self.agents)
        for uid in noticed:
            self.agents[uid].take_notice(deadline)

        def drained_at() -> list[float]:
            return [at for agent in waiting if (at := agent.status.drained_at) is not None and at >= begun]

        await self.until(lambda: len(drained_at()) == len(waiting), "all are told to drain")
        seconds = sorted(at - begun for at in drained_at())
        say(f"assigned after {statistics.median(seconds):.2f} s (p50), {percentile(seconds, 0.99):.2f} s (p99)")
        await asyncio.sleep(2 * PACE.save)
        whole = await self.until_all_train(num_members)
        return {
            "nodes": len(noticed),
            "jobs": len(jobs),
            "members": len(waiting),
            "seconds": [round(each, 4) for each in seconds],
            "secondsUntilAllTrain": whole + 2 * PACE.save + seconds[-1],
        }

    async def restart(self, num_jobs: int) -> Result:
        """Restart the operator: seconds until ready and assigned, and peak rate."""
        # Whoever asks with a peer's token would take it from its relay.
        of_job = {agent.pod.job: agent for agent in self.agents.values() if agent.status.node_rank == 0}
        assert len(of_job) == num_jobs
        tokens = [agent.pod.token for agent in of_job.values()]
        await self.operator.kill()
        before = await self.server.requests()
        rates: list[float] = []
        sampling = asyncio.create_task(self._sample(rates))
        begun = time.monotonic()
        await self.operator.start()
        await self.operator.until_ready(self._sessions[0])
        ready = time.monotonic() - begun
        processor_ready = self.operator.cost()[1]
        probes = zip(itertools.cycle(self._sessions), tokens, strict=False)
        await asyncio.gather(*(self.operator.until_assigned(session, token) for session, token in probes))
        assigned = time.monotonic() - begun
        processor_assigned = self.operator.cost()[1]
        await asyncio.sleep(SAMPLE_SECONDS)
        sampling.cancel()
        asked = await self.server.requests() - before
        return {
            "secondsUntilReady": ready,
            "secondsUntilAssigned": assigned,
            "processorSecondsUntilReady": processor_ready,
            "processorSecondsUntilAssigned": processor_assigned,
            "mostRequestsPerSecond": max(rates, default=0.0),
            "byKind": {" ".join(which): count for which, count in asked.most_common()},
        }

    async def _sample(self, rates: list[float]) -> None:
        last, at = await self.server.requests(), time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            now, later = await self.server.requests(), time.monotonic()
            rates.append((now - last).total() / (later - at))
            last, at = now, later


@asynccontextmanager
async def world(
    folder: Path,
    *,
    num_jobs: int,
    num_members: int,
    num_finished: int = 0,
    hosts: int = 0,
    python: str = sys.executable,
) -> AsyncIterator[tuple[Bench, float]]:
    """Yield a bench with jobs that train, and the seconds that these took to start.

    With 0 hosts, there are as many as the agents need. `python` runs the operator.
    """
    hosts = hosts or num_hosts(num_jobs * num_members, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(api_server(folder / "cluster"))
        sessions = [await stack.enter_async_context(open_session(number)) for number in range(NUM_SOURCES)]
        operator = OperatorProcess(server.kubeconfig, server.client, folder, python=python)
        holding = [
            await stack.enter_async_context(agent_host(operator.address_folder, folder, sources))
            for sources in (range(number, NUM_SOURCES, hosts) for number in range(hosts))
        ]
        bench = Bench(server, operator, sessions, holding)
        keeping = [asyncio.create_task(bench.kubelets.run())]
        try:
            await bench.create_finished(num_finished)
            await operator.start()
            await operator.until_ready(sessions[0])
            begun = time.monotonic()
            await bench.start_jobs(num_jobs, num_members)
            started = time.monotonic() - begun
            say(f"all train after {started:.0f} s")
            keeping.append(asyncio.create_task(bench.kubelets.keep_nodes_alive()))
            yield bench, started
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            await operator.kill()


def say(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def percentile(ordered: list[float], share: float) -> float:
    """The smallest sample that is at least as large as `share` of all samples."""
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]
