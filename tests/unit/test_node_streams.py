"""Requests for streams: their contents, who serves them, and what refuses them."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from spottrain_local.node.containers import Mount
from spottrain_local.node.process_environment import process_arguments
from spottrain_local.node.process_runtime import ProcessRuntime
from spottrain_local.node.shimmed_processes import ShimmedProcesses
from spottrain_local.node.streams import ConnectionFront, StreamRequest, StreamServer, parse_stream_request


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "/exec/ns/p/c?command=sh&command=-c&command=echo+%22a%26b%22&input=1&output=1&tty=1",
            StreamRequest(
                kind="exec",
                namespace="ns",
                pod="p",
                container="c",
                command=("sh", "-c", 'echo "a&b"'),
                stdin=True,
                tty=True,
            ),
        ),
        (
            "/exec/ns/p/0123-uid/c?command=ls&output=1",
            StreamRequest(kind="exec", namespace="ns", pod="p", container="c", command=("ls",)),
        ),
        ("/attach/ns/p/c?output=1", StreamRequest(kind="attach", namespace="ns", pod="p", container="c")),
        ("/portForward/ns/p?ports=80", StreamRequest(kind="portForward", namespace="ns", pod="p")),
        ("/portForward/ns/p/uid", StreamRequest(kind="portForward", namespace="ns", pod="p")),
        ("/containerLogs/ns/p/c", None),
        ("/exec/ns", None),
        ("/", None),
    ],
)
def test_what_a_request_asks_for(target: str, expected: StreamRequest | None) -> None:
    assert parse_stream_request(target) == expected


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a node without pods and without kubelet-streams."""

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text=f"hello {request.query_string}")

    app = web.Application()
    app.router.add_get("/hello", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    web_server = runner.server
    assert web_server is not None
    streams = StreamServer(lambda namespace, name: None, ProcessRuntime(ShimmedProcesses()), None)
    server = await asyncio.get_running_loop().create_server(
        lambda: ConnectionFront(streams, web_server), "127.0.0.1", 0
    )
    yield server.sockets[0].getsockname()[1]
    server.close()
    await runner.cleanup()


async def answer(port: int, *pieces: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    received = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return received


async def test_other_requests_are_served_as_ever_in_whatever_pieces_they_come(port: int) -> None:
    request = b"GET /hello?" + b"x" * 3000 + b" HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n"
    for pieces in ((request,), (request[:5], request[5:2000], request[2000:])):
        assert (await answer(port, *pieces)).endswith(b"hello " + b"x" * 3000)


async def test_nonsense_is_refused_by_the_http_server(port: int) -> None:
    assert (await answer(port, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.0 400")
    assert (await answer(port, b"x" * 100_000)).startswith(b"HTTP/1.0 400")


async def test_a_refusal_is_a_status_that_clients_read(port: int) -> None:
    received = await answer(port, b"POST /exec/ns/gone/c?command=ls HTTP/1.1\r\nHost: n\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert json.loads(body) == {
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "message": 'pod "gone" not found',
        "reason": "NotFound",
        "code": 404,
    }


def test_the_archive_of_kubectl_cp_has_the_paths_of_the_container(tmp_path: Path) -> None:
    source = tmp_path / "v [x], $1" / "data"
    (source / "there").mkdir(parents=True)
    (source / "there" / "file").write_text("text")
    mounts = (Mount(source=source, target="/mnt/data"), Mount(source=tmp_path / "other", target="/other"))
    arguments = process_arguments(("tar", "cf", "-", "/mnt/data/there"), mounts)
    archive = subprocess.run(arguments, capture_output=True, check=True).stdout
    names = subprocess.run(["tar", "tf", "-"], input=archive, capture_output=True, check=True).stdout.decode()
    assert names.splitlines() == ["mnt/data/there/", "mnt/data/there/file"]


def test_other_arguments_have_the_paths_of_this_machine(tmp_path: Path) -> None:
    mounts = (Mount(source=tmp_path, target="/data"),)
    assert process_arguments(("tar", "xmf", "-", "-C", "/data"), mounts) == ("tar", "xmf", "-", "-C", str(tmp_path))
    assert not [a for a in process_arguments(("tar", "cf", "-", "/etc"), mounts) if re.match("--transform", a)]
