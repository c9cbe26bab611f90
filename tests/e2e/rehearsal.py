"""Rehearsals: one job on a local cluster, and what happens to its nodes.

The ranks' own records show what that cost.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

from cluster_fixtures import Kubectl, processes_of, wait_for
from spottrain.data.audit import Audit, AuditRecord, read_audit
from spottrain_agent.records import WorkerStarted, worker_started_file
from spottrain_api.contract.assignments import CapacityType, Member
from spottrain_api.contract.names import ENV_AUDIT_DIR, ENV_POD_NAME, GROUP, VERSION
from spottrain_api.contract.reports import Progress
from spottrain_api.v1alpha1.status import FINISHED_PHASES, GenerationState, GenerationStatus, Phase, TrainingJobStatus
from spottrain_local.cluster import Cluster

Answer = TypeVar("Answer")

NAMESPACE = "default"
# Steps after an incident until it is taken to be over.
SETTLED_STEPS = 5
INTERVAL = "10steps"
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one incident cost, by the ranks' own records.

    `redone` are the steps that two generations recorded, `uncommitted` those since the newest commit that the
    job's status knew of when the incident began, `stepless` the generations that ended without a step.
    """

    title: str
    redone: int
    uncommitted: int
    stepless: int
    gap_seconds: float
    world_before: int
    world_after: int
    reasons: tuple[str, ...]

    def row(self) -> str:
        world = f"{self.world_before}->{self.world_after}"
        why = ", ".join(self.reasons) + (f" ({self.stepless} without a step)" if self.stepless else "")
        return f"{self.title:58} redone {self.redone:3d}, {self.gap_seconds:5.1f} s without a step, {world}, {why}"


