"""What a connection to the control API costs, and when a silent end is noticed."""

from __future__ import annotations

import asyncio
import ssl
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from socket import IPPROTO_TCP, SO_KEEPALIVE, SOL_SOCKET, TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL

import aiohttp
from aiohttp import web
from benchmarks.ports import free_ports

from spottrain_operator.control_api.certificates import issue, new_authority
from spottrain_operator.control_api.sockets import Port, bound, keep_tls_buffers_small

NUM_CONNECTIONS = 20


async def test_a_connection_that_waits_takes_little_memory(tmp_path: Path) -> None:
    keep_tls_buffers_small()
    now = datetime.now(UTC)
    authority = new_authority(now)
    served = issue(authority, ["127.0.0.1"], now)
    (tmp_path / "cert").write_text(served.certificate)
    (tmp_path / "key").write_text(served.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    trust = ssl.create_default_context(cadata=authority.certificate)
    ends: list[asyncio.StreamWriter] = []
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_server(
        lambda _, there: accepted.put_nowait(there), sock=bound("127.0.0.1", 0), ssl=context
    )
    port = server.sockets[0].getsockname()[1]
    tracemalloc.start()
    try:
        async with asyncio.timeout(20):
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(NUM_CONNECTIONS):
                ends.append((await asyncio.open_connection("127.0.0.1", port, ssl=trust))[1])
                ends.append(await accepted.get())
            # asyncio's own buffers would take 512 KiB for both ends.
            assert (tracemalloc.get_traced_memory()[0] - before) / NUM_CONNECTIONS < 128 * 1024
    finally:
        tracemalloc.stop()
        for end in ends:
            end.close()
        server.close()


async def test_a_peer_that_loses_its_power_is_given_up_within_three_seconds() -> None:
    options = [
        (SOL_SOCKET, SO_KEEPALIVE),
        *((IPPROTO_TCP, each) for each in (TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT)),
    ]

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        return web.json_response([connection.getsockopt(*each) for each in options])

    application = web.Application()
    application.router.add_get("/", answer)
    (number,) = free_ports(1)
    port = Port("test", application, "127.0.0.1", number)
    await port.open()
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{number}/") as response:
            is_probed, idle, between, count = await response.json()
    finally:
        await port.close()
    assert (is_probed, idle, between, count) == (1, 1, 1, 2)
    assert idle + between * count <= 3
