"""A connection to the control API: its cost, its bounds, and its silent end."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from socket import IPPROTO_TCP, SO_KEEPALIVE, SOL_SOCKET, TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL

import aiohttp
import pytest
from aiohttp import web
from benchmarks.ports import free_ports

from spottrain_operator.control_api import sockets
from spottrain_operator.control_api.certificates import issue, new_authority
from spottrain_operator.control_api.sockets import Port, bound, keep_tls_buffers_small
from spottrain_runtime import http_server

NUM_CONNECTIONS = 20


def tls(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server and of a client that trusts it."""
    now = datetime.now(UTC)
    authority = new_authority(now)
    served = issue(authority, ["127.0.0.1"], now)
    (folder / "cert").write_text(served.certificate)
    (folder / "key").write_text(served.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert", folder / "key")
    return context, ssl.create_default_context(cadata=authority.certificate)


async def test_a_connection_that_waits_takes_little_memory(tmp_path: Path) -> None:
    keep_tls_buffers_small()
    context, trust = tls(tmp_path)
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


@dataclass
class Held:
    """A port whose GET / is answered once the test says so.

    `polls` has the requests that wait.
    """

    number: int = field(default_factory=lambda: free_ports(1)[0])
    polls: asyncio.Queue[web.Request] = field(default_factory=asyncio.Queue)
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        self.polls.put_nowait(request)
        await self.answers.wait()
        return web.Response(text="answered")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.number)


@asynccontextmanager
async def holding(context: ssl.SSLContext | None = None) -> AsyncIterator[Held]:
    held = Held()
    application = web.Application()
    application.router.add_get("/", held.answer)
    port = Port("test", application, "127.0.0.1", held.number, context)
    await port.open()
    try:
        async with asyncio.timeout(20):
            yield held
    finally:
        await port.close()


WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HALF = b"GET / HTTP/1.1\r\nHost: a\r\nA: "


@pytest.mark.parametrize("before", [b"", WHOLE], ids=["first", "second"])
@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half"])
async def test_a_connection_without_a_whole_request_is_closed_and_a_poll_is_not(
    before: bytes, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.1)
    async with holding() as held:
        polling, poll = await held.connect()
        poll.write(WHOLE)
        waiting = await held.polls.get()
        if before:
            held.answers.set()
        reading, writing = await held.connect()
        writing.write(before + sent)
        received = await reading.read()
        assert (b"answered" in received) is bool(before)
        held.answers.set()
        assert b"answered" in await polling.readuntil(b"answered")
        assert waiting.method == "GET"
        for each in (poll, writing):
            each.close()


async def test_who_does_not_answer_the_end_of_tls_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(sockets, "TLS_END_SECONDS", 0.1)
    context, trust = tls(tmp_path)

    def shake_hands(number: int) -> socket.socket:
        connection = trust.wrap_socket(socket.create_connection(("127.0.0.1", number)), server_hostname="127.0.0.1")
        connection.sendall(HALF)
        return socket.socket(fileno=connection.detach())

    async with holding(context) as held:
        silent = await asyncio.to_thread(shake_hands, held.number)
        with silent:
            silent.setblocking(False)
            try:
                while await asyncio.get_running_loop().sock_recv(silent, 4096):
                    pass
            except ConnectionResetError:
                pass


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer " + "t" * 3500}, 200),
        ({"Authorization": "Bearer " + "t" * 4096}, 400),
        ({f"a{number}": "b" for number in range(20)}, 200),
        ({f"a{number}": "b" for number in range(40)}, 400),
        ({"Content-Length": "1"}, 400),
        ({"Transfer-Encoding": "chunked"}, 400),
        ({"Connection": "upgrade", "Upgrade": "websocket"}, 400),
    ],
    ids=["long token", "too long", "headers of a mesh", "too many", "body", "body of any length", "upgrade"],
)
async def test_what_would_be_held_until_the_answer_is_refused(headers: dict[str, str], status: int) -> None:
    async with holding() as held:
        held.answers.set()
        reading, writing = await held.connect()
        lines = [f"{name}: {value}" for name, value in headers.items()]
        writing.write("\r\n".join(["GET / HTTP/1.1", "Host: a", *lines, "", ""]).encode())
        assert int((await reading.readline()).split()[1]) == status
        writing.close()


async def test_requests_that_wait_for_another_one_take_little_memory() -> None:
    large = WHOLE[:-2] + b"".join(b"a%d: %s\r\n" % (number, b"b" * 4000) for number in range(30)) + b"\r\n"
    more = large * 40
    loop = asyncio.get_running_loop()
    async with holding() as held:
        with socket.create_connection(("127.0.0.1", held.number)) as connection:
            connection.setblocking(False)
            await loop.sock_sendall(connection, WHOLE)
            transport = (await held.polls.get()).transport
            assert isinstance(transport, asyncio.Transport)
            tracemalloc.start()
            sending = asyncio.create_task(loop.sock_sendall(connection, more))
            try:
                while transport.is_reading():  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.01)
                # aiohttp's own 32 requests would take 8 MiB.
                assert tracemalloc.get_traced_memory()[0] < 2 * 2**20
            finally:
                tracemalloc.stop()
                sending.cancel()
