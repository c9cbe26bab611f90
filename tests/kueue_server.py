"""The real Kueue as a process beside a local cluster, for the tests of queues.

`make kueue` builds it. It validates what is written to its groups, as in a cluster.
"""

from __future__ import annotations

import base64
import ipaddress
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from benchmarks.ports import free_ports
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cluster_api import PATHS
from cluster_fixtures import Kubectl, wait_for
from spottrain_local.binaries import find_add_on
from spottrain_local.go_module import KUEUE_MODULE

GROUP = "apis/kueue.x-k8s.io/v1beta2"
PATHS |= {
    "clusterqueue": f"{GROUP}/clusterqueues",
    "localqueue": f"{GROUP}/{{}}localqueues",
    "mutatingwebhookconfiguration": "apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "resourceflavor": f"{GROUP}/resourceflavors",
    "validatingwebhookconfiguration": "apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
    "workload": f"{GROUP}/{{}}workloads",
    "workloadpriorityclass": f"{GROUP}/workloadpriorityclasses",
}
NAMESPACE = "kueue-system"
HOST = f"kueue-webhook-service.{NAMESPACE}.svc"
MOST_OF_LOG = 20_000
SIGNS = x509.KeyUsage(
    digital_signature=True,
    key_cert_sign=True,
    key_encipherment=True,
    crl_sign=False,
    content_commitment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)
# These have several versions.
CONVERTED = frozenset({"clusterqueues", "cohorts", "localqueues", "multikueueclusters", "workloads"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """An authority and a certificate for Kueue's webhooks.

    Kueue reads RSA keys in the form of PKCS#1 alone. It replaces an authority with another name, or one that ends
    soon.
    """

    files: dict[str, bytes]

    @classmethod
    def make(cls) -> Authority:
        ca_key, key = (rsa.generate_private_key(65537, 2048) for _ in range(2))
        ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kueue-ca")])
        ca = (
            _certificate(ca_name, ca_name, ca_key)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("kueue-ca")]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(SIGNS, critical=True)
            .sign(ca_key, hashes.SHA256())
        )
        names = [x509.DNSName(HOST), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            _certificate(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)]), ca_name, key)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        keys = {"ca.key": ca_key, "tls.key": key}
        form = (pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
        return cls(
            files={
                "ca.crt": ca.public_bytes(pem),
                "tls.crt": certificate.public_bytes(pem),
                **{name: each.private_bytes(*form) for name, each in keys.items()},
            }
        )

    def encoded(self, name: str) -> str:
        return base64.b64encode(self.files[name]).decode()


def _certificate(subject: x509.Name, issuer: x509.Name, key: rsa.RSAPrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=365))
    )


@contextmanager
def kueue(kubectl: Kubectl, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Kueue, with its CRDs and webhooks, while the block runs. These stay, as the cluster ends with its tests.

    It shows the end of its log, in case a test fails.
    """
    binary, authority, (webhook, probes) = find_add_on(KUEUE_MODULE), Authority.make(), free_ports(2)
    certificates = folder / "certificates"
    certificates.mkdir()
    for name, content in authority.files.items():
        (certificates / name).write_bytes(content)
    for each in _manifests(binary.parent, authority, webhook):
        kubectl.apply(each)
    (folder / "config.yaml").write_text(yaml.safe_dump(_configuration(certificates, webhook, probes)))
    log = (folder / "kueue.log").open("ab")
    command = [str(binary), f"--kubeconfig={kubectl.kubeconfig}", f"--config={folder / 'config.yaml'}"]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: _validates(kubectl), "Kueue validates", 60)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)  # while it waits for its CRDs, it ignores SIGTERM
        process.wait(10)
        print((folder / "kueue.log").read_text()[-MOST_OF_LOG:])


def _validates(kubectl: Kubectl) -> bool:
    """Whether its webhooks answer."""
    flavor = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "tried"}}
    return kubectl.run("create", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(flavor)).returncode == 0


def _configuration(certificates: Path, webhook: int, probes: int) -> dict[str, Any]:
    """As Kueue's own, but without what needs a Service, and without other kinds of jobs."""
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{probes}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {
            "enable": True,
            "webhookServiceName": "kueue-webhook-service",
            "webhookSecretName": "kueue-webhook-server-cert",
        },
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {"frameworks": ["batch/job"]},
    }


def _manifests(folder: Path, authority: Authority, port: int) -> Iterator[dict[str, Any]]:
    yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    data = {name: authority.encoded(name) for name in authority.files}
    secret = {"metadata": {"name": "kueue-webhook-server-cert", "namespace": NAMESPACE}, "data": data}
    yield {"apiVersion": "v1", "kind": "Secret"} | secret
    client = {"caBundle": authority.encoded("ca.crt")}
    for file in sorted((folder / "crds").glob("*.yaml")):
        definition = yaml.safe_load(file.read_text())
        if definition["spec"]["names"]["plural"] in CONVERTED:
            url = client | {"url": f"https://127.0.0.1:{port}/convert"}
            webhook = {"conversionReviewVersions": ["v1"], "clientConfig": url}
            definition["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
        definition["metadata"].pop("creationTimestamp", None)
        definition.pop("status", None)
        yield definition
    for found in yaml.safe_load_all((folder / "webhooks" / "manifests.yaml").read_text()):
        kind = found["kind"].removesuffix("WebhookConfiguration").lower()
        hooks = [hook for hook in found["webhooks"] if _is_own(hook["rules"])]
        for hook in hooks:
            hook["clientConfig"] = client | {
                "url": f"https://127.0.0.1:{port}{hook['clientConfig']['service']['path']}"
            }
        yield {
            "apiVersion": found["apiVersion"],
            "kind": found["kind"],
            "metadata": {"name": f"kueue-{kind}-webhook-configuration"},
            "webhooks": hooks,
        }


def _is_own(rules: list[dict[str, Any]]) -> bool:
    return all("kueue.x-k8s.io" in rule["apiGroups"] for rule in rules)
