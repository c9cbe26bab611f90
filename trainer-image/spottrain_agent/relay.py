"""The relay: node rank 0 passes on reports and assignments of its peers.

So the operator has one connection for each job. Peers ask and report here as they would at the control API, and each
side proves that it knows the relay's token. A peer is there as long as it holds a poll here. This agent's own reports
say so to the operator, and carry those of the peers. A peer's news is reported at once, except a commit, which this
agent reports at once itself. All else waits for this agent's own next report.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NoReturn

from aiohttp import web
from pydantic import ValidationError

from spottrain_agent import routes
from spottrain_agent.ports import bind
from spottrain_agent.routes import proof_of_answer, proven_nonce
from spottrain_api.contract.assignments import AgentReport, Assignment, RelayReport
from spottrain_api.contract.names import PATH_ASSIGNMENT, PATH_REPORT, QUIET_REPORT_SECONDS
from spottrain_runtime import http_server

# A peer may be faster than this agent's own assignment, which says who its peers are.
UNKNOWN_PEER_SECONDS = 1.0
# A peer that was answered asks again within this time.
BETWEEN_POLLS_SECONDS = 2.0
# If the operator doesn't answer for this long, this node may be cut off, and peers go to it themselves.
SILENT_OPERATOR_SECONDS = 15.0
# While it restarts, nobody listens at its address, and it may answer 503 then. After that, one of a thousand jobs may
# be too busy to answer for more than 15 s. It would be busier if all their peers shook hands with it.
RESTART_SECONDS = 120.0
# The kernel gives a peer up that has acknowledged nothing for this long.
UNACKNOWLEDGED_MILLISECONDS = 2000
MAX_REPORT_BYTES = 128 * 1024
# Of the peers' reports that go into one of this agent's, which the operator limits to 384 KiB.
MAX_BATCH_BYTES = 128 * 1024
_BEAT = b"\n"


class RelayServer:
    """Serves the peers in the generation in which this agent has node rank 0.

    `on_news` is called when there is something to report for them. Each report of this agent is `filled` and then
    `sent`.
    """

    def __init__(
        self, address: str, on_news: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket = bind(address)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS)
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_hex(32)
        self._on_news = on_news
        self._clock = clock
        self._peers: dict[str, tuple[str, bytes]] = {}
        self._changed = asyncio.Event()
        self._num_polls: Counter[str] = Counter()
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._reports: dict[str, AgentReport] = {}
        self._unsent: set[str] = set()
        self._quiet: set[str] = set()  # peers whose newest report can wait for the next one
        self._sending: set[str] = set()  # peers whose newest report is in that which is filled
        self._news_accepted: set[str] = set()  # peers whose newest news, except commits, an operator has
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._in_flight: dict[str, asyncio.Future[bool]] = {}
        self._reported_present: frozenset[str] | None = frozenset()
        self._alone_since: float | None = None
        self._restarts = False

    async def run(self) -> None:
        """Serve until cancelled. Peers that wait for an answer are then sent to the operator."""
        application = web.Application(client_max_size=MAX_REPORT_BYTES)
        application.router.add_get(PATH_ASSIGNMENT, self._poll)
        application.router.add_post(PATH_REPORT, self._report)
        runner = http_server.bounded_runner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket).start()
            await asyncio.Event().wait()
        finally:
            self.set_peers({})
            self.sent(accepted=False)
            await runner.cleanup()

    # --- this agent and the operator ---------------------------------------------------------------------

    def set_peers(self, peers: Mapping[str, Assignment]) -> None:
        """Set the peers, by pod uid, and what each is assigned."""
        self._peers = {
            uid: (each.revision, each.model_copy(update={"relay": None}).to_json().encode())  # it has the token
            for uid, each in peers.items()
        }
        self._reports = {uid: report for uid, report in self._reports.items() if uid in peers}
        self._unsent &= peers.keys()
        self._quiet &= peers.keys()
        self._news_accepted &= peers.keys()
        for uid in self._waiting.keys() - peers.keys():
            _settle(self._waiting.pop(uid), accepted=False)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self.has_news:
            self._on_news()

    @property
    def present(self) -> frozenset[str]:
        """The peers that hold a poll here."""
        return frozenset(self._peers.keys() & (self._num_polls.keys() | self._leaving.keys()))

    @property
    def has_news(self) -> bool:
        return bool(self._unsent) or self._reported_present != self.present

    def filled(self, report: AgentReport) -> RelayReport:
        """This agent's report, with those of its peers that the operator lacks."""
        size = 0
        chosen: list[str] = []
        for uid in [*sorted(self._unsent), *sorted(self._quiet)]:
            size += len(self._reports[uid].to_json().encode())
            if chosen and size > MAX_BATCH_BYTES:
                break
            chosen.append(uid)
        self._sending = set(chosen)
        self._unsent -= self._sending
        self._quiet -= self._sending
        self._in_flight = {uid: self._waiting.pop(uid) for uid in chosen if uid in self._waiting}
        self._reported_present = self.present
        peers = tuple(self._reports[uid] for uid in chosen)
        return RelayReport(**dict(report), present=tuple(sorted(self._reported_present)), peers=peers)

    def sent(self, *, accepted: bool, restarts: bool = False) -> None:
        """Note whether the operator has accepted the report that was filled last.

        If it hasn't, `restarts` says whether it seems to restart.
        """
        answered, self._in_flight = self._in_flight, {}
        for future in answered.values():
            _settle(future, accepted=accepted)
        if accepted:
            self._alone_since = None
            self._restarts = False
            self._news_accepted |= self._sending & self._peers.keys()
            if self.has_news:
                self._on_news()
            return
        self._alone_since = self._clock() if self._alone_since is None else self._alone_since
        self._restarts |= restarts
        for uid in answered.keys() - self._waiting.keys():  # the peer hands it to the operator itself
            self._reports.pop(uid, None)
            self._unsent.discard(uid)  # the contact may have been lost meanwhile
            self._quiet.discard(uid)

    def lose_contact(self) -> None:
        """Report anew of all peers, to an operator that may know none of them."""
        self._unsent |= self.present & self._reports.keys()
        self._quiet -= self._unsent
        self._reported_present = None

    # --- the peers ---------------------------------------------------------------------------------------

    async def _poll(self, request: web.Request) -> web.StreamResponse:
        """Answer once the peer's assignment differs from `?after=`.

        Until then, write a line each second.
        The answer's first line proves it. It is cut off if this agent can't answer any more.
        """
        nonce = self._question(request)
        uid = request.query.get("pod", "")
        await self._require_peer(uid)
        response = web.StreamResponse()
        with suppress(OSError), self._polling(uid):  # the peer may go at any time
            await response.prepare(request)
            while (found := self._peers.get(uid)) is not None and self._reaches_operator():
                changed, (revision, content) = self._changed, found
                if revision != request.query.get("after"):
                    await response.write(self._proven(nonce, content))
                    break
                await response.write(_BEAT)
                with suppress(TimeoutError):
                    async with asyncio.timeout(routes.BEAT_SECONDS):
                        await changed.wait()
            await response.write_eof()
        return response

    async def _report(self, request: web.Request) -> web.Response:
        """Answer once the operator has accepted the report, or at once if it can wait.

        It can if it has no news, or none but a commit.

        503: the operator has not accepted it, so the peer has to go there itself.
        """
        try:
            async with asyncio.timeout(http_server.REQUEST_SECONDS):
                body = await request.read()  # which the proof covers
        except TimeoutError as error:
            request.protocol.force_close()  # aiohttp would wait for the rest, to send an answer
            raise web.HTTPRequestTimeout from error
        nonce = self._question(request, body)
        try:
            report = AgentReport.from_json(body)
        except ValidationError as error:
            raise web.HTTPBadRequest(text="not an agent report") from error
        uid = report.pod_uid
        await self._require_peer(uid)
        known = self._reports.get(uid)
        if known is None or not report.is_older_than(known):
            self._reports[uid] = report
            if known is not None and report.news_but_commits == known.news_but_commits and uid in self._news_accepted:
                if uid not in self._unsent:
                    self._quiet.add(uid)
                return self._accepted(nonce)
            self._news_accepted.discard(uid)
            self._sending.discard(uid)
            self._quiet.discard(uid)
            self._unsent.add(uid)
        elif uid not in self._unsent:
            raise web.HTTPBadRequest(text="a newer report has come before")
        future = self._waiting.setdefault(uid, asyncio.get_running_loop().create_future())
        self._on_news()
        if not await asyncio.shield(future):
            raise web.HTTPServiceUnavailable(text="node rank 0 can't report to the operator")
        return self._accepted(nonce)

    def _accepted(self, nonce: str) -> web.Response:
        return web.Response(body=self._proven(nonce, f"{QUIET_REPORT_SECONDS:g}".encode()))

    def _question(self, request: web.Request, body: bytes = b"") -> str:
        """The nonce of a request by whoever knows the token."""
        nonce = proven_nonce(self.token, request.headers, request.method, request.rel_url, body)
        if nonce is None:
            raise web.HTTPForbidden(text="the request does not prove that its sender knows the relay's token")
        return nonce

    def _proven(self, nonce: str, content: bytes) -> bytes:
        return proof_of_answer(self.token, nonce, content) + b"\n" + content

    async def _require_peer(self, uid: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(UNKNOWN_PEER_SECONDS):
                while uid not in self._peers:
                    await self._changed.wait()
        if uid not in self._peers:
            self._refuse("this agent has no such peer")
        if not self._reaches_operator():
            self._refuse("node rank 0 can't report to the operator")

    def _refuse(self, sentence: str) -> NoReturn:
        raise web.HTTPServiceUnavailable(text=sentence)

    def _reaches_operator(self) -> bool:
        if self._alone_since is None:
            return True
        patience = RESTART_SECONDS if self._restarts else SILENT_OPERATOR_SECONDS
        return self._clock() < self._alone_since + patience

    @contextmanager
    def _polling(self, uid: str) -> Iterator[None]:
        """The peer holds a poll, and is there as long as its connection is. After an answer it asks again soon."""
        if uid not in self.present:
            self._reported_present = None  # it may have been away without a word of this agent
        self._num_polls[uid] += 1
        leaving = self._leaving.pop(uid, None)
        if leaving is not None:
            leaving.cancel()
        self._on_news()
        try:
            yield
        except (asyncio.CancelledError, OSError):
            self._end_poll(uid)
            self._on_news()
            raise
        self._end_poll(uid)
        if not self._num_polls[uid]:
            self._leaving[uid] = asyncio.get_running_loop().call_later(BETWEEN_POLLS_SECONDS, self._has_left, uid)

    def _end_poll(self, uid: str) -> None:
        self._num_polls[uid] -= 1
        if not self._num_polls[uid]:
            del self._num_polls[uid]

    def _has_left(self, uid: str) -> None:
        del self._leaving[uid]
        self._on_news()


def _settle(future: asyncio.Future[bool], *, accepted: bool) -> None:
    if not future.done():
        future.set_result(accepted)
