"""Signals of EC2's instance metadata service, version 2.

EC2 announces a spot interruption about two minutes ahead, by best effort. A rebalance recommendation comes earlier or
together with it.

Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TypeVar

import aiohttp
from pydantic import AwareDatetime, BaseModel, Field, ValidationError

from spottrain_api.contract import Notice, NoticeKind, clock_offset

logger = logging.getLogger(__name__)
_B = TypeVar("_B", bound=BaseModel)

ENV_ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DEFAULT_ENDPOINT = "http://169.254.169.254"
PATH_TOKEN = "/latest/api/token"
PATH_INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
PATH_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
HEADER_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
HEADER_TOKEN = "X-aws-ec2-metadata-token"
TOKEN_TTL_SECONDS = 21600
POLL_SECONDS = 0.5
TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# A recommendation has no deadline, but a notice has to name one. Nobody drains for it.
REBALANCE_LEAD = timedelta(minutes=10)


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


class MetadataUnavailable(Exception):
    """The service gave no usable answer. What was known before stays valid."""


class Ec2Source:
    """Polls the metadata service of the instance that this process runs on."""

    name = "ec2"

    def __init__(self, session: aiohttp.ClientSession, node: str, environ: Mapping[str, str]) -> None:
        self._session = session
        self._node = node
        self._endpoint = (environ.get(ENV_ENDPOINT) or DEFAULT_ENDPOINT).rstrip("/")
        self._token: str | None = None
        self._offset = timedelta()  # of this node's clock against the cloud's
        self._trouble: str | None = self._says_nothing("it has not been asked yet")

    @property
    def trouble(self) -> str | None:
        """Why the source hears nothing at present, as a sentence; None while its endpoint answers."""
        return self._trouble

    def _says_nothing(self, why: object) -> str:
        return f"EC2's metadata service at {self._endpoint} gives no usable answer: {why}."

    async def watch(self) -> AsyncIterator[tuple[Notice, ...]]:
        # A bad answer from one path changes neither the other path nor what was known before.
        known: dict[str, Notice | None] = {}
        told: tuple[Notice, ...] | None = None
        while True:
            for path, to_notice in ((PATH_INSTANCE_ACTION, self._interruption), (PATH_REBALANCE, self._rebalance)):
                try:
                    body = await self._get(path)
                    notice = None if body is None else to_notice(body)
                except MetadataUnavailable as error:
                    logger.debug("EC2 metadata: %s", error)
                    if path == PATH_INSTANCE_ACTION:
                        self._trouble = self._says_nothing(error)
                    continue
                if path == PATH_INSTANCE_ACTION:
                    self._trouble = None
                known[path] = _first_sighting(known.get(path), notice)
                notices = tuple(notice for notice in known.values() if notice is not None)
                if notices != told and PATH_INSTANCE_ACTION in known:
                    told = notices
                    yield notices
            await asyncio.sleep(POLL_SECONDS)

    def _interruption(self, body: bytes) -> Notice:
        action, now = _parse(InstanceAction, body), datetime.now(UTC)
        time = action.time + self._offset
        # Hibernation starts at once, whatever the time says.
        deadline = min(time, now) if action.action is Action.HIBERNATE else time
        return Notice(
            id=f"ec2-{action.action}-{action.time.isoformat()}",
            node=self._node,
            kind=NoticeKind.PREEMPT,
            source=self.name,
            deadline=deadline,
            observed_at=now,
            cancellable=True,
        )

    def _rebalance(self, body: bytes) -> Notice:
        recommendation = _parse(RebalanceRecommendation, body)
        return Notice(
            id=f"ec2-rebalance-{recommendation.notice_time.isoformat()}",
            node=self._node,
            kind=NoticeKind.REBALANCE,
            source=self.name,
            deadline=recommendation.notice_time + self._offset + REBALANCE_LEAD,
            observed_at=datetime.now(UTC),
            cancellable=True,
        )

    async def _get(self, path: str) -> bytes | None:
        """Read a path.

        Returns:
            The body, or None if the service answers 404.

        Raises:
            MetadataUnavailable: There was no usable answer.
        """
        try:
            async with self._session.get(
                self._endpoint + path, headers={HEADER_TOKEN: await self._fresh_token()}, timeout=TIMEOUT
            ) as response:
                if response.status == 404:
                    return None
                if response.status == 401:
                    self._token = None
                if response.status != 200:
                    raise MetadataUnavailable(f"{path}: status {response.status}")
                body = await response.read()
                self._offset = clock_offset(response.headers.get("Date"), datetime.now(UTC))
                return body
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise MetadataUnavailable(f"{path}: {error!r}") from error

    async def _fresh_token(self) -> str:
        """The session token. A new one is requested if there is none, or if the service no longer accepts it."""
        if self._token is None:
            async with self._session.put(
                self._endpoint + PATH_TOKEN, headers={HEADER_TTL: str(TOKEN_TTL_SECONDS)}, timeout=TIMEOUT
            ) as response:
                if response.status != 200:
                    raise MetadataUnavailable(f"{PATH_TOKEN}: status {response.status}")
                self._token = (await response.text()).strip()
        return self._token


def _first_sighting(known: Notice | None, notice: Notice | None) -> Notice | None:
    """A notice that is read again is the same one."""
    return known if known is not None and notice is not None and known.id == notice.id else notice


def _parse(model: type[_B], body: bytes) -> _B:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise MetadataUnavailable(f"malformed {model.__name__}: {body[:200]!r}") from error
