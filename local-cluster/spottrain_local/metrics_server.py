"""Kubernetes' metrics-server, which `kubectl top` needs.

This module runs it as a process beside the control plane, and registers its API.
"""

import asyncio
import base64
import logging
import socket
from dataclasses import dataclass

from spottrain_local.binaries import METRICS
from spottrain_local.controlplane import LOOPBACK, ControlPlane
from spottrain_local.node.api import UNREACHABLE, ApiClient, ApiError, JSONObject
from spottrain_local.pki import Authority
from spottrain_local.processes import ProcessSpec

logger = logging.getLogger(__name__)

PORT_NAME = "metrics"
# Seconds between two readings of the nodes. metrics-server accepts no less than 10.
RESOLUTION_SECONDS = 10
KUBELET_SECONDS = 5
NAMESPACE, SERVICE = "kube-system", "metrics-server"
API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
API_SERVICE = "v1beta1.metrics.k8s.io"
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsServer:
    """The metrics-server of one cluster."""

    control_plane: ControlPlane

    @property
    def _port(self) -> int:
        return self.control_plane.ports[PORT_NAME]

    @property
    def _authority(self) -> Authority:
        return self.control_plane.credentials.authority

    def process(self) -> ProcessSpec | None:
        """Return the program, or None if the binaries do not have it."""
        plane, authority = self.control_plane, self._authority
        program = plane.binaries.find(METRICS)
        if program is None:
            return None
        pki = plane.layout.pki
        serving = authority.issue(pki / "metrics-server-serving", SERVICE, names=[f"{SERVICE}.{NAMESPACE}.svc"])
        identity = authority.issue(pki / "metrics-server", "system:metrics-server", organizations=["system:masters"])
        kubeconfig = pki / "metrics-server.kubeconfig"
        plane.write_kubeconfig(kubeconfig, identity)
        return plane.process(
            METRICS,
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--bind-address={LOOPBACK}",
            f"--secure-port={self._port}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--kubelet-certificate-authority={authority.certificate_file}",
            f"--kubelet-client-certificate={identity.certificate}",
            f"--kubelet-client-key={identity.key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--kubelet-use-node-status-port",
            f"--kubelet-request-timeout={KUBELET_SECONDS}s",
            f"--metric-resolution={RESOLUTION_SECONDS}s",
        )

    async def withdraw(self, client: ApiClient) -> None:
        """Withdraw the API of the last start.

        kubectl complains about an API that nobody serves.
        """
        try:
            await client.delete(f"{API_SERVICES}/{API_SERVICE}")
        except ApiError as error:
            if error.status != 404:
                raise

    async def announce(self, client: ApiClient) -> None:
        """Add the API to the API server's as soon as metrics-server serves it."""
        while True:
            try:
                await self._announce(client)
                return
            except (ApiError, *UNREACHABLE) as error:
                logger.info("the API of metrics-server is not there yet: %s", error)
                await asyncio.sleep(POLL_SECONDS)

    async def _announce(self, client: ApiClient) -> None:
        with socket.create_connection((LOOPBACK, self._port), timeout=1):
            pass
        metadata = {"name": SERVICE, "namespace": NAMESPACE}
        service: JSONObject = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            # The only kind of Service whose address may be on loopback.
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        }
        api: JSONObject = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": API_SERVICE},
            "spec": {
                "group": "metrics.k8s.io",
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "service": metadata | {"port": self._port},
                "caBundle": base64.b64encode(self._authority.certificate_file.read_bytes()).decode(),
            },
        }
        for path, body in ((f"/api/v1/namespaces/{NAMESPACE}/services", service), (API_SERVICES, api)):
            try:
                await client.create(path, body)
            except ApiError as error:
                if error.status != 409:
                    raise
