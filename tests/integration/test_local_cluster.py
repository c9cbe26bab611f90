"""The local cluster as its users meet it: real processes, real kubectl."""

import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest

from cluster_fixtures import Kubectl, processes_of, throw_away_cluster, wait_for
from spottrain_local.cluster import Cluster
from spottrain_local.layout import LocalClusterError
from spottrain_local.node.api import ApiClient
from spottrain_local.spec import ClusterSpec, NodePool

pytestmark = pytest.mark.cluster

ONE_SPOT_NODE = ClusterSpec(nodes=[NodePool(name="spot", capacity_type="spot")])


@pytest.fixture
def kubectl(whole_cluster: Cluster) -> Kubectl:
    return Kubectl(kubeconfig=whole_cluster.kubeconfig)


def test_nodes_are_ready_and_look_like_those_of_the_cloud(whole_cluster: Cluster, kubectl: Kubectl) -> None:
    assert kubectl.ready_nodes() == {"system-0", "on-demand-0", "spot-0", "spot-1"}
    spot = kubectl.get("node", "spot-0")
    assert spot["metadata"]["labels"]["eks.amazonaws.com/capacityType"] == "SPOT"
    assert "nvidia.com/gpu" not in spot["status"]["allocatable"]


def test_nodes_offer_their_gpus(local_cluster: Cluster) -> None:
    spot = Kubectl(kubeconfig=local_cluster.kubeconfig).get("node", "spot-0")
    assert spot["status"]["allocatable"]["nvidia.com/gpu"] == "8"


def test_kubeconfig_is_for_the_user_alone(whole_cluster: Cluster) -> None:
    assert stat.S_IMODE(whole_cluster.kubeconfig.stat().st_mode) == 0o600


def test_version_is_stamped(kubectl: Kubectl) -> None:
    assert '"gitVersion": "v1.36.' in kubectl("version", "-o", "json")


