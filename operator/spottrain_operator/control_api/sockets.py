"""The socket of the control API.

Its connections end soon after a peer has gone without a word.
"""

from __future__ import annotations

import socket

# Seconds of silence after which the kernel asks a peer, and between two such questions; how many may go unanswered.
IDLE_SECONDS = 1
BETWEEN_SECONDS = 1
NUM_UNANSWERED = 2
BACKLOG = 4096


def listening(host: str, port: int) -> socket.socket:
    """Open a socket that listens, and whose kernel probes each connection.

    A node that loses its power sends no FIN. Without the probes, its connection would stay open for hours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Linux hands these options on to the connections.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_SECONDS),
        ("TCP_KEEPINTVL", BETWEEN_SECONDS),
        ("TCP_KEEPCNT", NUM_UNANSWERED),
    ):
        if hasattr(socket, name):  # not on every system
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
