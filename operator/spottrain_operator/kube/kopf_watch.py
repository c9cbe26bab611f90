"""The watch of the jobs, which kopf makes.

Pods and nodes have watches that select on the server, which kopf's can't.

kopf runs in a thread, as its documentation advises for use inside another program. In the same event loop it would
take the process' signals, and cancel every task at its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import kopf

from spottrain_api.contract.names import GROUP, PLURAL, VERSION
from spottrain_operator.kube.api_server import connection_info
from spottrain_operator.kube.cluster import WatchEvent
from spottrain_operator.kube.errors import ExpiredError
from spottrain_operator.kube.kubernetes_cluster import (
    CONNECT_SECONDS,
    INACTIVITY_SECONDS,
    PAGE_SIZE,
    READ_SECONDS,
    WATCH_SECONDS,
)
from spottrain_operator.kube.resources import Manifest

# The task of a job ends so long after its last event.
IDLE_SECONDS = 0.1
# Between tries of a request, until kopf gives up and is started again. They stay short, so that the operator hears of
# changes soon after an outage.
PAUSES = (0.5, 1.0, 2.0, 2.0, 2.0)
STOP_SECONDS = 5

RawEvent = Mapping[str, Any]
"""An event as kopf shows it: `object`, and `type`, which is None for what a list holds."""
LISTED: RawEvent = {"type": "LISTED"}
"""Comes before the events of each list that kopf makes."""


class JobEvents:
    """Converts kopf's events into watch events.

    Those of one job are in order, because kopf has a queue for each job.
    """

    def __init__(self) -> None:
        self._is_listed = False

    def convert(self, raw: RawEvent) -> WatchEvent | None:
        """What the event shows, if anything.

        Raises:
            ExpiredError: kopf has listed all jobs again, which does not show those that were deleted meanwhile.
        """
        if raw is LISTED:
            if self._is_listed:
                raise ExpiredError("kopf has listed the jobs again")
            self._is_listed = True
            return None
        found: Manifest = dict(raw["object"])
        version = int(found["metadata"]["resourceVersion"])
        return WatchEvent(object=found, version=version, deleted=raw["type"] == "DELETED")


async def watch_jobs(version: int) -> AsyncIterator[WatchEvent]:
    """Watch the jobs of all namespaces.

    A watch starts with the jobs that there are, whatever the version. Events of different jobs come in any order. A
    job that is deleted between a list and the start of its watch is not shown: the first write to it finds that out.
    Nobody writes to a job that is over, so the end of kopf expires the watch: the jobs are listed again.

    Raises:
        ExpiredError: kopf has stopped, or has listed the jobs again.
    """
    loop = asyncio.get_running_loop()
    raw_events: asyncio.Queue[RawEvent | Exception | None] = asyncio.Queue()
    stop = threading.Event()

    def put(item: RawEvent | Exception | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(raw_events.put_nowait, item)

    thread = threading.Thread(target=_run_kopf, args=(put, stop), name="kopf", daemon=True)
    thread.start()
    events = JobEvents()
    try:
        while (raw := await raw_events.get()) is not None:
            if isinstance(raw, Exception):
                raise ExpiredError(f"kopf has stopped: {raw}") from raw
            if (event := events.convert(raw)) is not None:
                yield event
        raise ExpiredError("kopf has stopped")
    finally:
        stop.set()
        await asyncio.to_thread(thread.join, STOP_SECONDS)


def _run_kopf(put: Callable[[RawEvent | Exception | None], None], stop: threading.Event) -> None:
    running = kopf.operator(
        registry=build_registry(put), settings=build_settings(), standalone=True, clusterwide=True, stop_flag=stop
    )
    try:
        asyncio.run(running)
    except Exception as error:
        put(error)
    else:
        put(None)


def build_registry(put: Callable[[RawEvent], None]) -> kopf.OperatorRegistry:
    """The one event handler, which passes each event of a job on, and the login.

    kopf tells no handler that it lists the jobs, so that its connections do.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_event(event: RawEvent, **_: Any) -> None:
        put(event)

    async def has_answered(_: object, __: object, request: aiohttp.TraceRequestEndParams) -> None:
        url, answer = request.url, request.response
        if url.path.endswith(f"/{PLURAL}") and not {"watch", "continue"} & url.query.keys() and answer.ok:
            put(LISTED)

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        info = connection_info()
        tracing = aiohttp.TraceConfig()
        tracing.on_request_end.append(has_answered)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            proxy=info.proxy_url,
            trust_env=info.trust_env,
            trace_configs=[tracing],
        )
        return kopf.AiohttpSession(server=info.server, expiration=info.expiration, aiohttp_session=session)

    return registry


class NoDiffs(kopf.DiffBaseStorage):
    """Nothing is compared with what kopf has shown before.

    For handlers of changes, of which there are none here, kopf copies each job at each event, twice.
    """

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


def build_settings() -> kopf.OperatorSettings:
    """Settings of kopf, with a limit on every wait.

    kopf adds no finalizers, annotations or events of its own, and looks for no other kinds of resources. It lists the
    jobs in pages, and keeps no task for a job that nothing happens to: there may be thousands.
    """
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = NoDiffs()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.chunk_size = PAGE_SIZE
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + READ_SECONDS
    settings.watching.inactivity_timeout = INACTIVITY_SECONDS
    settings.watching.connect_timeout = CONNECT_SECONDS
    settings.networking.request_timeout = READ_SECONDS
    settings.networking.connect_timeout = CONNECT_SECONDS
    settings.networking.error_backoffs = PAUSES
    return settings
