"""The nodes and pods of the simulated cloud."""

from __future__ import annotations

from dataclasses import dataclass, field

from spottrain_api.contract.assignments import Assignment, CapacityType
from spottrain_api.contract.names import TAINT_PREEMPTION
from spottrain_api.contract.notices import Notice
from spottrain_operator.core.model import NodeView, PodView
from spottrain_simulator.agents import Agent
from spottrain_simulator.clock import NOT_READY_AFTER, at


@dataclass
class Node:
    name: str
    capacity_type: CapacityType
    pool: str | None = None
    died_at: float | None = None
    hint: Notice | None = None  # the cloud recommends to leave the node
    notice: Notice | None = None
    notice_seen_at: float = 0.0  # when the node object shows it
    kill_at: float | None = None

    @property
    def alive(self) -> bool:
        return self.died_at is None

    @property
    def announced(self) -> bool:
        """The node's watcher has a notice to tell; a machine that came up again has none."""
        return self.notice is not None and not self.notice.cancelled and self.kill_at is not None

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What the node's watcher tells its pods."""
        notice = self.notice if self.notice is not None and (self.announced or self.notice.cancelled) else None
        return tuple(each for each in (self.hint, notice) if each is not None)

    def tainted(self, time: float) -> bool:
        """Whether the node object shows that the node is about to go."""
        return self.notice is not None and not self.notice.cancelled and time >= self.notice_seen_at

    def view(self, time: float, *, taints: bool) -> NodeView:
        """The node object. `taints`: a node that is about to go is closed to new pods."""
        shown = self.notice if time >= self.notice_seen_at else None
        ready = self.died_at is None or time < self.died_at + NOT_READY_AFTER
        taint = (TAINT_PREEMPTION,) if taints and self.tainted(time) else ()
        return NodeView(name=self.name, ready=ready, notice=shown or self.hint, taints=taint)


@dataclass
class Pod:
    """A pod. `agent` is that of its container: None before it has started, and once it is gone."""

    view_name: str
    uid: str
    sequence: int
    capacity_type: CapacityType
    template_hash: str
    created: float
    pool: str | None = None
    pool_hash: str | None = None
    node: str | None = None
    scheduled: float | None = None
    unschedulable_since: float | None = None
    delete_at: float | None = None
    agent: Agent | None = None
    agent_since: float | None = None  # when its agent came up
    exit_code: int | None = None
    assignment: Assignment | None = None
    next_poll: float = 0.0
    next_report: float = 0.0
    protection: dict[str, str] = field(default_factory=dict)

    def view(self, time: float) -> PodView:
        up = self.agent_since is not None and time >= self.agent_since
        return PodView(
            name=self.view_name,
            uid=self.uid,
            sequence=self.sequence,
            capacity_type=self.capacity_type,
            template_hash=self.template_hash,
            created_at=at(self.created),
            phase={None: "Running" if up else "Pending", 0: "Succeeded"}.get(self.exit_code, "Failed"),
            ready=up and self.exit_code is None,
            exit_code=self.exit_code,
            ready_since=at(self.agent_since) if self.agent_since is not None and up else None,
            node=self.node,
            scheduled_at=at(self.scheduled) if self.scheduled is not None else None,
            ip=f"127.0.1.{self.sequence % 250}" if up else None,
            deleting=self.delete_at is not None,
            deletion_deadline=at(self.delete_at) if self.delete_at is not None else None,
            unschedulable_since=at(self.unschedulable_since) if self.unschedulable_since is not None else None,
            container_started=up,
            pool=self.pool,
            pool_hash=self.pool_hash,
            protection=self.protection,
        )
