"""The agent's client of the operator's control API. Its long polls never give up."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
from pydantic import ValidationError

from spottrain_agent.control_address import ControlAddress, ControlEndpoint
from spottrain_api.contract import (
    MAX_LONG_POLL_SECONDS,
    PATH_ASSIGNMENT,
    PATH_REPORT,
    REPORT_SECONDS_HEADER,
    AgentReport,
    Assignment,
    clock_offset,
)
from spottrain_api.wording import one_line

logger = logging.getLogger(__name__)

POLL_TIMEOUT = aiohttp.ClientTimeout(total=MAX_LONG_POLL_SECONDS + 10, sock_connect=2)
REPORT_TIMEOUT = aiohttp.ClientTimeout(total=3)
# Longest pause between reports to an operator that names none.
OLDER_REPORT_SECONDS = 1.0
MIN_BACK_OFF_SECONDS = 0.1
MAX_BACK_OFF_SECONDS = 1.0
# How soon an outage is reported again, doubling up to an hour.
SAY_AGAIN_SECONDS = 60.0
MAX_SAY_AGAIN_SECONDS = 3600.0
TRANSIENT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValidationError)


class RefusedError(aiohttp.ClientError):
    """The operator answers, but refuses the request. The text has its sentence."""


async def _require_success(response: aiohttp.ClientResponse) -> None:
    if response.status >= 400:
        raise RefusedError(f"{response.status}: {one_line(await response.text()) or response.reason}")


class BackOff:
    """Waits between attempts.

    The pause doubles, with jitter, up to a second, so that a restart is noticed soon.
    """

    def __init__(self) -> None:
        self._seconds = MIN_BACK_OFF_SECONDS

    def reset(self) -> None:
        self._seconds = MIN_BACK_OFF_SECONDS

    async def wait(self) -> None:
        await asyncio.sleep(self._seconds * random.uniform(0.5, 1.0))
        self._seconds = min(2 * self._seconds, MAX_BACK_OFF_SECONDS)


class Outage:
    """Logs that the operator does not answer.

    It logs at the start, then at growing intervals, and at the end. The outage is over when none of the requests that
    failed, such as reports and polls, fails any more.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self._clock = clock
        self._failing: set[str] = set()
        self._began_at = self._say_at = 0.0
        self._pause = SAY_AGAIN_SECONDS

    def failed(self, request: str, error: Exception) -> None:
        """Call it for each failed request."""
        logger.debug("%s to the operator failed: %r", request, error)
        now = self._clock()
        if not self._failing:
            self._began_at = self._say_at = now
            self._pause = SAY_AGAIN_SECONDS
        self._failing.add(request)
        if now < self._say_at:
            return
        self._say_at = now + self._pause
        self._pause = min(2 * self._pause, MAX_SAY_AGAIN_SECONDS)
        elapsed = now - self._began_at
        logger.warning(
            "The operator at %s %s: %s. The ranks train on, but the job's members and status stay as they are until "
            "it answers. Check that the operator's pod is ready, that the name resolves, and that no NetworkPolicy "
            "keeps trainer pods from it.",
            self.url,
            f"has not answered for {elapsed:.0f} s" if elapsed else "does not answer",
            str(error) or type(error).__name__,
        )

    def succeeded(self, request: str) -> None:
        """Call it for each answered request."""
        if request not in self._failing:
            return
        self._failing.remove(request)
        if not self._failing:
            elapsed = self._clock() - self._began_at
            logger.info("The operator at %s answers again, after %.0f s.", self.url, elapsed)


