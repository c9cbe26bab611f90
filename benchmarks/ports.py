"""Ports for the servers of benchmarks and tests."""

from __future__ import annotations

import itertools
import os
import socket

# The kernel gives these to nobody who asks for any port.
_PORTS = range(10_000, 20_000)
# Neighbouring processes, as the workers of a test run, begin far from each other.
_numbers = itertools.count(997 * os.getpid())


def free_ports(count: int) -> list[int]:
    """Free ports of 127.0.0.1, all different.

    No call names a port again: a server that starts may take seconds until it listens.
    """
    candidates = (_PORTS[number % len(_PORTS)] for number in _numbers)
    return list(itertools.islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
