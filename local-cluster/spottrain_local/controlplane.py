"""The control plane as processes.

They are etcd, kube-apiserver, kube-controller-manager and kube-scheduler: Kubernetes' own programs. They have a
production cluster's flags if behaviour depends on them, and short times if a rehearsal would have to wait.
"""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from spottrain_local.binaries import Binaries
from spottrain_local.go_module import DEFAULT_KUBERNETES, KubernetesRelease
from spottrain_local.layout import ClusterLayout, write_atomically
from spottrain_local.node.api import UNREACHABLE, ApiClient, ApiError
from spottrain_local.pki import Authority, KeyPair, open_authority, open_service_account_key
from spottrain_local.processes import ProcessSpec

LOOPBACK = "127.0.0.1"
PORT_NAMES = ("apiserver", "etcd", "etcd-peer")
# The first address of this range is the Service `kubernetes`. Nothing routes these addresses here.
SERVICE_RANGE = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"
# Name of the API server when it forwards requests to metrics-server.
FRONT_PROXY = "front-proxy-client"
# Seconds after which a node is NotReady if it has not renewed its lease (Kubernetes: 50). Nodes do so every 10 s.
NODE_GRACE_SECONDS = 20
# Rarer garbage collection saves a quarter of the processor time at the start, and costs 90 MB.
GO_ENVIRONMENT = {"GOGC": "400"}
# Gang scheduling is beta in 1.37, and off. 1.36 has an alpha of it, which differs.
GANG_SCHEDULING = "--feature-gates=GenericWorkload=true"
# These have no use without volumes, clouds and a kubelet's certificates. Each costs watches and memory.
NEEDLESS_CONTROLLERS = (
    "certificatesigningrequest-approving-controller",
    "certificatesigningrequest-cleaner-controller",
    "certificatesigningrequest-signing-controller",
    "device-taint-eviction-controller",
    "endpoints-controller",
    "endpointslice-mirroring-controller",
    "ephemeral-volume-controller",
    "horizontal-pod-autoscaler-controller",
    "node-ipam-controller",
    "persistentvolume-attach-detach-controller",
    "persistentvolume-binder-controller",
    "persistentvolume-expander-controller",
    "persistentvolume-protection-controller",
    "persistentvolumeclaim-protection-controller",
    "podcertificaterequest-cleaner-controller",
    "replicationcontroller-controller",
    "storage-version-migrator-controller",
    "volumeattributesclass-protection-controller",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The certificates and keys with which the parts of one cluster authenticate."""

    authority: Authority
    etcd_authority: Authority
    service_account_key: Path
    apiserver: KeyPair
    kubelet_client: KeyPair
    etcd: KeyPair
    admin: KeyPair
    front_proxy_authority: Authority
    front_proxy: KeyPair


def issue_credentials(folder: Path, addresses: Sequence[str] = ()) -> Credentials:
    """Open the cluster's authorities, and issue certificates for one run.

    The certificates are those of the control plane.

    `addresses` are those of the API server for pods, beside loopback.
    """
    authority, etcd_authority = open_authority(folder, "ca"), open_authority(folder, "etcd-ca")
    front_proxy_authority = open_authority(folder, "front-proxy-ca")
    return Credentials(
        authority=authority,
        # etcd admits whoever its authority signs for, so the nodes have a different authority.
        etcd_authority=etcd_authority,
        service_account_key=open_service_account_key(folder),
        apiserver=authority.issue(
            folder / "apiserver",
            "kube-apiserver",
            addresses=[LOOPBACK, KUBERNETES_SERVICE_IP, *addresses],
            names=["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"],
        ),
        kubelet_client=authority.issue(
            folder / "kubelet-client", "kube-apiserver-kubelet-client", organizations=["system:masters"]
        ),
        etcd=etcd_authority.issue(folder / "etcd", "etcd", addresses=[LOOPBACK], names=["localhost"]),
        admin=authority.issue(folder / "admin", "admin", organizations=["system:masters"]),
        # Whoever has this certificate may act as any user of the APIs that the API server forwards.
        front_proxy_authority=front_proxy_authority,
        front_proxy=front_proxy_authority.issue(folder / "front-proxy", FRONT_PROXY),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    """One control plane: its programs, and how to reach it."""

    layout: ClusterLayout
    binaries: Binaries
    credentials: Credentials
    ports: dict[str, int]
    kubernetes: KubernetesRelease = DEFAULT_KUBERNETES

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://{LOOPBACK}:{self.ports['apiserver']}"

    @property
    def _has_gangs(self) -> bool:
        return self.kubernetes != "1.36"

    def client(self) -> ApiClient:
        """Return a client with all rights."""
        admin = self.credentials.admin
        ca_file = self.credentials.authority.certificate_file
        return ApiClient(self.server, ca_file=ca_file, cert_file=admin.certificate, key_file=admin.key)

    def write_kubeconfigs(self) -> None:
        """Write the user's kubeconfig and those of the controllers.

        Only the user can read them.
        """
        pki, authority = self.layout.pki, self.credentials.authority
        self.write_kubeconfig(self.layout.kubeconfig, self.credentials.admin)
        scheduler = authority.issue(pki / "scheduler", "system:kube-scheduler")
        self.write_kubeconfig(pki / "scheduler.kubeconfig", scheduler)
        # The controllers share one identity (--use-service-account-credentials=false), so it needs all rights.
        controllers = authority.issue(
            pki / "controller-manager", "system:kube-controller-manager", organizations=["system:masters"]
        )
        self.write_kubeconfig(pki / "controller-manager.kubeconfig", controllers)

    def write_kubeconfig(self, path: Path, user: KeyPair) -> None:
        """Write a kubeconfig that only the user can read."""
        name = f"spottrain-{self.layout.name}"
        cluster = {
            "server": self.server,
            "certificate-authority-data": _base64(self.credentials.authority.certificate_file),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate-data": _base64(user.certificate),
                        "client-key-data": _base64(user.key),
                    },
                }
            ],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
        write_atomically(path, yaml.safe_dump(config, sort_keys=False))

    def processes(self) -> list[ProcessSpec]:
        """Return the programs in the order of their start.

        Each tolerates that the others are late.
        """
        return [self._etcd(), self._apiserver(), self._controller_manager(), self._scheduler()]

    def process(self, name: str, *flags: str) -> ProcessSpec:
        """Return one of the binaries as a program."""
        log_file = self.layout.logs / f"{name}.log"
        return ProcessSpec(name=name, argv=[self.binaries.path(name), *flags], log_file=log_file, env=GO_ENVIRONMENT)

    def _etcd(self) -> ProcessSpec:
        keys, authority = self.credentials.etcd, self.credentials.etcd_authority
        client = f"https://{LOOPBACK}:{self.ports['etcd']}"
        peer = f"https://{LOOPBACK}:{self.ports['etcd-peer']}"
        return self.process(
            "etcd",
            "--name=local",
            f"--data-dir={self.layout.etcd}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=local={peer}",
            f"--cert-file={keys.certificate}",
            f"--key-file={keys.key}",
            f"--trusted-ca-file={authority.certificate_file}",
            "--client-cert-auth=true",
            f"--peer-cert-file={keys.certificate}",
            f"--peer-key-file={keys.key}",
            f"--peer-trusted-ca-file={authority.certificate_file}",
            "--peer-client-cert-auth=true",
            # A killed process loses nothing by this. Only a machine that loses power does.
            "--unsafe-no-fsync=true",
            "--auto-compaction-retention=1h",
            "--log-level=warn",
        )

    def _apiserver(self) -> ProcessSpec:
        keys = self.credentials
        return self.process(
            "kube-apiserver",
            f"--bind-address={LOOPBACK}",
            f"--secure-port={self.ports['apiserver']}",
            f"--advertise-address={LOOPBACK}",
            # EndpointSlices refuse loopback addresses, so pods get the server's address by environment variables.
            "--endpoint-reconciler-type=none",
            f"--etcd-servers=https://{LOOPBACK}:{self.ports['etcd']}",
            f"--etcd-cafile={keys.etcd_authority.certificate_file}",
            f"--etcd-certfile={keys.etcd.certificate}",
            f"--etcd-keyfile={keys.etcd.key}",
            f"--client-ca-file={keys.authority.certificate_file}",
            f"--tls-cert-file={keys.apiserver.certificate}",
            f"--tls-private-key-file={keys.apiserver.key}",
            f"--kubelet-client-certificate={keys.kubelet_client.certificate}",
            f"--kubelet-client-key={keys.kubelet_client.key}",
            f"--kubelet-certificate-authority={keys.authority.certificate_file}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={keys.front_proxy_authority.certificate_file}",
            f"--requestheader-allowed-names={FRONT_PROXY}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={keys.front_proxy.certificate}",
            f"--proxy-client-key-file={keys.front_proxy.key}",
            f"--service-account-key-file={keys.service_account_key}",
            f"--service-account-signing-key-file={keys.service_account_key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--anonymous-auth=false",
            "--allow-privileged=true",
            "--profiling=false",
            *([GANG_SCHEDULING, "--runtime-config=scheduling.k8s.io/v1beta1=true"] if self._has_gangs else ()),
            "--v=1",
        )

    def _controller_manager(self) -> ProcessSpec:
        controllers = ",".join(["*", *(f"-{name}" for name in NEEDLESS_CONTROLLERS)])
        return self.process(
            "kube-controller-manager",
            f"--kubeconfig={self.layout.pki / 'controller-manager.kubeconfig'}",
            f"--root-ca-file={self.credentials.authority.certificate_file}",
            f"--service-account-private-key-file={self.credentials.service_account_key}",
            f"--controllers={controllers}",
            "--leader-elect=false",
            "--secure-port=0",
            "--node-monitor-period=2s",
            f"--node-monitor-grace-period={NODE_GRACE_SECONDS}s",
            "--kube-api-qps=100",
            "--kube-api-burst=200",
            *([GANG_SCHEDULING] if self._has_gangs else ()),
            "--v=1",
        )

    def _scheduler(self) -> ProcessSpec:
        return self.process(
            "kube-scheduler",
            f"--kubeconfig={self.layout.pki / 'scheduler.kubeconfig'}",
            "--leader-elect=false",
            "--secure-port=0",
            "--kube-api-qps=100",
            "--kube-api-burst=200",
            *([GANG_SCHEDULING] if self._has_gangs else ()),
            "--v=1",
        )


async def wait_until_served(client: ApiClient) -> None:
    """Wait until the API server answers requests."""
    await _wait_for_each(client, ["/version"])


async def wait_until_ready(client: ApiClient) -> None:
    """Wait until `kubectl apply` of a pod works.

    `/readyz` alone is early: kubectl needs the OpenAPI documents, and a pod needs its namespace's default
    service account and the certificate that is published for it.
    """
    namespace = "/api/v1/namespaces/default"
    await _wait_for_each(
        client,
        [
            "/readyz",
            "/openapi/v3",
            "/openapi/v3/api/v1",
            f"{namespace}/serviceaccounts/default",
            f"{namespace}/configmaps/kube-root-ca.crt",
        ],
    )


async def _wait_for_each(client: ApiClient, paths: list[str]) -> None:
    for path in paths:
        while True:
            if await _answers(client, path):
                break
            await asyncio.sleep(0.1)


async def _answers(client: ApiClient, path: str) -> bool:
    try:
        await client.request("GET", path)
    except (ApiError, *UNREACHABLE):
        return False
    except ValueError:  # An answer that is not JSON, such as that of /readyz.
        return True
    return True


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
