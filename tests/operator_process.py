"""Operator and watcher as processes, and the jobs of a namespace, for tests."""

from __future__ import annotations

import base64
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from benchmarks.operator_environment import operator_environment
from benchmarks.ports import free_ports

from cluster_fixtures import Kubectl, wait_for
from spottrain_operator.control_api.certificate_keeper import SECRET_NAME

LABEL_OPERATOR = "tests.spottrain.dev/operator"


def _free_port() -> int:
    return free_ports(1)[0]


@dataclass
class OperatorProcess:
    """`python -m spottrain_operator`, which a test can kill and start again.

    It leads the jobs of namespaces with the label LABEL_OPERATOR of its own namespace, so that many operators share a
    cluster.
    """

    kubectl: Kubectl
    namespace: str
    folder: Path
    port: int = field(default_factory=_free_port)
    health_port: int = field(default_factory=_free_port)
    metrics_port: int = field(default_factory=_free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def authority(self) -> str:
        """What agents trust, from the operator's Secret."""
        secret = self.kubectl.get("secret", SECRET_NAME, self.namespace)
        return base64.b64decode(secret["data"]["ca.crt"]).decode()

    def start(self, identity: str = "operator-0") -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")}
        env |= operator_environment(
            self.kubectl.kubeconfig,
            self.namespace,
            port=self.port,
            health_port=self.health_port,
            metrics_port=self.metrics_port,
            identity=identity,
        )
        # Operators of other tests lead other namespaces, and may have left their leases behind.
        env["SPOTTRAIN_WATCH_LABELS"] = f"{LABEL_OPERATOR}={self.namespace}"
        log = (self.folder / "operator.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spottrain_operator"], env=env, stdout=log, stderr=log, cwd=self.folder
        )

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_ready(self, seconds: float = 60.0) -> None:
        wait_for(self._is_ready, "the operator is ready", seconds)

    def _is_ready(self) -> bool:
        assert self.runs(), f"the operator has ended:\n{self.log()}"
        return self.readiness() == 200

    def readiness(self) -> int:
        return self.asked(urllib.request.Request(f"http://127.0.0.1:{self.health_port}/readyz"))[0]

    def log(self) -> str:
        return (self.folder / "operator.log").read_text()

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(15)

    def get(self, path: str, token: str | None = None) -> tuple[int, bytes]:
        return self.request(path, None, token)

    def metrics(self) -> bytes:
        return self.asked(urllib.request.Request(f"http://127.0.0.1:{self.metrics_port}/metrics"))[1]

    def request(self, path: str, body: bytes | None, token: str | None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        trust = ssl.create_default_context(cadata=self.authority())
        return self.asked(urllib.request.Request(self.url + path, data=body, headers=headers), trust)

    def asked(self, request: urllib.request.Request, trust: ssl.SSLContext | None = None) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=40, context=trust) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""


@contextmanager
def led_namespace(operator: OperatorProcess) -> Iterator[str]:
    """A restricted namespace whose jobs this operator leads, while the block runs."""
    name, kubectl = f"jobs-{uuid4().hex[:8]}", operator.kubectl
    kubectl.create_namespace(
        name, {LABEL_OPERATOR: operator.namespace, "pod-security.kubernetes.io/enforce": "restricted"}
    )
    try:
        yield name
    finally:
        kubectl.delete_all("tj", name)
        kubectl.delete("namespace", name)


@contextmanager
def running(kubectl: Kubectl, folder: Path) -> Iterator[OperatorProcess]:
    """An operator while the block runs. It shows its log, in case a test fails."""
    namespace = f"operator-{uuid4().hex[:8]}"
    kubectl.create_namespace(namespace)
    operator = OperatorProcess(kubectl=kubectl, namespace=namespace, folder=folder)
    try:
        operator.start()
        operator.wait_ready()
        yield operator
    finally:
        if operator.runs():
            operator.end(signal.SIGKILL)
        kubectl.delete("namespace", namespace)
        print(operator.log())


