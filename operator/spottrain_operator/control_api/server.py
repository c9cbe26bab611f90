"""The control API for agents: GET /v1/assignment and POST /v1/report.

It also serves /healthz and /readyz.

An agent speaks for its own pod only, which is one that the operator made. Kubernetes binds its token to that pod, and
the pod's uid comes from the verified token, never from the agent's report. The agent of node rank 0 speaks for the
other members of its generation, too, if they hold their polls at its relay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from email.utils import format_datetime
from functools import partial

from aiohttp import web

from spottrain_api.contract.assignments import RelayReport
from spottrain_api.contract.names import (
    LONG_POLL_SECONDS,
    MAX_LONG_POLL_SECONDS,
    PATH_ASSIGNMENT,
    PATH_REPORT,
    QUIET_REPORT_SECONDS,
    REPORT_SECONDS,
    REPORT_SECONDS_HEADER,
    TOKEN_AUDIENCE,
)
from spottrain_operator.control_api.agents import AssignmentBoard, ReportBox
from spottrain_operator.control_api.cluster_keys import ClusterKeys
from spottrain_operator.control_api.observability import add_probes, require_leader
from spottrain_operator.control_api.rate_limit import RateLimit
from spottrain_operator.control_api.report_bounds import MAX_BODY_BYTES, InvalidReportError, parse_report
from spottrain_operator.control_api.token_review import review_token
from spottrain_operator.control_api.tokens import (
    NotOurPodError,
    TokenGate,
    TokenRefusedError,
    TooManyTokensError,
)
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import PodIdentity

logger = logging.getLogger(__name__)

# Refusals of one source that are logged. A flood must not fill the log.
REFUSALS_PER_SECOND = 0.1
REFUSALS_BURST = 20
# What the reports of one pod may take of the operator's processor, in seconds: each second, and at once. A relay with
# 511 peers takes some 15 s while all of them start: 3 ms for each report, and 0.1 ms for each peer in it.
WORK_PER_SECOND = 0.1
WORK_BURST = 60.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _DroppingResponse(web.Response):
    """An answer that drops its body once it is sent.

    aiohttp keeps an answer until the next one on its connection. That is minutes later for a poll that is held, and
    8 KiB for a job of 8 members.
    """

    async def write_eof(self, data: bytes = b"") -> None:
        await super().write_eof(data)
        self.body = None


class ControlApi:
    """The HTTP application.

    `is_ready` returns whether this process leads and has observed the cluster. Progress of a job is recorded every
    `record_interval` seconds.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        keys: ClusterKeys,
        board: AssignmentBoard,
        reports: ReportBox,
        is_ready: Callable[[], bool],
        now: Callable[[], datetime],
        record_interval: float = DEFAULT_TIMING.record_interval,
        long_poll_seconds: float = LONG_POLL_SECONDS,
    ) -> None:
        self._tokens = TokenGate(partial(review_token, cluster, audience=TOKEN_AUDIENCE), keys, reports.knows)
        self._board = board
        self._reports = reports
        self._is_ready = is_ready
        self._now = now
        self._report_seconds = min(REPORT_SECONDS, record_interval)
        self._long_poll_seconds = long_poll_seconds
        self._logged = RateLimit(per_second=REFUSALS_PER_SECOND, burst=REFUSALS_BURST)
        self._work = RateLimit(per_second=WORK_PER_SECOND, burst=WORK_BURST)

    def application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._log_refusals])
        application.router.add_get(PATH_ASSIGNMENT, self.get_assignment)
        application.router.add_post(PATH_REPORT, self.post_report)
        add_probes(application, self._is_ready)
        return application

    async def get_assignment(self, request: web.Request) -> web.Response:
        """Answer with the assignment once its revision differs from `?after=`.

        The answer is 204 if that takes too long.
        """
        pod = await self._authenticated(request)
        after = request.query.get("after") or None
        with self._reports.polling(pod):
            assignment = await self._board.next(
                pod.uid,
                after=after,
                timeout_seconds=self._seconds(request),
            )
        # An operator that lost the lease during the poll must not hand out its old decisions.
        require_leader(self._is_ready)
        if assignment is None:
            return web.Response(status=204)
        # Agents compare their clock with the one that set the assignment's deadline.
        headers = {"ETag": f'"{assignment.revision}"', "Date": format_datetime(self._now(), usegmt=True)}
        return _DroppingResponse(text=assignment.to_json(), headers=headers, content_type="application/json")

    async def post_report(self, request: web.Request) -> web.Response:
        received_at = self._now()
        pod = await self._authenticated(request)
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            problem = f"the report is larger than {MAX_BODY_BYTES // 1024} KiB, more than any agent sends"
            return self._refused_report(request, pod, web.HTTPRequestEntityTooLarge.status_code, problem)
        if self._work.is_overspent(pod.uid):
            raise web.HTTPTooManyRequests(
                text=f"the reports of pod {pod.pod} take more of the operator's time than those of any agent; retry "
                "in a second",
                headers={"Retry-After": "1"},
            )
        began = time.thread_time()
        try:
            return self._accept(request, pod, body, received_at)
        finally:
            self._work.spend(pod.uid, time.thread_time() - began)

    def _accept(self, request: web.Request, pod: PodIdentity, body: bytes, received_at: datetime) -> web.Response:
        """Accept a report. This doesn't wait, so that its processor time is its own."""
        try:
            report = parse_report(body)
        except InvalidReportError as error:
            return self._refused_report(request, pod, web.HTTPBadRequest.status_code, str(error))
        if (report.pod, report.pod_uid) != (pod.pod, pod.uid):
            raise web.HTTPForbidden(
                text=f"this token speaks for pod {pod.pod} ({pod.uid}), the report is about {report.pod} "
                f"({report.pod_uid}); report with the token of the pod itself"
            )
        if self._reports.put(pod, report.model_copy(update={"peers": ()}), received_at=received_at):
            self._accept_peers(pod, report, received_at)
        seconds = QUIET_REPORT_SECONDS if self._board.node_rank(pod.uid) else self._report_seconds
        return web.Response(status=204, headers={REPORT_SECONDS_HEADER: f"{seconds:g}"})

    def _refused_report(self, request: web.Request, pod: PodIdentity, status: int, problem: str) -> web.Response:
        """Refuse what no agent should send.

        The job's message and the log say so, too.
        """
        self._reports.refuse(pod, problem)
        if self._logged.allows(request.remote or ""):
            logger.warning("the report of pod %s/%s is refused: %s", pod.namespace, pod.pod, problem)
        return web.Response(status=status, text=problem)

    def _accept_peers(self, pod: PodIdentity, report: RelayReport, received_at: datetime) -> None:
        """Accept what node rank 0 reports of the other members of its generation."""
        if (report.present or report.peers) and not self._board.has_decided(pod.uid):
            raise web.HTTPServiceUnavailable(
                text="this operator has not decided on the job yet, so it doesn't know whom the pod may relay; retry "
                "in a second",
                headers={"Retry-After": "1"},
            )
        led = self._board.led_by(pod.uid) or {}
        self._reports.relay(pod, report, led.keys(), received_at=received_at)

    def _seconds(self, request: web.Request) -> float:
        """How long to hold a poll: as long as the agent waits for the answer."""
        try:
            wanted = float(request.query.get("wait", self._long_poll_seconds))
        except ValueError as error:
            raise web.HTTPBadRequest(text="wait: not a number of seconds") from error
        return wanted if 0 <= wanted <= MAX_LONG_POLL_SECONDS else self._long_poll_seconds

    async def _authenticated(self, request: web.Request) -> PodIdentity:
        require_leader(self._is_ready)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise web.HTTPUnauthorized(
                text="no token: send the pod's projected service-account token as 'Authorization: Bearer …'"
            )
        try:
            return await self._tokens.identify(token.strip(), request.remote or "")
        except TooManyTokensError as error:
            raise web.HTTPTooManyRequests(text=str(error), headers={"Retry-After": "1"}) from error
        except NotOurPodError as error:
            raise web.HTTPForbidden(text=str(error)) from error
        except TokenRefusedError as error:
            raise web.HTTPUnauthorized(text=str(error)) from error
        except ClusterError as error:
            raise web.HTTPServiceUnavailable(
                text=f"the token can't be checked now: {error}; retry in a second",
                headers={"Retry-After": "1"},
            ) from error

    @web.middleware
    async def _log_refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Log refusals with their sentence, which the agent's log shows, too."""
        try:
            return await handler(request)
        except web.HTTPClientError as refusal:
            if self._logged.allows(request.remote or ""):
                logger.info("%s %s from %s: %s", request.method, request.path, request.remote, refusal.text)
            raise
