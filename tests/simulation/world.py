"""The simulated world with faults, and what holds of each of the operator's plans in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from spottrain_api.contract.assignments import AgentReport
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.core.model import Observed, Plan, ReportView
from spottrain_operator.core.plan import plan
from spottrain_simulator import world as simulated
from spottrain_simulator.agents import Agent
from spottrain_simulator.machines import Node, Pod
from spottrain_simulator.world import TICK
from world.invariants import problems_of


@dataclass
class World(simulated.World):
    """A world in which reports get lost or come late, and the operator crashes or is away.

    Time passes in ticks, since agents poll all the time.
    """

    report_loss: float = 0.05
    crashes: float = 0.0  # probability that the operator dies at any write
    rivals: list[World] = field(default_factory=list)  # other jobs on the same nodes
    operator_up: bool = True
    operator_back_at: float | None = None
    inbox: list[tuple[float, AgentReport]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    jumps: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.back_up()

    # --- what a test does to the world -------------------------------------------------------------------

    def revive(self, node: Node) -> None:
        """Start a machine of the same name.

        The node object still has what the old machine left. The pods that were on it are found dead.
        """
        if not node.alive and node.name in self.nodes:
            node.died_at, node.kill_at = None, None
            for pod in self.pods_on(node):
                pod.exit_code = 137 if pod.exit_code is None else pod.exit_code

    def restart_agent(self, pod: Pod) -> None:
        if pod.agent is not None:
            self._end_agent(pod)
            pod.agent_since, pod.assignment = None, None

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
        self.held_before = ()

    def story(self) -> str:
        return "\n".join([*self.events[-80:], *self.problems])

    # --- time passes -------------------------------------------------------------------------------------

    def tick(self, end: float | None = None) -> None:
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
                self._run_operator()

    def _taken_nodes(self) -> set[str | None]:
        rivals = {pod.node for each in self.rivals for pod in each.pods.values() if pod.exit_code is None}
        return super()._taken_nodes() | rivals

    def _assign(self, pod: Pod, agent: Agent) -> None:
        if self.operator_up and self.time >= pod.next_poll:
            pod.next_poll = self.time + self.rng.choice([0.0, 0.25, 0.5])
            super()._assign(pod, agent)

    def _send(self, pod: Pod, agent: Agent) -> None:
        if not agent.has_news and self.time < pod.next_report:
            return
        pod.next_report = self.time + 1.0
        report = self._report(pod, agent, self.time).report
        if not self.operator_up or self.rng.random() < self.report_loss:
            return
        self.inbox.append((self.time + self.rng.choice([0.0, 0.0, 0.25, 0.5]), report))
        if self.rng.random() < self.report_loss:
            self.inbox.append((self.time + 0.5, report))

    # --- the operator ------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        due = [item for item in self.inbox if item[0] <= self.time]
        self.inbox = [item for item in self.inbox if item[0] > self.time]
        for _, report in due:
            known = self.reports.get(report.pod_uid)
            if known is None or known.report.sent_at <= report.sent_at:
                self.reports[report.pod_uid] = ReportView(report=report, received_at=self.now)
                self.next_pass = min(self.next_pass, self.time)

    def _reports(self, time: float) -> dict[str, ReportView]:
        """What has come so far."""
        return dict(self.reports)

    def _carry_out(self, observed: Observed, decided: Plan) -> None:
        """The operator may crash before the status is written, and after each write."""
        going = {node.name for node in self.nodes.values() if node.announced}
        for problem in problems_of(observed, decided, going):
            self._problem(problem)
        if self._crash():
            return
        if decided.status != self.status:
            self._store(decided.status)
        self.held_before = decided.held
        if self._crash():
            return
        for action in decided.actions:
            self._apply(action)
            if self._crash():
                return
        self._note(decided)
        if self.rng.random() < 0.1:
            self._check_idempotence()

    def _store(self, status: TrainingJobStatus) -> None:
        stored = TrainingJobStatus.model_validate_json(status.model_dump_json(by_alias=True, exclude_none=True))
        if stored != status:
            self.problems.append("the status doesn't survive JSON")
        self._replace_job(status=stored)

    def _crash(self) -> bool:
        if self.rng.random() >= self.crashes:
            return False
        self.stop_operator(self.rng.choice([1.0, 3.0, 20.0]))
        return True

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
