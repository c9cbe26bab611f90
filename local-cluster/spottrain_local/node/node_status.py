"""The Node object: its registration, its status and its lease."""

import asyncio
import hashlib
import logging
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from spottrain_local.node.api import UNREACHABLE, ApiClient, ApiError, JSONObject
from spottrain_local.node.config import NodeConfig
from spottrain_local.node.events import now_text

logger = logging.getLogger(__name__)

LEASE_SECONDS = 40
STATUS_SECONDS = 60.0
_CONDITIONS = (
    ("MemoryPressure", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
)


def instance_id(config: NodeConfig) -> str:
    """Return the cloud instance's id: as configured, or created once.

    A created id is kept in the state folder.
    """
    if config.instance_id:
        return config.instance_id
    kept = config.state_dir / "instance-id"
    if not kept.exists():
        config.state_dir.mkdir(parents=True, exist_ok=True)
        seed = f"{config.name}{datetime.now(UTC).timestamp()}"
        kept.write_text("i-0" + hashlib.sha256(seed.encode()).hexdigest()[:16])
    return kept.read_text().strip()


def provider_id(config: NodeConfig, instance: str) -> str:
    """Return the Node's providerID, in the form of its cloud."""
    match config.provider:
        case "eks":
            return f"aws:///{config.zone}/{instance}"
        case "gke":
            return f"gce://spottrain-local/{config.zone}/{config.name}"
        case "aks":
            return (
                "azure:///subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/spottrain-local"
                f"/providers/Microsoft.Compute/virtualMachineScaleSets/local/virtualMachines/{config.name}"
            )


def node_status(config: NodeConfig, runtime: str, *, ready: bool, now: str, since: str) -> JSONObject:
    """Return the Node's status. `since` is when it became ready, or ceased to be."""
    amounts = {
        "cpu": config.cpu,
        "memory": config.memory,
        "pods": str(config.max_pods),
        "ephemeral-storage": "100Gi",
    }
    if config.gpus:
        amounts["nvidia.com/gpu"] = str(config.gpus)
    conditions = [
        {"type": kind, "status": "False", "reason": reason, "message": message}
        for kind, reason, message in _CONDITIONS
    ]
    conditions.append(
        {
            "type": "Ready",
            "status": "True" if ready else "False",
            "reason": "KubeletReady" if ready else "KubeletNotReady",
            "message": "the node runtime is ready" if ready else "node is shutting down",
        }
    )
    return {
        # There is no Hostname: by default, an API server prefers it to the address, and nothing resolves it.
        "addresses": [{"type": "InternalIP", "address": config.node_ip}],
        "capacity": amounts,
        "allocatable": amounts,
        "conditions": [c | {"lastHeartbeatTime": now, "lastTransitionTime": since} for c in conditions],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": config.kubelet_port}},
        "nodeInfo": _node_info(config, runtime),
    }


def _node_info(config: NodeConfig, runtime: str) -> JSONObject:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    machine = platform.machine()
    return {
        "machineID": hashlib.sha256(config.name.encode()).hexdigest()[:32],
        "systemUUID": hashlib.sha256(config.name.encode()).hexdigest()[:32],
        "bootID": boot_id,
        "kernelVersion": os.uname().release,
        "osImage": "spottrain local node",
        "containerRuntimeVersion": runtime,
        "kubeletVersion": "v1.36.0-spottrain",
        "kubeProxyVersion": "",
        "operatingSystem": "linux",
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
    }


class NodeRegistration:
    """Keeps the Node object and its lease."""

    def __init__(self, client: ApiClient, config: NodeConfig, runtime: str) -> None:
        self._client = client
        self._runtime = runtime
        self._config = config
        self._path = f"/api/v1/nodes/{config.name}"
        self._ready_since = now_text()
        self._uid = ""

    async def register(self) -> None:
        """Create the Node, or update the existing one. Waits for the API server."""
        while True:
            try:
                await self._register_once()
                return
            except (ApiError, *UNREACHABLE) as error:
                logger.info("node %s cannot register yet: %s", self._config.name, error)
                await asyncio.sleep(0.3)

    async def _register_once(self) -> None:
        config = self._config
        node: JSONObject = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": config.name, "labels": {"kubernetes.io/hostname": config.name, **config.labels}},
            "spec": {
                "providerID": provider_id(config, instance_id(config)),
                "taints": [taint.model_dump(exclude_defaults=True) for taint in config.taints],
                "podCIDR": config.pod_network,
                "podCIDRs": [config.pod_network],
            },
            "status": self._status(ready=True),
        }
        try:
            created = await self._client.create("/api/v1/nodes", node)
        except ApiError as error:
            if error.status != 409:
                raise
            created = await self._client.patch(self._path, {"metadata": {"labels": node["metadata"]["labels"]}})
            await self._client.patch(f"{self._path}/status", {"status": node["status"]})
        self._uid = created["metadata"]["uid"]
        await self._renew()

    def _status(self, *, ready: bool) -> JSONObject:
        return node_status(self._config, self._runtime, ready=ready, now=now_text(), since=self._ready_since)

    async def run(self) -> None:
        """Renew the lease and, less often, the status, for ever.

        Register a deleted Node again.
        """
        renewals = 0
        while True:
            await asyncio.sleep(self._config.lease_renew_seconds)
            renewals += 1
            try:
                await self._renew()
                if renewals * self._config.lease_renew_seconds >= STATUS_SECONDS:
                    renewals = 0
                    await self._client.patch(f"{self._path}/status", {"status": self._status(ready=True)})
            except ApiError as error:
                logger.warning("node %s: %s", self._config.name, error)
                if error.status == 404:
                    await self.register()
            except UNREACHABLE as error:
                logger.info("node %s cannot renew its lease: %s", self._config.name, error)

    async def shut_down(self) -> None:
        """Report that the node shuts down."""
        self._ready_since = now_text()
        try:
            async with asyncio.timeout(2):
                await self._client.patch(f"{self._path}/status", {"status": self._status(ready=False)})
        except (ApiError, *UNREACHABLE) as error:
            logger.info("node %s could not report that it shuts down: %s", self._config.name, error)

    async def _renew(self) -> None:
        name = self._config.name
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {
            "holderIdentity": name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        try:
            await self._client.patch(f"{leases}/{name}", {"spec": spec})
        except ApiError as error:
            if error.status != 404:
                raise
            owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": self._uid}
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name, "ownerReferences": [owner]},
                "spec": spec,
            }
            await self._client.create(leases, lease)
