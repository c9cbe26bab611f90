"""Names of Services, in a file like /etc/hosts that the pods' resolver reads.

EndpointSlices refuse loopback addresses, so the addresses come from the status of the ready pods that a
Service selects. All namespaces share the file: names are namespaced (`svc.ns` and longer).
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spottrain_local.layout import cache_root

Object = dict[str, Any]

HEADER = "127.0.0.1 localhost\n"
CLUSTER_DOMAIN = "svc.cluster.local"
PRELOAD = "libnss_wrapper.so"
FETCH_SECONDS = 20.0


def hosts_file(services: Iterable[Object], pods: Iterable[Object]) -> str:
    """Write the text of the hosts file for these Services and pods."""
    pods = sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
    lines: list[str] = []
    for service in sorted(services, key=_full_name):
        lines += _service_lines(service, pods)
    return HEADER + "".join(f"{line}\n" for line in lines)


def _full_name(service: Object) -> str:
    return f"{service['metadata']['namespace']}/{service['metadata']['name']}"


def _service_lines(service: Object, pods: list[Object]) -> list[str]:
    metadata, spec = service["metadata"], service["spec"]
    name, namespace, selector = metadata["name"], metadata["namespace"], spec.get("selector")
    if not selector:
        return []
    early = bool(spec.get("publishNotReadyAddresses"))
    lines = []
    for pod in pods:
        if pod["metadata"]["namespace"] != namespace or not _selected(selector, pod) or not _serves(pod, early):
            continue
        address = pod["status"]["podIP"]
        lines.append(f"{address} {' '.join(_names(name, namespace))}")
        hostname = pod["spec"].get("hostname")
        if hostname and pod["spec"].get("subdomain") == name:
            lines.append(f"{address} {' '.join(_names(f'{hostname}.{name}', namespace))}")
    return lines


def _names(name: str, namespace: str) -> list[str]:
    return [f"{name}.{namespace}", f"{name}.{namespace}.svc", f"{name}.{namespace}.{CLUSTER_DOMAIN}"]


def _selected(selector: dict[str, str], pod: Object) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in selector.items())


def _serves(pod: Object, early: bool) -> bool:
    """Return whether a Service lists the pod.

    It does if the pod has an address, is ready, and is not being deleted.
    """
    status = pod.get("status") or {}
    gone = pod["metadata"].get("deletionTimestamp") or status.get("phase") in ("Succeeded", "Failed")
    if not status.get("podIP") or gone:
        return False
    conditions = status.get("conditions") or []
    return early or any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def find_preload_library() -> Path | None:
    """Find libnss_wrapper, which makes a process read our hosts file.

    It is installed, or comes from Debian's or Ubuntu's archive into the cache, without root. If it is not available,
    the result is None.
    """
    cached = cache_root() / "nss-wrapper"
    for folder in (*Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"), cached):
        if (folder / PRELOAD).is_file():
            return folder / PRELOAD
    return _fetch_preload_library(cached)


def _fetch_preload_library(target: Path) -> Path | None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        download = ["apt-get", "download", "-qq", "libnss-wrapper"]
        try:
            subprocess.run(download, cwd=folder, capture_output=True, check=True, timeout=FETCH_SECONDS)
        except subprocess.SubprocessError:
            return None
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, folder / "files"], check=False)
        for library in folder.glob(f"files/usr/lib/*/{PRELOAD}"):
            staged = target / f".{PRELOAD}"
            shutil.copy(library, staged)
            return staged.replace(target / PRELOAD)
    return None
