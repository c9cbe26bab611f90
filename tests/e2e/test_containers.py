"""The chart, and a job, the drain of a node and a preemption in containers.

They are on a local cluster whose nodes run podman.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cluster_fixtures import SMALL, Kubectl, wait_for
from container_fixtures import command, containers, network
from e2e.rehearsal import rehearsal
from spottrain_local.cluster import Cluster
from spottrain_local.install import NAMESPACE, install_operator
from spottrain_local.layout import ClusterLayout
from spottrain_local.podman import bridge_name, namespaces

pytestmark = [pytest.mark.containers, pytest.mark.timeout(400)]

SPEC = SMALL.model_copy(update={"runtime": "podman"})


@pytest.fixture
def cluster(tmp_path: Path, operator_image: str) -> Iterator[Cluster]:
    """A cluster that runs containers, with the operator."""
    cluster = Cluster(layout=ClusterLayout(root=tmp_path / "cluster"))
    try:
        cluster.up(SPEC)
        install_operator(cluster)
        yield cluster
    finally:
        cluster.down()


def mounts() -> list[str]:
    """The file systems of containers that are mounted in the tests' store."""
    return [line for line in Path("/proc/mounts").read_text().splitlines() if "/spottrain/containers/" in line]


def assert_nothing_is_left(cluster: Cluster) -> None:
    assert containers(cluster) == []
    assert namespaces(network(cluster)) == []
    assert not Path("/sys/class/net", bridge_name(network(cluster))).exists()
    assert [line for line in mounts() if "/merged " in line] == []


TWO_NODES: dict[str, Any] = {
    "podTemplate": {"readOnlyRootFilesystem": True},
    "nodes": {"min": 1, "max": 2},
    "capacity": {"onDemand": {"min": 1, "max": 1}, "spot": {"max": 1}},
}


def test_a_job_in_containers_loses_no_step_to_a_drain_and_a_preemption(
    cluster: Cluster, trainer_image: str, shared_folder: Path
) -> None:
    kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
    parts = {pod["metadata"]["name"].split("-")[1]: pod for pod in kubectl.list("pod", NAMESPACE)}
    assert parts["operator"]["status"]["podIP"].startswith(f"10.{network(cluster)}.")
    assert "leads" in kubectl("logs", "-n", NAMESPACE, "deploy/spottrain-operator")

    with rehearsal(cluster, "containers", shared_folder, members=2, image=trainer_image, **TWO_NODES) as run:
        [node] = run.wait_for_spot_nodes()
        assert len(containers(cluster, node)) == 2  # the watcher and the member
        with run.incident("the node of a spot member is drained"):
            kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s")
            assert len(containers(cluster, node)) == 1
        kubectl("uncordon", node)

        run.wait_for_spot(1, ready=2)
        [node] = run.wait_for_spot_nodes()
        with run.incident("one node, 15 s of notice, to the end"):
            run.preempt([node], 15)
            run.wait("the node is gone", lambda: node in run.gone(), 40)
        wait_for(lambda: not containers(cluster, node), "podman has forgotten the node's containers")
        status = run.finish()
    assert [incident.redone for incident in run.evidence] == [0, 0]
    assert (status.failures, status.steps_redone, status.preemptions_without_notice) == (0, 0, 0)

    cluster.down()
    assert_nothing_is_left(cluster)


# Numbers of a user and a group that no image knows.
USER, GROUP_ID = 12345, 23456
LOOKS = """
id -u; cat /map/key; cat /secret/key; echo mine > /empty/file; stat -c %g /empty/file
cat /var/run/secrets/kubernetes.io/serviceaccount/namespace; echo
getent hosts spottrain-operator.spottrain-system.svc | cut -d. -f1; echo over > /dev/termination-log
"""


def pod(name: str, container: dict[str, object], **spec: object) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "c"} | container], **spec},
    }


def test_pods_have_what_a_kubelet_gives_them(cluster: Cluster, base_image: str) -> None:
    kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
    looking = pod(
        "looks",
        {
            "image": base_image,
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", LOOKS],
            "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in ("map", "secret", "empty")],
        },
        securityContext={"runAsUser": USER, "fsGroup": GROUP_ID},
        volumes=[
            {"name": "map", "configMap": {"name": "a"}},
            {"name": "secret", "secret": {"secretName": "a", "defaultMode": 0o400}},
            {"name": "empty", "emptyDir": {}},
        ],
    )
    objects = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"key": "map\n"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}, "stringData": {"key": "secret\n"}},
        looking,
        pod("never", {"image": "localhost/nothing:1", "imagePullPolicy": "Never"}),
        pod("missing", {"image": "localhost/nothing:1", "imagePullPolicy": "IfNotPresent"}),
    ]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def status(name: str) -> dict[str, Any]:
        return dict((kubectl.get("pod", name)["status"].get("containerStatuses") or [{}])[0].get("state") or {})

    def waiting(name: str, field: str = "reason") -> str:
        return str(status(name).get("waiting", {}).get(field))

    wait_for(lambda: "terminated" in status("looks"), "the pod has ended")
    lines = [str(USER), "map", "secret", str(GROUP_ID), "default", "10"]
    assert kubectl("logs", "looks").splitlines() == lines
    ended = status("looks")["terminated"]
    assert (ended["exitCode"], ended["message"]) == (0, "over\n")
    wait_for(lambda: waiting("never") == "ErrImageNeverPull", "the image is missing")
    wait_for(lambda: waiting("missing") == "ImagePullBackOff", "the image cannot be pulled")
    backs_off = 'Back-off pulling image "localhost/nothing:1": ErrImagePull: '
    wait_for(lambda: waiting("missing", "message").startswith(backs_off), "the registry's answer is kept")


def test_nothing_is_left_of_a_supervisor_that_was_killed(cluster: Cluster) -> None:
    kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
    before = set(containers(cluster))
    assert len(before) == 3  # the operator and two watchers
    inside = [int(pid) for pid in command("podman", "inspect", "--format={{.State.Pid}}", *before).split()]
    os.kill(int(cluster.layout.lock.read_text()), signal.SIGKILL)
    wait_for(lambda: not any(map(psutil.pid_exists, inside)), "the containers' processes are gone", 10)

    cluster.up()
    assert before.isdisjoint(containers(cluster))
    wait_for(lambda: len(kubectl.ready_nodes()) == 4, "all nodes are ready")
    os.kill(int(cluster.layout.lock.read_text()), signal.SIGKILL)
    wait_for(lambda: cluster.status() is None, "the supervisor is gone")
    cluster.down()
    assert_nothing_is_left(cluster)
