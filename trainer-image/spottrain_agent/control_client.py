"""The agent's client of the operator, directly or through a relay. Its long polls never give up."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

import aiohttp
from pydantic import ValidationError

from spottrain_agent.control_address import ControlAddress
from spottrain_agent.routes import (
    DEFAULT_REPORT_SECONDS,
    BadReportError,
    DirectRoute,
    PollResult,
    RefusedError,
    RelayRoute,
    Route,
)
from spottrain_api.contract.assignments import AgentReport, Assignment, RelayAssignment
from spottrain_api.contract.names import MAX_LONG_POLL_SECONDS, PATH_ASSIGNMENT, PATH_REPORT

logger = logging.getLogger(__name__)

MIN_BACK_OFF_SECONDS = 0.1
MAX_BACK_OFF_SECONDS = 1.0
# How soon a relay that has failed is tried again, doubling.
MIN_WITHOUT_RELAY_SECONDS = 1.0
MAX_WITHOUT_RELAY_SECONDS = 240.0
# How soon an outage is reported again, doubling up to an hour.
LOG_AGAIN_SECONDS = 60.0
MAX_LOG_AGAIN_SECONDS = 3600.0
# A poll that has been open for so long is held: one that finds nobody, or is refused, ends sooner.
HELD_SECONDS = 5.0
# In messages, until the pod says where the operator is.
UNKNOWN_ADDRESS = "an unknown address"
TRANSIENT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValidationError)


class BackOff:
    """Waits between attempts. The pause doubles, with jitter, up to a second, so that a restart is noticed soon."""

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
        self._began_at = self._log_at = 0.0
        self._pause = LOG_AGAIN_SECONDS

    def failed(self, request: str, error: Exception) -> None:
        """Call it for each failed request."""
        logger.debug("%s to the operator failed: %r", request, error)
        now = self._clock()
        if not self._failing:
            self._began_at = self._log_at = now
            self._pause = LOG_AGAIN_SECONDS
        self._failing.add(request)
        if now < self._log_at:
            return
        self._log_at = now + self._pause
        self._pause = min(2 * self._pause, MAX_LOG_AGAIN_SECONDS)
        self._log(now - self._began_at, str(error) or type(error).__name__)

    def _log(self, elapsed: float, problem: str) -> None:
        logger.warning(
            "The operator at %s %s: %s. The ranks train on, but the job's members and status stay as they are until "
            "it answers. Check that the operator's pod is ready, that the name resolves, and that no NetworkPolicy "
            "keeps trainer pods from it.",
            self.url,
            f"has not answered for {elapsed:.0f} s" if elapsed else "does not answer",
            problem,
        )

    def succeeded(self, request: str) -> None:
        """Call it for each answered request."""
        if request not in self._failing:
            return
        self._failing.remove(request)
        if not self._failing:
            self._log_end(self._clock() - self._began_at)

    def _log_end(self, elapsed: float) -> None:
        logger.info("The operator at %s answers again, after %.0f s.", self.url, elapsed)


class RefusedReports(Outage):
    """Logs, as often as an outage, that the operator answers and accepts no report."""

    def _log(self, elapsed: float, problem: str) -> None:
        logger.warning(
            "The operator at %s refuses this pod's reports%s: %s. The ranks train on, but the job's status stays as "
            "it is, and hangTimeoutSeconds counts from the last report that was accepted. Use an operator and a "
            "trainer image of the same version. If they are, this is a bug: report it with this line.",
            self.url,
            f" for {elapsed:.0f} s" if elapsed else "",
            problem,
        )

    def _log_end(self, elapsed: float) -> None:
        logger.info("The operator at %s accepts this pod's reports again, after %.0f s.", self.url, elapsed)


async def _longest() -> float:
    return MAX_LONG_POLL_SECONDS


class ControlClient:
    """Talks to the operator, through a relay if there is one that works.

    Attributes:
        report_seconds: The longest pause between reports that the operator allows.
        operator_restarts: Whether nobody listened at the operator's address for the newest report, or it was answered
            with 503.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        folder: Path,
        token_file: Path | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        pod_uid: str = "",
    ) -> None:
        """Configure the client.

        Args:
            session: For the requests.
            folder: Holds the address of the control API, and the authorities to trust.
            token_file: Holds the token.
            clock: For the intervals of messages, and of attempts at a relay.
            pod_uid: The agent's pod, which it names to a relay.
        """
        self._session = session
        self._pod_uid = pod_uid
        self._clock = clock
        self._outage = Outage(UNKNOWN_ADDRESS, clock)
        self._refused = RefusedReports(UNKNOWN_ADDRESS, clock)
        self._direct = DirectRoute(session, ControlAddress(folder), token_file)
        self._route: Route = self._direct
        self._relay: RelayRoute | None = None
        self._relay_pause = MIN_WITHOUT_RELAY_SECONDS
        self._relay_at = 0.0
        self._unreachable = asyncio.Event()
        self._polling_since = clock()
        self.report_seconds = DEFAULT_REPORT_SECONDS
        self.operator_restarts = False

    async def follow_assignments(
        self,
        on_assignment: Callable[[RelayAssignment], None],
        on_lost_contact: Callable[[], None] = lambda: None,
        before_poll: Callable[[], Awaitable[float]] = _longest,
    ) -> None:
        """Pass on each new assignment, until cancelled.

        Errors are only logged, because training continues. `on_lost_contact` is called after each, and if the next
        answer comes from somebody else: a relay or an operator, which may know nothing of this agent. `before_poll`
        is awaited before each poll of the operator itself, and returns for how many seconds it may be held.
        """
        revision = ""
        back_off = BackOff()
        while True:
            self._choose_route(on_lost_contact)
            try:
                seconds = await before_poll() if self._route is self._direct else MAX_LONG_POLL_SECONDS
                assignment, offset = await self._poll_while_reachable(revision, seconds)
            except TRANSIENT_ERRORS as error:
                if self._route is not self._direct:
                    self._give_up_relay(error)
                    continue
                self._failed(self._outage, PATH_ASSIGNMENT, error)
                on_lost_contact()
                await back_off.wait()
                continue
            self._outage.succeeded(PATH_ASSIGNMENT)
            if self._route is not self._direct:
                self._relay_pause = MIN_WITHOUT_RELAY_SECONDS
            if assignment is not None and assignment.revision == revision:
                # A newer operator has changed fields that this agent doesn't know: don't ask in a tight loop.
                await back_off.wait()
                continue
            back_off.reset()
            if assignment is not None:
                revision = assignment.revision
                self._follow_relay(assignment)
                on_assignment(assignment.shifted(offset))

    async def send_report(self, report: AgentReport) -> bool:
        """Send a report, and to the operator itself if the relay fails.

        Returns whether the operator has accepted it; if not, the next report holds the same and more.
        """
        route = self._route
        if route is not self._direct:
            try:
                self.report_seconds = await route.report(report)
            except TRANSIENT_ERRORS as error:
                if self._route is route:
                    self._give_up_relay(error)
            else:
                self._reported()
                return True
        try:
            self.report_seconds = await self._direct.report(report)
        except BadReportError as error:
            self._answered()
            self._failed(self._refused, PATH_REPORT, error)
            return False
        except TRANSIENT_ERRORS as error:
            self._failed(self._outage, PATH_REPORT, error)
            self.operator_restarts = _shows_restart(error)
            self._unreachable.set()
            return False
        self._reported()
        return True

    def _reported(self) -> None:
        self._answered()
        self._refused.succeeded(PATH_REPORT)

    def _answered(self) -> None:
        self.operator_restarts = False
        self._outage.succeeded(PATH_REPORT)
        if self._clock() - self._polling_since > HELD_SECONDS:
            self._outage.succeeded(PATH_ASSIGNMENT)

    async def _poll_while_reachable(self, revision: str, seconds: float) -> PollResult:
        """Poll for at most so many seconds, and until a report fails.

        The node of whoever holds the poll may have gone down without a word.
        """
        self._unreachable.clear()
        self._polling_since = self._clock()
        poll = asyncio.create_task(self._route.poll(revision, min(seconds, self._poll_seconds())))
        unreachable = asyncio.create_task(self._unreachable.wait())
        try:
            await asyncio.wait({poll, unreachable}, return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                return poll.result()
            raise aiohttp.ClientConnectionError("a report has failed, so the poll is repeated")
        finally:
            poll.cancel()
            unreachable.cancel()

    def _failed(self, trouble: Outage, request: str, error: Exception) -> None:
        trouble.url = self._direct.url or trouble.url
        trouble.failed(request, error)

    # --- the relay ---------------------------------------------------------------------------------------

    def _follow_relay(self, assignment: Assignment) -> None:
        """Use the relay that an assignment names.

        A new operator may not know the relay yet, so an assignment that names none doesn't end its use.
        """
        generation = assignment.generation
        if generation is None or generation.node_rank == 0:
            self._relay = None
        elif assignment.relay is not None and (self._relay is None or self._relay.relay != assignment.relay):
            self._relay = RelayRoute(self._session, assignment.relay, self._pod_uid)
            self._relay_pause, self._relay_at = MIN_WITHOUT_RELAY_SECONDS, 0.0

    def _choose_route(self, on_change: Callable[[], None]) -> None:
        relay = self._relay
        route = relay if relay is not None and self._clock() >= self._relay_at else self._direct
        if route is not self._route:
            self._route = route
            on_change()

    def _give_up_relay(self, error: Exception) -> None:
        """Go to the operator itself, and try the relay again later."""
        if self._clock() < self._relay_at:  # a poll and a report have failed together
            return
        level = logging.DEBUG if self._relay_pause < LOG_AGAIN_SECONDS else logging.INFO  # rank 0 often leaves
        reason = str(error) or type(error).__name__
        logger.log(level, "the relay on node rank 0 fails, so this agent asks the operator itself: %s", reason)
        self._relay_at = self._clock() + self._relay_pause
        self._relay_pause = min(2 * self._relay_pause, MAX_WITHOUT_RELAY_SECONDS)
        self._unreachable.set()

    def _poll_seconds(self) -> float:
        """How long a poll is held: if the relay has failed, until it is tried again."""
        if self._relay is None:
            return MAX_LONG_POLL_SECONDS
        return min(max(0.0, self._relay_at - self._clock()), MAX_LONG_POLL_SECONDS)


def _shows_restart(error: Exception) -> bool:
    """Nobody listens, or who does is about to lead."""
    if isinstance(error, RefusedError):
        return error.status == HTTPStatus.SERVICE_UNAVAILABLE
    return isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
