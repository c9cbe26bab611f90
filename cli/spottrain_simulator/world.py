"""The simulated world: its nodes and pods, how time passes, and the operator's passes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime

from spottrain_api.contract.assignments import Assignment, CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import FINISHED_PHASES, TrainingJobStatus
from spottrain_operator.core.assignments import assignments_for
from spottrain_operator.core.facts.pools import pool_hash
from spottrain_operator.core.model import (
    AnnotatePod,
    CreatePod,
    DeletePod,
    HeldNode,
    JobView,
    Observed,
    Plan,
    ReportView,
)
from spottrain_operator.core.plan import decides, plan
from spottrain_operator.core.timing import DEFAULT_TIMING, Timing
from spottrain_simulator.agents import Agent
from spottrain_simulator.clock import NOT_READY_AFTER, at, seconds_of
from spottrain_simulator.machines import Node, Pod
from spottrain_simulator.notices import preemption, recommendation
from spottrain_simulator.ranks import NEVER, NOW, Pace, Training

# Seconds of a moment in which something happens. Others are skipped.
TICK = 0.25
# From a pod's creation until the scheduler has looked at it.
SCHEDULED_AFTER = 0.5
# From there until its agent is up, and from there until it is warm.
UP_AFTER = 1.5
WARM_AFTER = 1.0
# From a dead node's NotReady until its object is removed.
REMOVED_AFTER = NOT_READY_AFTER + 20
# A time at which the operator decides differently is found to within so many seconds.
_PRECISION = 1.0
# So many of the operator's waits are remembered.
_WAITS = 4


@dataclass
class World:
    """Everything, and the time. `job.status` is what the API server has.

    Nothing that is sent gets lost or is late, and the operator never crashes.
    """

    spec: TrainingJobSpec
    seed: int = 0
    total_steps: int = 120
    peers_hang: bool = False  # ranks whose peer is gone hang in their collective, as NCCL's do
    taints: bool = True  # a node that is about to go is closed to new pods
    pace: Pace = Pace()
    timing: Timing = DEFAULT_TIMING
    num_younger_waiting: int = 0
    num_nodes: int = 0
    template_hash: str = "t1"
    time: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    operator_started: float = 0.0
    next_pass: float = 0.0
    reports: dict[str, ReportView] = field(default_factory=dict)
    held_before: tuple[HeldNode, ...] = ()
    created: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    gone: bool = False
    jumps: bool = True

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.training = Training(
            total_steps=self.total_steps, pace=self.pace, peers_hang=self.peers_hang, jumps=self.jumps
        )
        self.job = JobView(
            namespace="default",
            name="job",
            uid="0123456789ab",
            spec=self.spec,
            metadata_generation=1,
            created_at=at(0),
            status=TrainingJobStatus(),
        )
        self._assignments: tuple[JobView, dict[str, Assignment]] = (self.job, {})
        self._restless = True
        self._waits: list[int] = []

    # --- what happens to the world -----------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        return at(self.time)

    @property
    def status(self) -> TrainingJobStatus:
        return self.job.status

    @property
    def finished(self) -> bool:
        return self.status.phase in FINISHED_PHASES

    def add_node(self, capacity_type: CapacityType, pool: str | None = None) -> Node:
        self.num_nodes += 1
        node = Node(name=f"{capacity_type.value}-{self.num_nodes}", capacity_type=capacity_type, pool=pool)
        self.nodes[node.name] = node
        self._restless = True
        return node

    def preempt(self, node: Node, lead: float) -> None:
        """Announce that the cloud takes a node back.

        The agents on the node get the notice first, and the node object shows it a little later.
        """
        if not node.alive or node.notice is not None:
            return
        node.notice = preemption(node.name, deadline=at(self.time + lead), observed_at=self.now)
        node.notice_seen_at = self.time + self.rng.uniform(0.0, 1.0)
        node.kill_at = self.time + lead
        self._restless = True

    def hint(self, node: Node, *, stands: bool = True) -> None:
        """Recommend to leave a node, or take that back. Nothing happens to the node."""
        node.hint = recommendation(node.name, self.now) if stands else None

    def cancel(self, node: Node) -> None:
        if node.alive and node.notice is not None:
            node.notice = node.notice.model_copy(update={"cancelled": True, "observed_at": self.now})
            node.kill_at = None

    def kill(self, node: Node) -> None:
        """The node is gone with all on it. Kubernetes notices later. Its agents have reported up to now."""
        self.reports = self._reports(self.time)
        node.died_at = self.time
        for pod in self.pods_on(node):
            self._end_agent(pod)
        self._restless = True

    def edit(self, **changes: object) -> None:
        """A user's `kubectl apply`; the template changes if `image` does."""
        self.spec = TrainingJobSpec.model_validate(self.spec.to_dict() | changes)
        if "image" in changes:
            self.template_hash = f"t-{changes['image']}"
        self._replace_job(spec=self.spec, metadata_generation=self.job.metadata_generation + 1)
        self.next_pass = min(self.next_pass, self.time)
        self._restless = True

    def run(self, seconds: float) -> None:
        self.run_to(self.time + seconds)

    def run_until_finished(self, limit: float) -> None:
        end = self.time + limit
        while self.time < end and not self.finished:
            self.tick(end)

    def run_to(self, end: float) -> None:
        while self.time < end and not self.gone:
            self.tick(end)

    # --- time passes -------------------------------------------------------------------------------------

    def tick(self, end: float) -> None:
        """Let time pass up to the next moment in which something happens, or up to `end`."""
        self.time = self._next_moment(end)
        self._restless = False
        self.training.advance(self.now)
        self._move_nodes()
        self._move_pods()
        self._move_agents()
        self.training.advance(self.now)
        self._run_operator()

    def _next_moment(self, end: float) -> float:
        soon = self.time + TICK
        if self._restless or self.training.due == NOW or soon >= end:
            return min(soon, end) if soon < end else max(end, self.time + 1e-6)
        due = min((moment for moment in self._moments() if moment > self.time), default=end)
        return self._next_decision(min(max(due, soon), end))

    def _moments(self) -> Iterator[float]:
        """When something happens by itself; some may be past."""
        news_at = self.training.news_at
        if news_at != NEVER:
            yield seconds_of(news_at)
        for node in self.nodes.values():
            if node.died_at is not None:
                yield node.died_at + NOT_READY_AFTER
                yield node.died_at + REMOVED_AFTER
            elif node.kill_at is not None:
                yield node.kill_at
                yield node.notice_seen_at
        for pod in self.pods.values():
            yield from self._moments_of(pod)

    def _moments_of(self, pod: Pod) -> Iterator[float]:
        if pod.node is None:
            yield pod.created + SCHEDULED_AFTER
        elif pod.agent_since is not None:
            yield pod.agent_since + WARM_AFTER
        elif pod.scheduled is not None:
            yield pod.scheduled + UP_AFTER
        if pod.delete_at is not None:
            yield pod.delete_at

    def _next_decision(self, limit: float) -> float:
        """When the operator decides something, if nothing happens up to `limit`, or that.

        Its decision is pure, so it is tried for later times. What it decides after some time it also decides later,
        so one try shows whether there is anything to search for. Most decisions come after the same waits as earlier
        ones: these are tried first.
        """
        if not self._decides(limit):
            return limit
        nothing_by, then = self.time, limit
        for time in (self.time + wait for wait in sorted(self._waits) if self.time + wait < limit):
            if self._decides(time):
                then = time
                break
            nothing_by = time
        found = self._first_decision(nothing_by, then)
        wait = math.ceil(found - self.time)
        self._waits = [*(each for each in self._waits if each != wait), wait][-_WAITS:]
        return found

    def _first_decision(self, nothing_by: float, then: float) -> float:
        if then - nothing_by > _PRECISION and not self._decides(then - _PRECISION):
            return then
        while then - nothing_by > _PRECISION:
            middle = (nothing_by + then) / 2
            nothing_by, then = (nothing_by, middle) if self._decides(middle) else (middle, then)
        return then

    def _decides(self, time: float) -> bool:
        return decides(self.observe(time), at(time))

    def _move_nodes(self) -> None:
        for node in list(self.nodes.values()):
            if node.kill_at is not None and node.alive and self.time >= node.kill_at:
                self.kill(node)
            if node.died_at is not None and self.time >= node.died_at + REMOVED_AFTER:
                self.remove(node)

    def remove(self, node: Node) -> None:
        """The node object goes, and what was on it."""
        del self.nodes[node.name]
        for pod in self.pods_on(node):
            self._remove(pod)

    def pods_on(self, node: Node) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.node == node.name]

    def _remove(self, pod: Pod) -> None:
        self._end_agent(pod)
        del self.pods[pod.uid]
        self.reports.pop(pod.uid, None)
        self._restless = True

    def _end_agent(self, pod: Pod) -> None:
        if pod.agent is not None:
            self.training.lose(pod.agent)
            pod.agent = None

    def _move_pods(self) -> None:
        for pod in list(self.pods.values()):
            node = self.nodes.get(pod.node or "")
            if node is None:
                self._schedule(pod)
            elif node.alive and pod.delete_at is not None and self.time >= pod.delete_at:
                self._remove(pod)
            elif node.alive and pod.scheduled is not None and pod.agent_since is None:
                self._start_agent(pod, node, pod.scheduled)

    def _start_agent(self, pod: Pod, node: Node, scheduled: float) -> None:
        if self.time >= scheduled + UP_AFTER:
            pod.agent, pod.agent_since = Agent(pod.view_name, pod.uid, node.name, self.training), self.time

    def _taken_nodes(self) -> set[str | None]:
        return {pod.node for pod in self.pods.values()}

    def _schedule(self, pod: Pod) -> None:
        if self.time < pod.created + SCHEDULED_AFTER:
            return
        taken = self._taken_nodes()
        for node in self.nodes.values():
            suits = (node.capacity_type, node.pool) == (pod.capacity_type, pod.pool)
            if node.alive and suits and node.name not in taken and not (self.taints and node.tainted(self.time)):
                pod.node, pod.scheduled, pod.unschedulable_since = node.name, self.time, None
                self._restless = True
                return
        if pod.unschedulable_since is None:
            pod.unschedulable_since = self.time
            self._restless = True

    def _move_agents(self) -> None:
        for pod in list(self.pods.values()):
            if pod.agent is None:
                continue
            self._hear(pod, pod.agent)
            self._send(pod, pod.agent)
            if pod.agent.has_left:
                self._exit(pod, pod.agent)

    def _hear(self, pod: Pod, agent: Agent) -> None:
        """What the agent hears from the node, the kubelet and the operator."""
        agent.hear(self.nodes[agent.node].notices, self.now)
        if pod.delete_at is not None and agent.state.sigterm is None:
            agent.terminate(at(pod.delete_at), self.now)
        self._assign(pod, agent)

    def _assign(self, pod: Pod, agent: Agent) -> None:
        """What the operator assigns to it."""
        assigned = self._assigned(pod.uid)
        if pod.assignment is None or (
            assigned is not pod.assignment and assigned.revision != pod.assignment.revision
        ):
            agent.receive(assigned)
        pod.assignment = assigned

    def _assigned(self, uid: str) -> Assignment:
        """What the operator assigns to a pod, computed for all pods once for each change of the job."""
        job, assignments = self._assignments
        if job is not self.job or uid not in assignments:
            assignments = assignments_for(self.job, (pod.uid for pod in self.pods.values()))
            self._assignments = self.job, assignments
        return assignments[uid]

    def _send(self, pod: Pod, agent: Agent) -> None:
        """An agent reports what is new."""
        if agent.has_news:
            self.reports[pod.uid] = self._report(pod, agent, self.time)
            self.next_pass = self.time

    def _report(self, pod: Pod, agent: Agent, time: float) -> ReportView:
        is_warm = pod.agent_since is not None and time >= pod.agent_since + WARM_AFTER
        report = agent.report(at(time), warm=is_warm, port=20000 + pod.sequence, replica_port=9000)
        return ReportView(report=report, received_at=at(time))

    def _exit(self, pod: Pod, agent: Agent) -> None:
        self._end_agent(pod)
        pod.exit_code = int(agent.state.failure is not None and agent.state.sigterm is None)
        self._restless = True
        if pod.delete_at is not None:
            self._remove(pod)

    # --- the operator ------------------------------------------------------------------------------------

    def _reports(self, time: float) -> dict[str, ReportView]:
        """The newest report of each agent: those that are there have reported just now."""
        here = (pod for pod in self.pods.values() if pod.agent is not None)
        return self.reports | {pod.uid: self._report(pod, pod.agent, time) for pod in here if pod.agent is not None}

    def observe(self, time: float | None = None) -> Observed:
        """What the operator sees now, or at a later time if nothing happens until then."""
        moment = self.time if time is None else time
        return Observed(
            job=self.job,
            pods=tuple(pod.view(moment) for pod in self.pods.values()),
            nodes={name: node.view(moment, taints=self.taints) for name, node in self.nodes.items()},
            reports=self._reports(moment),
            template_hash=self.template_hash,
            listening_since=at(self.operator_started),
            timing=self.timing,
            num_younger_waiting=self.num_younger_waiting,
            held_before=self.held_before,
        )

    def _run_operator(self) -> None:
        observed = self.observe()
        self.reports = dict(observed.reports)
        decided = plan(observed, self.now)
        self.next_pass = self.time + (decided.requeue_after if decided.requeue_after is not None else 1e9)
        known = self.status.generation
        self._restless |= bool(decided.actions) or decided.status.generation != known
        self._carry_out(observed, decided)

    def _carry_out(self, observed: Observed, decided: Plan) -> None:
        if decided.status != self.status:
            self._replace_job(status=decided.status)
        self.held_before = decided.held
        for action in decided.actions:
            self._apply(action)
        self._note(decided)

    def _note(self, decided: Plan) -> None:
        self.events += [f"{self.time:7.2f} {e.type[0]} {e.reason}: {e.message}" for e in decided.events]

    def _apply(self, action: object) -> None:
        if isinstance(action, CreatePod):
            if any(p.view_name == action.name for p in self.pods.values()):
                return
            self.created.append(action.name)
            uid = f"uid-{len(self.created)}"
            self.pods[uid] = Pod(
                view_name=action.name,
                uid=uid,
                sequence=action.sequence,
                capacity_type=action.capacity_type,
                template_hash=self.template_hash,
                created=self.time,
                pool=action.pool,
                pool_hash=pool_hash(self.spec, action.capacity_type, action.pool),
            )
        elif isinstance(action, DeletePod):
            pod = self.pods.get(action.uid)
            if pod is None:
                return
            if action.grace_seconds == 0 or pod.node is None:
                self._remove(pod)
            elif pod.delete_at is None:
                pod.delete_at = self.time + 1.0
        elif isinstance(action, AnnotatePod):
            pod = self.pods.get(action.uid)
            if pod is not None:
                merged = pod.protection | dict(action.annotations)
                pod.protection = {name: value for name, value in merged.items() if value is not None}
        else:
            self.gone = True

    def _replace_job(self, **changes: object) -> None:
        self.job = replace(self.job, **changes)  # type: ignore[arg-type]
