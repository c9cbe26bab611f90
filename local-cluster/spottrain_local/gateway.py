"""What pods in containers reach on this machine.

They reach the names of Services, the API server and the object store. The servers listen at the address of the
cluster's bridge, and only for what comes in over the bridge. This machine's other networks don't reach them, even if
a machine there has a route.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import cast

from spottrain_local.podman import bridge_name, gateway_ip

logger = logging.getLogger(__name__)

DNS_PORT = 53
TTL_SECONDS = 1
# GCE's name of its metadata server, which every node has at the same address of its own.
FIXED_NAMES = {"metadata.google.internal": ["169.254.169.254"]}
_HEADER = struct.Struct("!6H")
_TYPE_A, _CLASS_IN = 1, 1
_ANSWER_FLAGS, _NO_SUCH_NAME = 0x8400, 3


def parse_hosts(text: str) -> dict[str, list[str]]:
    """Parse a hosts file into the addresses of each name."""
    names: dict[str, list[str]] = {}
    for line in text.splitlines():
        address, *found = line.split()
        for name in found:
            names.setdefault(name, []).append(address)
    return names


def answer(query: bytes, names: Mapping[str, Sequence[str]]) -> bytes | None:
    """Answer a DNS query of one question (RFC 1035); None if it is not one."""
    try:
        number, flags, questions, *_ = _HEADER.unpack_from(query)
        name, end = _name(query, _HEADER.size)
        kind, network = struct.unpack_from("!2H", query, end)
    except (struct.error, IndexError, UnicodeDecodeError):
        return None
    if questions != 1 or flags & 0x8000:
        return None
    addresses = names.get(name.lower())
    found = (addresses or []) if (kind, network) == (_TYPE_A, _CLASS_IN) else []
    code = _ANSWER_FLAGS | (flags & 0x0100) | (0 if addresses else _NO_SUCH_NAME)
    records = b"".join(
        # The name is that of the question, at the first byte after the header.
        struct.pack("!3HIH", 0xC000 | _HEADER.size, _TYPE_A, _CLASS_IN, TTL_SECONDS, 4) + socket.inet_aton(address)
        for address in found
    )
    return _HEADER.pack(number, code, 1, len(found), 0, 0) + query[_HEADER.size : end + 4] + records


def _name(query: bytes, start: int) -> tuple[str, int]:
    labels = []
    while length := query[start]:
        labels.append(query[start + 1 : start + 1 + length].decode("ascii"))
        start += 1 + length
    return ".".join(labels), start + 1


class NameServer(asyncio.DatagramProtocol):
    """Answers with the addresses that `update` was last called with."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = FIXED_NAMES
        self._transport: asyncio.DatagramTransport | None = None

    def update(self, hosts: str) -> None:
        """Take the text of a hosts file."""
        self._names = parse_hosts(hosts) | FIXED_NAMES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = answer(data, self._names)
        if reply and self._transport:
            self._transport.sendto(reply, addr)


@contextlib.asynccontextmanager
async def serve_gateway(network: int, names: NameServer, ports: Sequence[int]) -> AsyncIterator[None]:
    """Serve names, and relay connections to these ports of 127.0.0.1."""
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        transport, _ = await loop.create_datagram_endpoint(
            lambda: names, sock=_on_bridge(network, socket.SOCK_DGRAM, DNS_PORT)
        )
        stack.callback(transport.close)
        for port in ports:
            listening = _on_bridge(network, socket.SOCK_STREAM, port)
            server = await asyncio.start_server(partial(_relay, port), sock=listening)
            stack.callback(server.close)
        yield


def _on_bridge(network: int, kind: socket.SocketKind, port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, bridge_name(network).encode())
    found.bind((gateway_ip(network), port))
    return found


async def _relay(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        there, back = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        logger.info("port %d: %s", port, error)
        writer.close()
        return
    try:
        await asyncio.gather(_copy(reader, back), _copy(there, writer))
    finally:
        back.close()
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
