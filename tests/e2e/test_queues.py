"""Jobs in queues of the real Kueue, on a local cluster with the operator as users have it.

Nightly, as a build of Kueue takes minutes, and they need a cluster of their own. `make test-queues` runs them alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cluster_fixtures import Kubectl, wait_for
from e2e.rehearsal import Rehearsal, manifest, num_redone
from kueue_server import kueue
from shared_clusters import BRISK, RunFolder
from spottrain_api.contract.conditions import ConditionType
from spottrain_api.contract.names import LABEL_JOB, LABEL_QUEUE, LABEL_QUEUE_PRIORITY
from spottrain_api.v1alpha1.status import Phase
from spottrain_local.cluster import Cluster
from spottrain_local.install import install_operator
from spottrain_local.spec import ClusterSpec, NodePool

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(900)]

API = "kueue.x-k8s.io/v1beta2"
GPU = "nvidia.com/gpu"
NODES = ClusterSpec(
    nodes=[
        NodePool(name="system", gpus=0),
        NodePool(name="on-demand", count=2),
        NodePool(name="spot", count=4, capacity_type="spot"),
    ]
)
PATIENCE = 120.0
ENOUGH_STEPS = 20


def _operate(cluster: Cluster) -> None:
    timing = {"name": "SPOTTRAIN_TIMING", "value": json.dumps(BRISK)}
    install_operator(cluster, {"operator": {"env": [timing]}, "kueue": {"enabled": True}})


@pytest.fixture(scope="module")
def queue_cluster(run_folder: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with the operator and Kueue. The operator came first."""
    cluster = run_folder.cluster("queues", NODES, _operate)
    kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
    with kueue(kubectl, tmp_path_factory.mktemp("kueue")):
        for name, kind in (("on-demand", "ON_DEMAND"), ("spot", "SPOT")):
            spec = {"nodeLabels": {"eks.amazonaws.com/capacityType": kind}}
            kubectl.apply({"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": spec})
        for name, value in (("high", 1000), ("low", -1000)):
            meta = {"name": name}
            kubectl.apply({"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": meta, "value": value})
        yield cluster


