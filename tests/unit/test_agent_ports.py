"""Where an agent listens: on its pod's address alone."""

from __future__ import annotations

import socket

import psutil
import pytest

from spottrain_agent.ports import ReservedPort, interface_of


def test_the_interface_of_each_address_of_this_machine() -> None:
    found = {
        address.address: interface_of(address.address)
        for addresses in psutil.net_if_addrs().values()
        for address in addresses[:1]
        if address.family == socket.AF_INET
    }
    assert found["127.0.0.1"] == "lo"
    expected = {
        addresses[0].address: name
        for name, addresses in psutil.net_if_addrs().items()
        if addresses[0].family == socket.AF_INET
    }
    assert found == expected


@pytest.mark.parametrize("address", ["203.0.113.7", "::1"])
def test_an_address_of_no_interface_and_ipv6_leave_the_choice_to_gloo(address: str) -> None:
    assert interface_of(address) is None


def test_a_reserved_port_is_free_on_other_addresses() -> None:
    reserved = ReservedPort("127.0.0.2")
    with socket.socket() as other:
        other.bind(("127.0.0.3", reserved.number))
    with socket.socket() as same, pytest.raises(OSError, match="in use"):
        same.bind(("127.0.0.2", reserved.number))
    reserved.release()


def test_an_address_that_the_pod_does_not_have() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        ReservedPort("203.0.113.7")
