"""Probes and lifecycle handlers against real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web

from spottrain_local.node.probes import HandlerTarget, ProbeCounter, probe_forever, run_handler


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server for probes.

    It answers /ok with 200, /bad with 500, and /slow never, and shows the header X-Probe at /header.
    """

    async def ok(_: web.Request) -> web.Response:
        return web.Response()

    async def bad(_: web.Request) -> web.Response:
        return web.Response(status=500)

    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async def header(request: web.Request) -> web.Response:
        return web.Response(status=200 if request.headers.get("X-Probe") == "1" else 400)

    app = web.Application()
    app.add_routes([web.get("/ok", ok), web.get("/bad", bad), web.get("/slow", slow), web.get("/header", header)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


def target(port: int, code: int = 0) -> HandlerTarget:
    async def execute(command: Sequence[str], timeout: float) -> tuple[int, str]:
        return code, " ".join(command)

    return HandlerTarget(pod_ip="127.0.0.1", ports={"web": port}, execute=execute)


@pytest.mark.parametrize(
    ("handler", "ok", "message"),
    [
        ({"httpGet": {"path": "/ok", "port": "web"}}, True, ""),
        ({"httpGet": {"path": "ok", "port": "web"}}, True, ""),
        ({"httpGet": {"path": "/bad", "port": "web"}}, False, "500"),
        ({"httpGet": {"path": "/slow", "port": "web"}}, False, "no answer within 0.2 s"),
        (
            {"httpGet": {"path": "/header", "port": "web", "httpHeaders": [{"name": "X-Probe", "value": "1"}]}},
            True,
            "",
        ),
        ({"httpGet": {"path": "/ok", "port": "other"}}, False, "no port named 'other'"),
        ({"tcpSocket": {"port": "web"}}, True, ""),
        ({"tcpSocket": {"port": 1}}, False, ""),
        ({"exec": {"command": ["a", "b"]}}, True, ""),
        ({"sleep": {"seconds": 0}}, True, ""),
        ({"grpc": {"port": 1}}, False, "grpc"),
    ],
)
async def test_handlers(port: int, handler: dict[str, Any], ok: bool, message: str) -> None:
    outcome = await run_handler(handler, target(port), 0.2)
    assert outcome.ok is ok
    assert ok or message in outcome.message


async def test_a_failing_command_shows_its_output(port: int) -> None:
    outcome = await run_handler({"exec": {"command": ["not", "here"]}}, target(port, code=1), 1)
    assert (outcome.ok, outcome.message) == (False, "not here")


def test_verdicts_follow_the_thresholds() -> None:
    counter = ProbeCounter(success_threshold=2, failure_threshold=3)
    outcomes = [True, True, False, False, True, False, False, False, False]
    assert [counter.observe(ok) for ok in outcomes] == [None, True, None, None, None, None, None, False, False]


async def test_probing_ends_when_the_verdict_says_so(port: int) -> None:
    seen: list[bool] = []

    async def verdict(ok: bool, message: str) -> bool:
        seen.append(ok)
        return False

    probe = {"httpGet": {"path": "/bad", "port": port}, "failureThreshold": 2, "periodSeconds": 0.01}
    async with asyncio.timeout(5):
        await probe_forever(probe, target(port), verdict)
    assert seen == [False]


async def test_a_first_success_is_seen_before_the_period_is_over() -> None:
    verdicts: asyncio.Queue[bool] = asyncio.Queue()

    async def verdict(ok: bool, message: str) -> bool:
        await verdicts.put(ok)
        return not ok

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        probe = {"tcpSocket": {"port": port}, "failureThreshold": 1, "periodSeconds": 3600}
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(probe_forever(probe, target(port), verdict, eager=True))
            assert await verdicts.get() is False
            server.listen()
            assert await verdicts.get() is True