@dataclass(frozen=True)
class Jobs:
    """kubectl, as far as jobs in one namespace go."""

    kubectl: Kubectl
    namespace: str

    def apply(self, name: str, **changes: Any) -> None:
        spec: dict[str, Any] = {
            "image": "local/none",
            "entrypoint": {"script": "train.py"},
            "nodes": {"min": 2, "max": 3},
            "capacity": {"onDemand": {"min": 1}, "spot": {"max": 2}},
            "batch": {"global": 8},
            # The pods need not run: no node has that many accelerators.
            "resources": {"limits": {"nvidia.com/gpu": "64"}},
            "checkpoint": {"uri": f"s3://checkpoints/{self.namespace}/{name}"},
        }
        job = {
            "apiVersion": "spottrain.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": spec | changes,
        }
        self.kubectl.create(job, self.namespace)

    def status(self, name: str) -> dict[str, Any]:
        return dict(self.kubectl.get("tj", name, self.namespace).get("status", {}))

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        conditions = self.status(name).get("conditions", ())
        return next((each for each in conditions if each["type"] == kind), {"status": None, "reason": None})

    def has_run(self, name: str) -> None:
        """Set a status that says the job has had generations.

        The fourth of them has ended.
        """
        generation = {
            **{"number": 4, "state": "Ended", "worldSize": 3, "startedAt": "2026-01-01T00:00:00Z"},
            **{"rendezvousID": "g4", "rendezvousEndpoint": "10.0.0.1:1"},
        }
        status = {"status": {"generation": generation}}
        self.kubectl.patch("tj", name, status, self.namespace, subresource="status")

    def lose(self, pod: str) -> None:
        """Delete a pod at once, as if its node were gone."""
        self.kubectl.delete("pod", pod, self.namespace, grace_seconds=0)

    def edit(self, name: str, **changes: Any) -> None:
        self.kubectl.patch("tj", name, {"spec": changes}, self.namespace)

    def delete(self, name: str) -> None:
        self.kubectl.delete("tj", name, self.namespace)

    def pods(self, name: str) -> list[Any]:
        pods = self.kubectl.list("pod", self.namespace, f"spottrain.dev/job={name}")
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def annotations(self, name: str, annotation: str) -> set[str]:
        return {pod["metadata"]["annotations"][annotation] for pod in self.pods(name)}

    def capacity(self, name: str) -> list[str]:
        return sorted(pod["metadata"]["labels"]["spottrain.dev/capacity-type"] for pod in self.pods(name))


@contextmanager
def watcher(kubectl: Kubectl, pod: Any, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m spottrain_watcher` on the node of `pod`.

    It may do anything in the cluster.
    """
    namespace = pod["metadata"]["namespace"]
    account = ("--clusterrole=cluster-admin", f"--serviceaccount={namespace}:default")
    kubectl("create", "clusterrolebinding", namespace, *account)
    [cluster] = yaml.safe_load(kubectl.kubeconfig.read_text())["clusters"]
    server = urllib.parse.urlparse(cluster["cluster"]["server"])
    (folder / "token").write_text(kubectl.token("default", namespace))
    (folder / "ca.crt").write_bytes(base64.b64decode(cluster["cluster"]["certificate-authority-data"]))
    env = dict(os.environ) | {
        "KUBERNETES_SERVICE_HOST": str(server.hostname),
        "KUBERNETES_SERVICE_PORT": str(server.port),
        "SPOTTRAIN_SERVICEACCOUNT_DIR": str(folder),
        "SPOTTRAIN_NODE_NAME": pod["spec"]["nodeName"],
        "SPOTTRAIN_HOST_IP": pod["status"]["hostIP"],
        "SPOTTRAIN_PROVIDER": "other",
    }
    log = (folder / "watcher.log").open("ab")
    process = subprocess.Popen([sys.executable, "-m", "spottrain_watcher"], env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        kubectl.delete("clusterrolebinding", namespace)
