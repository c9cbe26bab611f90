"""The agent's client of the watcher on its node, which reports the notices and whether it can see them."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable

import aiohttp

from spottrain_agent.control_client import TRANSIENT_ERRORS, BackOff
from spottrain_agent.routes import POLL_TIMEOUT
from spottrain_api.contract.names import PATH_NOTICE
from spottrain_api.contract.notices import NodeWatch, Notice, NoticeList, WatchState, watcher_mark
from spottrain_runtime.wording import one_line

logger = logging.getLogger(__name__)


class NoticeClient:
    """Holds a long poll on the watcher. If no watcher answers, it waits for one."""

    def __init__(
        self, session: aiohttp.ClientSession, watcher_url: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._url = watcher_url
        self._clock = clock
        self._since = clock()
        self._mark = ""
        self._is_expecting = asyncio.Event()
        self._watch = NodeWatch(state=WatchState.MISSING, trouble=f"{watcher_url} was not asked yet")

    @property
    def watch(self) -> NodeWatch:
        """Whether the notices arrive, and for how long that has been so."""
        return self._watch.model_copy(update={"seconds": self._clock() - self._since})

    def expect(self, mark: str) -> None:
        """Believe only the watcher with this mark on the node: nobody, if it is empty."""
        self._mark = mark
        self._is_expecting.set()

    async def follow(self, on_notices: Callable[[NoticeList], None]) -> None:
        """Pass on the notices in force whenever the watcher's change, until cancelled.

        It waits for the first `expect`.
        """
        await self._is_expecting.wait()
        revision = ""
        known: tuple[Notice, ...] = ()
        back_off = BackOff()
        while True:
            try:
                notices = await self._poll(revision)
                trouble = self._doubt(notices)
            except TRANSIENT_ERRORS as error:
                trouble = f"{self._url} does not answer: {str(error) or type(error).__name__}"
            if trouble is not None:
                # Ask for all again afterwards: whoever answers then may have nothing new to say.
                revision = ""
                self._set_state(WatchState.MISSING, trouble)
                await back_off.wait()
                continue
            back_off.reset()
            if notices is not None:
                revision = notices.revision
                self._set_state(_state(notices), notices.trouble, hears_cloud=notices.hears_cloud)
                known = _in_force(known, notices)
                on_notices(notices.model_copy(update={"notices": known}))

    async def _poll(self, revision: str) -> NoticeList | None:
        """The notices, or None if they are those of `revision`."""
        async with self._session.get(
            self._url + PATH_NOTICE, params={"after": revision}, timeout=POLL_TIMEOUT
        ) as response:
            response.raise_for_status()
            return None if response.status == 204 else NoticeList.from_json(await response.read())

    def _doubt(self, notices: NoticeList | None) -> str | None:
        """Why whoever answers is not the watcher of this node; None if it may be."""
        if not self._mark:
            return f"{self._url} answers, but no watcher has marked the node"
        if notices is None or not notices.notices:
            return None
        if notices.proof is not None and hmac.compare_digest(watcher_mark(notices.proof), self._mark):
            return None
        return f"{self._url} gives notices, but can't prove that it is the watcher that has marked the node"

    def _set_state(self, state: WatchState, trouble: str | None, *, hears_cloud: bool = True) -> None:
        if state is not self._watch.state:
            self._since = self._clock()
            logger.info("notices of this node: %s%s", state, f" ({one_line(trouble)})" if trouble else "")
        said = one_line(trouble) if trouble else None
        self._watch = NodeWatch(state=state, trouble=said, hears_cloud=hears_cloud)


def _in_force(known: tuple[Notice, ...], reported: NoticeList) -> tuple[Notice, ...]:
    """The notices of the watcher, and those that it can't see at present.

    A watcher in trouble, such as one that has just restarted, takes nothing back by not repeating it.
    """
    repeated = {notice.id for notice in reported.notices}
    unseen = (notice for notice in known if notice.id not in repeated) if reported.trouble else ()
    return (*reported.notices, *unseen)


def _state(notices: NoticeList) -> WatchState:
    """What a watcher that answers says of itself."""
    if notices.trouble is None:
        return WatchState.WATCHED
    return WatchState.STARTING if notices.starting else WatchState.BLIND
