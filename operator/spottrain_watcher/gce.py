"""Signals of Compute Engine's metadata server, by long polls.

A spot VM has 30 seconds from the signal; on GKE, the kubelet leaves the first 15 of them to pods. A VM that can't
migrate, such as one with GPUs, is stopped for maintenance of its host 60 seconds after the signal or later.

Sources:
https://cloud.google.com/compute/docs/instances/preemptible#preemption-process
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import aiohttp

from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_watcher.metadata import REQUEST_SECONDS, Answer, MetadataServer, MetadataUnavailable, Poll, Polls, word

ENV_HOST = "GCE_METADATA_HOST"
DEFAULT_HOST = "169.254.169.254"
PATH_PREEMPTED = "/computeMetadata/v1/instance/preempted"
PATH_MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
FLAVOR = {"Metadata-Flavor": "Google"}
# What each value announces. VMs that migrate go on running, so that is no notice.
PREEMPTED = {"FALSE": False, "TRUE": True}
TERMINATED = {"NONE": False, "MIGRATE_ON_HOST_MAINTENANCE": False, "TERMINATE_ON_HOST_MAINTENANCE": True}
PREEMPTION_LEAD = timedelta(seconds=30)
MAINTENANCE_LEAD = timedelta(seconds=60)
# How long the server may keep a request while nothing changes. A server that is gone shows after that at the latest.
WAIT_SECONDS = 10
# Between two requests, in case the server answers at once though nothing has changed.
PAUSE_SECONDS = 0.2
MAINTENANCE_PAUSE_SECONDS = 2.0


def _utc_now() -> datetime:
    return datetime.now(UTC)


class GceSource(Polls):
    """Waits for changes at the metadata server of this process' instance."""

    name = "gce"

    def __init__(
        self,
        session: aiohttp.ClientSession,
        node: str,
        environ: Mapping[str, str],
        *,
        shutdown_grace_seconds: Callable[[], float | None] = lambda: None,
        wait_seconds: int = WAIT_SECONDS,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        """Configure the source.

        Args:
            session: For the requests.
            node: Name of the node.
            environ: May name the server in GCE_METADATA_HOST, as Google's own clients have it.
            shutdown_grace_seconds: What the node's shutdown leaves its pods, if that is known. It is asked at the
                signal: labels of the node may change.
            wait_seconds: How long the server may keep a request.
            now: The signals carry no time: deadlines are counted from here.
        """
        host = environ.get(ENV_HOST) or DEFAULT_HOST
        server = MetadataServer(session, "Compute Engine's metadata server", f"http://{host}")
        preempted = _LongPoll(server, PATH_PREEMPTED, wait_seconds)
        maintenance = _LongPoll(server, PATH_MAINTENANCE, wait_seconds)

        async def ask_preempted() -> Sequence[Notice]:
            announced = PREEMPTED[await preempted.value(PREEMPTED)]
            grace = shutdown_grace_seconds()
            lead = PREEMPTION_LEAD if grace is None else timedelta(seconds=grace)
            return [self._notice("preempted", NoticeKind.PREEMPT, lead)] if announced else []

        async def ask_maintenance() -> Sequence[Notice]:
            try:
                announced = TERMINATED[await maintenance.value(TERMINATED)]
            except MetadataUnavailable as error:
                if error.status == 404:  # not every VM has it
                    return []
                raise
            return [self._notice("maintenance", NoticeKind.MAINTENANCE, MAINTENANCE_LEAD)] if announced else []

        super().__init__(
            server,
            [
                Poll(path=PATH_PREEMPTED, ask=ask_preempted, pause_seconds=PAUSE_SECONDS),
                Poll(path=PATH_MAINTENANCE, ask=ask_maintenance, pause_seconds=MAINTENANCE_PAUSE_SECONDS),
            ],
        )
        self._node = node
        self._now = now

    def _notice(self, event: str, kind: NoticeKind, lead: timedelta) -> Notice:
        now = self._now()
        return Notice(
            id=f"{self.name}-{event}",
            node=self._node,
            kind=kind,
            source=self.name,
            deadline=now + lead,
            observed_at=now,
        )


class _LongPoll:
    """Reads a value repeatedly.

    The first answer comes at once. Later ones come whenever the value changes or `wait_seconds` are over.
    """

    def __init__(self, server: MetadataServer, path: str, wait_seconds: int) -> None:
        self._server = server
        self._path = path
        self._wait_seconds = wait_seconds
        self._etag: str | None = None

    async def value(self, known: Mapping[str, bool]) -> str:
        """One of the `known` values. Raises MetadataUnavailable."""
        etag, self._etag = self._etag, None  # after a failure, the next request is to be answered at once
        answer = await self._read(etag)
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise MetadataUnavailable("the answer lacks the header Metadata-Flavor: Google")
        value = answer.body.decode().strip()
        if value not in known:
            raise MetadataUnavailable(f"{value[:100]!r} is not a value that is known")
        self._etag = word(answer.headers.get("ETag", ""))
        return value

    async def _read(self, etag: str | None) -> Answer:
        if etag is None:
            return await self._server.get(self._path, headers=FLAVOR)
        wait = {"wait_for_change": "true", "last_etag": etag, "timeout_sec": str(self._wait_seconds)}
        seconds = self._wait_seconds + REQUEST_SECONDS
        return await self._server.get(self._path, headers=FLAVOR, params=wait, seconds=seconds)
