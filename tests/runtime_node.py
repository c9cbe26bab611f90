"""A node of the tests' own, which joins the shared local cluster.

The tests' pods run on it alone.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from cluster_fixtures import Kubectl, processes_of, wait_for
from spottrain_local.cluster import Cluster
from spottrain_local.pki import open_authority

NODE = "runtime-test"
NAMESPACE = "node-runtime"
ONLY_HERE = {
    "nodeSelector": {"kubernetes.io/hostname": NODE},
    "tolerations": [{"key": "spottrain.dev/runtime-test", "operator": "Exists"}],
    "terminationGracePeriodSeconds": 1,
}


class NodeProcess:
    """A node process of our own.

    The processes of its pods all name its state folder in their environment.
    """

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.ip = config["nodeIP"]
        self.state = Path(config["stateDir"])
        self.log = folder / "node.log"
        self._config = folder / "node.json"
        self._config.write_text(json.dumps(config))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "spottrain_local.node", "--config", str(self._config)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait for the node process (not for its pods)."""
        assert self._process
        self._process.send_signal(number)
        self._process.wait(30)

    def pod_processes(self) -> list[psutil.Process]:
        return [p for p in processes_of(self.state) if p.pid != self.pid]


def node_config(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """The configuration of a node like the cluster's.

    The name and the address are its own.
    """
    found: dict[str, Any] = json.loads((cluster.layout.pki / "node-system-0.json").read_text())
    network = found["nodeIP"].rsplit(".", 2)[0]
    authority = open_authority(cluster.layout.pki, "ca")
    identity = authority.issue(folder / "node", f"system:node:{NODE}", organizations=["system:nodes"])
    serving = authority.issue(folder / "serving", NODE, addresses=[f"{network}.251.1"])
    return found | {
        "name": NODE,
        "labels": {"kubernetes.io/hostname": NODE},
        "taints": [{"key": "spottrain.dev/runtime-test", "effect": "NoSchedule"}],
        "nodeIP": f"{network}.251.1",
        "podNetwork": f"{network}.251.0/24",
        "clientCertFile": str(identity.certificate),
        "clientKeyFile": str(identity.key),
        "servingCertFile": str(serving.certificate),
        "servingKeyFile": str(serving.key),
        "stateDir": str(folder / "s"),
        "workingDir": None,  # each container's own home
        "instanceID": "i-runtime-test",
        "volumeSyncSeconds": 0.3,
        "crashLoopSeconds": 0.3,
        "shutdownGraceSeconds": 2,
    }


class Pods:
    """Pods of these tests, on the test's own node."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl = kubectl

    def create(self, name: str, *containers: dict[str, Any], **spec: Any) -> None:
        named = [{"name": f"c{i}", "image": "none"} | c for i, c in enumerate(containers)]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"test": name}}}
        self.apply(pod | {"spec": {"containers": named, "restartPolicy": "Never", **ONLY_HERE, **spec}})

    def apply(self, *objects: dict[str, Any]) -> None:
        for each in objects:
            self.kubectl.apply(each, NAMESPACE)

    def get(self, name: str, kind: str = "pod") -> dict[str, Any]:
        found: dict[str, Any] = self.kubectl.get(kind, name, NAMESPACE)
        return found

    def status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = self.get(name)["status"]
        return status

    def container(self, name: str, index: int = 0) -> dict[str, Any]:
        statuses = self.status(name).get("containerStatuses")
        return (
            dict(statuses[index]) if statuses else {"state": {}, "lastState": {}, "restartCount": 0, "ready": False}
        )

    def wait_phase(self, name: str, phase: str) -> dict[str, Any]:
        wait_for(lambda: self.status(name).get("phase") == phase, f"pod {name} is {phase}")
        return self.status(name)

    def logs(self, name: str, *options: str) -> str:
        return self.kubectl("logs", "-n", NAMESPACE, name, *options)

    def wait_log(self, name: str, text: str) -> None:
        wait_for(lambda: text in self.kubectl.log(name, NAMESPACE), f"pod {name} prints {text!r}")

    def delete(self, name: str, *options: str) -> None:
        self.kubectl("delete", "pod", "-n", NAMESPACE, name, *options)


def sh(script: str, **more: Any) -> dict[str, Any]:
    return {"command": ["sh", "-c", script], **more}


@contextmanager
def running_node(cluster: Cluster, folder: Path) -> Iterator[NodeProcess]:
    """Run a node of the tests' own, with a namespace for its pods.

    Both are gone afterwards.
    """
    kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
    kubectl.create_namespace(NAMESPACE)
    process = NodeProcess(node_config(cluster, folder), folder)
    process.start()
    try:
        wait_for(lambda: NODE in kubectl.ready_nodes(), "the test's node is ready")
        yield process
    finally:
        process.end(signal.SIGKILL)
        kubectl.delete("node", NODE)
        kubectl.delete("namespace", NAMESPACE)
