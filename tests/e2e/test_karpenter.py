"""Jobs whose nodes the real Karpenter makes, on a local cluster with the operator as users have it.

Nightly, as a build of Karpenter takes minutes, and they need a cluster of their own. `make test-karpenter` runs them
alone. Its nodes run nothing: these tests are about which nodes there are, and which stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from cluster_fixtures import Kubectl
from karpenter_server import NODE_CLASS, Kubelets, karpenter, nodes
from minimal_job import MINIMAL
from shared_clusters import RunFolder
from spottrain_api.contract.names import ANNOTATION_DO_NOT_DISRUPT, API_VERSION, KIND, LABEL_JOB
from spottrain_local.cluster import Cluster
from spottrain_local.install import install_operator
from spottrain_local.spec import ClusterSpec, NodePool

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(900)]

NODES = ClusterSpec(nodes=[NodePool(name="system", gpus=0)])
SPOT, ON_DEMAND = "spot", "on-demand"
# While a node is new.
OF_KARPENTER = {"karpenter.sh/unregistered", "node.kubernetes.io/not-ready"}
# No instance has it.
NOWHERE = {"node.kubernetes.io/instance-type": "none-such"}


def pool(name: str, kind: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "capacityType": kind, "provider": "karpenter", "nodeClass": NODE_CLASS} | changes


class Jobs:
    """A job, and what Karpenter has made for it."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl, self.kubelets = kubectl, Kubelets(kubectl)
        self.name = f"gpt-{uuid4().hex[:6]}"
        self.label = {"example.com/job": self.name}

    def apply(self, *pools: dict[str, Any], **capacity: Any) -> None:
        """A job of two nodes in these pools, of which nobody else's pods get nodes."""
        own = [each | {"nodeSelector": self.label | each.get("nodeSelector", {})} for each in pools]
        spec = {
            "nodes": {"min": 1, "max": 2},
            "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
            "capacity": {"spot": {"max": 2}, "pools": own} | capacity,
            "checkpoint": {"uri": f"s3://bucket/{self.name}"},
        }
        job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": self.name}, "spec": MINIMAL | spec}
        self.kubectl.apply(job)

    def kinds(self) -> list[str]:
        """How the nodes of the job's pods are bought."""
        bought = {each["metadata"]["name"]: each["metadata"]["labels"] for each in nodes(self.kubectl)}
        found = [bought.get(each["spec"].get("nodeName", ""), {}) for each in self.pods()]
        return sorted(each["karpenter.sh/capacity-type"] for each in found if each)

    def pods(self) -> list[Any]:
        return self.kubectl.list("pod", labels=f"{LABEL_JOB}={self.name}")

    def pools(self) -> list[Any]:
        return self.kubectl.list("nodepool", labels=f"{LABEL_JOB}={self.name}")

    def condition(self, kind: str) -> dict[str, str]:
        conditions = self.kubectl.get("tj", self.name).get("status", {}).get("conditions", ())
        return next((each for each in conditions if each["type"] == kind), {})

    def end(self) -> None:
        """Delete the job, and see that nothing is left of it."""
        if self.kubectl.has("tj", self.name):
            self.kubectl.delete("tj", self.name)
        self.kubelets.until(lambda: not self.pools(), "its NodePools are gone")
        self.kubelets.until(lambda: not nodes(self.kubectl), "their nodes are gone")


