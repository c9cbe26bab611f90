"""The leader election in a thread of its own.

A leader with many jobs may be busy for longer than a lease lasts: a new one decides on all of them, and a storm of
notices reaches many at once. In the event loop of the passes, each step of a renewal would wait for what is ready
before it, and the lease would be lost just when a leader is needed most. So the election has an event loop and
connections of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Self, TypeVar

from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.lease import LeaderElection, LeaseSettings

Result = TypeVar("Result")


class ElectionThread:
    """A LeaderElection beside the process's event loop.

    Use it as an async context manager.

    Args:
        settings: Of the election.
        open_cluster: Opens the connections, in the thread.

    Raises:
        ClusterError: On entry: no cluster is configured.
    """

    def __init__(
        self, settings: LeaseSettings, open_cluster: Callable[[], AbstractAsyncContextManager[Cluster]]
    ) -> None:
        self._settings = settings
        self._open_cluster = open_cluster
        self._opened: Future[tuple[asyncio.AbstractEventLoop, LeaderElection]] = Future()
        self._thread = threading.Thread(target=self._live, name="election", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        self._loop, self._election = await asyncio.wrap_future(self._opened)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        await asyncio.to_thread(self._thread.join)

    @property
    def is_leader(self) -> bool:
        return self._election.is_leader

    @property
    def is_standby(self) -> bool:
        return self._election.is_standby

    async def acquire(self) -> None:
        await self._there(self._election.acquire())

    async def hold(self) -> None:
        await self._there(self._election.hold())

    async def regain(self) -> bool:
        return await self._there(self._election.regain())

    async def release(self) -> None:
        await self._there(self._election.release())

    async def _there(self, what: Coroutine[None, None, Result]) -> Result:
        """Run it in the thread's loop. If the caller is cancelled, so is that."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(what, self._loop))

    def _live(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        async with self._open_cluster() as cluster:
            self._opened.set_result((asyncio.get_running_loop(), LeaderElection(cluster, self._settings)))
            await self._ended.wait()