def manifest(name: str, folder: Path, *, strategy: str = "ddp", **spec: Any) -> dict[str, Any]:
    """The job of a rehearsal, with its records in `folder`.

    `spec` replaces fields of the spec.
    """
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "image": "local/trainer",
            "entrypoint": {"script": "tests/e2e/jobs/mlp.py", "args": ["--until", str(folder / "over")]},
            "env": [
                {"name": ENV_AUDIT_DIR, "value": str(folder / "audit")},
                {"name": "OMP_NUM_THREADS", "value": "1"},
            ],
            "nodes": {"min": 1, "max": 6},
            "capacity": {"onDemand": {"min": 2, "max": 2}},
            "strategy": strategy,
            "batch": {"global": 24, "micro": 4},
            "checkpoint": {"uri": f"s3://checkpoints/{name}", "interval": INTERVAL},
            **spec,
        },
    }


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """A running job and the cloud around it.

    All waits are bounded, and say what they waited for.
    """

    cluster: Cluster
    name: str
    folder: Path
    evidence: list[Evidence] = field(default_factory=list)

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(kubeconfig=self.cluster.kubeconfig)

    # --- the job -----------------------------------------------------------------------------------------

    def status(self) -> TrainingJobStatus:
        return TrainingJobStatus.model_validate(self.kubectl.get("tj", self.name).get("status") or {})

    def generation(self) -> GenerationStatus:
        """The newest generation; fails where there is none yet."""
        generation = self.status().generation
        assert generation is not None, f"the job {self.name} has no generation yet"
        return generation

    def members(self, capacity_type: CapacityType | None = None) -> list[Member]:
        """The members of the generation that trains, in the order of their ranks.

        The list is empty while no generation trains.
        """
        generation = self.status().generation
        if generation is None or generation.state is not GenerationState.ACTIVE or generation.first_step_at is None:
            return []
        return [m for m in generation.members if capacity_type in (None, m.capacity_type)]

    def spot_nodes(self) -> list[str]:
        """Nodes of the spot members, in the order of their ranks."""
        return [member.node for member in self.members(CapacityType.SPOT)]

    def audit(self) -> Audit:
        return read_audit(self.folder / "audit")

    def records(self) -> list[AuditRecord]:
        """All complete records of all ranks and generations."""
        lines = (
            line
            for path in (self.folder / "audit").glob("audit-*.jsonl")
            for line in path.read_text().splitlines()
            if '"step"' in line and line.endswith("}")
        )
        return [AuditRecord.model_validate_json(line) for line in lines]

    def events(self) -> list[tuple[str, str, str]]:
        """Type, reason and message of the job's events, oldest first."""
        own = [item for item in self.kubectl.list("events") if item["involvedObject"].get("name") == self.name]
        own.sort(key=lambda item: item.get("eventTime") or "")
        return [(item["type"], item["reason"], item["message"]) for item in own]

    def set_interval(self, interval: str) -> None:
        """Commit more or less often from the next generation on."""
        patch = json.dumps({"spec": {"checkpoint": {"interval": interval}}})
        self.kubectl("patch", "tj", self.name, "--type=merge", "-p", patch)

    @contextmanager
    def operator_stopped(self) -> Iterator[None]:
        """Stop the operator while the block runs.

        The operator runs again afterwards, even if the test failed, because other tests share the cluster.
        """
        self._scale_operator(0)
        try:
            yield
        finally:
            self._scale_operator(1)

    def _scale_operator(self, replicas: int) -> None:
        self.kubectl(
            "--namespace=spottrain-system", "scale", "deployment/spottrain-operator", f"--replicas={replicas}"
        )

        def num_running() -> int:
            return sum("spottrain_operator" in line for line in command_lines(processes_of(self.cluster.layout.root)))

        self.wait(f"{replicas} operators run", lambda: num_running() == replicas)

    # --- waits -------------------------------------------------------------------------------------------

    def wait(self, what: str, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until a condition holds.

        If it never does, the failure says `what` was missing, and describes the job.
        """
        try:
            wait_for(condition, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from error

    def describe(self) -> str:
        status = self.status()
        generation = status.generation.model_dump_json(exclude_none=True) if status.generation else "none"
        events = "\n".join(f"  {kind} {reason}: {message}" for kind, reason, message in self.events()[-15:])
        return (
            f"job {self.name}: {status.phase} {status.message}; step {status.progress.step}; "
            f"waiting {status.members.waiting}; generation {generation}\n{events}"
        )

    def wait_for_members(
        self, num: int = 1, capacity_type: CapacityType | None = None, *, seconds: float = 90.0
    ) -> list[Member]:
        """Return `members` once there are at least `num`.

        There are none for a moment when the job grows.
        """
        found: list[Member] = []

        def enough() -> bool:
            found[:] = self.members(capacity_type)
            return len(found) >= num

        self.wait(f"{num} members train", enough, seconds)
        return found

    def wait_for_spot_nodes(self, num: int = 1) -> list[str]:
        """Return `spot_nodes` once there are at least `num`."""
        return [member.node for member in self.wait_for_members(num, CapacityType.SPOT)]

    def wait_for_spot(self, num: int, *, ready: int, seconds: float = 90.0) -> None:
        """Wait until `num` spot nodes train and `ready` nodes of any kind are ready.

        A node is ready if it trains, or waits and is warm.
        """

        def enough() -> bool:
            return len(self.spot_nodes()) >= num and len(self.members()) + self.status().members.waiting >= ready

        self.wait(f"{num} spot nodes train and {ready} nodes are ready to", enough, seconds)

    def wait_until_settled(self, since_step: int, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until training goes on past all steps that were made before.

        A generation must train on nodes that stay.
        """

        def settled() -> bool:
            status = self.status()
            assert status.phase not in FINISHED_PHASES, f"the job ended too early\n{self.describe()}"
            nodes = {member.node for member in self.members()}
            return bool(nodes) and not nodes & self.announced() and status.progress.step > since_step + SETTLED_STEPS

        self.wait(f"training goes on past step {since_step} on nodes that stay", settled, seconds)

    # --- the cloud ---------------------------------------------------------------------------------------

    def announced(self) -> set[str]:
        """Nodes that are gone, or announced to go."""
        return {name for name, state in self._node_states().items() if state != "running"}

    def gone(self) -> set[str]:
        """Nodes that the cloud has taken."""
        return {name for name, state in self._node_states().items() if state == "gone"}

    def _node_states(self) -> dict[str, str]:
        return {node["node"]: node["state"] for node in self.cluster.running_status()["nodes"]}

    def preempt(self, nodes: Iterable[str], notice_seconds: float) -> None:
        self.cluster.preempt(list(nodes), notice_seconds=notice_seconds)

    def bring_back(self) -> None:
        """Take the nodes whose preemption is announced, and give fresh ones for them.

        Nodes that the cloud has taken already get fresh ones, too.
        """
        nodes = sorted(self.announced())
        staying = [node for node in nodes if node not in self.gone()]
        if staying:
            self.cluster.kill(staying)
        if nodes:
            self.cluster.restore(nodes)

    @contextmanager
    def incident(self, title: str) -> Iterator[None]:
        """Treat what happens in the block as one incident.

        Afterwards, wait until training has settled, and note the cost.
        """
        before, redone_before, begin = self.status(), num_redone(self.records()), time.time()
        assert before.generation is not None
        yield
        self.wait_until_settled(max(record.step for record in self.records()))
        after, records, until = self.status(), self.records(), time.time()
        newest = max(record.step for record in records if record.generation <= before.generation.number)
        assert after.generation is not None
        known = {(t.generation, t.at) for t in before.transitions}
        ended = [t for t in after.transitions if (t.generation, t.at) not in known]
        stepping = {record.generation for record in records}
        self.evidence.append(
            Evidence(
                title=title,
                redone=num_redone(records) - redone_before,
                uncommitted=newest - (before.commit.step if before.commit is not None else 0),
                stepless=len({t.generation for t in ended} - stepping),
                gap_seconds=self.audit().longest_gap(begin, until),
                world_before=before.generation.world_size,
                world_after=after.generation.world_size,
                reasons=tuple(t.reason for t in ended),
            )
        )
        print(self.evidence[-1].row(), flush=True)

    # --- processes ---------------------------------------------------------------------------------------

    def run_directory(self, pod: str, generation: int) -> Path:
        """The run directory of a generation in a pod."""
        uid = self.kubectl.get("pod", pod)["metadata"]["uid"]
        found = list(self.cluster.layout.root.glob(f"nodes/*/pods/{uid[:8]}/v/*/g{generation}"))
        assert len(found) == 1, f"run directories of generation {generation} in pod {pod}: {found}"
        return found[0]

    def progress(self, pod: str, generation: int) -> Progress | None:
        return Progress.read(self.run_directory(pod, generation) / "progress-0.json")

    def rank_process(self, pod: str, generation: int) -> psutil.Process:
        started = WorkerStarted.read(self.run_directory(pod, generation) / worker_started_file(0))
        assert started is not None, f"the rank of pod {pod} has not started"
        return psutil.Process(started.pid)

    def agent_process(self, pod: str) -> psutil.Process:
        """PID 1 of a pod."""
        found = self._processes(pod)
        return next(p for p, line in zip(found, command_lines(found), strict=True) if "spottrain_agent" in line)

    def zygote_process(self, pod: str) -> psutil.Process:
        """The agent's child from which ranks are forked."""
        children = self.agent_process(pod).children()
        return min(children, key=lambda process: process.create_time())

    def _processes(self, pod: str) -> list[psutil.Process]:
        return [process for process in self.processes() if environment(process).get(ENV_POD_NAME) == pod]

    def processes(self) -> list[psutil.Process]:
        """Living processes of the job's pods, on nodes of any runtime.

        Their environment names the folder of the job's records.
        """
        return [
            process
            for process in processes_of(self.folder)
            if {ENV_POD_NAME, "SPOTTRAIN_JOB"} <= environment(process).keys()
        ]

    # --- begin and end -----------------------------------------------------------------------------------

    def begin(self, spec: dict[str, Any], members: int) -> None:
        self.apply(spec)
        self.wait_for_members(members)

    def apply(self, spec: dict[str, Any]) -> None:
        """Create the job, and the folder of its records."""
        records = self.folder / "audit"
        records.mkdir(parents=True, exist_ok=True)
        records.chmod(0o777)  # ranks in containers are another user
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(spec))

    def finish(self) -> TrainingJobStatus:
        """Let the script end, and check that the job succeeds.

        Its samples must be those of an undisturbed run, and no process may be left.
        """
        (self.folder / "over").touch()
        self.wait("the job succeeds", lambda: self.status().phase in FINISHED_PHASES)
        status = self.status()
        assert status.phase is Phase.SUCCEEDED, self.describe()
        assert self.audit().problems() == []
        self.wait("no process of its pods is left", lambda: not self.processes())
        return status