class ControlClient:
    """Talks to the operator.

    It reads the projected token and the operator's address for each request, because the kubelet renews them.
    `report_seconds` is the longest pause between reports that the operator allows.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        token_file: Path | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        folder: Path | None = None,
    ) -> None:
        """Configure the client.

        Args:
            session: For the requests.
            url: Address of the control API, if there is no `folder`.
            token_file: Holds the token.
            clock: For the intervals of messages.
            folder: Holds the address, and the authorities to trust.
        """
        self._session = session
        self._address = ControlAddress(url, folder)
        self._token_file = token_file
        self._outage = Outage(url, clock)
        self._unreachable = asyncio.Event()
        self.report_seconds = OLDER_REPORT_SECONDS

    async def follow_assignments(
        self, on_assignment: Callable[[Assignment], None], on_lost_contact: Callable[[], None] = lambda: None
    ) -> None:
        """Pass on each new assignment, until cancelled.

        Errors are only logged, because training continues. `on_lost_contact` is called after each: another operator
        may answer next, which knows nothing of this agent.
        """
        revision = ""
        back_off = BackOff()
        while True:
            try:
                assignment, offset = await self._poll_while_reachable(revision)
            except TRANSIENT_ERRORS as error:
                self._outage.failed(PATH_ASSIGNMENT, error)
                on_lost_contact()
                await back_off.wait()
                continue
            self._outage.succeeded(PATH_ASSIGNMENT)
            if assignment is not None and assignment.revision == revision:
                # A newer operator has changed fields that this agent doesn't know: don't ask in a tight loop.
                await back_off.wait()
                continue
            back_off.reset()
            if assignment is not None:
                revision = assignment.revision
                drain = assignment.drain.shifted(offset) if assignment.drain is not None else None
                on_assignment(assignment.model_copy(update={"drain": drain}))

    async def send_report(self, report: AgentReport) -> bool:
        """Send a report.

        Returns whether the operator has taken it; if not, the next report holds the same and more.
        """
        try:
            endpoint = self._endpoint()
            async with self._session.post(
                endpoint.url + PATH_REPORT,
                data=report.to_json(),
                headers=self._headers() | {"Content-Type": "application/json"},
                timeout=REPORT_TIMEOUT,
                ssl=endpoint.trust,
            ) as response:
                await _require_success(response)
                self.report_seconds = _seconds(response.headers.get(REPORT_SECONDS_HEADER))
        except TRANSIENT_ERRORS as error:
            self._outage.failed(PATH_REPORT, error)
            self._unreachable.set()
            return False
        self._outage.succeeded(PATH_REPORT)
        return True

    async def _poll_while_reachable(self, revision: str) -> tuple[Assignment | None, timedelta]:
        """Poll until a report fails.

        The node of the operator that holds the poll may have gone down without a word.
        """
        self._unreachable.clear()
        poll = asyncio.create_task(self._poll_assignment(revision))
        unreachable = asyncio.create_task(self._unreachable.wait())
        try:
            await asyncio.wait({poll, unreachable}, return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                return poll.result()
            raise aiohttp.ClientConnectionError("a report has failed, so the poll is repeated")
        finally:
            poll.cancel()
            unreachable.cancel()

    async def _poll_assignment(self, revision: str) -> tuple[Assignment | None, timedelta]:
        """The new assignment, if there is one, and the clock's lead.

        The lead is how far this clock is ahead of the operator's.
        """
        query = {"after": revision, "wait": f"{MAX_LONG_POLL_SECONDS:g}"}
        endpoint = self._endpoint()
        async with self._session.get(
            endpoint.url + PATH_ASSIGNMENT,
            params=query,
            headers=self._headers(),
            timeout=POLL_TIMEOUT,
            ssl=endpoint.trust,
        ) as response:
            await _require_success(response)
            assignment = None if response.status == 204 else Assignment.from_json(await response.read())
            return assignment, clock_offset(response.headers.get("Date"), datetime.now(UTC))

    def _endpoint(self) -> ControlEndpoint:
        endpoint = self._address.read()
        self._outage.url = endpoint.url
        return endpoint

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        return {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}


def _seconds(header: str | None) -> float:
    """The pause between reports that an answer names."""
    try:
        seconds = float(header or OLDER_REPORT_SECONDS)
    except ValueError:
        return OLDER_REPORT_SECONDS
    return seconds if seconds > 0 else OLDER_REPORT_SECONDS