class Queues:
    """Two queues of a cohort in `default`, and who is in them."""

    def __init__(self, cluster: Cluster, **spot: int) -> None:
        self.cluster = cluster
        self.kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
        self.suffix = uuid4().hex[:6]
        self.made: list[tuple[str, str]] = []
        for team, number in spot.items():
            self.set_quota(team, number)
            queue = {"metadata": {"name": self.name(team)}, "spec": {"clusterQueue": self.name(team)}}
            self.kubectl.apply({"apiVersion": API, "kind": "LocalQueue"} | queue)

    def name(self, team: str) -> str:
        return f"{team}-{self.suffix}"

    def set_quota(self, team: str, spot: int) -> None:
        """Let a team have so many spot nodes. All teams borrow from each other."""
        flavors = [
            {
                "name": flavor,
                "resources": [
                    {"name": "cpu", "nominalQuota": 1000},
                    {"name": "memory", "nominalQuota": "100Ti"},
                    {"name": GPU, "nominalQuota": gpus},
                ],
            }
            for flavor, gpus in (("on-demand", 0), ("spot", spot))
        ]
        spec = {
            "namespaceSelector": {},
            "cohortName": self.suffix,
            "preemption": {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Any"},
            "resourceGroups": [{"coveredResources": ["cpu", "memory", GPU], "flavors": flavors}],
        }
        queue = {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": self.name(team)}, "spec": spec}
        self.kubectl.apply(queue)

    def job(self, name: str, team: str, folder: Path, *, priority: str = "", **spec: Any) -> Rehearsal:
        """A job that trains until it may end."""
        usual: dict[str, Any] = {"nodes": {"min": 1, "max": 3}, "capacity": {"fallback": {"policy": "None"}}}
        made = manifest(name, folder, **(usual | spec))
        labels = {LABEL_QUEUE: self.name(team)} | ({LABEL_QUEUE_PRIORITY: priority} if priority else {})
        made["metadata"]["labels"] = labels
        self.made.append(("tj", name))
        run = Rehearsal(cluster=self.cluster, name=name, folder=folder)
        run.apply(made)
        return run

    def rival(self, name: str, team: str, count: int, *, priority: int = 0) -> None:
        """Somebody else's work, which is no job of ours."""
        affinity = {"key": "eks.amazonaws.com/capacityType", "operator": "In", "values": ["SPOT"]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [affinity]}]}
        pod = {
            "containers": [{"name": "c", "resources": {"requests": {GPU: "1"}}}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        }
        pod_sets = [{"name": "main", "count": count, "template": {"spec": pod}}]
        spec = {"queueName": self.name(team), "priority": priority, "podSets": pod_sets}
        self.kubectl.create({"apiVersion": API, "kind": "Workload", "metadata": {"name": name}, "spec": spec})
        self.made.append(("workload", name))

    def is_admitted(self, name: str) -> bool:
        found = self.kubectl.get("workload", name)
        return is_true(found, "Admitted") and not is_true(found, "Evicted")

    def workloads_of(self, job: str) -> list[Any]:
        return self.kubectl.list("workload", labels=f"{LABEL_JOB}={job}")

    def pods_of(self, job: str) -> list[Any]:
        return self.kubectl.list("pod", labels=f"{LABEL_JOB}={job}")

    def granted(self, job: str) -> int:
        """Number of nodes that are counted for a job."""
        held = [each for each in self.workloads_of(job) if is_true(each, "QuotaReserved")]
        held = [each for each in held if not is_true(each, "Finished")]
        return sum(int(pods["count"]) for each in held for pods in each["spec"]["podSets"])

    def used(self, team: str) -> int:
        """GPUs that the queue of a team counts."""
        status = self.kubectl.get("clusterqueue", self.name(team)).get("status", {})
        counted = [each for flavor in status.get("flavorsReservation", ()) for each in flavor["resources"]]
        return sum(int(each["total"]) for each in counted if each["name"] == GPU)

    def end(self) -> None:
        for kind, name in self.made:
            if self.kubectl.has(kind, name):
                self.kubectl.delete(kind, name)


def is_true(workload: Any, kind: str) -> bool:
    conditions = workload.get("status", {}).get("conditions") or ()
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


@pytest.fixture
def queues(queue_cluster: Cluster) -> Iterator[Queues]:
    """Two queues with two spot nodes each."""
    made = Queues(queue_cluster, a=2, b=2)
    yield made
    made.end()


def said(run: Rehearsal) -> tuple[str, str]:
    """Reason and message of the condition Admitted."""
    found = run.status().condition(ConditionType.ADMITTED)
    return (found.reason, found.message) if found is not None else ("", "")


def assert_nothing_redone(run: Rehearsal) -> None:
    assert num_redone(run.records()) == 0
    status = run.status()
    assert (status.steps_redone, status.failures) == (0, 0)


def test_a_job_borrows_shrinks_is_preempted_resumes_and_loses_no_step(queues: Queues, tmp_path: Path) -> None:
    run = queues.job(f"elastic-{queues.suffix}", "a", tmp_path / "elastic")
    run.wait("it borrows a node of the other team", lambda: len(run.members()) == 3, PATIENCE)
    assert queues.used("a") == 3
    queues.rival(f"owner-{queues.suffix}", "b", 2)
    run.wait("it gives the node back", lambda: queues.is_admitted(f"owner-{queues.suffix}"), PATIENCE)
    assert queues.granted(run.name) == 2
    run.wait("it trains on without", lambda: len(run.members()) == 2, PATIENCE)
    queues.rival(f"urgent-{queues.suffix}", "a", 2, priority=1000)
    run.wait("it gives all back", lambda: queues.is_admitted(f"urgent-{queues.suffix}"), PATIENCE)
    assert (run.status().phase, queues.pods_of(run.name)) == ("Suspended", [])
    assert said(run)[0] in ("QuotaTaken", "WaitsForQuota")
    for rival in ("urgent", "owner"):
        queues.kubectl.delete("workload", f"{rival}-{queues.suffix}")
    run.wait("it resumes, and grows", lambda: len(run.members()) == 3, PATIENCE)
    reasons = [each.reason for each in run.status().transitions]
    assert reasons.count("QuotaTaken") == 2
    run.finish()
    assert_nothing_redone(run)
    wait_for(lambda: queues.used("a") == 0, "it holds no quota", 30)


def test_a_lowered_quota_is_taken_back_for_its_owner_and_no_step_is_lost(queues: Queues, tmp_path: Path) -> None:
    run = queues.job(f"lowered-{queues.suffix}", "a", tmp_path / "lowered")
    run.wait("three nodes train", lambda: len(run.members()) == 3, PATIENCE)
    queues.set_quota("a", 1)
    queues.set_quota("b", 2)
    queues.rival(f"owner-{queues.suffix}", "b", 2)
    run.wait("the owner gets its nodes", lambda: queues.is_admitted(f"owner-{queues.suffix}"), PATIENCE)
    run.wait("the job trains on with one", lambda: len(run.members()) == 1, PATIENCE)
    run.finish()
    assert_nothing_redone(run)


def test_a_job_that_waits_says_for_what_and_leaves_nothing_if_it_is_deleted(queues: Queues, tmp_path: Path) -> None:
    queues.rival(f"first-{queues.suffix}", "a", 4)
    wait_for(lambda: queues.is_admitted(f"first-{queues.suffix}"), "the first one is admitted")
    run = queues.job(f"waits-{queues.suffix}", "a", tmp_path / "waits")
    run.wait("it waits", lambda: "insufficient" in said(run)[1], PATIENCE)
    assert run.status().message.startswith(f"Suspended: it waits for quota in queue {queues.name('a')}: ")
    assert not queues.pods_of(run.name)
    queues.kubectl.delete("tj", run.name)
    wait_for(lambda: not queues.workloads_of(run.name), "its Workload goes")
    queues.kubectl.delete("workload", f"first-{queues.suffix}")
    wait_for(lambda: queues.used("a") == 0, "no quota is used")


def test_a_queue_that_does_not_exist_is_named_and_the_job_starts_once_it_does(queues: Queues, tmp_path: Path) -> None:
    run = queues.job(f"lost-{queues.suffix}", "nowhere", tmp_path / "lost", nodes={"min": 1, "max": 1})
    run.wait("it says so", lambda: "doesn't exist" in said(run)[1], PATIENCE)
    assert queues.name("nowhere") in run.status().message
    queue = {"metadata": {"name": queues.name("nowhere")}, "spec": {"clusterQueue": queues.name("b")}}
    queues.kubectl.apply({"apiVersion": API, "kind": "LocalQueue"} | queue)
    run.wait("it trains", lambda: len(run.members()) == 1, PATIENCE)
    run.finish()
    wait_for(lambda: queues.used("b") == 0, "it holds no quota", 30)


def test_ten_jobs_in_two_queues_all_end_and_lose_no_step_to_preemptions(queues: Queues, tmp_path: Path) -> None:
    """Six of usual priority come first, then two low and two high ones. The short ones end by themselves."""
    runs: list[Rehearsal] = []
    for number in range(10):
        team, priority = "ab"[number % 2], {6: "low", 7: "low", 8: "high", 9: "high"}.get(number, "")
        name = f"ten-{number}-{queues.suffix}"
        if priority == "high":
            runs[0].wait("one trains before the urgent ones come", lambda: runs[0].status().progress.step, PATIENCE)
        nodes = {"min": 1 + number % 2, "max": 2}
        runs.append(queues.job(name, team, tmp_path / name, priority=priority, nodes=nodes))

    def have_ended() -> bool:
        for run in runs:
            if (run.status().progress.step or 0) >= ENOUGH_STEPS:
                (run.folder / "over").touch()
        return all(run.status().phase == Phase.SUCCEEDED for run in runs)

    wait_for(have_ended, "all jobs end", 600)
    for run in runs:
        assert_nothing_redone(run)
    wait_for(lambda: queues.used("a") == queues.used("b") == 0, "no quota is used", 30)
