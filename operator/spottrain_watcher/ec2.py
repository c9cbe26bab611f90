"""Signals of EC2's instance metadata service, version 2.

EC2 announces a spot interruption about two minutes ahead, by best effort. A rebalance recommendation comes earlier or
together with it. Maintenance is announced days ahead.

Sources:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitoring-instances-status-check_sched.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated

import aiohttp
from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field, TypeAdapter

from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_watcher.metadata import (
    Answer,
    MetadataServer,
    MetadataUnavailable,
    Poll,
    Polls,
    deadline_of,
    http_time,
    word,
)

ENV_ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DEFAULT_ENDPOINT = "http://169.254.169.254"
PATH_TOKEN = "/latest/api/token"
PATH_INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
PATH_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PATH_MAINTENANCE = "/latest/meta-data/events/maintenance/scheduled"
HEADER_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
HEADER_TOKEN = "X-aws-ec2-metadata-token"
TOKEN_TTL_SECONDS = 21600
POLL_SECONDS = 0.5
# A hint, and what is known for days, need no haste.
SLOW_POLL_SECONDS = 2.0
# EC2 gives two minutes, by best effort. If a time can't be, no more than this is counted on.
SHORTEST_LEAD = timedelta(seconds=15)
# A recommendation has no deadline, but a notice has to name one. Nobody drains for it.
REBALANCE_LEAD = timedelta(minutes=10)
ACTIVE = "active"


class Action(StrEnum):
    TERMINATE = "terminate"
    STOP = "stop"
    HIBERNATE = "hibernate"


class InstanceAction(BaseModel):
    """Body of spot/instance-action."""

    action: Action
    time: AwareDatetime


class RebalanceRecommendation(BaseModel):
    """Body of events/recommendations/rebalance."""

    notice_time: AwareDatetime = Field(alias="noticeTime")


class MaintenanceEvent(BaseModel):
    """One item of events/maintenance/scheduled."""

    event_id: str = Field(alias="EventId", min_length=1)
    code: str = Field(alias="Code")  # system-reboot, instance-reboot, system-maintenance, instance-retirement, …
    state: str = Field(alias="State")  # active; completed and canceled events are listed elsewhere
    not_before: Annotated[datetime, BeforeValidator(http_time)] = Field(alias="NotBefore")


_MAINTENANCE = TypeAdapter(list[MaintenanceEvent])


class Ec2Source(Polls):
    """Polls the metadata service of the instance that this process runs on."""

    name = "ec2"

    def __init__(self, session: aiohttp.ClientSession, node: str, environ: Mapping[str, str]) -> None:
        server = MetadataServer(session, "EC2's metadata server", environ.get(ENV_ENDPOINT) or DEFAULT_ENDPOINT)
        super().__init__(
            server,
            [
                self._poll(PATH_INSTANCE_ACTION, POLL_SECONDS, self._interruption),
                self._poll(PATH_REBALANCE, SLOW_POLL_SECONDS, self._rebalance),
                self._poll(PATH_MAINTENANCE, SLOW_POLL_SECONDS, self._maintenance),
            ],
        )
        self._ec2 = server
        self._node = node
        self._token: str | None = None

    def _poll(self, path: str, pause_seconds: float, notices_of: Callable[[Answer], Sequence[Notice]]) -> Poll:
        async def ask() -> Sequence[Notice]:
            answer = await self._get(path)
            return notices_of(answer) if answer is not None else ()

        return Poll(path=path, ask=ask, pause_seconds=pause_seconds)

    def _interruption(self, answer: Answer) -> list[Notice]:
        action, now = InstanceAction.model_validate_json(answer.body), datetime.now(UTC)
        deadline = deadline_of(action.time + answer.offset, SHORTEST_LEAD, now)
        # Hibernation starts at once, whatever the time says.
        deadline = min(deadline, now) if action.action is Action.HIBERNATE else deadline
        return [self._notice(f"{action.action}-{action.time.isoformat()}", NoticeKind.PREEMPT, deadline)]

    def _rebalance(self, answer: Answer) -> list[Notice]:
        time = RebalanceRecommendation.model_validate_json(answer.body).notice_time
        deadline = time + answer.offset + REBALANCE_LEAD
        return [self._notice(f"rebalance-{time.isoformat()}", NoticeKind.REBALANCE, deadline)]

    def _maintenance(self, answer: Answer) -> list[Notice]:
        now = datetime.now(UTC)
        return [
            self._notice(
                event.event_id,
                NoticeKind.MAINTENANCE,
                deadline_of(event.not_before + answer.offset, SHORTEST_LEAD, now),
            )
            for event in _MAINTENANCE.validate_json(answer.body)
            if event.state == ACTIVE
        ]

    def _notice(self, event: str, kind: NoticeKind, deadline: datetime) -> Notice:
        return Notice(
            id=f"{self.name}-{event}",
            node=self._node,
            kind=kind,
            source=self.name,
            deadline=deadline,
            observed_at=datetime.now(UTC),
        )

    async def _get(self, path: str) -> Answer | None:
        """Read a path; None if the service answers 404: nothing is announced there."""
        try:
            return await self._ec2.get(path, headers={HEADER_TOKEN: await self._fresh_token()})
        except MetadataUnavailable as error:
            if error.status == 404:
                return None
            if error.status == 401:
                self._token = None
            raise

    async def _fresh_token(self) -> str:
        """The session token.

        A new one is requested if there is none, or if the service no longer accepts it.
        """
        if self._token is None:
            ttl = {HEADER_TTL: str(TOKEN_TTL_SECONDS)}
            try:
                answer = await self._ec2.request("PUT", PATH_TOKEN, headers=ttl)
            except MetadataUnavailable as error:
                raise MetadataUnavailable(f"no token: {error}") from error
            self._token = word(answer.body.decode())
            if self._token is None:
                raise MetadataUnavailable("no token: the answer is not one")
        return self._token
