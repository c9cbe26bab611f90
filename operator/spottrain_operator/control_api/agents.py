"""The newest assignment and report of every pod.

Both are kept in memory only. After a restart of the operator, assignments follow from the jobs' status, and agents
report again within a second, as their polls have ended. An agent is there as long as it holds a poll.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from spottrain_api.contract import AgentPhase, AgentReport, Assignment
from spottrain_operator.cluster.client import JobKey, PodIdentity
from spottrain_operator.core.model import ReportView

# Without a word, a connection may have been dead for this long before it is given up.
DEAD_BEFORE_CLOSED_SECONDS = 2.0


class AssignmentBoard:
    """The published assignments by pod uid. Agents wait here for changes."""

    def __init__(self) -> None:
        self._assignments: dict[str, Assignment] = {}
        self._pods: dict[JobKey, frozenset[str]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._num_waiting = 0

    def publish(self, job: JobKey, assignments: Mapping[str, Assignment]) -> None:
        """Replace all assignments of the job.

        This drops those of pods that the job no longer has.
        """
        for uid in self._pods.get(job, frozenset()) - assignments.keys():
            self._assignments.pop(uid, None)
            self._changed.pop(uid, None)
        for uid, assignment in assignments.items():
            if self._assignments.get(uid) != assignment:
                self._assignments[uid] = assignment
                if uid in self._changed:
                    self._changed.pop(uid).set()
        self._pods[job] = frozenset(assignments)
        if not assignments:
            del self._pods[job]

    def node_rank(self, pod_uid: str) -> int | None:
        """The pod's rank in the generation that it is assigned to; None if there is none."""
        assignment = self._assignments.get(pod_uid)
        generation = assignment.generation if assignment is not None else None
        return generation.node_rank if generation is not None else None

    @property
    def num_waiting(self) -> int:
        """Number of agents that hold a long poll now."""
        return self._num_waiting

    async def next(self, pod_uid: str, *, after: str | None, timeout_seconds: float) -> Assignment | None:
        """Wait for the pod's assignment to have another revision than `after`.

        A pod without an assignment waits, too: right after a restart, the operator must not assign anything to a pod
        that trains before it has observed it.

        Returns:
            The assignment, or None if nothing changes within `timeout_seconds`.
        """
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout_seconds):
                while (assignment := self._assignments.get(pod_uid)) is None or assignment.revision == after:
                    await self._changed.setdefault(pod_uid, asyncio.Event()).wait()
                return assignment
        except TimeoutError:
            return None
        finally:
            self._num_waiting -= 1


class Wake(Protocol):
    """Asks for a pass over a job."""

    def __call__(self, job: JobKey, /, *, urgent: bool) -> None: ...


class ReportBox:
    """The pods that the operator has, and the newest report of each.

    Wakes the pod's job if a report changes something that matters.
    """

    def __init__(
        self,
        wake: Wake,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._wake = wake
        self._now = now
        self._pods: dict[JobKey, frozenset[str]] = {}
        self._known: set[str] = set()
        self._reports: dict[str, ReportView] = {}
        self._num_polls: Counter[str] = Counter()
        self._heard_at: dict[str, datetime] = {}

    def keep(self, job: JobKey, pod_uids: frozenset[str]) -> None:
        """Set the pods that a job has. Drop the reports of those that it no longer has."""
        gone = self._pods.pop(job, frozenset()) - pod_uids
        self._known -= gone
        self._known |= pod_uids
        for uid in gone:
            self._reports.pop(uid, None)
            self._heard_at.pop(uid, None)
        if pod_uids:
            self._pods[job] = pod_uids

    def knows(self, pod_uid: str) -> bool:
        """Whether a job has the pod, as of its newest pass."""
        return pod_uid in self._known

    @contextmanager
    def polling(self, sender: PodIdentity) -> Iterator[None]:
        """The agent holds a poll, and is there as long as its connection is.

        One whose connection ends before its answer may be lost, and its job is woken.
        """
        self._num_polls[sender.uid] += 1
        try:
            yield
        except asyncio.CancelledError:
            self._heard(sender, ago=DEAD_BEFORE_CLOSED_SECONDS)
            self._wake(job_of_pod(sender), urgent=True)
            raise
        else:
            self._heard(sender)
        finally:
            self._num_polls[sender.uid] -= 1
            if not self._num_polls[sender.uid]:
                del self._num_polls[sender.uid]

    def _heard(self, sender: PodIdentity, *, ago: float = 0.0) -> None:
        if sender.uid in self._known:
            self._heard_at[sender.uid] = self._now() - timedelta(seconds=ago)

    def put(self, sender: PodIdentity, report: AgentReport, *, received_at: datetime | None = None) -> None:
        """Keep a report, unless a later one has overtaken it.

        Args:
            sender: The pod that it is about.
            report: What its agent has sent.
            received_at: Time at which the request came, by the operator's clock. None: now. A report tells of that
                time, even if the check of its token took long.
        """
        received_at = received_at or self._now()
        previous = self._reports.get(sender.uid)
        if is_overtaken(previous, received_at):
            return
        self._reports[sender.uid] = ReportView(report=report, received_at=received_at)
        if previous is None or previous.report.news != report.news:
            urgent = previous is not None and brings_trouble(previous.report, report)
            self._wake(job_of_pod(sender), urgent=urgent)

    def of(self, pod_uids: frozenset[str]) -> dict[str, ReportView]:
        """The newest reports of these pods, with when each agent was last heard."""
        now = self._now()
        return {
            uid: replace(self._reports[uid], heard_at=now if uid in self._num_polls else self._heard_at.get(uid))
            for uid in pod_uids & self._reports.keys()
        }


def job_of_pod(pod: PodIdentity) -> JobKey:
    """The job that a pod is named after ({job}-{sequence}).

    It is only woken, so it need not exist.
    """
    return JobKey(namespace=pod.namespace, name=pod.pod.rpartition("-")[0])


def is_overtaken(newest: ReportView | None, received_at: datetime) -> bool:
    """Whether a report of the same pod came after `received_at`."""
    return newest is not None and newest.received_at > received_at


def brings_trouble(before: AgentReport, after: AgentReport) -> bool:
    """Whether the new report tells of a notice, or that a member has ended."""
    ended = after.phase not in (AgentPhase.IDLE, AgentPhase.STARTING, AgentPhase.RUNNING)
    return before.notices != after.notices or (ended and before.phase is not after.phase)
