"""The operator's ports.

Their connections end soon after a peer has gone without a word, and take little memory, because each agent holds one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from asyncio import sslproto

from aiohttp import web

from spottrain_runtime.http_server import bounded_runner

logger = logging.getLogger(__name__)

# Seconds of silence after which the kernel asks a peer, and between two such questions; how many may go unanswered.
IDLE_SECONDS = 1
BETWEEN_SECONDS = 1
NUM_UNANSWERED = 2
# Connections that the kernel keeps until they are accepted: after a restart, all agents come at once.
BACKLOG = 4096
# What an agent sends fits in. A long list from the API server takes a few reads more.
TLS_BUFFER_BYTES = 4096
# The token of a service account has about a thousand characters, and no more than 3,500 with the longest names.
MAX_HEADER_BYTES = 4096
# A peer that doesn't answer the end of TLS is cut off then. asyncio would keep all that it has sent for 30 s.
TLS_END_SECONDS = 5.0


def keep_tls_buffers_small() -> None:
    """Let asyncio read TLS connections in small pieces, in the whole process.

    It keeps a buffer of 256 KiB for each connection: 2 GiB for the agents of a thousand jobs.
    """
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES


class Port:
    """A port that is taken at once, and serves from `open` on.

    Until then, the kernel refuses clients, which costs the operator nothing.
    """

    def __init__(
        self, name: str, application: web.Application, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        """Take the port.

        Raises:
            OSError: Somebody else has it.
        """
        self.is_open = False
        self._name = name
        self._server: asyncio.Server | None = None
        self._tls = tls
        self._socket = bound(host, port)
        # A poll whose agent goes away ends at once: that is how a lost member is noticed.
        self._runner = bounded_runner(
            application, max_header_bytes=MAX_HEADER_BYTES, shutdown_timeout=0.5, handler_cancellation=True
        )

    async def open(self) -> None:
        """Serve from now on. Nothing changes if it does already."""
        if self.is_open:
            return
        await self._runner.setup()
        assert self._runner.server is not None
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            sock=self._socket,
            ssl=self._tls,
            ssl_shutdown_timeout=TLS_END_SECONDS if self._tls else None,
        )
        # asyncio's own number is also that of the connections that it accepts at a time.
        self._socket.listen(BACKLOG)
        self.is_open = True
        logger.info("%s on %s:%d", self._name, *self._socket.getsockname()[:2])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()
        self._socket.close()


def bound(host: str, port: int) -> socket.socket:
    """Open a socket whose kernel probes each connection. It doesn't listen yet.

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
    except OSError:
        listener.close()
        raise
    return listener
