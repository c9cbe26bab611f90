"""The core's vocabulary for Kueue: what is known of a job's Workloads, and what to do with them.

A Workload asks Kueue for quota. A job has one for `nodes.min`, and one for each node beyond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from spottrain_api.contract.assignments import CapacityType
from spottrain_operator.core.trouble import Trouble

Nodes = Mapping[CapacityType, int]
"""Numbers of nodes by capacity type."""


class Part(StrEnum):
    """What a Workload asks for: the nodes without which the job can't train, or one more."""

    MINIMUM = "minimum"
    MORE = "more"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadView:
    """What the core knows of a Workload.

    Attributes:
        content: Hash of what it asks for. Of another one than the job's, it was made before an edit.
        nodes: What it asks for.
        active: False: somebody has deactivated it, and Kueue doesn't admit it.
        reserved: It holds quota, also while it is evicted, until that is cleared.
        admitted: Its nodes may run.
        evicted: Kueue wants its quota back.
        ready: It was said that its pods are ready, since it was admitted.
        finished: It asks for nothing any more.
        reason, message: Why it is evicted, or isn't admitted, in Kueue's words. Empty: Kueue has not said it.
    """

    name: str
    uid: str
    part: Part
    content: str
    nodes: Nodes
    active: bool = True
    reserved: bool = False
    admitted: bool = False
    evicted: bool = False
    ready: bool = False
    finished: bool = False
    reason: str = ""
    message: str = ""

    @property
    def grants(self) -> bool:
        """Whether its nodes may run, and go on to."""
        return self.admitted and not self.evicted and not self.finished


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """A job in a queue.

    Attributes:
        name: The LocalQueue. Empty: the job was taken out of its queue, and Workloads are left of it.
        content: Hash of what the job's Workloads ask for now.
        workloads: By name.
    """

    name: str
    content: str = ""
    workloads: tuple[WorkloadView, ...] = ()
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateWorkload:
    """Ask Kueue for these nodes."""

    name: str
    part: Part
    content: str
    nodes: Nodes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWorkload:
    """Give the quota of an evicted Workload back. It waits in its queue again."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyWorkload:
    """Say that a Workload's pods are ready. With waitForPodsReady, Kueue takes its quota back otherwise."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishWorkload:
    """Say that a Workload needs its quota no more, and how its job has ended."""

    name: str
    uid: str
    succeeded: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteWorkload:
    """Delete exactly this Workload, and what it holds with it."""

    name: str
    uid: str


WorkloadAction = CreateWorkload | ReadyWorkload | ReleaseWorkload | FinishWorkload | DeleteWorkload
