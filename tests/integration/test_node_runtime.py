"""The node runtime against a real control plane.

A node of the tests' own joins the shared local cluster.
"""

import base64
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster_fixtures import Kubectl, wait_for
from etcd import Etcd
from runtime_node import NAMESPACE, NODE, ONLY_HERE, NodeProcess, Pods, running_node, sh
from spottrain_local.cluster import Cluster

pytestmark = pytest.mark.cluster

# Several sessions deep, and deaf to SIGTERM: what is hardest to get rid of.
STUBBORN = "trap '' TERM; setsid sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' &); echo ready; sleep 1000"


@pytest.fixture(scope="module")
def node(local_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with running_node(local_cluster, tmp_path_factory.mktemp("node")) as node:
        yield node


@pytest.fixture
def pods(kubectl: Kubectl, node: NodeProcess) -> Iterator[Pods]:
    """Pods, all of which are gone after the test."""
    yield Pods(kubectl)
    for kind in ("deployment", "daemonset", "pod"):
        kubectl.delete_all(kind, NAMESPACE, grace_seconds=1)
    wait_for(lambda: not kubectl.list("pod", NAMESPACE), "the test's pods are gone")
    wait_for(lambda: not node.pod_processes(), "the test's processes are gone")


def test_a_pod_runs_to_its_end(pods: Pods, node: NodeProcess) -> None:
    mount = {"volumeMounts": [{"name": "d", "mountPath": "/data"}]}
    env = [
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "GREETING", "value": "hello $(IP)"},
    ]
    pods.create(
        "done",
        sh("cat /data/x; echo $(GREETING)", env=env, **mount),
        initContainers=[{"name": "i", "image": "none", **sh("echo made > /data/x"), **mount}],
        volumes=[{"name": "d", "emptyDir": {}}],
    )
    status = pods.wait_phase("done", "Succeeded")
    assert status["podIP"].rsplit(".", 1)[0] == node.ip.rsplit(".", 1)[0]
    assert status["hostIP"] == node.ip
    assert pods.logs("done") == f"made\nhello {status['podIP']}\n"
    ended = status["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (0, "Completed")


def test_logs_are_followed_while_the_pod_runs(pods: Pods, kubectl: Kubectl) -> None:
    pods.create("talks", sh("echo one; while [ ! -e go ]; do sleep 0.05; done; echo two"))
    pods.wait_log("talks", "one")
    command = ["kubectl", f"--kubeconfig={kubectl.kubeconfig}", "logs", "-f", "-n", NAMESPACE, "talks"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "one\n"
        uid = pods.get("talks")["metadata"]["uid"]
        folders = [p.environ()["HOME"] for p in psutil.process_iter() if _runs_in(p, uid)]
        (Path(folders[0]) / "go").touch()
        assert following.stdout.read() == "two\n"
    assert pods.logs("talks", "--tail=1") == "two\n"
    assert pods.logs("talks", "--timestamps").startswith("20")


def _runs_in(process: psutil.Process, uid: str) -> bool:
    try:
        return f"/pods/{uid[:8]}/home" in process.environ().get("HOME", "")
    except psutil.Error:
        return False


def test_a_failing_container_is_restarted_with_back_off(pods: Pods) -> None:
    pods.create("fails", sh("echo attempt; exit 3"), restartPolicy="OnFailure")
    wait_for(lambda: pods.container("fails")["restartCount"] >= 2, "two restarts")
    wait_for(
        lambda: pods.container("fails")["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff", "back-off"
    )
    found = pods.container("fails")
    assert found["lastState"]["terminated"]["exitCode"] == 3
    assert pods.status("fails")["phase"] == "Running"
    assert pods.logs("fails", "--previous") == "attempt\n"


def test_the_log_of_the_last_run_is_shown_until_the_next_one_starts(pods: Pods, kubectl: Kubectl) -> None:
    source = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "goes"}, "data": {"a": "b"}}
    pods.apply(source)
    container = sh("echo attempt; exit 3", envFrom=[{"configMapRef": {"name": "goes"}}])
    pods.create("waits", container, restartPolicy="OnFailure")
    wait_for(lambda: pods.container("waits")["restartCount"] >= 1, "a restart")
    kubectl.delete("configmap", "goes", NAMESPACE)
    wait_for(
        lambda: pods.container("waits")["state"].get("waiting", {}).get("reason") == "CreateContainerConfigError",
        "the next run waits",
    )
    assert pods.logs("waits", "--previous") == "attempt\n"
    assert pods.logs("waits") == "attempt\n"


@pytest.mark.parametrize(
    ("name", "container", "kind", "reason", "message"),
    [
        ("no-file", {"command": ["/no/such"]}, "terminated", "StartError", "'/no/such' does not exist"),
        ("no-command", {}, "waiting", "CreateContainerConfigError", "has no command"),
        (
            "no-map",
            {"command": ["true"], "envFrom": [{"configMapRef": {"name": "nope"}}]},
            "waiting",
            "CreateContainerConfigError",
            'configmap "nope" not found',
        ),
    ],
)
def test_a_container_that_cannot_start_says_why(
    pods: Pods, name: str, container: dict[str, Any], kind: str, reason: str, message: str
) -> None:
    pods.create(name, container)
    wait_for(lambda: pods.container(name)["state"].get(kind, {}).get("reason") == reason, f"{name} is {reason}")
    assert message in pods.container(name)["state"][kind]["message"]


def test_deletion_gives_the_grace_period_and_then_kills(pods: Pods, node: NodeProcess) -> None:
    pods.create("polite", sh("trap 'echo bye; exit 0' TERM; echo ready; while true; do sleep 0.02; done"))
    pods.create("stubborn", sh(STUBBORN), terminationGracePeriodSeconds=2)
    pods.wait_log("polite", "ready")
    pods.wait_log("stubborn", "ready")
    pods.delete("polite", "--grace-period=600")  # longer than kubectl may take
    began = time.monotonic()
    pods.delete("stubborn")
    assert time.monotonic() - began > 1.5
    assert not node.pod_processes()


def test_a_forced_deletion_leaves_no_process(pods: Pods, node: NodeProcess) -> None:
    pods.create("forced", sh(STUBBORN), terminationGracePeriodSeconds=600)
    pods.wait_log("forced", "ready")
    pods.delete("forced", "--force", "--grace-period=0")
    wait_for(lambda: not node.pod_processes(), "the pod's processes are gone")


def test_a_pod_that_etcd_no_longer_knows_has_its_grace_period(
    pods: Pods, node: NodeProcess, local_cluster: Cluster, tmp_path: Path
) -> None:
    """As after a restore of etcd from a backup that is older than the pod."""
    said = tmp_path / "said"
    script = f"trap 'sleep 2; echo bye > {said}; exit 0' TERM; echo ready; while true; do sleep 0.02; done"
    pods.create("forgotten", sh(script), terminationGracePeriodSeconds=20)
    pods.wait_log("forgotten", "ready")
    Etcd(cluster=local_cluster).ctl("del", f"/registry/pods/{NAMESPACE}/forgotten")
    wait_for(lambda: not node.pod_processes(), "the pod's processes are gone", 15)
    assert said.read_text() == "bye\n"


def test_a_status_that_goes_back_is_reported_again(pods: Pods) -> None:
    """As after a restore of etcd from a backup that was made while the pod started."""
    pods.create("back", sh("echo ready; sleep 1000"))
    pods.wait_log("back", "ready")
    wait_for(lambda: pods.status("back")["phase"] == "Running", "it runs")
    before = {"status": {"phase": "Pending", "conditions": None, "containerStatuses": None}}
    pods.kubectl.patch("pod", "back", before, NAMESPACE, subresource="status")
    wait_for(lambda: pods.status("back")["phase"] == "Running", "it is reported to run")
    assert "running" in pods.container("back")["state"]


def test_a_pod_that_started_at_another_address_is_reported_at_the_nodes(pods: Pods, node: NodeProcess) -> None:
    """As after a cluster that went down while the pod started came up elsewhere."""
    pods.create("moved", sh("echo ready; sleep 1000"))
    pods.wait_log("moved", "ready")
    wait_for(lambda: pods.status("moved")["phase"] == "Running", "it runs")
    found = pods.status("moved")
    other = {name: "127.0.0.9" for name in ("hostIP", "podIP")} | {
        name: [{"ip": "127.0.0.9"}] for name in ("hostIPs", "podIPs")
    }
    before = {"status": {"phase": "Pending"} | other}
    pods.kubectl.patch("pod", "moved", before, NAMESPACE, subresource="status")
    wait_for(lambda: pods.status("moved")["phase"] == "Running", "it is reported to run")
    assert {name: pods.status("moved")[name] for name in other} == {name: found[name] for name in other}


def test_pre_stop_runs_before_sigterm(pods: Pods, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    hook = {"preStop": {"exec": {"command": ["sh", "-c", f"echo hook >> {seen}"]}}}
    script = f"trap 'echo term >> {seen}; exit 0' TERM; echo ready; while true; do sleep 0.02; done"
    pods.create("hooked", sh(script, lifecycle=hook), terminationGracePeriodSeconds=20)
    pods.wait_log("hooked", "ready")
    pods.delete("hooked")
    assert seen.read_text() == "hook\nterm\n"


def test_probes_decide_on_readiness_and_restarts(pods: Pods) -> None:
    probe = {"exec": {"command": ["sh", "-c", "test ! -e sick"]}, "periodSeconds": 1, "failureThreshold": 1}
    script = (
        "rm -f sick; echo up; while [ ! -e make-sick ]; do sleep 0.05; done; rm make-sick; touch sick; sleep 1000"
    )
    pods.create("sick", sh(script, livenessProbe=probe, readinessProbe=probe), restartPolicy="Always")
    wait_for(lambda: pods.container("sick")["ready"], "the container is ready")
    uid = pods.get("sick")["metadata"]["uid"]
    home = next(p.environ()["HOME"] for p in psutil.process_iter() if _runs_in(p, uid))
    (Path(home) / "make-sick").touch()
    wait_for(lambda: pods.container("sick")["restartCount"] == 1, "the container is restarted")
    wait_for(lambda: pods.container("sick")["ready"], "the container is ready again")


def test_a_pod_that_was_marked_not_ready_by_mistake_is_ready_again(pods: Pods, kubectl: Kubectl) -> None:
    """A node makes a pod ready again that was marked not ready.

    The node lifecycle controller marks pods when it hasn't heard of their node, and leaves the way back to the node.
    """
    pods.create("well", sh("sleep 1000"))
    ready = {"type": "Ready", "status": "True"}

    def condition() -> dict[str, Any]:
        found = {c["type"]: c for c in pods.status("well").get("conditions", ())}
        return {key: found.get("Ready", {}).get(key) for key in ready}

    wait_for(lambda: condition() == ready, "the pod is ready")
    unready = {"status": {"conditions": [ready | {"status": "False"}]}}
    kubectl.patch("pod", "well", unready, NAMESPACE, subresource="status", how="strategic")
    wait_for(lambda: condition() == ready, "the pod is ready again")


def test_sidecars_run_beside_and_end_after_the_main_container(pods: Pods) -> None:
    shared = {"volumeMounts": [{"name": "d", "mountPath": "/shared"}]}
    script = "trap 'echo sidecar-end; exit 0' TERM; touch /shared/up; while true; do sleep 0.02; done"
    check = {"exec": {"command": ["test", "-e", "/shared/up"]}, "periodSeconds": 1}
    sidecar = {"name": "side", "image": "none", "restartPolicy": "Always", "startupProbe": check}
    pods.create(
        "sidecar",
        sh("ls /shared", **shared),
        initContainers=[{**sidecar, **sh(script, **shared)}],
        volumes=[{"name": "d", "emptyDir": {}}],
        terminationGracePeriodSeconds=20,
    )
    pods.wait_phase("sidecar", "Succeeded")

    def ended() -> Any:
        return pods.status("sidecar")["initContainerStatuses"][0]["state"].get("terminated")

    wait_for(ended, "the sidecar has ended")
    assert ended()["exitCode"] == 0
    assert pods.logs("sidecar", "-c", "c0") == "up\n"
    assert pods.logs("sidecar", "-c", "side") == "sidecar-end\n"


def test_a_failed_init_container_keeps_the_others_from_starting(pods: Pods) -> None:
    init = {"name": "i", "image": "none", **sh("echo no > /dev/termination-log; exit 4")}
    pods.create("init-fails", sh("echo never"), initContainers=[init])
    status = pods.wait_phase("init-fails", "Failed")
    ended = status["initContainerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (4, "no\n")
    assert status["containerStatuses"][0]["state"]["waiting"]["reason"] == "PodInitializing"


def test_an_active_deadline_fails_the_pod(pods: Pods, node: NodeProcess) -> None:
    pods.create("late", sh("sleep 1000"), activeDeadlineSeconds=1)
    assert pods.wait_phase("late", "Failed")["reason"] == "DeadlineExceeded"
    assert not node.pod_processes()


def test_deployments_and_daemon_sets_work(pods: Pods, kubectl: Kubectl) -> None:
    spec = {**ONLY_HERE, "containers": [{"name": "c", "image": "none", "command": ["sleep", "1000"]}]}
    objects = []
    for kind, more, host in (("Deployment", {"replicas": 2}, False), ("DaemonSet", {}, True)):
        labels = {"app": kind.lower()}
        template = {"metadata": {"labels": labels}, "spec": {**spec, "hostNetwork": host}}
        objects.append(
            {
                "apiVersion": "apps/v1",
                "kind": kind,
                "metadata": {"name": kind.lower()},
                "spec": {"selector": {"matchLabels": labels}, "template": template, **more},
            }
        )
    pods.apply(*objects)
    wait_for(
        lambda: pods.get("deployment", "deployment")["status"].get("readyReplicas") == 2, "the deployment is ready"
    )
    wait_for(lambda: pods.get("daemonset", "daemonset")["status"].get("numberReady") == 1, "the daemon set is ready")
    found = kubectl.list("pod", NAMESPACE, "app=daemonset")[0]
    assert found["status"]["podIP"] == found["status"]["hostIP"]


def test_a_projected_token_is_good_for_its_audience_only(pods: Pods, kubectl: Kubectl) -> None:
    token = {"path": "token", "audience": "spottrain", "expirationSeconds": 600}
    pods.create(
        "token",
        sh("cat /tokens/token", volumeMounts=[{"name": "t", "mountPath": "/tokens"}]),
        volumes=[{"name": "t", "projected": {"sources": [{"serviceAccountToken": token}]}}],
    )
    pods.wait_phase("token", "Succeeded")
    value = pods.logs("token")
    for audience, good in (("spottrain", True), ("other", False)):
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": value, "audiences": [audience]},
        }
        answer = kubectl.create(review)["status"]
        assert answer.get("authenticated", False) is good
        if good:
            extra = answer["user"]["extra"]
            assert extra["authentication.kubernetes.io/pod-name"] == ["token"]


def test_config_map_and_secret_volumes_are_updated_while_the_pod_runs(pods: Pods) -> None:
    def objects(text: str) -> list[dict[str, Any]]:
        secret = {"data": {"s": base64.b64encode(text.encode()).decode()}}
        return [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "live"}, "data": {"a": text}},
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "live"}, **secret},
        ]

    pods.apply(*objects("old"))
    mounts = [{"name": "m", "mountPath": "/etc/map"}, {"name": "s", "mountPath": "/etc/secret"}]
    pods.create(
        "reads",
        sh("while true; do echo $(cat /etc/map/a /etc/secret/s); sleep 0.1; done", volumeMounts=mounts),
        volumes=[
            {"name": "m", "configMap": {"name": "live"}},
            {"name": "s", "secret": {"secretName": "live"}},
        ],
    )
    pods.wait_log("reads", "oldold")
    pods.apply(*objects("new"))
    pods.wait_log("reads", "newnew")


