"""The agent's contact with the operator.

It has the agent's assignments and reports, and those of the peers that it relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable

from spottrain_agent.control_client import BackOff, ControlClient
from spottrain_agent.relay import RelayServer
from spottrain_agent.report_rhythm import ReportRhythm
from spottrain_agent.routes import IDLE_SECONDS
from spottrain_api.contract.assignments import AgentReport, RelayAssignment
from spottrain_api.contract.names import REPORT_SECONDS

# How often the agent looks for news that nothing reports to it.
LOOK_SECONDS = 1.0
# A poll ends so long before the next report, which then uses its connection.
EARLY_SECONDS = 2.0
# The next poll waits at most so long for that report.
SHARING_SECONDS = 1.0


class Contact:
    """Follows the assignments, and reports by the rhythm.

    Attributes:
        num_reports: The number of reports that were sent.
    """

    def __init__(self, address: str, report: Callable[[], AgentReport]) -> None:
        """`report` makes a report of the present state."""
        self._make_report = report
        self._news = asyncio.Event()
        self._has_looked = asyncio.Event()
        self._is_early = False
        self._rhythm = ReportRhythm()
        self._relay = RelayServer(address, self.report_soon)
        self._is_known = False  # to whoever answers now
        self._process = secrets.token_hex(8)
        self.num_reports = 0

    async def keep(self, control: ControlClient, on_assignment: Callable[[RelayAssignment], None]) -> None:
        """Stay in contact until cancelled."""

        def handle(assignment: RelayAssignment) -> None:
            self._relay.set_peers(assignment.peers or {})
            on_assignment(assignment)

        async with asyncio.TaskGroup() as doing:
            doing.create_task(self._relay.run())
            doing.create_task(control.follow_assignments(handle, self._lose_contact, lambda: self._share(control)))
            doing.create_task(self._report_forever(control))

    def report_soon(self) -> None:
        """Look at once if there is news to report."""
        self._news.set()

    async def report_last(self, control: ControlClient) -> None:
        """Report once more, until the operator has accepted it."""
        back_off = BackOff()
        while not await control.send_report(self._numbered(self._report())):
            await back_off.wait()

    def _lose_contact(self) -> None:
        self._is_known = False
        self._rhythm.lose_contact()
        self._relay.lose_contact()
        self.report_soon()

    async def _share(self, control: ControlClient) -> float:
        """Send the report that is due before a poll, so that both use one connection.

        While a poll is held, a report needs a connection of its own: a handshake, most of what a report costs the
        operator.

        Returns:
            For how many seconds the next poll may be held: until shortly before the next report.
        """
        self._is_early = self._rhythm.seconds_left(time.monotonic()) < 1.5 * EARLY_SECONDS
        if self._is_early or self._news.is_set():
            self._has_looked.clear()
            self._news.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHARING_SECONDS):
                    await self._has_looked.wait()
        left = self._rhythm.seconds_left(time.monotonic())
        # Reports that come sooner keep a connection of their own open.
        return left - EARLY_SECONDS if left > IDLE_SECONDS else max(control.report_seconds, REPORT_SECONDS)

    async def _report_forever(self, control: ControlClient) -> None:
        while True:
            self._news.clear()
            report = self._report()
            if self._is_early or self._relay.has_news or self._rhythm.is_due(report, time.monotonic()):
                self._is_early = False
                self._is_known = True
                accepted = await control.send_report(self._relay.filled(self._numbered(report)))
                self._relay.sent(accepted=accepted, restarts=control.operator_restarts)
                if accepted and self._is_known:
                    self._rhythm.sent(report, time.monotonic(), control.report_seconds)
                else:
                    self._rhythm.lose_contact()
                    self._relay.lose_contact()
            self._has_looked.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._news.wait()

    def _report(self) -> AgentReport:
        relay = {"relay_port": self._relay.port, "relay_token": self._relay.token}
        return self._make_report().model_copy(update=relay)

    def _numbered(self, report: AgentReport) -> AgentReport:
        self.num_reports += 1
        return report.model_copy(update={"process": self._process, "number": self.num_reports})
