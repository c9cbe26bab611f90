"""The ways from an agent to the operator: its control API, and a relay."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import aiohttp
from yarl import URL

from spottrain_agent.control_address import ControlAddress, ControlEndpoint
from spottrain_api.contract.assignments import AgentReport, Relay, RelayAssignment
from spottrain_api.contract.clocks import clock_offset
from spottrain_api.contract.names import MAX_LONG_POLL_SECONDS, PATH_ASSIGNMENT, PATH_REPORT, REPORT_SECONDS_HEADER
from spottrain_runtime.wording import one_line

# An operator that thousands ask at once answers late. Whoever gives up and asks anew makes it later.
FIRST_REPORT_SECONDS = 3.0
MAX_REPORT_SECONDS = 30.0
CONNECT_SECONDS = 2.0
POLL_TIMEOUT = aiohttp.ClientTimeout(total=MAX_LONG_POLL_SECONDS + 10, sock_connect=CONNECT_SECONDS)
# A connection without a request is closed after this time: it takes 45 KiB of the operator's memory.
IDLE_SECONDS = 5.0
# Longest pause between reports until an answer names one.
DEFAULT_REPORT_SECONDS = 1.0
# A relay that holds a poll writes a line each second. One that writes none for longer is gone, or hangs.
BEAT_SECONDS = 1.0
RELAY_REPORT_TIMEOUT = aiohttp.ClientTimeout(total=3)
RELAY_POLL_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=1, sock_read=3)
HEADER_PROOF = "Spottrain-Proof"
# How the operator answers a report that is out of bounds, or too large.
BAD_REPORT = (400, 413)

PollResult = tuple[RelayAssignment | None, timedelta]


class RefusedError(aiohttp.ClientError):
    """Whoever answers refuses the request, with an HTTP status. The text has the status and the sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(f"{status}: {sentence}")
        self.status = status


class BadReportError(RefusedError):
    """The report itself is refused. To send it again changes nothing."""


class UnprovenError(aiohttp.ClientError):
    """The answer does not prove that a relay gave it, or was cut off."""


class Route(Protocol):
    """Where to ask and report. Each method raises one of TRANSIENT_ERRORS if that fails."""

    async def poll(self, revision: str, seconds: float) -> PollResult:
        """The assignment if a new one comes within `seconds`, and how far this clock is ahead of the answerer's."""

    async def report(self, report: AgentReport) -> float:
        """Hand over a report. Returns the longest pause until the next one, in seconds."""


