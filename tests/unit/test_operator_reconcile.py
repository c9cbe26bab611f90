"""Passes over a job from beginning to end, with the operator crashing around every single write.

After Sieve (OSDI '22): the oracle is the undisturbed run. However the operator crashes, the job ends the same way,
and no pod is created or deleted more often.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spottrain_api.contract import (
    LABEL_CAPACITY_TYPE,
    AgentPhase,
    AgentReport,
    AssignmentAction,
    CommitRef,
    Progress,
    TrainerPhase,
)
from spottrain_operator.agents import AssignmentBoard, ReportBox
from spottrain_operator.cluster import ClusterError, ForbiddenError, InvalidObjectError, JobKey, Manifest, PodIdentity
from spottrain_operator.core.plan import plan
from spottrain_operator.history import HistoryKeeper
from spottrain_operator.memory_cluster import MemoryCluster
from spottrain_operator.metrics import Metrics
from spottrain_operator.reconcile import Reconciler

KEY = JobKey(namespace="team", name="gpt")
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
LAST_STEP = 6


def job(**changes: Any) -> Manifest:
    spec = {
        "image": "local/train",
        "entrypoint": {"script": "train.py"},
        "nodes": {"min": 2, "max": 3},
        "capacity": {"onDemand": {"min": 1}, "spot": {"max": 2}},
        "batch": {"global": 8},
        "checkpoint": {"uri": "s3://bucket/prefix"},
    }
    return {"metadata": {"namespace": KEY.namespace, "name": KEY.name}, "spec": spec | changes}


class CrashingCluster(MemoryCluster):
    """Fails once, before or after its n-th write took effect."""

    def __init__(self, *, crash_at: int | None = None, after: bool = False) -> None:
        super().__init__()
        self._crash_at = crash_at
        self._after = after
        self.num_writes = 0
        self.num_status_writes = 0
        self.created: list[str] = []
        self.deleted: set[str] = set()

    async def _crashing(self, write: Callable[[], Awaitable[Any]]) -> Any:
        self.num_writes += 1
        crashes = self.num_writes == self._crash_at
        if crashes and not self._after:
            raise ClusterError("crashed before the write")
        result = await write()
        if crashes:
            raise ClusterError("crashed after the write")
        return result

    async def replace_job_status(self, job: Manifest) -> Manifest:
        self.num_status_writes += 1
        return dict(await self._crashing(lambda: MemoryCluster.replace_job_status(self, job)))

    async def create_pod(self, pod: Manifest) -> None:
        async def create() -> None:
            await MemoryCluster.create_pod(self, pod)
            self.created.append(pod["metadata"]["name"])

        await self._crashing(create)

    async def delete_pod(self, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None) -> None:
        self.deleted.add(name)
        await self._crashing(
            lambda: MemoryCluster.delete_pod(self, namespace, name, uid=uid, grace_seconds=grace_seconds)
        )

    async def create_event(self, event: Manifest) -> None:
        await self._crashing(lambda: MemoryCluster.create_event(self, event))


@dataclass
class World:
    """The operator, and kubelets and agents that do as they are told; one turn is one second."""

    cluster: CrashingCluster
    now: datetime = BEGIN
    num_crashes: int = 0
    steps: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start_operator()

    def start_operator(self) -> None:
        self.board = AssignmentBoard()
        self.reports = ReportBox(lambda _: None, now=lambda: self.now)
        self.metrics = Metrics(num_agents=lambda: 0)
        self.reconciler = Reconciler(
            plan=plan,
            cluster=self.cluster,
            board=self.board,
            reports=self.reports,
            metrics=self.metrics,
            history=HistoryKeeper(self.cluster),
            control_url="http://control:8080",
            now=lambda: self.now,
        )

    async def turn(self) -> None:
        try:
            await self.reconciler.reconcile(KEY)
        except ClusterError:
            self.num_crashes += 1
            self.start_operator()
        self.cluster.finish_deletions()
        for pod in self.cluster.pods.values():
            self._run(pod)
            await self._agent(pod)
        self.now += timedelta(seconds=1)

    def _run(self, pod: Manifest) -> None:
        """As the scheduler and the kubelet would."""
        name, kind = pod["metadata"]["name"], pod["metadata"]["labels"][LABEL_CAPACITY_TYPE]
        pod["spec"]["nodeName"] = f"{kind}-{name}"
        self.cluster.nodes[f"{kind}-{name}"] = {
            "metadata": {"name": f"{kind}-{name}"},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
        at = BEGIN.isoformat()
        pod["status"] = {
            "phase": "Running",
            "podIP": "127.9.0.1",
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": at},
                {"type": "Ready", "status": "True", "lastTransitionTime": at},
            ],
            "containerStatuses": [{"state": {"running": {"startedAt": at}}}],
        }

    async def _agent(self, pod: Manifest) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        told = await self.board.next(uid, after=None, timeout_seconds=0)
        state: dict[str, Any] = {"phase": AgentPhase.IDLE}
        if told is not None and told.action is AssignmentAction.RUN and told.generation is not None:
            self.steps[uid] = self.steps.get(uid, 0) + 1
        if uid in self.steps:
            state = self._trained(self.steps[uid])
        report = AgentReport(pod=name, pod_uid=uid, warm=True, rendezvous_port=4000, sent_at=self.now, **state)
        self.reports.put(PodIdentity(namespace=KEY.namespace, pod=name, uid=uid), report)

    def _trained(self, step: int) -> dict[str, Any]:
        done = step >= LAST_STEP
        commit = CommitRef(generation=1, step=LAST_STEP, manifest="m", committed_at=BEGIN) if done else None
        progress = Progress(
            generation=1,
            phase=TrainerPhase.DONE if done else TrainerPhase.TRAINING,
            step=min(step, LAST_STEP),
            total_steps=LAST_STEP,
            first_step_at=BEGIN,
            last_step_at=self.now,
            updated_at=self.now,
            commit=commit,
        )
        phase = AgentPhase.SUCCEEDED if done else AgentPhase.RUNNING
        return {"generation": 1, "phase": phase, "progress": progress, "commit": commit, "step_age_seconds": 0.1}

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.cluster.jobs[KEY].get("status", {}))

    async def until_finished(self) -> None:
        for _ in range(90):
            await self.turn()
            if self.status.get("phase") in ("Succeeded", "Failed") and not self.cluster.pods:
                return
        raise AssertionError(f"not finished: {self.status}")


def end_state(world: World) -> dict[str, Any]:
    status = world.status
    return {
        "phase": status["phase"],
        "step": status["progress"]["step"],
        "generation": status["generation"]["number"],
        "commit": status["commit"]["step"],
        "failures": status["failures"],
        "preemptions": status["preemptions"],
        "created": len(world.cluster.created),
        "deleted": len(world.cluster.deleted),
        "pods": len(world.cluster.pods),
    }


async def lived(cluster: CrashingCluster) -> World:
    cluster.put_job(job())
    world = World(cluster)
    await world.until_finished()
    return world


async def test_a_job_lives_from_pods_to_success() -> None:
    world = await lived(CrashingCluster())
    assert end_state(world) == {
        "phase": "Succeeded",
        "step": LAST_STEP,
        "generation": 1,
        "commit": LAST_STEP,
        "failures": 0,
        "preemptions": 0,
        "created": 3,
        "deleted": 3,
        "pods": 0,
    }


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
async def test_a_crash_around_any_write_changes_nothing_in_the_end(after: bool) -> None:
    undisturbed = await lived(CrashingCluster())
    assert undisturbed.cluster.num_writes > 12
    for crash_at in range(1, undisturbed.cluster.num_writes + 1):
        world = await lived(CrashingCluster(crash_at=crash_at, after=after))
        assert world.num_crashes == 1
        assert end_state(world) == end_state(undisturbed), f"crash at write {crash_at}"


async def test_the_second_pass_at_the_same_moment_writes_nothing() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    for _ in range(25):
        await world.reconciler.reconcile(KEY)
        before = cluster.num_writes
        await world.reconciler.reconcile(KEY)
        assert cluster.num_writes == before
        await world.turn()


async def test_agents_are_told_only_what_is_written() -> None:
    """The status write that starts the generation fails: nobody may run yet."""
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    real_write = cluster.replace_job_status

    async def refuse_generations(job: Manifest) -> Manifest:
        if job["status"].get("generation"):
            raise ClusterError("the API server is down")
        return await real_write(job)

    cluster.replace_job_status = refuse_generations  # type: ignore[method-assign]
    for _ in range(30):
        await world.turn()
    assert world.num_crashes > 0
    assert world.steps == {}


async def test_a_spec_that_cannot_be_used_fails_the_job_once_and_takes_its_pods() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.turn()
    assert len(cluster.pods) == 3
    cluster.put_job(job(strategy="wishful"))
    for _ in range(3):
        await world.turn()
    assert world.status["phase"] == "Failed"
    assert "spec.strategy" in world.status["message"]
    assert [condition["type"] for condition in world.status["conditions"]] == ["Failed"]
    assert cluster.pods == {}
    assert [event["reason"] for event in cluster.events].count("InvalidSpec") == 1
    before = cluster.num_writes
    await world.turn()
    assert cluster.num_writes == before


async def test_pods_that_are_refused_fail_the_job_with_the_reason() -> None:
    class Refusing(CrashingCluster):
        async def create_pod(self, pod: Manifest) -> None:
            raise InvalidObjectError('Pod "gpt-1" is invalid: volumeMounts: Not found: "nowhere"')

    cluster = Refusing()
    cluster.put_job(job())
    world = World(cluster)
    await world.turn()
    assert world.status["phase"] == "Failed"
    assert "nowhere" in world.status["message"]


async def test_what_the_cluster_does_not_admit_is_tried_again_and_told() -> None:
    class Forbidding(CrashingCluster):
        async def create_pod(self, pod: Manifest) -> None:
            raise ForbiddenError('serviceaccount "trainer" not found')

    cluster = Forbidding()
    cluster.put_job(job())
    world = World(cluster)
    for _ in range(3):
        with pytest.raises(ForbiddenError):
            await world.reconciler.reconcile(KEY)
    assert world.status["phase"] == "Pending"
    assert 'serviceaccount "trainer" not found' in world.status["message"]
    assert [event["reason"] for event in cluster.events].count("PodNotCreated") == 1


async def test_a_job_that_is_gone_takes_its_pods_and_metrics_along() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.turn()
    assert b'job_name="gpt"' in world.metrics.exposition()[0]
    del cluster.jobs[KEY]
    result = await world.reconciler.reconcile(KEY)
    assert result.gone
    cluster.finish_deletions()
    assert cluster.pods == {}
    assert b'job_name="gpt"' not in world.metrics.exposition()[0]


async def test_pods_that_only_bear_the_labels_are_not_the_jobs() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.turn()
    [some, *_] = cluster.pods.values()
    stranger = {**some, "metadata": {**some["metadata"], "name": "gpt-99", "uid": "x", "ownerReferences": []}}
    cluster.pods[KEY.namespace, "gpt-99"] = stranger
    for _ in range(5):
        await world.reconciler.reconcile(KEY)
    assert "gpt-99" not in cluster.deleted
