"""Azure's Scheduled Events.

A spot VM has at least 30 seconds from the event. Reboots, moves and freezes of VMs are announced some 15 minutes
ahead. The document is that of a whole scale set: an event concerns the VMs that it names.

Source: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import aiohttp
from pydantic import BaseModel, Field

from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_watcher.metadata import (
    REQUEST_SECONDS,
    Answer,
    MetadataServer,
    MetadataUnavailable,
    Poll,
    Polls,
    deadline_of,
    http_time,
)

logger = logging.getLogger(__name__)

ENV_ENDPOINT = "SPOTTRAIN_AZURE_METADATA_ENDPOINT"
ENV_ACKNOWLEDGE = "SPOTTRAIN_AZURE_ACKNOWLEDGE"
DEFAULT_ENDPOINT = "http://169.254.169.254"
PATH_EVENTS = "/metadata/scheduledevents"
PATH_NAME = "/metadata/instance/compute/name"
HEADERS = {"Metadata": "true"}
EVENTS_VERSION = {"api-version": "2020-07-01"}
NAME_VERSION = {"api-version": "2021-02-01", "format": "text"}
# Azure recommends a request a second, and answers up to five a second for all processes of a VM together.
POLL_SECONDS = 0.5
# The first request enables the service for the scale set, and is answered after two minutes at most.
FIRST_ANSWER_SECONDS = 150.0
KINDS = {
    "Preempt": NoticeKind.PREEMPT,
    "Terminate": NoticeKind.PREEMPT,
    "Reboot": NoticeKind.MAINTENANCE,
    "Redeploy": NoticeKind.MAINTENANCE,
    "Freeze": NoticeKind.MAINTENANCE,
}
VM_NAME = re.compile(r"\w[\w.-]{0,79}", re.ASCII)
# The shortest notice that Azure gives, for an event whose time can't be read.
LEAD = timedelta(seconds=30)


class ScheduledEvent(BaseModel):
    """One scheduled event.

    It may be another VM's. So a new type, and times, states and durations that can't be read, are no reason to refuse
    the document.
    """

    id: str = Field(alias="EventId", min_length=1)
    type: str = Field(alias="EventType")
    resources: list[str] = Field(alias="Resources")
    status: object = Field(alias="EventStatus", default="Scheduled")
    not_before: object = Field(alias="NotBefore", default=None)
    duration_seconds: object = Field(alias="DurationInSeconds", default=-1)

    @property
    def has_started(self) -> bool:
        return self.status == "Started"

    def concerns(self, vm: str) -> bool:
        """Whether it takes this VM away.

        A duration of 0 says that it doesn't interrupt it.
        """
        return self.type in KINDS and vm in self.resources and self.duration_seconds != 0

    def starts_at(self, now: datetime, offset: timedelta) -> datetime:
        """When it starts. An event that has started has no time any more."""
        if self.has_started:
            return now
        try:
            announced = http_time(self.not_before) + offset
        except (ValueError, OverflowError):
            announced = None
        return deadline_of(announced, LEAD, now)


class Document(BaseModel):
    """Body of /metadata/scheduledevents."""

    events: list[ScheduledEvent] = Field(alias="Events")


class AzureSource(Polls):
    """Polls the events of the VM that this process runs on, and may acknowledge them."""

    name = "azure"

    def __init__(
        self,
        session: aiohttp.ClientSession,
        node: str,
        environ: Mapping[str, str],
        *,
        is_vacated: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Configure the source.

        Args:
            session: For the requests.
            node: Name of the node.
            environ: May name the server in SPOTTRAIN_AZURE_METADATA_ENDPOINT.
            is_vacated: Whether nothing on the node needs the rest of a notice. An event is then acknowledged, so that
                Azure need not wait. None: events are never acknowledged.
        """
        self._azure = MetadataServer(
            session, "Azure's metadata server", environ.get(ENV_ENDPOINT) or DEFAULT_ENDPOINT
        )
        super().__init__(self._azure, [Poll(path=PATH_EVENTS, ask=self._ask, pause_seconds=POLL_SECONDS)])
        self._node = node
        self._is_vacated = is_vacated
        self._vm: str | None = None
        self._foreign: set[str] = set()  # events of other VMs
        self._has_answered = False
        self._acknowledged: set[str] = set()

    async def _ask(self) -> Sequence[Notice]:
        vm = await self._name_of_vm()
        answer = await self._azure.get(
            PATH_EVENTS,
            headers=HEADERS,
            params=EVENTS_VERSION,
            seconds=REQUEST_SECONDS if self._has_answered else FIRST_ANSWER_SECONDS,
        )
        self._has_answered = True
        events = Document.model_validate_json(answer.body).events
        foreign = {event.id for event in events if vm not in event.resources}
        if foreign - self._foreign:
            self._vm = None  # was that the right name? It is read again for each event that seems to be another VM's
            vm = await self._name_of_vm()
        self._foreign = foreign
        ours = [event for event in events if event.concerns(vm)]
        await self._acknowledge([event for event in ours if event.resources == [vm] and not event.has_started])
        return [self._notice(event, answer) for event in ours]

    async def _name_of_vm(self) -> str:
        """The VM's name as events have it, which isn't the node's."""
        if self._vm is None:
            try:
                answer = await self._azure.get(PATH_NAME, headers=HEADERS, params=NAME_VERSION)
            except MetadataUnavailable as error:
                raise MetadataUnavailable(f"the name of the VM is unknown: {error} ({PATH_NAME})") from error
            name = answer.body.decode().strip()
            if not VM_NAME.fullmatch(name):
                raise MetadataUnavailable(f"the name of the VM is unknown: the answer is not a name ({PATH_NAME})")
            self._vm = name
        return self._vm

    def _notice(self, event: ScheduledEvent, answer: Answer) -> Notice:
        now = datetime.now(UTC)
        return Notice(
            id=f"{self.name}-{event.id}",
            node=self._node,
            kind=KINDS[event.type],
            source=self.name,
            deadline=event.starts_at(now, answer.offset),
            observed_at=now,
        )

    async def _acknowledge(self, events: Sequence[ScheduledEvent]) -> None:
        """Let Azure start events of this VM alone.

        This happens once nothing on the node needs the time.
        """
        waiting = [event.id for event in events if event.id not in self._acknowledged]
        if self._is_vacated is None or not waiting or not await self._is_vacated():
            return
        body = {"StartRequests": [{"EventId": each} for each in waiting]}
        try:
            await self._azure.request("POST", PATH_EVENTS, headers=HEADERS, params=EVENTS_VERSION, json=body)
        except MetadataUnavailable as error:
            logger.debug("events %s could not be acknowledged: %s", waiting, error)
            return
        self._acknowledged.update(waiting)
        logger.info("acknowledged %s: no trainer pod is left on the node", waiting)
