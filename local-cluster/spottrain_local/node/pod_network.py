"""Network namespaces of a node and its pods, connected to the cluster's bridge."""

import contextlib
import ctypes
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from spottrain_local.podman import NAMESPACES, remove_namespaces, run

# Address of every cloud's metadata server, in the node's own namespace only.
METADATA_IP = "169.254.169.254"
PREFIX_LENGTH = 16
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNetwork:
    """The namespaces of one node.

    The node's own is that of its pods on the host network.
    """

    bridge: str
    node: str

    def namespace(self, uid: str = "") -> Path:
        """Return the file of a pod's namespace, or of the node's own."""
        return NAMESPACES / ".".join(filter(None, (self.bridge, self.node, uid[:8])))

    def add(self, ip: str, uid: str = "") -> None:
        """Create a namespace with an address. One of the same name is replaced.

        Raises:
            OSError: It could not be created; the text says why.
        """
        name, device = self.namespace(uid).name, self._device(ip)
        if self.namespace(uid).exists():
            self.remove(uid)
        # The kernel removes the devices of a namespace some time after the namespace.
        with contextlib.suppress(OSError):
            run("ip", "link", "delete", device)
        run("ip", "netns", "add", name)
        run(
            *("ip", "link", "add", device, "up", "master", self.bridge),
            *("type", "veth", "peer", "name", "eth0", "netns", name),
        )
        lines = [f"address add {ip}/{PREFIX_LENGTH} dev eth0", "link set eth0 up", "link set lo up"]
        if not uid:
            lines.append(f"address add {METADATA_IP}/32 dev lo")
        run("ip", "-netns", name, "-batch", "-", stdin="".join(f"{line}\n" for line in lines))

    def remove(self, uid: str = "") -> None:
        """Remove a namespace, if it exists."""
        if self.namespace(uid).exists():
            remove_namespaces([self.namespace(uid).name])

    def _device(self, ip: str) -> str:
        """Return the name of the device at the bridge's end: at most 15 characters."""
        return f"{self.bridge}-{'-'.join(ip.split('.')[2:])}"

    def listen(self, ip: str, port: int) -> socket.socket:
        """Return a socket that listens in the node's namespace.

        This process serves it.
        """
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_listen_in, self.namespace(), ip, port).result()


def _listen_in(namespace: Path, ip: str, port: int) -> socket.socket:
    """Move this thread, which ends next, into the namespace.

    A socket stays in that in which it was made.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"The network namespace {namespace} cannot be entered: {os.strerror(number)}")
    finally:
        os.close(descriptor)
    return socket.create_server((ip, port), backlog=128)
