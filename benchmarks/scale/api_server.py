"""etcd and kube-apiserver of the local cluster, without controllers.

The driver plays the controllers that matter.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from spottrain_api.contract.names import API_VERSION, PLURAL
from spottrain_api.history import HISTORY_PLURAL
from spottrain_local.address import claim_network
from spottrain_local.binaries import find_binaries
from spottrain_local.controlplane import PORT_NAMES, ControlPlane, issue_credentials, wait_until_served
from spottrain_local.layout import ClusterLayout, checkout_root
from spottrain_local.node.api import ApiClient, ApiError
from spottrain_local.processes import ChildProcess

NAMESPACE = "bench"
JOBS_PATH = f"/apis/{API_VERSION}/namespaces/{NAMESPACE}/{PLURAL}"
# What operators ask for. The API server's own requests, and the driver's heartbeats of nodes, are left out.
_COUNTED = {PLURAL, HISTORY_PLURAL, "pods", "nodes", "secrets", "events", "tokenreviews", "leases"}
_DRIVERS_OWN = {("PATCH", "nodes")}
_SAMPLE = re.compile(r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Requests = Counter[tuple[str, str]]
"""Number of requests by verb and resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """A running API server. `client` has all rights."""

    client: ApiClient
    plane: ControlPlane

    @property
    def kubeconfig(self) -> Path:
        return self.plane.layout.kubeconfig

    async def requests(self) -> Requests:
        """The requests that it has answered so far."""
        found: Requests = Counter()
        for sample in _SAMPLE.finditer(await self.client.text("/metrics")):
            labels = dict(_LABEL.findall(sample["labels"]))
            which = (labels["verb"], labels["resource"])
            if labels["resource"] in _COUNTED and which not in _DRIVERS_OWN:
                found[which] += int(float(sample["value"]))
        return found


@asynccontextmanager
async def api_server(folder: Path) -> AsyncIterator[ApiServer]:
    """Run an API server with the benchmark's CRD and namespace.

    `folder` holds its state.
    """
    layout = ClusterLayout(root=folder)
    claim = claim_network()
    plane = ControlPlane(
        layout=layout,
        binaries=find_binaries(),
        credentials=issue_credentials(layout.pki),
        ports=claim.ports(PORT_NAMES),
    )
    plane.write_kubeconfigs()
    parts = [ChildProcess(spec) for spec in plane.processes()[:2]]
    try:
        for part in parts:
            part.start()
        async with plane.client() as client:
            await wait_until_served(client)
            await _install(client)
            yield ApiServer(client=client, plane=plane)
    finally:
        for part in reversed(parts):
            await part.stop(kill=True)
        claim.release()


async def _install(client: ApiClient) -> None:
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for path in sorted((checkout_root() / "crds").glob("*.yaml")):
        await client.create(crds, yaml.safe_load(path.read_text()))
    await add_namespace(client, NAMESPACE)
    while True:
        try:
            await client.get(JOBS_PATH)
        except ApiError:
            await asyncio.sleep(0.2)
            continue
        return


async def add_namespace(client: ApiClient, name: str) -> None:
    """Create a namespace in which pods can be created.

    Without its controller, the service account that pods need is the driver's to make.
    """
    await client.create("/api/v1/namespaces", {"metadata": {"name": name}})
    await client.create(f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "default"}})