@pytest.fixture(scope="module")
def cluster(run_folder: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with the operator and Karpenter. The operator came first."""
    made = run_folder.cluster(
        "karpenter", NODES, lambda each: install_operator(each, {"karpenter": {"enabled": True}})
    )
    with karpenter(Kubectl(kubeconfig=made.kubeconfig), tmp_path_factory.mktemp("karpenter")):
        yield made


@pytest.fixture
def jobs(cluster: Cluster) -> Iterator[Jobs]:
    made = Jobs(Kubectl(kubeconfig=cluster.kubeconfig))
    yield made
    made.end()


def test_a_jobs_pods_get_nodes_of_its_own_pools_as_they_are_bought(jobs: Jobs) -> None:
    taint = {"key": "example.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    jobs.apply(pool("a", SPOT, tolerations=[taint]), pool("b", ON_DEMAND), onDemand={"min": 1})
    jobs.kubelets.until(lambda: jobs.kinds() == [ON_DEMAND, SPOT], "each pod has a node of its type")
    mine = {each["metadata"]["name"] for each in jobs.pools()}
    for node in nodes(jobs.kubectl):
        labels = node["metadata"]["labels"]
        assert labels["karpenter.sh/nodepool"] in mine
        assert labels["example.com/job"] == jobs.name
        taints = {each["key"] for each in node["spec"].get("taints", ())} - OF_KARPENTER
        assert taints == ({"example.com/gpu"} if labels["karpenter.sh/capacity-type"] == SPOT else set()), node[
            "spec"
        ]


def test_the_pool_of_more_weight_comes_first_and_its_node_pool_has_it(jobs: Jobs) -> None:
    jobs.apply(pool("dear", SPOT, weight=10), pool("cheap", SPOT, weight=50))
    jobs.kubelets.until(lambda: jobs.kinds() == [SPOT, SPOT], "its pods have nodes")
    [first] = [each["metadata"]["name"] for each in jobs.pools() if each["spec"]["weight"] == 50]
    assert {each["metadata"]["labels"]["karpenter.sh/nodepool"] for each in nodes(jobs.kubectl)} == {first}


def test_on_demand_nodes_stand_in_for_spot_nodes_that_karpenter_can_not_make(jobs: Jobs) -> None:
    jobs.apply(pool("a", SPOT, nodeSelector=NOWHERE), pool("b", ON_DEMAND), fallback={"afterSeconds": 3})
    jobs.kubelets.until(lambda: ON_DEMAND in jobs.kinds(), "an on-demand node stands in")
    assert SPOT not in jobs.kinds()
    assert jobs.condition("SpotAvailable")["reason"] == "FellBack"


def test_a_job_without_pools_asks_for_or_ed_terms_and_karpenter_finds_its_own(jobs: Jobs) -> None:
    [theirs] = (pool("a", SPOT),)
    spec = {
        "template": {
            "spec": {
                "nodeClassRef": NODE_CLASS,
                "requirements": [
                    {"key": "karpenter.sh/capacity-type", "operator": "In", "values": [theirs["capacityType"]]}
                ],
            }
        }
    }
    made = {"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": jobs.name}, "spec": spec}
    jobs.kubectl.apply(made)
    try:
        jobs.apply()
        jobs.kubelets.until(lambda: jobs.kinds() == [SPOT, SPOT], "its pods have nodes of the NodePool")
    finally:
        jobs.kubectl.delete("nodepool", jobs.name)


def test_a_node_class_that_does_not_exist_is_named(jobs: Jobs) -> None:
    jobs.apply(pool("a", SPOT, nodeClass=NODE_CLASS | {"name": "none-such"}))
    jobs.kubelets.until(
        lambda: jobs.condition("NodePoolsReady").get("reason") == "NodePoolNotReady", "the job says so"
    )
    assert "Karpenter makes no nodes of NodePool" in jobs.condition("NodePoolsReady")["message"]


def test_karpenter_understands_for_how_long_a_new_pods_node_stays(jobs: Jobs) -> None:
    """Its nodes drift, as their NodePool has changed. Karpenter says until when it leaves one alone for its pod."""
    jobs.apply(pool("a", SPOT))
    jobs.kubelets.until(lambda: jobs.kinds() == [SPOT, SPOT], "its pods have nodes")
    assert {each["metadata"]["annotations"][ANNOTATION_DO_NOT_DISRUPT] for each in jobs.pods()} == {"10m"}
    before = {each["metadata"]["name"] for each in nodes(jobs.kubectl)}
    taint = {"key": "example.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    jobs.apply(pool("a", SPOT, tolerations=[taint]))

    def explained() -> bool:
        events = jobs.kubectl.list("events")
        mine = [each for each in events if each["involvedObject"].get("name", "").startswith(jobs.name)]
        return any(each["reason"] == "DoNotDisruptUntil" for each in mine)

    jobs.kubelets.until(explained, "Karpenter says until when", 180.0)
    assert before <= {each["metadata"]["name"] for each in nodes(jobs.kubectl)}
