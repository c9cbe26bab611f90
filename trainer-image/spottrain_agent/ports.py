"""Where this pod listens: on the pod's address alone.

The ports are for a generation's rendezvous store, and for replicas. gloo chooses its own.
"""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_ADDRESS_OF_REQUEST = slice(20, 24)


class ReservedPort:
    """A port that is bound but not listened on, so that the system gives it to no other process.

    The rendezvous store can bind it anyway, because both set SO_REUSEADDR. Each generation gets a port of its own, so
    that a late member can't reach the store of the previous generation.
    """

    def __init__(self, address: str) -> None:
        self._socket = bind(address)
        self.number: int = self._socket.getsockname()[1]

    @property
    def descriptor(self) -> int:
        """File descriptor of the bound socket, for a child that listens on it."""
        return self._socket.fileno()

    def release(self) -> None:
        self._socket.close()


def bind(address: str, port: int = 0) -> socket.socket:
    """A socket that is bound to the address alone. Port 0: any free port.

    Raises:
        OSError: The machine doesn't have the address, or the port is taken.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound


def interface_of(address: str) -> str | None:
    """Return the network interface of an IPv4 address.

    By this name, gloo listens on that address alone. None if no interface has the address, and for IPv6: gloo might
    take the interface's link-local address.
    """
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[_ADDRESS_OF_REQUEST]) == address:
                return name
    return None
