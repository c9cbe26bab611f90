"""An operator that does one run after the other.

It has a namespace, a proxy and kubelets of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from benchmarks.scale.agents import CallingAgent, keep_training
from benchmarks.scale.api_server import ApiServer, add_namespace
from benchmarks.scale.kubelets import Kubelets, RunningPod
from benchmarks.scale.operator_process import OperatorProcess

from crash_points.disturbances import Disturbance, Kind
from crash_points.proxy import LATE_SECONDS, ApiProxy, api_proxy
from crash_points.run import Run, State
from crash_points.scenarios import SCENARIOS
from spottrain_operator.command import main
from spottrain_simulator.ranks import Training

# After its last write, an operator has come to rest.
QUIET_SECONDS = 1.5
LEFT_PODS_SECONDS = 75.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run has ended.

    - is_hit: whether the disturbance happened. Another order of events may have fewer writes.
    - error: why it did not come to its end; empty if it did.
    """

    scenario: str
    disturbance: Disturbance
    state: State
    writes: tuple[str, ...]
    num_events: int
    is_hit: bool
    seconds: float
    error: str = ""


class Lane:
    """Runs scenarios, one at a time."""

    def __init__(self, server: ApiServer, session: aiohttp.ClientSession, folder: Path, namespace: str) -> None:
        self._server = server
        self._session = session
        self._folder = folder
        self._namespace = namespace
        self._run: Run | None = None
        self._num_runs = 0
        self._restarting: asyncio.Task[None] | None = None
        self._kubelets = Kubelets(server, self._started, self._ended, namespace)
        self._proxy: ApiProxy
        self._operator: OperatorProcess

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Lane]:
        async with AsyncExitStack() as stack:
            await add_namespace(self._server.client, self._namespace)
            self._proxy, kubeconfig = await stack.enter_async_context(
                api_proxy(self._server, self._folder, self._kill_operator)
            )
            self._operator = OperatorProcess(
                kubeconfig, self._server.client, self._folder, self._namespace, main=_operate
            )
            for task in (self._kubelets.run(), keep_training(self._trainings)):
                stack.callback(asyncio.create_task(task).cancel)
            stack.push_async_callback(self._operator.kill)
            await self._start_operator()
            yield self

    def _trainings(self) -> list[Training]:
        return [self._run.training] if self._run is not None else []

    def _started(self, pod: RunningPod) -> None:
        run = self._run
        if run is not None and pod.name.startswith(f"{run.job}-"):
            address = self._operator.address_folder
            run.agents[pod.uid] = CallingAgent(self._session, address, self._folder, pod, run.training)

    def _ended(self, uid: str) -> None:
        agent = self._run.agents.pop(uid, None) if self._run is not None else None
        if agent is not None:
            agent.stop()

    async def _kill_operator(self) -> None:
        await self._operator.kill()
        self._restarting = asyncio.create_task(self._start_operator())

    async def _start_operator(self) -> None:
        self._proxy.connect()
        await self._operator.start()
        await self._operator.until_ready(self._session)
        await self._proxy.watches_jobs.wait()  # it would miss the deletion of a job before that

    async def run(self, scenario: str, disturbance: Disturbance) -> Outcome:
        self._num_runs += 1
        begun = time.monotonic()
        self._run = run = Run(
            job=f"{self._namespace}-{scenario}-{self._num_runs:04d}",
            namespace=self._namespace,
            client=self._server.client,
            kubelets=self._kubelets,
            proxy=self._proxy,
            disturbance=disturbance,
        )
        self._proxy.begin(run.job)
        error, state = "", {}
        try:
            await SCENARIOS[scenario](run)
            await self._rest(disturbance)
            state = await run.state()
        except TimeoutError as missing:
            error = str(missing)
        outcome = Outcome(
            scenario=scenario,
            disturbance=disturbance,
            state=state,
            writes=tuple(self._proxy.writes),
            num_events=self._proxy.num_events,
            is_hit=self._proxy.is_hit,
            seconds=time.monotonic() - begun,
            error=error,
        )
        await self._clean_up(run)
        return outcome

    async def _rest(self, disturbance: Disturbance) -> None:
        """Wait until the operator runs, and writes no more."""
        quiet = QUIET_SECONDS + (LATE_SECONDS if disturbance.kind is Kind.EVENTS_LATE else 0.0)
        while True:
            if self._restarting is not None:
                await self._restarting
                self._restarting, self._proxy.last_write_at = None, time.monotonic()
            waited = time.monotonic() - self._proxy.last_write_at
            if waited >= quiet:
                return
            await asyncio.sleep(quiet - waited)

    async def _clean_up(self, run: Run) -> None:
        """Leave nothing to the next run.

        An operator that is shown late events ends with them.
        """
        if self._restarting is not None:
            await self._restarting
            self._restarting = None
        self._proxy.begin("")
        self._kubelets.free_nodes.release()
        if run.disturbance.kind in (Kind.EVENTS_LATE, Kind.KILLED_STALE):
            await self._operator.kill()
            await self._start_operator()
        await run.delete()
        deadline = time.monotonic() + LEFT_PODS_SECONDS
        while await run.pods() or self._kubelets.nodes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{run.job}: its pods are left {LEFT_PODS_SECONDS:.0f} s after its deletion")
            await asyncio.sleep(0.1)
        for agent in run.agents.values():
            agent.stop()
        self._kubelets.free_nodes = asyncio.Semaphore(2**31)
        self._run = None


def _operate() -> int:
    """`python -m spottrain_operator`, which has its imports already.

    The fork has closed what its parent logs to, such as pytest's files.
    """
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    logging.root.handlers.clear()
    main(args=[], standalone_mode=False)
    return 0
