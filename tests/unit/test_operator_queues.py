"""The operator's passes over a job in a queue, on a cluster in memory with a Kueue in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from operator_world import KEY, CrashingCluster, World, job
from spottrain_api.contract.names import LABEL_QUEUE, LABEL_QUEUE_PRIORITY
from spottrain_operator.kube.errors import ForbiddenError, NotFoundError
from spottrain_operator.kube.resources import (
    DEFINITIONS,
    PRIORITY_CLASSES,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    Manifest,
)
from spottrain_operator.objects.observe import job_view
from spottrain_operator.objects.placement import of_nodes
from spottrain_operator.objects.workloads import content_of, workload_view
from world.faults import Fault
from world.kueue import MemoryKueue, is_true, nodes_of


def queued(labels: dict[str, str] | None = None, **spec: Any) -> Manifest:
    manifest = job(**spec)
    return manifest | {"metadata": manifest["metadata"] | {"labels": {LABEL_QUEUE: "team-a"} | (labels or {})}}


class Queue:
    """A job in a queue with a quota of so many nodes."""

    def __init__(self, quota: int = 3, manifest: Manifest | None = None, **world: Any) -> None:
        self.cluster = CrashingCluster()
        self.cluster.put_job(manifest or queued())
        self.world = World(self.cluster, uses_kueue=True, **world)
        self.kueue = MemoryKueue(self.cluster, quota)

    async def turn(self) -> None:
        """A pass, and then Kueue. Nodes never exceed what Kueue counts."""
        await self.world.turn()
        assert len(self.cluster.pods) <= self.kueue.used()
        self.kueue.work()

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(90):
            if condition():
                return
            await self.turn()
        raise AssertionError(f"{self.world.status}, {list(self.cluster.workloads.values())}")

    @property
    def world_size(self) -> int:
        generation = self.world.generation
        return len(generation["members"]) if generation.get("state") == "Active" else 0

    @property
    def said(self) -> tuple[str, str]:
        condition = self.world.condition("Admitted")
        return condition["reason"], condition["message"]

    def workload(self, end: str) -> Manifest:
        [found] = [each for (_, name), each in self.cluster.workloads.items() if name.endswith(end)]
        return found

    @property
    def minimum(self) -> Manifest:
        return min(self.cluster.workloads.values(), key=lambda each: len(each["metadata"]["name"]))


async def test_a_job_waits_without_pods_and_runs_once_it_is_admitted_and_grows_within_its_quota() -> None:
    queue = Queue(quota=1, last_step=10_000)
    await queue.until(lambda: "insufficient quota" in queue.world.status.get("message", ""))
    assert queue.world.status["phase"] == "Suspended"
    assert not queue.cluster.pods
    assert queue.said == ("WaitsForQuota", "It waits for quota in queue team-a: insufficient quota, 1 more needed")
    queue.kueue.quota = 2
    await queue.until(lambda: queue.world_size == 2)
    await queue.until(lambda: "For one more, it waits: insufficient quota, 1 more needed" in queue.said[1])
    queue.kueue.quota = 3
    await queue.until(lambda: queue.world_size == 3)
    assert queue.said == ("Admitted", "Kueue grants the job 3 nodes in queue team-a")
    before = queue.cluster.num_writes
    await queue.world.reconciler.reconcile(KEY)
    assert queue.cluster.num_writes == before, "nothing is written without need"


def other(priority: int, count: int) -> Manifest:
    """A Workload of somebody else."""
    return {
        "metadata": {"namespace": KEY.namespace, "name": f"other-{priority}", "labels": {}},
        "spec": {"priority": priority, "podSets": [{"name": "main", "count": count}]},
    }


async def test_a_job_shrinks_for_others_is_preempted_resumes_and_loses_no_step() -> None:
    queue = Queue(last_step=200)
    await queue.until(lambda: queue.world_size == 3)
    first = other(0, 1)
    queue.cluster.workloads[KEY.namespace, "first"] = first
    await queue.until(lambda: is_true(first, "Admitted"))
    await queue.until(lambda: queue.world_size == 2)
    second = other(100, 3)
    queue.cluster.workloads[KEY.namespace, "second"] = second
    del queue.cluster.workloads[KEY.namespace, "first"]
    await queue.until(lambda: is_true(second, "Admitted"))
    assert (queue.world.status["phase"], len(queue.cluster.pods)) == ("Suspended", 0)
    del queue.cluster.workloads[KEY.namespace, "second"]
    await queue.until(lambda: queue.world_size == 3)
    assert queue.world.status.get("stepsRedone", 0) == 0
    reasons = [each["reason"] for each in queue.world.status["transitions"]]
    assert reasons.count("QuotaTaken") == 2


async def test_the_end_of_a_job_releases_its_quota_and_its_workload_says_how_it_ended() -> None:
    queue = Queue()
    await queue.until(lambda: queue.world.status.get("phase") == "Succeeded")
    await queue.until(lambda: queue.kueue.used() == 0)
    await queue.turn()
    [left] = queue.cluster.workloads.values()
    [finished] = [each for each in left["status"]["conditions"] if each["type"] == "Finished"]
    assert (finished["status"], finished["reason"]) == ("True", "Succeeded")
    assert queue.said[0] == "Finished"


@pytest.mark.parametrize("admitted", [True, False])
async def test_a_deleted_job_leaves_nothing_that_holds_quota(admitted: bool) -> None:
    queue = Queue(quota=3 if admitted else 0, last_step=10_000)
    await queue.until(lambda: queue.world_size == 3 if admitted else bool(queue.cluster.workloads))
    del queue.cluster.jobs[KEY]
    await queue.world.turn()
    assert not queue.cluster.workloads


async def test_what_an_earlier_job_of_the_name_has_left_is_deleted() -> None:
    queue = Queue(last_step=10_000)
    await queue.until(lambda: queue.world_size == 3)
    earlier = set(queue.cluster.workloads)
    queue.cluster.jobs[KEY]["metadata"]["uid"] = "another"
    queue.cluster.jobs[KEY].pop("status")
    await queue.world.turn()
    assert not earlier & set(queue.cluster.workloads)


async def test_an_edit_of_what_is_counted_asks_anew_and_an_edit_of_other_things_does_not() -> None:
    queue = Queue(last_step=10_000)
    await queue.until(lambda: queue.world_size == 3)
    before = set(queue.cluster.workloads)
    queue.cluster.put_job(queued(env=[{"name": "A", "value": "1"}]))
    await queue.until(lambda: queue.world_size == 3 and queue.world.generation["number"] > 1)
    assert set(queue.cluster.workloads) == before
    queue.cluster.put_job(queued(nodes={"min": 3, "max": 3}))
    await queue.until(lambda: queue.world_size == 3 and not before & set(queue.cluster.workloads))
    assert nodes_of(queue.minimum) == 3


async def test_a_workload_asks_for_what_pods_ask_for_and_no_more() -> None:
    resources = {"limits": {"nvidia.com/gpu": 2, "cpu": "3"}}
    spec: dict[str, Any] = {"resources": resources, "podTemplate": {"nodeSelector": {"a": "b"}}}
    queue = Queue(manifest=queued(**spec), last_step=10_000)
    await queue.until(lambda: queue.world_size == 3)
    for each in queue.cluster.workloads.values():
        for pod_set in each["spec"]["podSets"]:
            template = pod_set["template"]["spec"]
            [pod] = [p for p in queue.cluster.pods.values() if pod_set["name"] in p["spec"]["nodeName"]][:1]
            real = pod["spec"]
            assert template["containers"] == [{"name": "trainer", "resources": real["containers"][0]["resources"]}]
            assert template["affinity"] == {"nodeAffinity": of_nodes(real["affinity"]["nodeAffinity"])}
            assert (template["nodeSelector"], template["tolerations"]) == ({"a": "b"}, real["tolerations"])
    assert {name: nodes_of(each) for (_, name), each in queue.cluster.workloads.items()} == {
        queue.minimum["metadata"]["name"]: 2,
        f"{queue.minimum['metadata']['name']}-spot-1": 1,
    }


def put_classes(cluster: CrashingCluster) -> None:
    """Priority classes of both kinds. One is the default."""
    for resource, name, value in [
        (WORKLOAD_PRIORITY_CLASSES, "urgent", 1000),
        (PRIORITY_CLASSES, "high", 50),
        (PRIORITY_CLASSES, "usual", 7),
    ]:
        found = {"metadata": {"name": name}, "value": value, "globalDefault": name == "usual"}
        cluster._objects[resource][name] = found


@pytest.mark.parametrize(
    ("manifest", "value", "kind"),
    [
        (queued({LABEL_QUEUE_PRIORITY: "urgent"}), 1000, "WorkloadPriorityClass"),
        (queued(podTemplate={"priorityClassName": "high"}), 50, "PriorityClass"),
        (queued(), 7, "PriorityClass"),
    ],
    ids=["label", "pods", "default"],
)
async def test_a_job_has_the_priority_of_its_class_and_nodes_beyond_its_minimum_come_after(
    manifest: Manifest, value: int, kind: str
) -> None:
    queue = Queue(manifest=manifest)
    put_classes(queue.cluster)
    await queue.until(lambda: len(queue.cluster.workloads) == 2)
    spec = queue.minimum["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["kind"]) == (value, kind)
    more = queue.workload("spot-1")["spec"]
    assert (more["priority"], more.get("priorityClassRef")) == (value - 1, None)


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (queued({LABEL_QUEUE_PRIORITY: "none"}), "names none, and there is no such WorkloadPriorityClass: create it"),
        (queued(podTemplate={"priorityClassName": "none"}), "names none, and there is no such PriorityClass: create"),
    ],
    ids=["label", "pods"],
)
async def test_a_class_that_does_not_exist_is_named_and_the_job_waits_for_it(
    manifest: Manifest, expected: str
) -> None:
    queue = Queue(manifest=manifest, last_step=10_000)
    await queue.until(lambda: expected in queue.world.status.get("message", ""))
    assert queue.said[0] == "WorkloadRefused"
    for resource in (WORKLOAD_PRIORITY_CLASSES, PRIORITY_CLASSES):
        queue.cluster._objects[resource]["none"] = {"metadata": {"name": "none"}, "value": 1}
    await queue.until(lambda: queue.world_size == 3)


class Lacks(Fault):
    """Kueue isn't installed, or is another version."""

    def __init__(self) -> None:
        super().__init__(resource=WORKLOADS, error=NotFoundError("the server could not find the requested resource"))


