"""What the sources of clouds share.

These are bounded requests to a metadata server, and polls that never end.

A metadata server is slow, absent or wrong at times. Then what was known before stays valid, the source says why it
hears nothing, and asks again ever more slowly. Each poll runs by itself, so that one path can't hide another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from spottrain_api.contract.clocks import clock_offset
from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_watcher.ledger import merged

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 2.0
MAX_BODY_BYTES = 2**18
# A poll that fails waits twice as long each time, up to this.
MAX_PAUSE_SECONDS = 4.0
# Maintenance may be announced days ahead. It becomes a notice when it is this near: until then the node may train.
MAINTENANCE_AHEAD = timedelta(minutes=15)
# A machine that still runs does not end at a time that is further in the past, or in the future, than this.
LONGEST_OVERDUE = timedelta(minutes=10)
LONGEST_NOTICE = timedelta(days=10 * 365)


class MetadataUnavailable(Exception):
    """There was no usable answer. `status` is the HTTP status, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a metadata server answered.

    Attributes:
        offset: What to add to the times in it: our clock may differ from the cloud's.
    """

    body: bytes
    headers: Mapping[str, str]
    offset: timedelta


class MetadataServer:
    """Sends requests to one metadata server. `name` is for people."""

    def __init__(self, session: aiohttp.ClientSession, name: str, url: str) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._session = session

    async def get(self, path: str, *, seconds: float = REQUEST_SECONDS, **options: Any) -> Answer:
        """Read a path.

        Raises MetadataUnavailable: there was no answer of status 200 within `seconds`.
        """
        return await self.request("GET", path, seconds=seconds, **options)

    async def request(self, method: str, path: str, *, seconds: float = REQUEST_SECONDS, **options: Any) -> Answer:
        """Send a request.

        Raises MetadataUnavailable: there was no answer of status 200 within `seconds`.
        """
        try:
            async with self._session.request(
                method,
                self.url + path,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=seconds),
                **options,
            ) as response:
                if response.status != 200:
                    raise MetadataUnavailable(f"status {response.status}", response.status)
                body = await _bounded(response.content)
                offset = clock_offset(response.headers.get("Date"), datetime.now(UTC))
                return Answer(body=body, headers=response.headers, offset=offset)
        except TimeoutError as error:
            raise MetadataUnavailable(f"no answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise MetadataUnavailable(str(error) or type(error).__name__) from error


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise MetadataUnavailable(f"a body of more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def word(text: str) -> str | None:
    """A token or tag of an answer, if it can be sent back."""
    text = text.strip()
    return text if text and text.isascii() and text.isprintable() and len(text) <= 1024 else None


def http_time(text: object) -> datetime:
    """Parse a time such as "Mon, 19 Sep 2016 18:29:47 GMT".

    The day of the week may be missing.

    Raises:
        ValueError: `text` is no such time.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a time")
    time = parsedate_to_datetime(text)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def deadline_of(announced: datetime | None, lead: timedelta, now: datetime) -> datetime:
    """The deadline that the cloud gives.

    If it gives none, or an impossible one, the deadline is `lead` from now.
    """
    if announced is None or not now - LONGEST_OVERDUE < announced < now + LONGEST_NOTICE:
        return now + lead
    return announced


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """One thing to ask for.

    Attributes:
        ask: Returns all notices in the answer, and raises MetadataUnavailable or ValueError.
    """

    path: str
    ask: Callable[[], Awaitable[Sequence[Notice]]]
    pause_seconds: float


class Polls:
    """Asks for ever, and announces what changes. With a `name`, it is a SignalSource.

    The first poll is the one that matters: before its first answer nothing is announced, and the others wait for it.
    """

    def __init__(self, server: MetadataServer, polls: Sequence[Poll]) -> None:
        self._server = server
        self._polls = polls
        self._known: dict[str, tuple[Notice, ...]] = {}
        self._changed = asyncio.Event()
        self._unheard: str | None = f"{server.name} at {server.url} has not answered yet."
        self._troubles: dict[str, str] = {}

    @property
    def trouble(self) -> str | None:
        """Why the source hears nothing at present, as a sentence; None while its endpoint answers."""
        return next(iter(self._troubles.values()), self._unheard)

    @property
    def starting(self) -> bool:
        """Whether the first request still waits for its answer.

        Each request is bounded by what the cloud allows.
        """
        return self._unheard is not None and not self._troubles

    async def watch(self) -> AsyncIterator[tuple[Notice, ...]]:
        """Yield all notices whenever they change, for ever."""
        self._known.clear()
        reported: tuple[Notice, ...] | None = None
        first, *others = self._polls
        tasks = [asyncio.create_task(self._run(first))]
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                for task in tasks:
                    if task.done():
                        task.result()  # a poll never ends: this is a bug, and it has to show
                notices = tuple(notice for each in self._known.values() for notice in each)
                if notices != reported:
                    reported = notices
                    yield notices
                if len(tasks) == 1:
                    tasks += [asyncio.create_task(self._run(poll)) for poll in others]
        finally:
            for task in tasks:
                task.cancel()

    async def _run(self, poll: Poll) -> None:
        pause = poll.pause_seconds
        try:
            while True:
                try:
                    notices = await poll.ask()
                # ValueError and ArithmeticError: the answer is malformed, or has a time that no clock shows.
                except (MetadataUnavailable, ValueError, ArithmeticError) as error:
                    self._failed(poll, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, max(MAX_PAUSE_SECONDS, poll.pause_seconds))
                    continue
                self._answered(poll, notices)
                pause = poll.pause_seconds
                await asyncio.sleep(pause)
        finally:
            self._changed.set()

    def _failed(self, poll: Poll, error: Exception) -> None:
        reason = str(error) if isinstance(error, MetadataUnavailable) else "the answer is malformed"
        text = f"{self._server.name} at {self._server.url} gives no usable answer to {poll.path}: {reason}."
        logger.debug("%s %s", text, error)  # the watcher logs the trouble
        self._troubles[poll.path] = text

    def _answered(self, poll: Poll, notices: Sequence[Notice]) -> None:
        self._troubles.pop(poll.path, None)
        self._unheard = None
        soon = datetime.now(UTC) + MAINTENANCE_AHEAD
        kept = {notice.id: notice for notice in self._known.get(poll.path, ())}
        near = [each for each in notices if each.kind is not NoticeKind.MAINTENANCE or each.deadline <= soon]
        for notice in near:
            kept[notice.id] = merged(kept.get(notice.id), notice)
        self._known[poll.path] = tuple(kept[each] for each in dict.fromkeys(notice.id for notice in near))
        self._changed.set()
