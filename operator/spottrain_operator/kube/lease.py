"""Leader election by a coordination.k8s.io Lease.

Only the leader reconciles and serves assignments.

As in client-go, another holder's lease has expired once it has not *changed* for a time, by this process' own clock.
The times in the lease are never compared with that clock, and its duration does not count: users may be able to write
a lease in their namespace. The holder's name is the pod's name. So a container that restarts in the same pod takes
its lease at once, as the container before it is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from spottrain_api.contract.names import ANNOTATION_WATCHED
from spottrain_operator.kube.cluster import Cluster, write
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.resources import LEASES, Manifest
from spottrain_operator.kube.scope import Scope

logger = logging.getLogger(__name__)

LEASE_NAME = "spottrain-operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Whose lease it is, and how long a silent leader keeps it.

    Attributes:
        renew_deadline_seconds: A leader gives up so long after its last renewal, well before others may take over.
            Each request may take a third of that, so that one that hangs leaves time for another attempt.
        scope: The namespaces whose jobs it leads.
    """

    namespace: str
    name: str = LEASE_NAME
    identity: str
    duration_seconds: int = 15
    renew_deadline_seconds: float = 10.0
    retry_seconds: float = 2.0
    scope: Scope = Scope()


class LeaderElection:
    """Acquires the lease, renews it, and notices its loss.

    - is_leader: whether this process holds the lease.
    - is_standby: whether another one does, and this one can take over: it has read the lease.
    """

    def __init__(
        self, cluster: Cluster, settings: LeaseSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._observed: dict[str, tuple[str, float]] = {}  # by namespace: resourceVersion, when it was first seen
        self._holder = settings.identity  # as last read
        self._renewed_at = 0.0
        self._version = 0  # of the lease, as last written
        self.is_leader = False
        self.is_standby = False

    async def acquire(self) -> None:
        """Return once this process leads.

        No other release leads a namespace of this one's then.
        """
        while not await self._try_to_lead():
            self._version = 0  # nothing is cached yet
            # Two releases that start at once may both give way, but not for ever.
            await asyncio.sleep(self._settings.retry_seconds * random.uniform(1.0, 1.5))
        self.is_leader = True
        logger.info("%s leads", self._settings.identity)

    async def hold(self) -> None:
        """Renew until the lease is lost or can't be renewed in time, then return.

        The caller must stop acting at once. `regain` says which of the two it was.
        """
        while self.is_leader:
            await asyncio.sleep(self._settings.retry_seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_left()):
                    await self._attempt()
            if self._taken_by_another() or self._seconds_left() <= 0:
                self.is_leader = False
        logger.error("%s no longer leads", self._settings.identity)

    async def regain(self) -> bool:
        """Renew the lease as soon as the API server answers, to lead on.

        It doesn't lead meanwhile. It leads on if nobody else has held the lease, which nobody can while the API
        server is away, if the cluster's state has not gone back, and if no other release leads a namespace of this
        one's.

        Returns:
            Whether this process leads on.
        """
        self.is_leader = False
        while not await self._try_to_lead(only_own=True):
            if self._taken_by_another():
                return False
            await asyncio.sleep(self._settings.retry_seconds)
        self.is_leader = True
        logger.info("%s leads on", self._settings.identity)
        return True

    async def release(self) -> None:
        """Let another operator take over at once, if the API server can be reached."""
        self.is_leader = False
        settings = self._settings
        try:
            lease = await self._read()
            if lease is not None and lease["spec"].get("holderIdentity") == settings.identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await write(self._cluster, LEASES, lease)
        except ClusterError as error:
            logger.warning("the lease could not be released; it expires by itself: %s", error)

    async def _read(self) -> Manifest | None:
        return await self._cluster.get(LEASES, self._settings.name, namespace=self._settings.namespace)

    async def _try_to_lead(self, *, only_own: bool = False) -> bool:
        """Try once to lead.

        That is to take the lease, as the only release, before it has to be renewed again. A slow answer about the
        other releases may outlast the lease, which another process then takes.
        """
        return await self._attempt(only_own=only_own) and await self._is_alone() and self._seconds_left() > 0

    async def _attempt(self, *, only_own: bool = False) -> bool:
        """Try once to take or renew the lease.

        With `only_own`, don't take it from another holder.
        """
        settings = self._settings
        self._holder = settings.identity
        self.is_standby = False
        patience = settings.renew_deadline_seconds / 3
        try:
            async with asyncio.timeout(patience):
                lease = await self._read()
            if lease is not None and self._has_gone_back(lease):
                self._holder = ""
                return False
            if lease is not None and not (self._is_own(lease) if only_own else self._may_acquire(lease)):
                self._holder = lease["spec"].get("holderIdentity", "")
                self.is_standby = not only_own
                return False
            sent_at = self._clock()  # others see it later, so that the lease lasts longer for them
            async with asyncio.timeout(patience):
                written = await write(self._cluster, LEASES, self._mine(lease))
        except (ClusterError, TimeoutError) as error:
            said = str(error) or "no answer"
            logger.warning("the lease %s could not be taken or renewed; retrying: %s", settings.name, said)
            return False
        self._version = int(written["metadata"]["resourceVersion"])
        self._renewed_at = sent_at
        return True

    async def _is_alone(self) -> bool:
        """Whether no other release leads a namespace of this one's.

        If one does, the lease is given back. Every candidate writes its lease before it reads those of the others, so
        that at least one of two sees the other, and gives way.
        """
        settings = self._settings
        try:
            found = await self._cluster.list(LEASES, fields={"metadata.name": settings.name})
        except ClusterError as error:
            logger.warning("the leases of other releases could not be read; retrying: %s", error)
            await self.release()
            return False
        others = [each for each in found.items if self._rivals(each)]
        if others:
            logger.warning(
                "the release in the namespace %s leads jobs of %s, and this one is to lead those of %s. Set "
                "watchNamespaces of both so that no namespace is in both, or uninstall one of them. Until then, this "
                "one waits",
                others[0]["metadata"]["namespace"],
                _scope(others[0]),
                settings.scope,
            )
            await self.release()
        return not others

    def _rivals(self, lease: Manifest) -> bool:
        if lease["metadata"]["namespace"] == self._settings.namespace or not lease["spec"].get("holderIdentity"):
            return False
        return self._settings.scope.overlaps(_scope(lease)) and not self._has_expired(lease)

    def _has_gone_back(self, lease: Manifest) -> bool:
        """Whether the lease is older than this process' last renewal.

        Then etcd was restored from a backup. The caches would take all that is written from now on for older than
        what they hold.
        """
        version = int(lease["metadata"]["resourceVersion"])
        if version >= self._version:
            return False
        logger.error(
            "the cluster's state went back from version %d to %d or before, as after a restore of etcd from a "
            "backup; this operator starts again",
            self._version,
            version,
        )
        return True

    def _seconds_left(self) -> float:
        """Seconds until a leader that can't renew has to give up."""
        return max(0.0, self._renewed_at + self._settings.renew_deadline_seconds - self._clock())

    def _taken_by_another(self) -> bool:
        return self._holder != self._settings.identity

    def _is_own(self, lease: Manifest) -> bool:
        return bool(lease["spec"].get("holderIdentity") == self._settings.identity)

    def _may_acquire(self, lease: Manifest) -> bool:
        holder = lease["spec"].get("holderIdentity")
        if not holder or holder == self._settings.identity:
            return True
        return self._has_expired(lease)

    def _has_expired(self, lease: Manifest) -> bool:
        namespace, version = lease["metadata"]["namespace"], lease["metadata"]["resourceVersion"]
        if self._observed.get(namespace, ("", 0.0))[0] != version:
            self._observed[namespace] = (version, self._clock())
        return self._clock() - self._observed[namespace][1] >= self._settings.duration_seconds

    def _mine(self, lease: Manifest | None) -> Manifest:
        settings = self._settings
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Manifest = dict(lease["spec"]) if lease else {}
        if spec.get("holderIdentity") != settings.identity:
            transitions = int(spec.get("leaseTransitions") or 0) + (1 if lease else 0)
            spec |= {"holderIdentity": settings.identity, "acquireTime": now, "leaseTransitions": transitions}
        spec |= {"renewTime": now, "leaseDurationSeconds": settings.duration_seconds}
        metadata: Manifest = lease["metadata"] if lease else {"namespace": settings.namespace, "name": settings.name}
        annotations = (metadata.get("annotations") or {}) | {ANNOTATION_WATCHED: settings.scope.to_json()}
        metadata = metadata | {"annotations": annotations}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }


def _scope(lease: Manifest) -> Scope:
    return Scope.from_json((lease["metadata"].get("annotations") or {}).get(ANNOTATION_WATCHED))
