"""The simulated world: what tests do to it, how time passes, and its operator."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import datetime

from simulation.cluster import Node, Pod
from spottrain_api.contract.assignments import AgentReport, Assignment, CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import FINISHED_PHASES, TrainingJobStatus
from spottrain_operator.core.assignments import assignments_for
from spottrain_operator.core.facts.pools import pool_hash
from spottrain_operator.core.model import AnnotatePod, CreatePod, DeletePod, JobView, Observed, ReportView
from spottrain_operator.core.plan import plan
from spottrain_operator.core.timing import DEFAULT_TIMING, Timing
from world.agents import Agent
from world.clock import NOT_READY_AFTER, at
from world.invariants import problems_of
from world.notices import preemption, recommendation
from world.ranks import Pace, Training

TICK = 0.25


@dataclass
class World:
    """Everything, and the time. `job.status` is what the API server has."""

    spec: TrainingJobSpec
    seed: int = 0
    total_steps: int = 120
    report_loss: float = 0.05
    crashes: float = 0.0  # probability that the operator dies at any write
    peers_hang: bool = False  # ranks whose peer is gone hang in their collective, as NCCL's do
    taints: bool = True  # a node that is about to go is closed to new pods
    pace: Pace = Pace()
    timing: Timing = DEFAULT_TIMING
    rivals: list[World] = field(default_factory=list)  # other jobs on the same nodes
    num_younger_waiting: int = 0
    num_nodes: int = 0
    template_hash: str = "t1"
    time: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    operator_up: bool = True
    operator_started: float = 0.0
    operator_back_at: float | None = None
    next_pass: float = 0.0
    inbox: list[tuple[float, AgentReport]] = field(default_factory=list)
    reports: dict[str, ReportView] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gone: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.training = Training(total_steps=self.total_steps, pace=self.pace, peers_hang=self.peers_hang)
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
        self.back_up()

    # --- what a test does to the world -------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        return at(self.time)

    @property
    def status(self) -> TrainingJobStatus:
        return self.job.status

    def add_node(self, capacity_type: CapacityType, pool: str | None = None) -> Node:
        self.num_nodes += 1
        node = Node(name=f"{capacity_type.value}-{self.num_nodes}", capacity_type=capacity_type, pool=pool)
        self.nodes[node.name] = node
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

    def hint(self, node: Node, *, stands: bool = True) -> None:
        """Recommend to leave a node, or take that back. Nothing happens to the node."""
        node.hint = recommendation(node.name, self.now) if stands else None

    def cancel(self, node: Node) -> None:
        if node.alive and node.notice is not None:
            node.notice = node.notice.model_copy(update={"cancelled": True, "observed_at": self.now})
            node.kill_at = None

    def kill(self, node: Node) -> None:
        """The node is gone with all on it. Kubernetes notices later."""
        node.died_at = self.time
        for pod in self._pods_on(node):
            self._end_agent(pod)

    def revive(self, node: Node) -> None:
        """Start a machine of the same name.

        The node object still has what the old machine left. The pods that were on it are found dead.
        """
        if not node.alive and node.name in self.nodes:
            node.died_at, node.kill_at = None, None
            for pod in self._pods_on(node):
                pod.exit_code = 137 if pod.exit_code is None else pod.exit_code

    def restart_agent(self, pod: Pod) -> None:
        if pod.agent is not None:
            self._end_agent(pod)
            pod.agent_since, pod.assignment = None, None

    def edit(self, **changes: object) -> None:
        """A user's `kubectl apply`; the template changes if `image` does."""
        self.spec = TrainingJobSpec.model_validate(self.spec.to_dict() | changes)
        if "image" in changes:
            self.template_hash = f"t-{changes['image']}"
        self._replace_job(spec=self.spec, metadata_generation=self.job.metadata_generation + 1)

    def back_up(self) -> None:
        """Back up etcd: the job's status, and which pods there are."""
        self.backup = (self.status, self.time)

    def restore_backup(self) -> None:
        """Restore etcd from the backup.

        The status goes back. Pods that were created since then are unknown, so their kubelets end them. The operator
        starts anew.
        """
        status, taken = self.backup
        self._replace_job(status=status)
        for pod in [pod for pod in self.pods.values() if pod.created > taken]:
            self._remove(pod)
        self.stop_operator(2.0)

    def stop_operator(self, seconds: float) -> None:
        self.operator_up = False
        self.operator_back_at = self.time + seconds
        self.reports.clear()
        self.inbox.clear()

    def run(self, seconds: float) -> None:
        end = self.time + seconds
        while self.time < end and not self.gone:
            self.tick()

    def run_until_finished(self, limit: float) -> None:
        end = self.time + limit
        while self.time < end and self.status.phase not in FINISHED_PHASES:
            self.tick()

    def story(self) -> str:
        return "\n".join([*self.events[-80:], *self.problems])

    # --- time passes -------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.time += TICK
        self._move_nodes()
        self._move_pods()
        self._move_agents()
        self.training.advance(self.now)
        if not self.operator_up and self.operator_back_at is not None and self.time >= self.operator_back_at:
            self.operator_up, self.operator_started, self.next_pass = True, self.time, self.time
        if self.operator_up:
            self._deliver()
            if self.time >= self.next_pass:
                self._reconcile()

    def _move_nodes(self) -> None:
        for node in list(self.nodes.values()):
            if node.kill_at is not None and node.alive and self.time >= node.kill_at:
                self.kill(node)
            if node.died_at is not None and self.time >= node.died_at + NOT_READY_AFTER + 20:
                del self.nodes[node.name]
                for pod in self._pods_on(node):
                    self._remove(pod)

    def _pods_on(self, node: Node) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.node == node.name]

    def _remove(self, pod: Pod) -> None:
        self._end_agent(pod)
        del self.pods[pod.uid]

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
        if self.time >= scheduled + 1.5:
            pod.agent, pod.agent_since = Agent(pod.view_name, pod.uid, node.name, self.training), self.time

    def _schedule(self, pod: Pod) -> None:
        taken = {p.node for p in self.pods.values()}
        taken |= {p.node for each in self.rivals for p in each.pods.values() if p.exit_code is None}
        for node in self.nodes.values():
            suits = (node.capacity_type, node.pool) == (pod.capacity_type, pod.pool)
            fits = node.alive and suits and node.name not in taken
            if fits and not (self.taints and node.tainted(self.time)) and self.time >= pod.created + 0.5:
                pod.node, pod.scheduled, pod.unschedulable_since = node.name, self.time, None
                return
        if pod.unschedulable_since is None and self.time >= pod.created + 0.5:
            pod.unschedulable_since = self.time

    def _move_agents(self) -> None:
        for pod in list(self.pods.values()):
            if pod.agent is None:
                continue
            self._tell(pod, pod.agent)
            if pod.agent.has_news or self.time >= pod.next_report:
                self._send(pod, pod.agent)
            if pod.agent.has_left:
                self._exit(pod, pod.agent)

    def _tell(self, pod: Pod, agent: Agent) -> None:
        """What the agent hears from the node, the kubelet and the operator."""
        agent.hear(self.nodes[agent.node].notices, self.now)
        if pod.delete_at is not None and agent.state.sigterm is None:
            agent.terminate(at(pod.delete_at), self.now)
        if self.operator_up and self.time >= pod.next_poll:
            pod.next_poll = self.time + self.rng.choice([0.0, 0.25, 0.5])
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
        pod.next_report = self.time + 1.0
        is_warm = pod.agent_since is not None and self.time >= pod.agent_since + 1.0
        report = agent.report(self.now, warm=is_warm, port=20000 + pod.sequence, replica_port=9000)
        if not self.operator_up or self.rng.random() < self.report_loss:
            return
        self.inbox.append((self.time + self.rng.choice([0.0, 0.0, 0.25, 0.5]), report))
        if self.rng.random() < self.report_loss:
            self.inbox.append((self.time + 0.5, report))

    def _exit(self, pod: Pod, agent: Agent) -> None:
        self._end_agent(pod)
        pod.exit_code = int(agent.state.failure is not None and agent.state.sigterm is None)
        if pod.delete_at is not None:
            self._remove(pod)

    # --- the operator ------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        due = [item for item in self.inbox if item[0] <= self.time]
        self.inbox = [item for item in self.inbox if item[0] > self.time]
        for _, report in due:
            known = self.reports.get(report.pod_uid)
            if known is None or known.report.sent_at <= report.sent_at:
                self.reports[report.pod_uid] = ReportView(report=report, received_at=self.now)
                self.next_pass = min(self.next_pass, self.time)

    def observe(self) -> Observed:
        views = tuple(pod.view(self.time) for pod in self.pods.values())
        return Observed(
            job=self.job,
            pods=views,
            nodes={name: node.view(self.time, taints=self.taints) for name, node in self.nodes.items()},
            reports=dict(self.reports),
            template_hash=self.template_hash,
            listening_since=at(self.operator_started),
            timing=self.timing,
            num_younger_waiting=self.num_younger_waiting,
        )

    def _reconcile(self) -> None:
        observed = self.observe()
        decided = plan(observed, self.now)
        going = {node.name for node in self.nodes.values() if node.announced}
        for problem in problems_of(observed, decided, going):
            self._problem(problem)
        self.next_pass = self.time + (decided.requeue_after if decided.requeue_after is not None else 1e9)
        if self._crash():
            return
        stored = TrainingJobStatus.model_validate_json(
            decided.status.model_dump_json(by_alias=True, exclude_none=True)
        )
        if stored != decided.status:
            self.problems.append("the status doesn't survive JSON")
        self._replace_job(status=stored)
        if self._crash():
            return
        for action in decided.actions:
            self._apply(action)
            if self._crash():
                return
        self.events += [f"{self.time:7.2f} {e.type[0]} {e.reason}: {e.message}" for e in decided.events]
        if self.rng.random() < 0.1:
            self._check_idempotence()

    def _crash(self) -> bool:
        if self.rng.random() >= self.crashes:
            return False
        self.stop_operator(self.rng.choice([1.0, 3.0, 20.0]))
        return True

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
                del self.pods[action.uid]
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

    def _check_idempotence(self) -> None:
        again = plan(self.observe(), self.now)
        if again.status != self.status or again.actions or again.events:
            changed = [
                f"{name}: {getattr(self.status, name)} -> {getattr(again.status, name)}"
                for name in TrainingJobStatus.model_fields
                if getattr(self.status, name) != getattr(again.status, name)
            ]
            self._problem(f"a second pass did something: {again.actions} {again.events} {changed}")

    def _problem(self, text: str) -> None:
        self.problems.append(f"{self.time:.2f}: {text}")
