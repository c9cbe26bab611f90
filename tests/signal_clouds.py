"""The other side of each source of signals.

It consists of servers that speak the protocols of clouds and of Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from memory_signals import MemorySource
from spottrain_api.contract.notices import Notice
from spottrain_local.metadata.interruption import Interruption
from spottrain_local.metadata.server import build_app
from spottrain_watcher import azure, ec2, gce
from spottrain_watcher.ec2 import (
    HEADER_TOKEN,
    HEADER_TTL,
    PATH_INSTANCE_ACTION,
    PATH_MAINTENANCE,
    PATH_REBALANCE,
    PATH_TOKEN,
    Ec2Source,
)
from spottrain_watcher.kubernetes_signals import KubernetesSource
from spottrain_watcher.signal_source import SignalSource

NODE = "node-1"
DEADLINE = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
Provider = Literal["eks", "gke", "aks"]


class Cloud(Protocol):
    """The other side of a source, as the tests need it."""

    @property
    def source(self) -> SignalSource: ...

    async def preempt(self) -> None: ...
    async def cancel(self) -> None: ...
    async def break_down(self) -> None: ...
    async def repair(self) -> None: ...


@dataclass
class MemoryCloud:
    source: MemorySource = field(default_factory=MemorySource)

    async def preempt(self) -> None:
        seen = DEADLINE - timedelta(seconds=120)
        await self.source.announce(Notice(id="1", node=NODE, source="memory", deadline=DEADLINE, observed_at=seen))

    async def cancel(self) -> None:
        await self.source.announce()

    async def break_down(self) -> None:
        self.source.trouble = "Memory fails."

    async def repair(self) -> None:
        self.source.trouble = None


@dataclass
class Ec2Cloud:
    """A metadata service that behaves like the real one.

    It has tokens, 404 for nothing, and bad moments.
    """

    source: Ec2Source = field(init=False)
    bodies: dict[str, str] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_put(PATH_TOKEN, self._put_token)
        for path in (PATH_INSTANCE_ACTION, PATH_REBALANCE, PATH_MAINTENANCE):
            application.router.add_get(path, self._get)
        return application

    async def _put_token(self, request: web.Request) -> web.Response:
        assert int(request.headers[HEADER_TTL]) > 0
        self.tokens.append(f"token-{len(self.tokens)}")
        return web.Response(text=self.tokens[-1])

    async def _get(self, request: web.Request) -> web.Response:
        if self.trouble:
            kind = self.trouble[0]
            if kind == "slow":
                await asyncio.sleep(5)
            if kind == "malformed":
                return web.Response(text="<html>not here</html>")
            return web.Response(status=500)
        if not self.tokens or request.headers.get(HEADER_TOKEN) != self.tokens[-1]:
            return web.Response(status=401)
        body = self.bodies.get(request.path)
        return web.Response(status=404) if body is None else web.Response(text=body, headers=self.headers)

    async def preempt(self) -> None:
        self.bodies[PATH_INSTANCE_ACTION] = json.dumps({"action": "terminate", "time": "2030-01-01T12:00:00Z"})

    async def cancel(self) -> None:
        self.bodies.clear()

    async def break_down(self) -> None:
        self.trouble.append("malformed")

    async def repair(self) -> None:
        self.trouble.clear()


@dataclass
class KubernetesCloud:
    """Lists and watches of one node and its pods, as the API server does them."""

    source: KubernetesSource = field(init=False)
    node: dict[str, Any] | None = field(default_factory=lambda: node_object())
    pods: list[dict[str, Any]] = field(default_factory=list)
    is_broken: bool = False
    version: int = 1
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/api/v1/nodes", self._nodes)
        application.router.add_get("/api/v1/pods", self._pods)
        return application

    async def _nodes(self, request: web.Request) -> web.StreamResponse:
        assert request.query["fieldSelector"] == f"metadata.name={NODE}"
        return await self._answer(request, lambda: [self.node] if self.node else [])

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        assert request.query["fieldSelector"] == f"spec.nodeName={NODE}"
        return await self._answer(request, lambda: self.pods)

    async def _answer(self, request: web.Request, items: Any) -> web.StreamResponse:
        if self.is_broken:
            return web.Response(status=503)
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items()})
        response = web.StreamResponse()
        await response.prepare(request)
        seen = int(request.query["resourceVersion"])
        async with self.changed:
            await self.changed.wait_for(lambda: self.version != seen)
        if self.is_broken:
            await response.write(b"{not json\n")
            return response
        for item in items():
            await response.write(json.dumps({"type": "MODIFIED", "object": item}).encode() + b"\n")
        # The watch then ends, as it does every few minutes; the source lists again.
        return response

    async def change(self) -> None:
        async with self.changed:
            self.version += 1
            self.changed.notify_all()

    async def preempt(self) -> None:
        taint = {
            "key": "aws-node-termination-handler/spot-itn",
            "effect": "NoSchedule",
            "timeAdded": (DEADLINE - timedelta(seconds=120)).isoformat(),
        }
        self.node = node_object(taints=[taint])
        await self.change()

    async def cancel(self) -> None:
        self.node = node_object()
        await self.change()

    async def break_down(self) -> None:
        self.is_broken = True
        await self.change()

    async def repair(self) -> None:
        self.is_broken = False
        await self.change()


def node_object(uid: str = "n-1", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": NODE, "uid": uid, "resourceVersion": "1"}, "spec": spec}


class Fault(StrEnum):
    """What a metadata server may do instead of answering."""

    UNAUTHORIZED = "401"
    FORBIDDEN = "403"
    NOT_FOUND = "404"
    TOO_MANY = "429"
    FAILS = "500"
    OVERLOADED = "503"
    SILENT = "never answers"
    HANGS_UP = "closes the connection"
    CUTS = "closes the connection in the body"
    REDIRECTS = "redirects to another server"
    HUGE = "a body without an end"
    HTML = "a page for people"
    BYTES = "bytes that are no text"
    EMPTY = "an empty body"
    NULL = "null"
    DEEP = "brackets a hundred thousand deep"


_BODIES = {
    Fault.HTML: b"<html>not here</html>",
    Fault.BYTES: b"\xff\xfe\x00",
    Fault.EMPTY: b"",
    Fault.NULL: b"null",
    Fault.DEEP: b"[" * 100_000,
}


async def misbehave(request: web.Request, fault: Fault) -> web.StreamResponse:
    """Answer a request as `fault` says."""
    if fault.isdigit():
        return web.Response(status=int(fault))
    if fault in _BODIES:
        return web.Response(body=_BODIES[fault])
    if fault is Fault.REDIRECTS:
        return web.Response(status=302, headers={"Location": "/trap"})
    if fault is Fault.SILENT:
        await asyncio.Event().wait()
    response = web.StreamResponse(headers={"Content-Length": "1000"} if fault is Fault.CUTS else {})
    if fault is not Fault.HANGS_UP:
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(1 if fault is Fault.CUTS else 1000):
                await response.write(b"x" * 500)
    assert request.transport is not None
    request.transport.abort()
    return response


@dataclass
class LocalCloud:
    """A node's metadata server of the local cluster.

    It misbehaves while `fault` is set.
    """

    provider: Provider
    file: Path
    spot: bool = True
    ahead: timedelta = timedelta(0)  # its clock, of this one
    source: SignalSource = field(init=False)
    fault: Fault | None = None
    num_requests: int = 0
    requested: asyncio.Condition = field(default_factory=asyncio.Condition)
    num_trapped: int = 0
    acknowledgements: list[Any] = field(default_factory=list)

    def application(self) -> web.Application:
        application = build_app(
            provider=self.provider,
            instance_id="i-0123456789abcdef0",
            name="vm_0",
            instance_type="g5.xlarge",
            zone="eu-central-1a",
            spot=self.spot,
            interruption_file=self.file,
            now=self.now,
        )
        application.middlewares.append(self._misbehave)
        return application

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    @web.middleware
    async def _misbehave(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        async with self.requested:
            self.num_requests += 1
            self.requested.notify_all()
        self.num_trapped += request.path == "/trap"
        if request.method == "POST":
            self.acknowledgements.append(await request.json())
        response = await handler(request) if self.fault is None else await misbehave(request, self.fault)
        if not response.prepared:
            response.headers["Date"] = format_datetime(self.now(), usegmt=True)
        return response

    async def until_requests(self, num: int) -> None:
        """Wait until so many more requests have come."""
        wanted = self.num_requests + num
        async with self.requested, asyncio.timeout(10):
            await self.requested.wait_for(lambda: self.num_requests >= wanted)

    def announce(self, kind: Literal["preempt", "rebalance", "maintenance"], deadline: datetime = DEADLINE) -> None:
        event = Interruption(id=f"{kind}-{deadline}", kind=kind, notice_at=self.now(), deadline=deadline)
        new = self.file.with_suffix(".new")
        new.write_text(event.model_dump_json(by_alias=True))
        new.replace(self.file)

    async def preempt(self) -> None:
        if not self.file.exists():
            self.announce("preempt")

    async def cancel(self) -> None:
        self.file.unlink()

    async def break_down(self) -> None:
        self.fault = Fault.HTML

    async def repair(self) -> None:
        self.fault = None


@contextlib.asynccontextmanager
async def local_cloud(provider: Provider, folder: Path, **options: Any) -> AsyncIterator[LocalCloud]:
    """A metadata server of the local cluster, and a source that asks it.

    `options` are the source's.
    """
    folder.mkdir(exist_ok=True)
    cloud = LocalCloud(provider, folder / "interruption.json")
    url, runner = await serve(cloud.application())
    async with aiohttp.ClientSession() as session:
        cloud.source = source_of(provider, session, url, **options)
        yield cloud
    await runner.cleanup()


def source_of(provider: Provider, session: aiohttp.ClientSession, url: str, **options: Any) -> SignalSource:
    """The source of a cloud, which asks the server at `url`."""
    match provider:
        case "eks":
            return ec2.Ec2Source(session, NODE, {ec2.ENV_ENDPOINT: url}, **options)
        case "gke":
            quick: dict[str, Any] = {"wait_seconds": 1, "now": lambda: DEADLINE - gce.PREEMPTION_LEAD}
            return gce.GceSource(session, NODE, {gce.ENV_HOST: url.removeprefix("http://")}, **quick | options)
        case "aks":
            return azure.AzureSource(session, NODE, {azure.ENV_ENDPOINT: url}, **options)


async def serve(application: web.Application) -> tuple[str, web.AppRunner]:
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}", runner


@contextlib.asynccontextmanager
async def listening(source: SignalSource) -> AsyncIterator[asyncio.Future[tuple[Notice, ...]]]:
    """The next answer of a source, which listens meanwhile."""
    first = asyncio.ensure_future(anext(source.watch()))
    yield first
    first.cancel()


async def within(seconds: float, answers: AsyncIterator[tuple[Notice, ...]]) -> tuple[Notice, ...]:
    async with asyncio.timeout(seconds):
        return await anext(answers)


async def until_trouble(source: SignalSource, has_trouble: bool, seconds: float = 30.0) -> None:
    """Wait until a source says that it has trouble, or that it has none.

    Before its first answer it only waits.
    """
    give_up_at = time.monotonic() + seconds
    while (source.trouble is not None) != has_trouble or "yet" in (source.trouble or ""):
        wanted = "some trouble" if has_trouble else "no trouble"
        assert time.monotonic() < give_up_at, f"{source.name} should report {wanted}, and reports {source.trouble!r}"
        await asyncio.sleep(0.02)
