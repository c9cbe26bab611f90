"""A proxy between an operator and the API server.

It counts what the operator writes and is shown about one job, and disturbs it once.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web
from benchmarks.ports import free_ports
from benchmarks.scale.api_server import ApiServer
from yarl import URL

from crash_points.disturbances import AT_WRITES, Disturbance, Kind
from spottrain_api.contract.names import API_VERSION, LABEL_MANAGED_BY, MANAGED_BY, PLURAL
from spottrain_api.cost_record import COST_PLURAL
from spottrain_api.history import HISTORY_PLURAL

LATE_SECONDS = 10.0
STALE_SECONDS = 2.0
# Short of the ten seconds after which the operator gives up a lease that it can't renew.
THROTTLED_SECONDS = 3.0
_MAX_BYTES = 2**22
# Leases, Secrets and reviews of tokens are no part of a job.
_OURS = f"{PLURAL}|{HISTORY_PLURAL}|{COST_PLURAL}"
_WRITTEN = re.compile(rf"/namespaces/[^/]+/(pods|events|{_OURS})(/[^/]+)?(/status)?$")
_READS = frozenset({"GET", "HEAD"})
# kopf and the operator's own watch each list the jobs.
_FIRST_LISTS = {f"/apis/{API_VERSION}/{PLURAL}": 2, "/api/v1/pods": 1, "/api/v1/nodes": 1}
# Of one connection, or meant for another server.
_OWN_HEADERS = frozenset(
    {"host", "connection", "accept-encoding", "content-encoding", "transfer-encoding", "content-length"}
)


class ApiProxy:
    """Passes requests on to the API server.

    `kill` ends the operator. The others hold since `begin`, for its job.

    - writes: what was written or tried since `arm`, in order, as "POST pods".
    - answered: how many writes the API server has accepted since `begin`, by the same words.
    - num_events: number of events about the job since `arm`.
    - is_hit: whether the disturbance has happened.
    - watches_jobs: set once the operator that runs watches the jobs.
    """

    def __init__(self, upstream: str, session: aiohttp.ClientSession, kill: Callable[[], Awaitable[None]]) -> None:
        self._upstream = upstream
        self._session = session
        self._kill = kill
        self._stale: dict[str, bytes] = {}
        self._lists_left: Counter[str] = Counter()
        self._watches: set[asyncio.Task[None]] = set()
        self.watches_jobs = asyncio.Event()
        self.is_cut_off = False
        self.begin("")

    def begin(self, job: str) -> None:
        """Count anew, for this job, and disturb nothing."""
        self._job = job.encode()
        self._disturbance = Disturbance()
        self._is_armed = False
        self._delay = 0.0
        self._throttled_until = 0.0
        self._lists_left.clear()
        self.writes: list[str] = []
        self.answered: Counter[str] = Counter()
        self.num_events = 0
        self.is_hit = False
        self.last_write_at = time.monotonic()

    async def arm(self, disturbance: Disturbance) -> None:
        """Number writes and events from now on, and disturb."""
        if disturbance.kind is Kind.KILLED_STALE:
            self._stale = {path: await self._fetch(path) for path in _FIRST_LISTS}
        self._disturbance = disturbance
        self._is_armed = True
        if disturbance.kind is Kind.EVENTS_LATE:
            self._delay, self.is_hit = LATE_SECONDS, True

    def connect(self) -> None:
        """Serve a new operator, and end the watches of the one before."""
        for each in self._watches:
            each.cancel()
        self.watches_jobs.clear()
        if self._disturbance.kind is Kind.KILLED_STALE:
            self._lists_left.update(_FIRST_LISTS)
            self._delay = STALE_SECONDS
        self.is_cut_off = False

    async def _fetch(self, path: str) -> bytes:
        query = {"labelSelector": f"{LABEL_MANAGED_BY}={MANAGED_BY}"} if path.endswith("/pods") else {}
        async with self._session.get(self._upstream + path, params=query) as answer:
            answer.raise_for_status()
            return await answer.read()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.is_cut_off:
            return _hang_up(request)
        if time.monotonic() < self._throttled_until:
            return _refused()
        if request.query.get("watch") in ("true", "1"):
            return await self._watch(request)
        body = await request.read()
        what = self._write_of(request, body)
        if what is None:
            return await self._read(request, body)
        return await self._write(request, body, what)

    def _write_of(self, request: web.Request, body: bytes) -> str | None:
        found = _WRITTEN.search(request.path)
        if request.method in _READS or found is None or not self._job:
            return None
        return f"{request.method} {found[1]}" if self._job in request.path.encode() or self._job in body else None

    async def _read(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if request.method == "GET" and self._lists_left[request.path] > 0:
            self._lists_left[request.path] -= 1
            return web.Response(body=self._stale[request.path], content_type="application/json")
        return await self._forward(request, body)

    async def _write(self, request: web.Request, body: bytes, what: str) -> web.StreamResponse:
        is_here = False
        if self._is_armed:
            self.writes.append(what)
            is_here = self._disturbance.kind in AT_WRITES and len(self.writes) == self._disturbance.number
        self.last_write_at = time.monotonic()
        if is_here and self._disturbance.kind is Kind.KILLED_BEFORE:
            return await self._end_operator(request)
        if is_here and self._disturbance.kind is Kind.THROTTLED:
            self.is_hit = True
            self.last_write_at = self._throttled_until = time.monotonic() + THROTTLED_SECONDS
            return _refused()
        answer = await self._forward(request, body)
        if answer.status < 300:
            self.answered[what] += 1
        return await self._end_operator(request) if is_here else answer

    async def _end_operator(self, request: web.Request) -> web.StreamResponse:
        self.is_cut_off = True
        self.is_hit = True
        await self._kill()
        return _hang_up(request)

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        async with self._session.request(
            request.method, self._url(request), data=body or None, headers=_headers(request)
        ) as answer:
            content = await answer.read()
            return web.Response(status=answer.status, body=content, headers=_kept(answer))

    def _url(self, request: web.Request) -> URL:
        return URL(self._upstream + request.raw_path, encoded=True)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(self._url(request), headers=_headers(request), timeout=timeout) as answer:
            response = web.StreamResponse(status=answer.status, headers=_kept(answer))
            await response.prepare(request)
            lines: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            receiving = asyncio.create_task(self._receive(answer, lines))
            showing = asyncio.create_task(self._show(request, response, lines))
            self._watches.add(showing)
            if request.path.endswith(f"/{PLURAL}"):
                self.watches_jobs.set()
            try:
                await asyncio.wait({showing})
            finally:
                self._watches.discard(showing)
                for each in (receiving, showing):
                    each.cancel()
            return response

    async def _receive(self, answer: aiohttp.ClientResponse, lines: asyncio.Queue[tuple[float, bytes]]) -> None:
        try:
            async for line in answer.content:
                lines.put_nowait((time.monotonic() + self._delay, line))
        except aiohttp.ClientError:
            pass
        lines.put_nowait((0.0, b""))

    async def _show(
        self, request: web.Request, response: web.StreamResponse, lines: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        with suppress(ConnectionError, aiohttp.ClientError):
            while True:
                due, line = await lines.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not line:
                    return
                if self._loses(line):
                    _hang_up(request)
                    return
                await response.write(line)

    def _loses(self, line: bytes) -> bool:
        if not self._is_armed or self._job not in line:
            return False
        self.num_events += 1
        is_here = self._disturbance.kind is Kind.EVENT_LOST and self.num_events == self._disturbance.number
        self.is_hit |= is_here
        return is_here


@asynccontextmanager
async def api_proxy(
    server: ApiServer, folder: Path, kill: Callable[[], Awaitable[None]]
) -> AsyncIterator[tuple[ApiProxy, Path]]:
    """Run a proxy with the cluster's certificates.

    Yields it, and a kubeconfig that points at it.
    """
    credentials = server.plane.credentials
    trust = ssl.create_default_context(cafile=credentials.authority.certificate_file)
    trust.load_cert_chain(credentials.admin.certificate, credentials.admin.key)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(credentials.apiserver.certificate, credentials.apiserver.key)
    connector = aiohttp.TCPConnector(ssl=trust, limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=_MAX_BYTES) as session:
        proxy = ApiProxy(server.plane.server, session, kill)
        application = web.Application(client_max_size=_MAX_BYTES)
        application.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            (port,) = free_ports(1)
            await web.TCPSite(runner, "127.0.0.1", port, ssl_context=serving).start()
            config = yaml.safe_load(server.kubeconfig.read_text())
            config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
            kubeconfig = folder / "kubeconfig"
            kubeconfig.write_text(yaml.safe_dump(config))
            yield proxy, kubeconfig
        finally:
            await runner.cleanup()


def _headers(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() not in _OWN_HEADERS}


def _kept(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.lower() not in _OWN_HEADERS}


def _refused() -> web.Response:
    """What an overloaded API server answers."""
    failure = {"kind": "Status", "status": "Failure", "code": 429, "message": "too many requests"}
    return web.json_response(failure, status=429, headers={"Retry-After": "1"})


def _hang_up(request: web.Request) -> web.Response:
    """End the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
