"""The addresses of a cluster: a 127.x.0.0/16 network and a block of ports.

In containers, the network is 10.x.0.0/16.

One number x stands for all. A cluster claims it by binding an abstract Unix socket. The socket's name is unique in
the network namespace, as the addresses are, and the kernel frees it when the process that holds it dies.
"""

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spottrain_local.layout import LocalClusterError

FIRST_NETWORK, LAST_NETWORK = 16, 250
LOOPBACK_PREFIX, CONTAINER_PREFIX = 127, 10
# Below the range of the kernel's ports for outgoing connections (32768 and up).
FIRST_PORT, PORTS_PER_NETWORK = 20000, 40
MAX_NODES = 250


@dataclass(slots=True, kw_only=True)
class NetworkClaim:
    """Network `prefix`.`number`.0.0/16, held until `release` or the process's end."""

    number: int
    prefix: int
    _socket: socket.socket

    def release(self) -> None:
        self._socket.close()

    def node_ip(self, index: int) -> str:
        """Return the address of the node at this position."""
        return f"{self.prefix}.{self.number}.{index + 1}.1"

    def pod_network(self, index: int) -> str:
        """Return the node's share of the network; its pods have .2 and up."""
        return f"{self.prefix}.{self.number}.{index + 1}.0/24"

    def ports(self, names: Iterable[str]) -> dict[str, int]:
        """Choose a free port on 127.0.0.1 for each name.

        Each start chooses the same ports, unless another process has taken them.
        """
        block = port_block(self.number)
        free = (port for port in block if is_free("127.0.0.1", port))
        try:
            return {name: next(free) for name in names}
        except StopIteration:
            raise LocalClusterError(
                f"Too few of the ports {block[0]} to {block[-1]} are free on 127.0.0.1."
                " `ss -ltnp` shows what uses them."
            ) from None


def port_block(network: int) -> range:
    """Return the ports on 127.0.0.1 that belong to a network's number."""
    first = FIRST_PORT + network * PORTS_PER_NETWORK
    return range(first, first + PORTS_PER_NETWORK)


def claim_network(
    preferred: int | None = None,
    *,
    prefix: int = LOOPBACK_PREFIX,
    usable: Callable[[int], bool] = lambda number: True,
) -> NetworkClaim:
    """Claim a free network that is `usable`: the preferred one if it is free."""
    numbers = [*([preferred] if preferred else []), *range(FIRST_NETWORK, LAST_NETWORK + 1)]
    for number in filter(usable, numbers):
        if claim := claim_number(number, prefix=prefix):
            return claim
    raise LocalClusterError(
        f"All {LAST_NETWORK - FIRST_NETWORK + 1} networks for local clusters are in use on this machine."
        " Stop one with `spottrain local down --name NAME`."
    )


def claim_number(number: int, *, prefix: int = LOOPBACK_PREFIX) -> NetworkClaim | None:
    """Claim one network. Returns None if a living cluster has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0spottrain-local-network-{number}")
    except OSError:
        claim.close()
        return None
    return NetworkClaim(number=number, prefix=prefix, _socket=claim)


def is_free(ip: str, port: int) -> bool:
    """Return whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except OSError:
            return False
    return True


def free_port(ip: str, preferred: int) -> int:
    """Return the preferred port, or the next free one.

    A server on 0.0.0.0 takes its port on every address.
    """
    for port in range(preferred, preferred + 200):
        if is_free(ip, port):
            return port
    raise LocalClusterError(f"None of the ports {preferred} to {preferred + 199} is free on {ip}.")
