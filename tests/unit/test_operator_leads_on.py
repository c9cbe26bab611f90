"""How an operator leads on after an outage, and after its clock was set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from operator_world import KEY
from running_operator import LeaseAway, Running, begin, settings_of
from spottrain_api.contract.assignments import AgentPhase
from spottrain_operator import process
from spottrain_operator.clock import SteadyClock
from spottrain_operator.core.model import DeletePod, Observed, Plan
from spottrain_operator.core.plan import plan
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_operator.kube.resources import Manifest


@dataclass
class Clocks:
    """The clocks of the operator's machine.

    A test can let time pass, or set the time of day.
    """

    passed: float = 0.0
    ahead: float = 0.0

    def wall(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.passed + self.ahead)

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


@dataclass
class Decisions:
    """What is decided, and by what."""

    made: list[tuple[Observed, Plan]] = field(default_factory=list)

    def __call__(self, observed: Observed, now: datetime) -> Plan:
        self.made.append((observed, plan(observed, now)))
        return self.made[-1][1]

    def heed(self, pod: str, phase: AgentPhase) -> Callable[[], bool]:
        """Whether the newest decision is by such a report."""

        def heeded() -> bool:
            reports = self.made[-1][0].reports.values() if self.made else ()
            return any((view.report.pod, view.report.phase) == (pod, phase) for view in reports)

        return heeded


@dataclass
class Training:
    """An operator whose clocks a test can set, and a job in its first generation."""

    running: Running
    clocks: Clocks
    decisions: Decisions
    pods: list[str]

    @property
    def cluster(self) -> LeaseAway:
        return self.running.cluster

    @property
    def generation(self) -> Manifest:
        found: Manifest = self.running.status(KEY.name)["generation"]
        return found

    async def hear(self, *pods: str, phase: AgentPhase) -> None:
        """Let these pods report, until a decision is by their reports."""
        for pod in pods:
            await self.running.report_until(self.decisions.heed(pod, phase), pod, generation=1, phase=phase)

    def assert_undisturbed(self) -> None:
        made = (action for _, plan in self.decisions.made for action in plan.actions)
        assert not any(isinstance(action, DeletePod) for action in made)
        assert self.generation["state"] == "Active"


@pytest.fixture
async def training(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Training]:
    clocks, decisions = Clocks(), Decisions()
    monkeypatch.setattr(process, "SteadyClock", lambda: SteadyClock(wall=clocks.wall, monotonic=clocks.monotonic))
    monkeypatch.setattr(process, "CLOCK_SECONDS", 0.01)
    monkeypatch.setattr(process, "plan", decisions)
    cluster, settings, stop = LeaseAway(), settings_of("a"), asyncio.Event()
    task = begin(settings, cluster, stop)
    running = Running(cluster, task, settings)
    running.apply(KEY.name)
    pods = [f"{KEY.name}-{number}" for number in (1, 2, 3)]
    training = Training(running, clocks, decisions, pods)
    try:
        await running.until_pods(KEY.name, 3)
        await running.until_ready(True)
        running.run_pods()
        for pod in pods:
            await running.report_until(decisions.heed(pod, AgentPhase.IDLE), pod)
        await running.until(lambda: "generation" in running.status(KEY.name))
        await training.hear(*pods, phase=AgentPhase.STARTING)
        yield training
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=20)


async def test_agents_that_come_back_after_an_outage_one_after_the_other_are_not_missed(training: Training) -> None:
    """Nobody could hear them meanwhile. One that stays away is missed later."""
    cluster, running = training.cluster, training.running
    cluster.is_away = True
    await running.until_ready(False)
    training.clocks.passed += 2 * DEFAULT_TIMING.silent_alone
    training.decisions.made.clear()
    cluster.is_away = False
    await training.hear(*training.pods[:2], phase=AgentPhase.RUNNING)
    training.assert_undisturbed()
    training.clocks.passed += DEFAULT_TIMING.silent_alone + 2 * DEFAULT_TIMING.operator_restart_grace
    going = {"generation": 1, "phase": AgentPhase.RUNNING}
    await running.report_until(lambda: training.generation.get("reason") == "NodeLost", training.pods[0], **going)


@pytest.mark.parametrize("jump", [timedelta(minutes=5), timedelta(minutes=-5)], ids=["forward", "back"])
async def test_a_leader_whose_clock_is_set_leads_on_by_the_new_time(training: Training, jump: timedelta) -> None:
    """As after a suspension of its machine. No agent counts as silent for that."""
    decisions = training.decisions
    before = decisions.made[-1][0].listening_since
    decisions.made.clear()
    training.clocks.ahead = jump.total_seconds()
    await training.hear(*training.pods, phase=AgentPhase.RUNNING)
    await training.running.until(lambda: abs(decisions.made[-1][0].listening_since - before) > abs(jump) / 2)
    await training.hear(*training.pods, phase=AgentPhase.RUNNING)
    training.assert_undisturbed()
