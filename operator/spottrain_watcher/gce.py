"""Signals of Compute Engine's metadata server, by long polls.

A spot VM has 30 seconds from the signal; on GKE, the kubelet leaves the first 15 of them to pods, or what its node
pool asks for. A VM with a `preemptionNoticeDuration` has that long in addition: `instance/preempted` is TRUE so
much earlier, but no documented key says how long that is. A VM that can't migrate, such as one with GPUs, is stopped
for maintenance of its host 60 seconds after the signal or later.

Sources:
https://cloud.google.com/compute/docs/instances/preemptible#preemption-process
https://cloud.google.com/compute/docs/instances/spot#preemption_process (preemptionNoticeDuration)
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange
https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
https://github.com/kubernetes/kubernetes/blob/v1.31.0/cluster/gce/gci/configure.sh (attributes/kubelet-config)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import aiohttp
import yaml
from pydantic import BaseModel, Field

from spottrain_api.contract.nodes import LONGEST_GRACE_SECONDS, notice_ahead_seconds, shutdown_grace_seconds
from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_watcher.metadata import (
    MAX_PAUSE_SECONDS,
    REQUEST_SECONDS,
    Answer,
    MetadataServer,
    MetadataUnavailable,
    Poll,
    Polls,
    word,
)

ENV_HOST = "GCE_METADATA_HOST"
DEFAULT_HOST = "169.254.169.254"
PATH_PREEMPTED = "/computeMetadata/v1/instance/preempted"
PATH_MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
FLAVOR = {"Metadata-Flavor": "Google"}
# The configuration file from which the node's kubelet was started.
PATH_KUBELET_CONFIG = "/computeMetadata/v1/instance/attributes/kubelet-config"
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
# GKE makes nodes anew for another configuration: this is the pause after a failure.
CONFIG_PAUSE_SECONDS = MAX_PAUSE_SECONDS


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
        labels: Callable[[], Mapping[str, str]] = dict,
        on_shutdown_grace: Callable[[int], None] = lambda seconds: None,
        wait_seconds: int = WAIT_SECONDS,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        """Configure the source.

        Args:
            session: For the requests.
            node: Name of the node.
            environ: May name the server in GCE_METADATA_HOST, as Google's own clients have it.
            labels: Those of the node, which say what its shutdown leaves its pods. They are asked at the signal: they
                may change.
            on_shutdown_grace: Called with the seconds that the kubelet's configuration leaves pods.
            wait_seconds: How long the server may keep a request.
            now: The signals carry no time: deadlines are counted from here.
        """
        host = environ.get(ENV_HOST) or DEFAULT_HOST
        server = MetadataServer(session, "Compute Engine's metadata server", f"http://{host}")
        preempted = _LongPoll(server, PATH_PREEMPTED, wait_seconds)
        maintenance = _LongPoll(server, PATH_MAINTENANCE, wait_seconds)

        async def ask_preempted() -> Sequence[Notice]:
            announced = PREEMPTED[await preempted.value(PREEMPTED)]
            grace = shutdown_grace_seconds(labels())
            lead = PREEMPTION_LEAD if grace is None else timedelta(seconds=grace)
            lead += timedelta(seconds=notice_ahead_seconds(labels()))
            return [self._notice("preempted", NoticeKind.PREEMPT, lead)] if announced else []

        async def ask_kubelet_config() -> Sequence[Notice]:
            try:
                answer = await server.get(PATH_KUBELET_CONFIG, headers=FLAVOR)
            except MetadataUnavailable as error:
                if error.status in (403, 404):  # it is not on GKE, or hides it
                    return []
                raise
            seconds = grace_of_config(answer.body)
            if seconds is not None:
                on_shutdown_grace(seconds)
            return []

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
                Poll(path=PATH_KUBELET_CONFIG, ask=ask_kubelet_config, pause_seconds=CONFIG_PAUSE_SECONDS),
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


class _KubeletConfiguration(BaseModel):
    """What the kubelet's configuration says of a shutdown: durations as in Go, such as `1m45s`."""

    total: str = Field("", alias="shutdownGracePeriod")
    critical: str = Field("", alias="shutdownGracePeriodCriticalPods")


def grace_of_config(text: bytes) -> int | None:
    """Seconds that a kubelet with this configuration leaves pods that aren't critical; None if it doesn't say.

    Raises:
        ValueError: It is no such configuration.
    """
    try:
        config = _KubeletConfiguration.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(f"the kubelet's configuration is no YAML: {error}") from error
    grace = _go_seconds(config.total) - _go_seconds(config.critical)
    return int(grace) if 0 < grace <= LONGEST_GRACE_SECONDS else None


def _go_seconds(duration: str) -> float:
    """Seconds of a duration in hours, minutes and seconds. An absent one is 0."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?|0", duration)
    if parts is None:
        raise ValueError(f"{duration!r} is no duration")
    hours, minutes, seconds = (float(part or 0) for part in parts.groups())
    return 3600 * hours + 60 * minutes + seconds


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
