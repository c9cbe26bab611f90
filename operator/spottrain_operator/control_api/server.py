"""The control API for agents: GET /v1/assignment and POST /v1/report.

It also serves /metrics, /healthz and /readyz.

An agent speaks for its own pod only. Kubernetes binds its token to that pod, and the pod's uid comes from the review
of the token, never from the agent's report.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from datetime import datetime
from email.utils import format_datetime

from aiohttp import web
from pydantic import ValidationError

from spottrain_api.contract import LONG_POLL_SECONDS, PATH_ASSIGNMENT, PATH_REPORT, TOKEN_AUDIENCE, AgentReport
from spottrain_operator.cluster.client import ClusterError, PodIdentity, TokenReviewer
from spottrain_operator.control_api.agents import AssignmentBoard, ReportBox

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024
# A pod's token stays valid for this long after the pod is deleted. Refusals are cached briefly, against floods.
ACCEPTED_SECONDS = 60.0
REFUSED_SECONDS = 5.0
MAX_REVIEWS = 20_000


class TokenCache:
    """Token reviews, cached for a short time by the token's hash."""

    def __init__(self, reviewer: TokenReviewer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._reviewer = reviewer
        self._clock = clock
        self._reviews: OrderedDict[bytes, tuple[float, PodIdentity | None]] = OrderedDict()

    async def identify(self, token: str) -> PodIdentity | None:
        """Find the pod that the token is bound to.

        Returns:
            The pod, or None if the token isn't valid or isn't bound to one.

        Raises:
            ClusterError: The token can't be checked now.
        """
        key = hashlib.sha256(token.encode()).digest()
        expires, pod = self._reviews.get(key, (0.0, None))
        if self._clock() < expires:
            return pod
        pod = await self._reviewer.review_token(token, audience=TOKEN_AUDIENCE)
        self._reviews.pop(key, None)
        self._reviews[key] = (self._clock() + (ACCEPTED_SECONDS if pod else REFUSED_SECONDS), pod)
        if len(self._reviews) > MAX_REVIEWS:
            self._reviews.popitem(last=False)
        return pod


class ControlApi:
    """The HTTP application.

    `is_ready` returns whether this process leads and has observed the cluster. `is_standby` returns whether another
    one leads, and this one could take over: then it is ready for Kubernetes, but answers no agent.
    """

    def __init__(
        self,
        *,
        reviewer: TokenReviewer,
        board: AssignmentBoard,
        reports: ReportBox,
        is_ready: Callable[[], bool],
        is_standby: Callable[[], bool] = lambda: False,
        metrics: Callable[[], tuple[bytes, str]],
        now: Callable[[], datetime],
        long_poll_seconds: float = LONG_POLL_SECONDS,
    ) -> None:
        self._tokens = TokenCache(reviewer)
        self._board = board
        self._reports = reports
        self._is_ready = is_ready
        self._is_standby = is_standby
        self._metrics = metrics
        self._now = now
        self._long_poll_seconds = long_poll_seconds

    def application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_refusals])
        application.router.add_get(PATH_ASSIGNMENT, self.get_assignment)
        application.router.add_post(PATH_REPORT, self.post_report)
        application.router.add_get("/metrics", self.get_metrics)
        application.router.add_get("/healthz", self.get_health)
        application.router.add_get("/readyz", self.get_readiness)
        return application

    async def get_assignment(self, request: web.Request) -> web.Response:
        """Answer with the assignment once its revision differs from `?after=`.

        The answer is 204 if that takes too long.
        """
        pod = await self._authenticated(request)
        after = request.query.get("after") or None
        assignment = await self._board.next(pod.uid, after=after, timeout_seconds=self._long_poll_seconds)
        # An operator that lost the lease during the poll must not hand out its old decisions.
        self._require_leader()
        if assignment is None:
            return web.Response(status=204)
        # Agents compare their clock with the one that set the assignment's deadline.
        headers = {"ETag": f'"{assignment.revision}"', "Date": format_datetime(self._now(), usegmt=True)}
        return web.json_response(text=assignment.to_json(), headers=headers)

    async def post_report(self, request: web.Request) -> web.Response:
        pod = await self._authenticated(request)
        try:
            report = AgentReport.from_json(await request.read())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "body"
            raise web.HTTPBadRequest(text=f"not an agent report: {field}: {first['msg']}") from error
        if (report.pod, report.pod_uid) != (pod.pod, pod.uid):
            raise web.HTTPForbidden(
                text=f"this token speaks for pod {pod.pod} ({pod.uid}), the report is about {report.pod} "
                f"({report.pod_uid}); report with the token of the pod itself"
            )
        self._reports.put(pod, report)
        return web.Response(status=204)

    async def get_metrics(self, _request: web.Request) -> web.Response:
        body, content_type = self._metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def get_health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def get_readiness(self, _request: web.Request) -> web.Response:
        if not self._is_standby():
            self._require_leader()
        return web.Response(text="ok")

    def _require_leader(self) -> None:
        if not self._is_ready():
            raise web.HTTPServiceUnavailable(
                text="this operator doesn't lead, or has not observed the cluster yet; retry in a second",
                headers={"Retry-After": "1"},
            )

    async def _authenticated(self, request: web.Request) -> PodIdentity:
        self._require_leader()
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise web.HTTPUnauthorized(
                text="no token: send the pod's projected service-account token as 'Authorization: Bearer …'"
            )
        try:
            pod = await self._tokens.identify(token.strip())
        except ClusterError as error:
            raise web.HTTPServiceUnavailable(
                text=f"the token can't be checked now: {error}; retry in a second",
                headers={"Retry-After": "1"},
            ) from error
        if pod is None:
            raise web.HTTPUnauthorized(
                text=f"the token isn't valid, or isn't bound to a pod for the audience '{TOKEN_AUDIENCE}'"
            )
        return pod


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log refusals with their sentence, which the agent's log shows, too."""
    try:
        return await handler(request)
    except web.HTTPClientError as refusal:
        logger.info("%s %s from %s: %s", request.method, request.path, request.remote, refusal.text)
        raise