def test_a_killed_node_process_leaves_nothing_and_its_pods_are_restarted(pods: Pods, node: NodeProcess) -> None:
    pods.create("comes-back", sh(STUBBORN), restartPolicy="Always")
    pods.create("stays-failed", sh(STUBBORN))
    for name in ("comes-back", "stays-failed"):
        pods.wait_log(name, "ready")
    assert len(node.pod_processes()) >= 10
    node.end(signal.SIGKILL)
    wait_for(lambda: not node.pod_processes(), "the pods' processes are gone")
    node.start()
    wait_for(lambda: pods.container("comes-back")["restartCount"] == 1, "the container is restarted")
    pods.wait_log("comes-back", "ready")
    status = pods.wait_phase("stays-failed", "Failed")
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137


def test_a_node_that_is_shut_down_ends_its_pods_as_failed(pods: Pods, node: NodeProcess, kubectl: Kubectl) -> None:
    pods.create("shut-down", sh("trap 'exit 0' TERM; echo ready; while true; do sleep 0.02; done"))
    pods.wait_log("shut-down", "ready")
    node.end(signal.SIGTERM)
    try:
        status = pods.status("shut-down")
        assert (status["phase"], status["reason"]) == ("Failed", "Terminated")
        disrupted = next(c for c in status["conditions"] if c["type"] == "DisruptionTarget")
        assert disrupted["reason"] == "TerminationByKubelet"
        assert NODE not in kubectl.ready_nodes()
        assert not node.pod_processes()
    finally:
        node.start()
        wait_for(lambda: NODE in kubectl.ready_nodes(), "the node is ready again")


def test_the_node_process_is_light(node: NodeProcess) -> None:
    assert psutil.Process(node.pid).memory_info().rss < 60 * 2**20


def test_logs_are_for_the_api_server_only(node: NodeProcess) -> None:
    port = json.loads((node.log.parent / "node.json").read_text())["kubeletPort"]
    context = ssl._create_unverified_context()
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(f"https://{node.ip}:{port}/pods", context=context, timeout=5).read()


def test_a_wrong_configuration_ends_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spottrain_local.node", "--config", str(tmp_path / "nope.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("cannot be read: No such file or directory.")
