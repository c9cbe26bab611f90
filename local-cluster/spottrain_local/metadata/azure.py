"""Azure's Scheduled Events, and the name of the VM that they refer to.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
https://learn.microsoft.com/azure/virtual-machines/instance-metadata-service
"""

import hashlib
import json
from datetime import UTC
from email.utils import format_datetime

from aiohttp import web

from spottrain_local.metadata.identity import InstanceMetadata
from spottrain_local.metadata.interruption import Interruption

PATH_EVENTS = "/metadata/scheduledevents"
PATH_NAME = "/metadata/instance/compute/name"
VERSIONS = {
    PATH_EVENTS: frozenset({"2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01"}),
    PATH_NAME: frozenset({"2019-03-11", "2020-09-01", "2021-02-01"}),
}
_EVENT_TYPES = {"preempt": "Preempt", "maintenance": "Redeploy"}


class ScheduledEvents:
    """The document of scheduled events. Its incarnation grows with each change."""

    def __init__(self, instance: InstanceMetadata) -> None:
        self._instance = instance
        self._incarnation = 1
        self._shown: list[dict[str, object]] = []
        self._started: set[str] = set()

    def document(self) -> dict[str, object]:
        """Return the document at this moment."""
        interruption = self._instance.interruption()
        events = [self._event(interruption)] if interruption and interruption.kind in _EVENT_TYPES else []
        if events != self._shown:
            self._incarnation += 1
            self._shown = events
        return {"DocumentIncarnation": self._incarnation, "Events": events}

    def _event(self, interruption: Interruption) -> dict[str, object]:
        event_id = event_identifier(interruption)
        started = event_id in self._started or interruption.deadline <= self._instance.now()
        not_before = "" if started else format_datetime(interruption.deadline.astimezone(UTC), usegmt=True)
        return {
            "EventId": event_id,
            "EventStatus": "Started" if started else "Scheduled",
            "EventType": _EVENT_TYPES[interruption.kind],
            "ResourceType": "VirtualMachine",
            "Resources": [self._instance.name],
            "NotBefore": not_before,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }

    def start(self, event_ids: set[str]) -> bool:
        """Acknowledge events, which then start at once; False if one of them is unknown."""
        interruption = self._instance.interruption()
        known = {event_identifier(interruption)} if interruption else set()
        if not event_ids or not event_ids <= known:
            return False
        self._started |= event_ids
        return True


def event_identifier(interruption: Interruption) -> str:
    """Return an event's id, in the form of a UUID."""
    digits = hashlib.sha256(interruption.id.encode()).hexdigest().upper()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))


def add_routes(app: web.Application, instance: InstanceMetadata) -> None:
    """Serve this instance's view under /metadata."""
    events = ScheduledEvents(instance)

    def refusal(request: web.Request) -> web.Response | None:
        if request.headers.get("Metadata", "").lower() != "true":
            return _bad_request("Required metadata header not specified")
        if request.query.get("api-version") not in VERSIONS[request.path]:
            return _bad_request("Bad request. api-version is invalid or was not specified in the request.")
        return None

    async def read(request: web.Request) -> web.Response:
        return refusal(request) or web.json_response(events.document())

    async def name(request: web.Request) -> web.Response:
        if request.query.get("format") != "text":
            return _bad_request("A single value is given as text alone: format=text")
        return refusal(request) or web.Response(text=instance.name)

    async def acknowledge(request: web.Request) -> web.Response:
        if refused := refusal(request):
            return refused
        try:
            requests = (await request.json())["StartRequests"]
            ids = {str(item["EventId"]) for item in requests}
        except (json.JSONDecodeError, KeyError, TypeError):
            return _bad_request("The body has no StartRequests with an EventId each.")
        return web.Response() if events.start(ids) else _bad_request("An event of that id is not scheduled.")

    app.router.add_get(PATH_EVENTS, read)
    app.router.add_post(PATH_EVENTS, acknowledge)
    app.router.add_get(PATH_NAME, name)


def _bad_request(message: str) -> web.Response:
    return web.json_response({"error": message}, status=400)