class DirectRoute:
    """The operator's control API.

    It reads the projected token and the operator's address for each request, because the kubelet renews them. After a
    report that was not answered in time, the next one may take twice as long.

    Attributes:
        url: The address of the newest request.
    """

    def __init__(self, session: aiohttp.ClientSession, address: ControlAddress, token_file: Path | None) -> None:
        self._session = session
        self._address = address
        self._token_file = token_file
        self._patience = FIRST_REPORT_SECONDS
        self.url = ""

    async def poll(self, revision: str, seconds: float) -> PollResult:
        endpoint = self._endpoint()
        async with self._session.get(
            endpoint.url + PATH_ASSIGNMENT,
            params={"after": revision, "wait": f"{seconds:g}"},
            headers=self._headers(),
            timeout=POLL_TIMEOUT,
            ssl=endpoint.trust,
        ) as response:
            await _require_success(response)
            assignment = None if response.status == 204 else RelayAssignment.from_json(await response.read())
            return assignment, _clock_offset(response)

    async def report(self, report: AgentReport) -> float:
        try:
            seconds = await self._report(report)
        except TimeoutError:
            self._patience = min(2 * self._patience, MAX_REPORT_SECONDS)
            raise
        self._patience = FIRST_REPORT_SECONDS
        return seconds

    async def _report(self, report: AgentReport) -> float:
        endpoint = self._endpoint()
        async with self._session.post(
            endpoint.url + PATH_REPORT,
            data=report.to_json(),
            headers=self._headers() | {"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=self._patience, sock_connect=CONNECT_SECONDS),
            ssl=endpoint.trust,
        ) as response:
            await _require_success(response)
            return _seconds(response.headers.get(REPORT_SECONDS_HEADER))

    def _endpoint(self) -> ControlEndpoint:
        endpoint = self._address.read()
        self.url = endpoint.url
        return endpoint

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        return {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}


class RelayRoute:
    """The relay of the generation, for one pod."""

    def __init__(self, session: aiohttp.ClientSession, relay: Relay, pod_uid: str) -> None:
        self._session = session
        self.relay = relay
        self._pod_uid = pod_uid

    async def poll(self, revision: str, seconds: float) -> PollResult:
        """As Route says, but the relay holds the poll for as long as nothing changes."""
        url = URL(f"http://{self.relay.address}{PATH_ASSIGNMENT}").with_query(pod=self._pod_uid, after=revision)
        nonce, headers = _question(self.relay.token, "GET", url)
        async with self._session.get(url, headers=headers, timeout=RELAY_POLL_TIMEOUT) as response:
            offset = _clock_offset(response)  # the headers come at once, and the answer perhaps minutes later
            return RelayAssignment.from_json(await self._answer(response, nonce)), offset

    async def report(self, report: AgentReport) -> float:
        report = report.model_copy(update={"relay_port": None, "relay_token": None})
        url, body = URL(f"http://{self.relay.address}{PATH_REPORT}"), report.to_json().encode()
        nonce, headers = _question(self.relay.token, "POST", url, body)
        async with self._session.post(url, data=body, headers=headers, timeout=RELAY_REPORT_TIMEOUT) as response:
            return _seconds((await self._answer(response, nonce)).decode())

    async def _answer(self, response: aiohttp.ClientResponse, nonce: str) -> bytes:
        await _require_success(response)
        proof, _, content = (await response.read()).strip().partition(b"\n")
        if not hmac.compare_digest(proof, proof_of_answer(self.relay.token, nonce, content)):
            raise UnprovenError(f"the relay at {self.relay.address} gives no answer that proves its token")
        return content


def _question(token: str, method: str, url: URL, body: bytes = b"") -> tuple[str, dict[str, str]]:
    """A nonce, and the header that proves a request with it."""
    nonce = secrets.token_hex(16)
    return nonce, {HEADER_PROOF: f"{nonce} {proof_of_question(token, nonce, method, url, body)}"}


def proven_nonce(token: str, headers: Mapping[str, str], method: str, url: URL, body: bytes = b"") -> str | None:
    """The nonce of a request whose sender knows the token; None if it doesn't."""
    nonce, _, proof = headers.get(HEADER_PROOF, "").partition(" ")
    expected = proof_of_question(token, nonce, method, url, body)
    return nonce if hmac.compare_digest(proof.encode(errors="surrogateescape"), expected.encode()) else None


def proof_of_question(token: str, nonce: str, method: str, url: URL, body: bytes) -> str:
    question = f"question {nonce} {method} {url.raw_path_qs}\n"
    return _proof(token, question.encode(errors="surrogateescape") + body)


def proof_of_answer(token: str, nonce: str, content: bytes) -> bytes:
    """What the first line of an answer holds.

    The nonce is the question's, so that an old answer is good for no new one.
    """
    return _proof(token, f"answer {nonce}\n".encode() + content).encode()


def _proof(token: str, message: bytes) -> str:
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest()


async def _require_success(response: aiohttp.ClientResponse) -> None:
    if response.status >= 400:
        kind = BadReportError if response.status in BAD_REPORT else RefusedError
        # A proxy may answer in any encoding.
        raise kind(response.status, one_line(await response.text(errors="replace")) or response.reason or "")


def _clock_offset(response: aiohttp.ClientResponse) -> timedelta:
    return clock_offset(response.headers.get("Date"), datetime.now(UTC))


def _seconds(text: str | None) -> float:
    """The pause between reports that an answer names."""
    try:
        seconds = float(text or DEFAULT_REPORT_SECONDS)
    except ValueError:
        return DEFAULT_REPORT_SECONDS
    return seconds if seconds > 0 else DEFAULT_REPORT_SECONDS
