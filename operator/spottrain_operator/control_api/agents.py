"""The newest assignment and report of every pod.

Both are kept in memory only. After a restart of the operator, assignments follow from the jobs' status, and agents
report again within a second, as their polls have ended. An agent is there as long as it holds a poll, here or at a
relay that holds one here.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Protocol, TypeVar

from spottrain_api.contract.assignments import AgentPhase, AgentReport, Assignment, RelayAssignment, RelayReport
from spottrain_api.contract.clocks import rounded_offset
from spottrain_api.contract.message import Message
from spottrain_operator.core.model import ReportView
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_operator.kube.identities import JobKey, PodIdentity
from spottrain_runtime.wording import one_line

# Without a word, a connection may have been dead for this long before it is given up.
DEAD_BEFORE_CLOSED_SECONDS = 2.0
# Reports that wait in a relay come every few minutes. In an hour, some of them are fast.
DELAYS_COUNT_FOR = timedelta(hours=1)

_M = TypeVar("_M", bound=Message)


def kept(message: _M) -> _M:
    """Return the message for keeping, with half the memory.

    pydantic notes in a set which fields the sender has set. That is read while a message is parsed. Later, one set
    does for all messages of a type.
    """
    object.__setattr__(message, "__pydantic_fields_set__", _all_fields(type(message)))
    for value in vars(message).values():
        if isinstance(value, Message):
            kept(value)
    return message


@cache
def _all_fields(model: type[Message]) -> set[str]:
    return set(model.model_fields)


class LeastDelay:
    """What a pod's clock is off.

    That is the delay of its fastest report in the last hour or two. Older ones don't count, because either clock may
    be set.
    """

    __slots__ = ("_before", "_least", "_since")

    def __init__(self) -> None:
        self._since: datetime | None = None
        self._before = self._least = math.inf

    def with_report(self, delay: float, received_at: datetime) -> float:
        """Return the least delay, in seconds, with that of a report that has just come."""
        if self._since is None or received_at - self._since > DELAYS_COUNT_FOR:
            self._since, self._before, self._least = received_at, self._least, math.inf
        self._least = min(self._least, delay)
        return min(self._before, self._least)


class AssignmentBoard:
    """The published assignments by pod uid. Agents wait here for changes."""

    def __init__(self) -> None:
        self._assignments: dict[str, Assignment] = {}
        self._pods: dict[JobKey, frozenset[str]] = {}
        self._jobs: dict[str, JobKey] = {}
        self._changed: dict[str, asyncio.Event] = {}

    def publish(self, job: JobKey, assignments: Mapping[str, Assignment]) -> None:
        """Replace all assignments of the job.

        This drops those of pods that the job no longer has.
        """
        before = {uid: self._assignments.pop(uid) for uid in self._pods.pop(job, frozenset())}
        for uid in before.keys() - assignments.keys():
            del self._jobs[uid]
            self._changed.pop(uid, None)
        if assignments:
            # A poll that waits holds the old ones. The same again would take memory twice.
            self._assignments.update(
                {
                    uid: before[uid] if before.get(uid) == assigned else kept(assigned)
                    for uid, assigned in assignments.items()
                }
            )
            self._jobs.update(dict.fromkeys(assignments, job))
            self._pods[job] = frozenset(assignments)
        if before != assignments:
            for uid in assignments.keys() & self._changed.keys():
                self._changed.pop(uid).set()

    def node_rank(self, pod_uid: str) -> int | None:
        """The pod's rank in the generation that it is assigned to; None if there is none."""
        assignment = self._assignments.get(pod_uid)
        generation = assignment.generation if assignment is not None else None
        return generation.node_rank if generation is not None else None

    def led_by(self, pod_uid: str) -> dict[str, Assignment] | None:
        """The assignments of the other members of the generation that the pod leads.

        None if the pod isn't its node rank 0.
        """
        own = self._assignments.get(pod_uid)
        if own is None or own.generation is None or own.generation.node_rank != 0:
            return None
        number, others = own.generation.number, self._pods[self._jobs[pod_uid]] - {pod_uid}
        assigned = {uid: self._assignments[uid] for uid in others}
        return {uid: a for uid, a in assigned.items() if a.generation is not None and a.generation.number == number}

    def has_decided(self, pod_uid: str) -> bool:
        """Whether the pod has an assignment."""
        return pod_uid in self._assignments

    async def next(self, pod_uid: str, *, after: str | None, timeout_seconds: float) -> Assignment | None:
        """Wait for the pod's assignment to have another revision than `after`.

        A pod without an assignment waits, too: right after a restart, the operator must not assign anything to a pod
        that trains before it has observed it.

        Returns:
            The assignment, with those of the members that it leads, or None if nothing changes within
            `timeout_seconds`.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                while (assigned := self._assigned(pod_uid)) is None or assigned.revision == after:
                    await self._changed.setdefault(pod_uid, asyncio.Event()).wait()
                return assigned
        except TimeoutError:
            return None

    def _assigned(self, pod_uid: str) -> Assignment | None:
        own = self._assignments.get(pod_uid)
        peers = self.led_by(pod_uid)
        return own if own is None or not peers else RelayAssignment(**dict(own), peers=peers)


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
        without_relay: float = DEFAULT_TIMING.without_relay,
    ) -> None:
        self._wake = wake
        self._without_relay = without_relay
        self._now = now
        self._pods: dict[JobKey, frozenset[str]] = {}
        self._known: set[str] = set()
        self._reports: dict[str, ReportView] = {}
        self._refused: dict[str, str] = {}
        self._least_delays: dict[str, LeastDelay] = {}
        self._num_polls: Counter[str] = Counter()
        self._heard_at: dict[str, datetime] = {}
        self._relays: dict[str, str] = {}  # uid of the relay of each pod that holds its poll at one
        self._relayed: dict[str, frozenset[str]] = {}  # the other way round
        self._coming: dict[str, datetime] = {}  # until when each pod that has lost its relay may be on its way
        self._clock_set_at = datetime.min.replace(tzinfo=UTC)

    def shift(self, by: timedelta) -> None:
        """Correct all times: the operator's clock was set forward by `by`, just now.

        The next reports show how far agents' clocks are off from it.
        """
        self._clock_set_at = self._now()
        self._reports = {
            uid: replace(
                view,
                report=kept(view.report.shifted(by)),
                received_at=view.received_at + by,
                clock_offset=view.clock_offset + by,
            )
            for uid, view in self._reports.items()
        }
        self._heard_at = {uid: at + by for uid, at in self._heard_at.items()}
        self._coming = {uid: until + by for uid, until in self._coming.items()}
        self._least_delays.clear()

    def keep(self, job: JobKey, pod_uids: frozenset[str]) -> None:
        """Set the pods that a job has. Drop the reports of those that it no longer has."""
        gone = self._pods.pop(job, frozenset()) - pod_uids
        self._known -= gone
        self._known |= pod_uids
        for uid in gone:
            self._reports.pop(uid, None)
            self._refused.pop(uid, None)
            self._least_delays.pop(uid, None)
            self._heard_at.pop(uid, None)
            self._coming.pop(uid, None)
            self._comes_itself(uid)
        if pod_uids:
            self._pods[job] = pod_uids

    @property
    def jobs(self) -> Set[JobKey]:
        """The jobs that have pods, as of their newest pass."""
        return self._pods.keys()

    def knows(self, pod_uid: str) -> bool:
        """Whether a job has the pod, as of its newest pass."""
        return pod_uid in self._known

    @property
    def num_present(self) -> int:
        """Number of agents that hold a long poll now, here or at a relay."""
        return sum(1 + len(self._relayed.get(uid, ())) for uid in self._num_polls)

    @contextmanager
    def polling(self, sender: PodIdentity) -> Iterator[None]:
        """The agent holds a poll, and is there as long as its connection is.

        One whose connection ends before its answer may be lost, and its job is woken. Its peers at its relay are not
        lost, and come themselves at once.
        """
        self._comes_itself(sender.uid)
        self._coming.pop(sender.uid, None)
        self._num_polls[sender.uid] += 1
        try:
            yield
        except asyncio.CancelledError:
            if self._num_polls[sender.uid] == 1:
                self._lose_relay(sender.uid)
            self._went(sender.uid, sender.job)
            raise
        else:
            self._heard(sender.uid)
        finally:
            self._num_polls[sender.uid] -= 1
            if not self._num_polls[sender.uid]:
                del self._num_polls[sender.uid]

    def relay(self, relay: PodIdentity, report: RelayReport, led: Set[str], *, received_at: datetime) -> None:
        """Take what an agent reports of the peers at its relay.

        Args:
            relay: The pod of the agent.
            report: Its report.
            led: The pods for which it may speak. What it says of others is ignored: it has yet to hear that it no
                longer leads them. They are about to ask whoever does.
            received_at: As in `put`.
        """
        job = relay.job
        if report.present is None:
            self._lose_relay(relay.uid)
        before, present = self._relayed.get(relay.uid, frozenset()), led & frozenset(report.present or ())
        for uid in before - present:
            self._comes_itself(uid)
            if uid in led:
                self._went(uid, job)
            else:
                self._expect(uid)
        for uid in present - before:
            self._comes_itself(uid)
            self._coming.pop(uid, None)
            self._relays[uid] = relay.uid
        for uid in present:
            self._heard(uid)
        if present:
            self._relayed[relay.uid] = frozenset(present)
        for peer in report.peers:
            identity = replace(relay, pod=peer.pod, uid=peer.pod_uid)
            if peer.pod_uid in led and identity.job == job:
                self.put(identity, self._with_relay(peer), received_at=received_at)

    def _with_relay(self, report: AgentReport) -> AgentReport:
        """The report, with the relay that the process has reported to the operator."""
        known = self._reports.get(report.pod_uid)
        if known is None or known.report.process != report.process:
            return report
        own = {"relay_port": known.report.relay_port, "relay_token": known.report.relay_token}
        return report.model_copy(update=own)

    def _lose_relay(self, relay: str) -> None:
        for uid in self._relayed.get(relay, frozenset()):
            self._comes_itself(uid)
            self._expect(uid)

    def _expect(self, uid: str) -> None:
        """It was there, and has to find another way now."""
        self._heard(uid)
        self._coming[uid] = self._now() + timedelta(seconds=self._without_relay)

    def _comes_itself(self, uid: str) -> None:
        """Forget at whose relay the pod has held its poll."""
        relay = self._relays.pop(uid, None)
        if relay is not None:
            self._relayed[relay] -= {uid}
            if not self._relayed[relay]:
                del self._relayed[relay]

    def _went(self, uid: str, job: JobKey) -> None:
        self._heard(uid, ago=DEAD_BEFORE_CLOSED_SECONDS)
        self._wake(job, urgent=True)

    def _heard(self, uid: str, *, ago: float = 0.0) -> None:
        if uid in self._known:
            self._heard_at[uid] = self._now() - timedelta(seconds=ago)

    def put(self, sender: PodIdentity, report: AgentReport, *, received_at: datetime | None = None) -> bool:
        """Keep a report, by the operator's clock, unless a later one has overtaken it.

        Args:
            sender: The pod that it is about.
            report: What its agent has sent.
            received_at: Time at which the request came, by the operator's clock. None: now. A report tells of that
                time, even if the check of its token took long.

        Returns:
            Whether it is kept.
        """
        now = self._now()
        # If the clock was set after the report came, that time is by the clock before.
        received_at = min(max(received_at or now, self._clock_set_at), now)
        previous = self._reports.get(sender.uid)
        if is_overtaken(previous, received_at) or (previous and report.is_older_than(previous.report)):
            return False
        delay = received_at.timestamp() - report.sent_at.timestamp()
        least = self._least_delays.setdefault(sender.uid, LeastDelay()).with_report(delay, received_at)
        offset = rounded_offset(least)
        report = kept(report.shifted(offset))
        self._reports[sender.uid] = ReportView(
            report=report, received_at=received_at, clock_offset=offset, latency=delay - least
        )
        was_refused = self._refused.pop(sender.uid, None) is not None
        if previous is None or was_refused or previous.report.news != report.news:
            urgent = previous is not None and brings_trouble(previous.report, report)
            self._wake(sender.job, urgent=urgent)
        return True

    def refuse(self, sender: PodIdentity, problem: str) -> None:
        """Note that the pod's newest report was refused, and why the first one was."""
        if sender.uid in self._known and sender.uid not in self._refused:
            self._refused[sender.uid] = one_line(problem)
            self._wake(sender.job, urgent=False)

    def refused(self, pod_uids: frozenset[str]) -> dict[str, str]:
        """Of these pods those whose newest report was refused, and why."""
        return {uid: self._refused[uid] for uid in pod_uids & self._refused.keys()}

    def of(self, pod_uids: frozenset[str]) -> dict[str, ReportView]:
        """The newest reports of these pods, with when each agent was last heard."""
        now = self._now()
        return {
            uid: replace(self._reports[uid], heard_at=self._last_heard(uid, now), comes_by=self._coming.get(uid))
            for uid in pod_uids & self._reports.keys()
        }

    def last_contact(self, pod_uid: str) -> datetime | None:
        """When the pod's agent was last known to be there; None if it never reported.

        A scrape asks in a thread of its own.
        """
        view = self._reports.get(pod_uid)
        return None if view is None else replace(view, heard_at=self._last_heard(pod_uid, self._now())).last_contact

    def _last_heard(self, uid: str, now: datetime) -> datetime | None:
        if uid in self._num_polls:
            return now
        relay = self._relays.get(uid)
        if relay in self._num_polls:
            return now
        times = (self._heard_at.get(each) for each in (uid, relay) if each is not None)
        return max((at for at in times if at is not None), default=None)


def is_overtaken(newest: ReportView | None, received_at: datetime) -> bool:
    """Whether a report of the same pod came after `received_at`."""
    return newest is not None and newest.received_at > received_at


def brings_trouble(before: AgentReport, after: AgentReport) -> bool:
    """Whether the new report tells of a notice, or that a member has ended."""
    ended = after.phase not in (AgentPhase.IDLE, AgentPhase.STARTING, AgentPhase.RUNNING)
    return before.notices != after.notices or (ended and before.phase is not after.phase)