def test_pod_security_is_enforced(kubectl: Kubectl) -> None:
    metadata = {"name": "restricted", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    kubectl("create", "-f", "-", stdin=json.dumps(namespace))
    refused = kubectl.run("run", "root", "--image=any", "-n", "restricted")
    assert refused.returncode != 0
    assert "violates PodSecurity" in refused.stderr


def test_projected_token_is_good_for_its_audience_alone(kubectl: Kubectl) -> None:
    token = kubectl("create", "token", "default", "--audience=spottrain").strip()

    def review(audience: str) -> bool:
        body = f"""{{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
                     "spec": {{"token": "{token}", "audiences": ["{audience}"]}}}}"""
        answer = kubectl("create", "-o", "jsonpath={.status.authenticated}", "-f", "-", stdin=body)
        return answer == "true"

    assert review("spottrain")
    assert not review("https://kubernetes.default.svc")


def test_object_store_has_its_bucket(whole_cluster: Cluster) -> None:
    boto3 = pytest.importorskip("boto3")
    store = whole_cluster.running_status()["store"]
    client = boto3.client(
        "s3",
        endpoint_url=store["AWS_ENDPOINT_URL_S3"],
        aws_access_key_id=store["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=store["AWS_SECRET_ACCESS_KEY"],
        region_name=store["AWS_REGION"],
    )
    client.put_object(Bucket="checkpoints", Key="a/b", Body=b"c", IfNoneMatch="*")
    with pytest.raises(client.exceptions.ClientError, match="PreconditionFailed"):
        client.put_object(Bucket="checkpoints", Key="a/b", Body=b"d", IfNoneMatch="*")
    assert client.get_object(Bucket="checkpoints", Key="a/b")["Body"].read() == b"c"


def test_a_preempted_node_goes_at_its_deadline_and_comes_back_fresh(whole_cluster: Cluster, kubectl: Kubectl) -> None:
    before = kubectl.get("node", "spot-0")["metadata"]["uid"]
    whole_cluster.preempt(["spot-0"], notice_seconds=1)
    assert (whole_cluster.layout.node("spot-0") / "interruption.json").exists()
    wait_for(lambda: kubectl.run("get", "node", "spot-0").returncode, "the Node is deleted")
    whole_cluster.restore(["spot-0"])
    wait_for(lambda: "spot-0" in kubectl.ready_nodes(), "the node is Ready again")
    assert kubectl.get("node", "spot-0")["metadata"]["uid"] != before
    assert not (whole_cluster.layout.node("spot-0") / "interruption.json").exists()


def test_a_cancelled_notice_takes_nothing(whole_cluster: Cluster, kubectl: Kubectl) -> None:
    whole_cluster.preempt(["spot-1"], notice_seconds=60)
    whole_cluster.cancel(["spot-1"])
    assert not (whole_cluster.layout.node("spot-1") / "interruption.json").exists()
    assert {node["node"]: node["state"] for node in whole_cluster.running_status()["nodes"]}["spot-1"] == "running"


def test_a_part_that_dies_is_started_again(whole_cluster: Cluster, kubectl: Kubectl) -> None:
    def scheduler() -> dict[str, int]:
        return next(p for p in whole_cluster.running_status()["parts"] if p["name"] == "kube-scheduler")

    first = scheduler()["pid"]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: scheduler()["pid"] not in (None, first), "another scheduler runs")


@pytest.mark.parametrize(
    ("verb", "nodes", "sentence"),
    [
        ("kill", ["spot-9"], r"no node 'spot-9' in this cluster. Its nodes are system-0"),
        ("restore", ["spot-1"], r"spot-1 is not gone"),
        ("cancel", ["spot-1"], r"Nothing is announced"),
        ("kill", [], r"Name at least one node"),
    ],
)
def test_wrong_requests_are_refused_with_a_sentence(
    whole_cluster: Cluster, verb: str, nodes: list[str], sentence: str
) -> None:
    with pytest.raises(LocalClusterError, match=sentence):
        getattr(whole_cluster, verb)(nodes)


def test_on_demand_nodes_are_not_preempted(whole_cluster: Cluster) -> None:
    with pytest.raises(LocalClusterError, match="on-demand-0 is on-demand"):
        whole_cluster.preempt(["on-demand-0"], notice_seconds=30)


def test_two_clusters_side_by_side_until_the_state_of_one_is_removed(
    whole_cluster: Cluster, kubectl: Kubectl, tmp_path: Path
) -> None:
    # Longer than a unix socket's name may be.
    root = tmp_path / ("deep-" * 20) / "other"
    with throw_away_cluster(root, ONE_SPOT_NODE) as other:
        other_kubectl = Kubectl(kubeconfig=other.kubeconfig)
        other_kubectl("create", "configmap", "only-there")
        assert other_kubectl.ready_nodes() == {"spot-0"}
        assert kubectl.run("get", "configmap", "only-there").returncode != 0
        mine, theirs = (
            {address["address"] for address in of.get("node", "spot-0")["status"]["addresses"]}
            for of in (kubectl, other_kubectl)
        )
        assert len(mine & theirs) <= 1  # the hostname
        other.kill(["spot-0"])
        assert "spot-0" in kubectl.ready_nodes()
        shutil.rmtree(root)
        wait_for(lambda: not processes_of(root), "the supervisor and all that it started have ended", seconds=15)
    assert kubectl.ready_nodes() >= {"system-0", "spot-0"}


def test_state_survives_down_and_a_killed_supervisor_and_down_ends_one_that_hangs(tmp_path: Path) -> None:
    with throw_away_cluster(tmp_path / "durable", ONE_SPOT_NODE) as cluster:
        kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
        kubectl("create", "configmap", "kept", "--from-literal=a=b")
        uid = kubectl.get("node", "spot-0")["metadata"]["uid"]

        assert cluster.down()
        assert not processes_of(tmp_path)
        assert cluster.status() is None
        cluster.up()
        assert kubectl.get("configmap", "kept")["data"] == {"a": "b"}
        assert kubectl.get("node", "spot-0")["metadata"]["uid"] == uid

        supervisor = int(cluster.layout.lock.read_text())
        os.kill(supervisor, signal.SIGKILL)
        wait_for(lambda: not processes_of(tmp_path), "everything dies with the supervisor", seconds=5)
        cluster.up()
        assert kubectl.get("configmap", "kept")["data"] == {"a": "b"}
        assert kubectl.ready_nodes() == {"spot-0"}

        os.kill(int(cluster.layout.lock.read_text()), signal.SIGSTOP)
        assert cluster.down()
        wait_for(lambda: not processes_of(tmp_path), "everything has ended", seconds=5)


async def test_nodes_can_not_touch_each_other(whole_cluster: Cluster) -> None:
    """A node's credentials are good for that node alone.

    The Node authorizer and NodeRestriction are on.
    """
    pki = whole_cluster.layout.pki
    client = ApiClient(
        whole_cluster.running_status()["server"],
        ca_file=pki / "ca.crt",
        cert_file=pki / "node-spot-0.crt",
        key_file=pki / "node-spot-0.key",
    )
    labels = {"metadata": {"labels": {"example.com/mine": "yes"}}}
    async with client:
        await client.patch("/api/v1/nodes/spot-0", labels)
        with pytest.raises(Exception, match="not allowed to modify node"):
            await client.patch("/api/v1/nodes/on-demand-0", labels)


def test_a_cluster_that_does_not_run_says_how_to_start_it(tmp_path: Path) -> None:
    from spottrain_local.layout import ClusterLayout

    with pytest.raises(LocalClusterError, match="Start it with `spottrain local up --name absent`"):
        Cluster(layout=ClusterLayout(root=tmp_path / "absent")).kill(["spot-0"])


def test_the_control_plane_heals_when_its_store_dies(whole_cluster: Cluster, kubectl: Kubectl) -> None:
    etcd = next(p for p in whole_cluster.running_status()["parts"] if p["name"] == "etcd")
    kubectl("create", "configmap", "before")
    os.kill(etcd["pid"], signal.SIGKILL)
    wait_for(lambda: kubectl.run("get", "configmap", "before").returncode == 0, "the API answers again")
    kubectl("create", "configmap", "after")


def test_names_of_services_follow_their_pods(whole_cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl("create", "namespace", "names")
    kubectl("run", "web", "--image=any", "-n", "names", "--labels=app=web", "--command", "--", "sleep", "600")
    kubectl("expose", "pod", "web", "--port=80", "-n", "names")

    def line() -> str:
        hosts = whole_cluster.layout.hosts.read_text().splitlines()
        return next((entry for entry in hosts if " web.names.svc " in entry), "")

    wait_for(line, "the Service has a name")
    assert line().split()[0] == kubectl.get("pod", "web", "names")["status"]["podIP"]
    kubectl("delete", "namespace", "names", "--wait=true")
    wait_for(lambda: not line(), "its name is gone")
