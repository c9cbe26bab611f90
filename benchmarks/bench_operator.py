"""Benchmark of the operator with many jobs: at rest, with notices, at a restart.

`make bench-operator` starts a real API server with etcd and the operator as a process. A driver plays scheduler,
kubelets and autoscaler through the API. The agents have no ranks, but run the agent's own state machine, and speak
the control API as it is, in as many processes as the limit of open files makes necessary. Three parts, one after the
other:

- rest: all jobs train. Requests that the API server has answered, by its own count, and the operator's processor time
  and memory. By default it is as long as the pause between two writes of a job's history.
- notices: a tenth of the nodes, at random, get a notice at once. Seconds until each member of their jobs is assigned
  to drain.
- restart: the operator is killed and started again. Seconds until it is ready, and until an agent of each job has its
  assignment, and how many of them are the operator's processor time. The rest is that of the others on this machine.

`--python` names an interpreter for the operator that has no more packages than the operator's image, as `make
bench-operator` does.

`--label` names the run in bench-out/operator-LABEL.json; `--plot A.json B.json` draws several runs side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks import clean_up_on_sigterm
from benchmarks.scale.agent_host import AgentHost, HostedAgent, agent_host, num_hosts, open_session
from benchmarks.scale.agents import DRAIN_SECONDS
from benchmarks.scale.api_server import JOBS_PATH, ApiServer, api_server
from benchmarks.scale.kubelets import Kubelets, RunningPod
from benchmarks.scale.operator_process import OperatorProcess
from spottrain_api.contract import API_VERSION, KIND
from spottrain_api.v1alpha1 import TrainingJobStatus
from spottrain_local.processes import watch_children_by_pidfd
from spottrain_operator.cluster.observe import job_view
from spottrain_operator.cluster.write_back import as_written
from spottrain_operator.core.model import Observed
from spottrain_operator.core.plan import plan
from spottrain_operator.core.timing import RECORD_INTERVAL
from spottrain_operator.process import RECORDS_PER_HISTORY

SEED = 20261122
NOTICE_SECONDS = 120.0
SHARE_NOTICED = 0.1
PATIENCE_SECONDS = 400.0
# At the start: a flood of a thousand new jobs is another benchmark.
JOBS_AT_ONCE = 100
SAMPLE_SECONDS = 1.0
# Of a job that has been over for an hour, the operator keeps only the phase.
FINISHED_AGO = timedelta(hours=2)
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
        await asyncio.sleep(2 * DRAIN_SECONDS)
        whole = await self.until_all_train(num_members)
        return {
            "nodes": len(noticed),
            "jobs": len(jobs),
            "members": len(waiting),
            "seconds": [round(each, 4) for each in seconds],
            "secondsUntilAllTrain": whole + 2 * DRAIN_SECONDS + seconds[-1],
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


def job(name: str, num_members: int) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {
            "image": "bench/none",
            "entrypoint": {"script": "train.py"},
            "nodes": {"min": max(1, num_members // 2), "max": num_members},
            "capacity": {
                "onDemand": {"min": max(1, num_members // 4), "max": num_members, "pricePerHour": 3.0},
                "spot": {"max": num_members, "pricePerHour": 1.0},
            },
            "batch": {"global": 8 * num_members},
            "checkpoint": {"uri": f"s3://bench/{name}"},
            "runPolicy": {"cleanPodPolicy": "All"},
        },
    }


def finished_status() -> dict[str, Any]:
    """The status in which the operator leaves a job that has succeeded."""
    ended = datetime.now(UTC) - FINISHED_AGO
    at = ended.isoformat(timespec="seconds").replace("+00:00", "Z")
    members = [
        {
            **{"pod": f"old-{rank}", "podUID": f"{rank:036d}", "podUid": f"{rank:036d}", "address": "10.0.0.1"},
            **{"node": f"node-{rank}", "nodeRank": rank, "capacityType": "spot"},
        }
        for rank in range(8)
    ]
    commit = {"generation": 9, "step": 5000, "manifest": "attempts/g9/manifest.json", "committedAt": at}
    transition = {
        **{"at": at, "reason": "Preempted", "message": "notice for node-1", "lastStep": 100, "resumedFrom": 100},
        **{"worldSizeBefore": 8, "worldSizeAfter": 7, "secondsWithoutStep": 4.2},
    }
    status = {
        "phase": "Succeeded",
        "message": "Trained to step 5000",
        "observedGeneration": 1,
        "startTime": at,
        "completionTime": at,
        "accountedAt": at,
        "lastSequence": 20,
        "commit": commit,
        "generation": {
            **{"number": 9, "state": "Ended", "rendezvousID": "old-g9", "rendezvousEndpoint": "10.0.0.1:29500"},
            **{"worldSize": 8, "members": members, "templateHash": "t", "startedAt": at, "endedAt": at},
            **{"firstStepAt": at, "reason": "Succeeded"},
        },
        "transitions": [{"generation": number, **transition} for number in range(8)],
        "progress": {"step": 5000, "totalSteps": 5000, "display": "5000/5000", "loss": 2.5, "lastStepAt": at},
    }
    meta = {"namespace": "default", "uid": "u", "generation": 1, "creationTimestamp": at}
    known = job("old", 8)
    view = job_view(known | {"metadata": known["metadata"] | meta, "status": status})
    left = plan(Observed(job=view, template_hash="t", listening_since=ended), ended).status
    return as_written(left, TrainingJobStatus(), {})


@contextlib.asynccontextmanager
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


async def measure(args: argparse.Namespace, folder: Path) -> Result:
    """All parts in one world."""
    sizes = {"num_jobs": args.jobs, "num_members": args.members, "num_finished": args.finished}
    async with world(folder, **sizes, hosts=args.hosts, python=args.python) as (bench, started):
        await asyncio.sleep(args.settle)
        result: Result = {"jobs": args.jobs, "members": args.members, "finished": args.finished, "start": started}
        for name, part in (
            ("rest", lambda: bench.rest(args.seconds, args.jobs)),
            ("notices", bench.notices),
            ("restart", lambda: bench.restart(args.jobs)),
        ):
            if name in args.parts:
                result[name] = await part()
                say(f"{name}: {summary(result[name])}")
        return result


def say(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def summary(result: Result) -> str:
    return json.dumps({key: value for key, value in result.items() if key != "seconds"})


def percentile(ordered: list[float], share: float) -> float:
    """The smallest sample that is at least as large as `share` of all samples."""
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def table(results: dict[str, Result]) -> Table:
    """A column for each run."""
    rows = Table("", *results, title="The operator with many jobs")

    def row(title: str, read: Callable[[Result], str]) -> None:
        cells = []
        for result in results.values():
            with contextlib.suppress(KeyError):
                cells.append(read(result))
                continue
            cells.append("–")
        rows.add_row(title, *cells)

    row("jobs × members", lambda r: f"{r['jobs']} × {r['members']}")
    row("finished jobs beside them", lambda r: str(r["finished"]))
    row("rest: API requests a job and hour", lambda r: f"{r['rest']['requestsPerJobHour']:.0f}")
    row("rest: processor, cores", lambda r: f"{r['rest']['cores']:.2f}")
    row("rest: memory, MiB", lambda r: f"{r['rest']['mebibytes']:.0f}")
    row("rest: reports of agents a second", lambda r: f"{r['rest']['reportsPerSecond']:.1f}")
    row("notices: nodes, jobs", lambda r: f"{r['notices']['nodes']}, {r['notices']['jobs']}")
    row("notice to assignment, p50 (s)", lambda r: f"{statistics.median(r['notices']['seconds']):.2f}")
    row("notice to assignment, p99 (s)", lambda r: f"{percentile(r['notices']['seconds'], 0.99):.2f}")
    row("restart: ready after (s)", lambda r: f"{r['restart']['secondsUntilReady']:.1f}")
    row(
        "restart: an agent of each job is assigned after (s)", lambda r: f"{r['restart']['secondsUntilAssigned']:.1f}"
    )
    row("restart: processor seconds of the operator until then", _processor_of_restart)
    row("restart: most API requests in a second", lambda r: f"{r['restart']['mostRequestsPerSecond']:.0f}")
    return rows


def _processor_of_restart(result: Result) -> str:
    return f"{result['restart']['processorSecondsUntilAssigned']:.1f}"


def plot(results: dict[str, Result], path: Path) -> None:
    """Plot requests at rest as bars, and the share assigned to drain over time."""
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(9, 3.2))
    rests = {label: result["rest"]["requestsPerJobHour"] for label, result in results.items() if "rest" in result}
    bars.barh(list(rests), list(rests.values()), color=[f"C{number}" for number in range(len(rests))])
    bars.set(xscale="log", xlabel="API requests a job and hour, at rest")
    bars.axvline(100, color="#888888", linewidth=0.8)
    for number, (label, result) in enumerate(results.items()):
        if "notices" in result:
            curves.ecdf(result["notices"]["seconds"], label=label, color=f"C{number}")
    curves.set(xlabel="seconds from the notices to the assignment", ylabel="share of the members", xlim=(0, None))
    curves.axvline(1.0, color="#888888", linewidth=0.8)
    curves.legend(fontsize=8)
    for axes in (bars, curves):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    clean_up_on_sigterm()
    watch_children_by_pidfd()
    # For the processes of agents: they have this limit, too.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.basicConfig(level=logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--label", default="now", help="name of this run")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--finished", type=int, default=0, help="finished jobs beside them")
    parser.add_argument("--hosts", type=int, default=0, help="processes of agents (0: by the limit of open files)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs the operator")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds between the start and the first part")
    parser.add_argument(
        "--seconds", type=float, default=RECORDS_PER_HISTORY * RECORD_INTERVAL, help="length of the first part"
    )
    parser.add_argument("--parts", nargs="+", default=["rest", "notices", "restart"])
    parser.add_argument(
        "--plot", nargs="+", type=Path, metavar="JSON", help="compare these runs, and measure nothing"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plot:
        results = {path.stem.removeprefix("operator-"): json.loads(path.read_text()) for path in args.plot}
    else:
        with tempfile.TemporaryDirectory(prefix="spottrain-bench-", dir=os.environ.get("TMPDIR")) as folder:
            results = {args.label: asyncio.run(measure(args, Path(folder)))}
        (args.out / f"operator-{args.label}.json").write_text(json.dumps(results[args.label], indent=1))
    Console(width=130).print(table(results))
    plot(results, args.out / "operator.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