@contextmanager
def rehearsal(cluster: Cluster, name: str, folder: Path, *, members: int, **spec: Any) -> Iterator[Rehearsal]:
    """A job that trains once it has so many members.

    Afterwards the job is deleted, and all nodes are back.
    """
    run = Rehearsal(cluster=cluster, name=name, folder=folder)
    try:
        run.begin(manifest(name, folder, **spec), members)
        yield run
    finally:
        run.kubectl.run("delete", "tj", name, "--wait=false")
        run.bring_back()
        # The next test needs the nodes.
        run.wait("the job's processes are gone", lambda: not run.processes(), seconds=90)


def command_lines(processes: Iterable[psutil.Process]) -> list[list[str]]:
    """The command of each process; empty for one that has ended since it was found."""
    return [_look(process.cmdline) or [] for process in processes]


def environment(process: psutil.Process) -> dict[str, str]:
    """The environment of a process; empty for one that has ended since it was found."""
    return _look(process.environ) or {}


def _look(question: Callable[[], Answer]) -> Answer | None:
    try:
        return question()
    except psutil.Error:
        return None


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def num_redone(records: Iterable[AuditRecord]) -> int:
    """The number of steps that were done again.

    A step counts once for each generation that recorded it after the first.
    """
    return len({(record.step, record.generation) for record in records}) - len({record.step for record in records})