@pytest.mark.parametrize(
    ("versions", "reason", "expected"),
    [
        (None, "KueueMissing", "Kueue is not installed in this cluster: install version 0.15 or newer, or remove"),
        (["v1beta1"], "KueueTooOld", "serves workloads.kueue.x-k8s.io in v1beta1, and spottrain needs v1beta2"),
    ],
)
async def test_a_cluster_without_kueue_or_with_an_older_one_is_named_and_the_job_runs_once_it_is_there(
    versions: list[str] | None, reason: str, expected: str
) -> None:
    queue = Queue(last_step=10_000)
    lacking = Lacks()
    queue.cluster.before.append(lacking)
    if versions:
        served = {"spec": {"versions": [{"name": name, "served": True} for name in versions]}}
        queue.cluster._objects[DEFINITIONS]["workloads.kueue.x-k8s.io"] = served | {"metadata": {}}
    await queue.until(lambda: expected in queue.world.status.get("message", ""))
    assert (queue.said[0], queue.world.num_crashes) == (reason, 0)
    queue.cluster.before.remove(lacking)
    await queue.until(lambda: queue.world_size == 3)


async def test_a_job_without_a_queue_runs_where_there_is_no_kueue() -> None:
    queue = Queue(manifest=job(), quota=99, last_step=10_000)
    queue.cluster.before.append(Lacks())
    await queue.world.until_running()
    assert not queue.world.condition("Admitted")


