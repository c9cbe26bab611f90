"""Addresses for pods."""

from ipaddress import IPv4Address, IPv4Network


class AddressPool:
    """Hands out the addresses of a network from .2 upwards.

    A released address is used again last.
    """

    def __init__(self, network: str) -> None:
        self._free = [str(address) for address in IPv4Network(network)][2:-1]
        self._taken: set[str] = set()

    def take(self, wanted: str | None = None) -> str:
        """Take a free address: `wanted` if it is free.

        Raises:
            ValueError: No address is free.
        """
        if not self._free:
            raise ValueError("The node's pod network has no free address left.")
        address = wanted if wanted in self._free else self._free[0]
        self._free.remove(str(address))
        self._taken.add(str(address))
        return str(address)

    def give_back(self, address: str) -> None:
        """Release the address."""
        if address in self._taken:
            self._taken.remove(address)
            self._free.append(str(IPv4Address(address)))
