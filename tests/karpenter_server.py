"""The real Karpenter, with its kwok provider, as a process beside a local cluster, for the tests of node pools.

`make karpenter` builds it. Its nodes are objects: `Kubelets` says of them what their kubelets would.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from benchmarks.ports import free_ports

from cluster_api import PATHS, refusal
from cluster_fixtures import Kubectl, wait_for
from spottrain_local.binaries import find_add_on
from spottrain_local.go_module import KARPENTER_MODULE

PATHS |= {
    "kwoknodeclass": "apis/karpenter.kwok.sh/v1alpha1/kwoknodeclasses",
    "nodeclaim": "apis/karpenter.sh/v1/nodeclaims",
}
NODE_CLASS = {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"}
MOST_OF_LOG = 20_000


@contextmanager
def karpenter(kubectl: Kubectl, folder: Path) -> Iterator[None]:
    """Karpenter with its CRDs and a node class, while the block runs. The end of its log shows if a test fails."""
    binary = find_add_on(KARPENTER_MODULE)
    for path in sorted(binary.parent.glob("*crds/*.yaml")):
        kubectl.apply(yaml.load(path.read_text(), Loader=yaml.CSafeLoader))
    wait_for(lambda: kubectl.serves("nodepool", "nodeclaim", "kwoknodeclass"), "Karpenter's API is served")
    meta = {"name": NODE_CLASS["name"]}
    kubectl.apply(
        {"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": NODE_CLASS["kind"], "metadata": meta, "spec": {}}
    )
    metrics, probes = free_ports(2)
    settings = {
        "KUBECONFIG": str(kubectl.kubeconfig),
        "SYSTEM_NAMESPACE": "kube-system",
        "DISABLE_LEADER_ELECTION": "true",
        "METRICS_PORT": str(metrics),
        "HEALTH_PROBE_PORT": str(probes),
        "BATCH_IDLE_DURATION": "500ms",
    }
    with (folder / "karpenter.log").open("ab") as log:
        process = subprocess.Popen([binary], env=os.environ | settings, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait(10)
        print((folder / "karpenter.log").read_text()[-MOST_OF_LOG:])


@dataclass(frozen=True, slots=True)
class Kubelets:
    """Says that Karpenter's nodes are ready and that their pods run, and lets pods go that are deleted."""

    kubectl: Kubectl

    def until(self, condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        """Wait for a condition, and work meanwhile."""

        def met() -> object:
            self.work()
            return condition()

        wait_for(met, what, seconds)

    def work(self) -> None:
        """Look at all of them once. One may go at the same time."""
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        names = {node["metadata"]["name"] for node in nodes(self.kubectl)}
        for name in names:
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
            self._say("node", name, {"conditions": [ready]})
        for pod in self.kubectl.list("pod"):
            if pod["spec"].get("nodeName") not in names:
                continue
            name = pod["metadata"]["name"]
            if "deletionTimestamp" in pod["metadata"]:
                refusal(lambda name=name: self.kubectl.delete("pod", name, grace_seconds=0))  # type: ignore[misc]
            elif pod["status"]["phase"] == "Pending":
                self._say("pod", name, {"phase": "Running", "startTime": now})

    def _say(self, kind: str, name: str, status: dict[str, Any]) -> None:
        refusal(lambda: self.kubectl.patch(kind, name, {"status": status}, subresource="status", how="strategic"))


def nodes(kubectl: Kubectl) -> list[dict[str, Any]]:
    """The nodes that Karpenter has made."""
    return [each for each in kubectl.list("node") if "karpenter.sh/nodepool" in each["metadata"]["labels"]]
