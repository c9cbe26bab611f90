"""Reserved ports of this pod.

They are for a generation's rendezvous store, and for replicas.
"""

from __future__ import annotations

import socket


class ReservedPort:
    """A port that is bound but not listened on.

    So the system gives it to nobody else.

    torch's store can bind it anyway, because both set SO_REUSEADDR. Each generation gets a port of its own, so that a
    late member can't reach the store of the previous generation.
    """

    def __init__(self) -> None:
        self._socket = _bind_any()
        self.number: int = self._socket.getsockname()[1]

    @property
    def descriptor(self) -> int:
        """File descriptor of the bound socket, for a child that listens on it."""
        return self._socket.fileno()

    def release(self) -> None:
        self._socket.close()


def _bind_any() -> socket.socket:
    """Bind on all addresses, as torch does. On IPv4 alone if the machine has no IPv6."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            bound = socket.socket(family)
        except OSError:
            continue
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind((address, 0))
            return bound
        except OSError:
            bound.close()
    raise OSError("no port could be bound on any address family")