async def test_a_refusal_is_named_and_no_pass_fails() -> None:
    queue = Queue(last_step=10_000)
    refusing = Fault(verbs=("create",), resource=WORKLOADS, error=ForbiddenError("a webhook says no"))
    queue.cluster.before.append(refusing)
    await queue.until(lambda: "no quota can be asked for: a webhook says no" in queue.world.status.get("message", ""))
    assert (queue.said[0], queue.world.num_crashes) == ("WorkloadRefused", 0)
    queue.cluster.before.remove(refusing)
    await queue.until(lambda: queue.world_size == 3)


async def test_an_operator_that_does_not_use_kueue_lets_the_job_wait_and_says_so() -> None:
    queue = Queue()
    queue.world.uses_kueue = False
    queue.world.start_operator()
    await queue.turn()
    assert queue.world.status["message"] == (
        "Suspended: it asks for queue team-a (kueue.x-k8s.io/queue-name), and the operator doesn't use Kueue: set "
        "the chart's value kueue.enabled, or remove the label to run the job without a queue"
    )
    assert not queue.cluster.pods


@pytest.mark.parametrize(("crash_at", "after"), [(number, number % 2 == 0) for number in range(1, 10)])
async def test_an_operator_that_dies_at_any_write_loses_no_quota_and_no_step(crash_at: int, after: bool) -> None:
    queue = Queue(last_step=30)
    queue.cluster = CrashingCluster(crash_at=crash_at, after=after)
    queue.cluster._counted = frozenset({WORKLOADS})
    queue.cluster.put_job(queued())
    queue.world = World(queue.cluster, uses_kueue=True, last_step=30)
    queue.kueue = MemoryKueue(queue.cluster, 3)
    await queue.until(lambda: queue.world_size == 3)
    queue.kueue.evict(queue.minimum)
    await queue.until(lambda: is_true(queue.minimum, "Requeued"))
    await queue.until(lambda: queue.world.status.get("phase") == "Succeeded")
    await queue.until(lambda: queue.kueue.used() == 0)
    assert queue.world.status.get("stepsRedone", 0) == 0


def test_the_content_does_not_depend_on_defaults_of_the_operator() -> None:
    manifest = queued()
    manifest["metadata"] |= {"uid": "u1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    view = job_view(manifest)
    assert content_of(view) == content_of(replace(view, metadata_generation=9))
    assert content_of(view) != content_of(replace(view, queue="team-b"))
    assert content_of(view) != content_of(replace(view, uid="u2"))


async def test_a_workload_is_read_as_it_was_made() -> None:
    queue = Queue(quota=0)
    await queue.until(lambda: bool(queue.cluster.workloads))
    await queue.turn()
    view = workload_view(queue.minimum)
    assert {each.value: number for each, number in view.nodes.items()} == {"on-demand": 1, "spot": 1}
    assert (view.admitted, view.reserved, view.reason) == (False, False, "Pending")
