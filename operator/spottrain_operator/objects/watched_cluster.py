"""A ClusterClient that reads from caches and sees its own writes at once.

Lists and watches fill the caches.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TypeVar

from spottrain_api.contract.names import LABEL_JOB
from spottrain_operator.kube.cache import Change, ObjectCache
from spottrain_operator.kube.client import ClusterClient, Kind, WatchClient, is_gone
from spottrain_operator.kube.errors import AlreadyExistsError, ClusterError, ExpiredError, RefusedError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import Manifest
from spottrain_operator.objects.kept_away import TAINTED, node_indices
from spottrain_operator.objects.observe import sequence_of
from spottrain_operator.objects.trimmed import pod_indices, trimmed_job, trimmed_node, trimmed_pod

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
# A watch that ends sooner and shows nothing counts as failed.
SHORTEST_WATCH_SECONDS = 1.0

OnChange = Callable[[Kind, Change], None]
Answer = TypeVar("Answer")
SpecVersion = tuple[str, int]
"""A job's uid, and the generation of its metadata."""


class WatchedCluster:
    """Implements ClusterClient.

    The answer to a write goes into the caches before the call returns, so that a pass never decides on what it has
    changed itself. If a write fails, nobody knows whether it took effect: the next pass over its job reads afresh. So
    it does after a conflict, which means that a watch is behind. With a job that has a status, its pods are
    read, too. The watches may also differ: then a pod appears that the job's status does not count yet, or the status
    counts one that has not appeared.

    The spec of a job that is new or edited is read once by itself: a watch that is older than a change of the CRD
    leaves out the fields that the change has added.

    Args:
        cluster: Writes, and reads what no cache holds.
        watches: Fills the caches.
        on_change: Called with each change, except about the status that this client writes itself.
    """

    def __init__(self, cluster: ClusterClient, watches: WatchClient, on_change: OnChange) -> None:
        self._cluster = cluster
        self._watches = watches

        self._on_change = on_change

        # kopf has a queue for each job.
        self._jobs = ObjectCache(trim=trimmed_job, on_change=self._job_changed, ordered=False)
        self._pods = ObjectCache(trim=trimmed_pod, index=pod_indices, on_change=self._pod_changed)
        self._nodes = ObjectCache(
            trim=trimmed_node, index=node_indices, on_change=lambda change: on_change(Kind.NODES, change)
        )
        self._unsure_jobs: set[JobKey] = set()
        self._unsure_pods: set[JobKey] = set()
        self._specs: dict[JobKey, tuple[SpecVersion, Manifest]] = {}
        # What the watch has shown of jobs whose status is being written.
        self._meanwhile: dict[JobKey, Change | None] = {}
        self._is_synced = False

    async def follow(self, is_synced: asyncio.Event) -> None:
        """Keep the caches up to date, for ever.

        `is_synced` is set once each cache has a first list.
        """
        caches = {Kind.NODES: self._nodes, Kind.JOBS: self._jobs, Kind.PODS: self._pods}
        synced = [asyncio.Event() for _ in caches]

        async def wait() -> None:
            for each in synced:
                await each.wait()
            self._is_synced = True
            is_synced.set()

        await asyncio.gather(
            wait(),
            *(
                _follow(self._watches, kind, cache, event)
                for (kind, cache), event in zip(caches.items(), synced, strict=True)
            ),
        )

    def jobs_on(self, node: str) -> set[JobKey]:
        """The jobs that have a pod on the node."""
        return {job_of(pod) for pod in self._pods.found_by(("node", node))}

    def nodes(self) -> Iterable[Manifest]:
        """All nodes."""
        return self._nodes.all()

    def tainted_nodes(self) -> list[Manifest]:
        """The nodes with taints that may keep pods away that ask for their labels."""
        return self._nodes.found_by(TAINTED)

    def jobs_with_pods(self) -> set[JobKey]:
        """The jobs of which there are pods, whether or not there are the jobs."""
        return {JobKey(namespace=index[1], name=index[2]) for index in self._pods.indices if index[0] == LABEL_JOB}

    # --- reads --------------------------------------------------------------------------------------------

    async def get_job(self, key: JobKey) -> Manifest | None:
        """Return the job, from the cache if it holds it.

        Others are read: the pods of a job that is gone are deleted, and they may have been seen before the job.
        """
        cached = self._jobs.get((key.namespace, key.name))
        if cached is not None and key not in self._unsure_jobs:
            version, spec = self._specs.get(key, (None, None))
            return cached | {"spec": spec} if _spec_version(cached) == version else cached
        job = await self._cluster.get_job(key)
        self._unsure_jobs.discard(key)
        if job is not None:
            if job.get("status"):
                self._unsure_pods.add(key)  # it counts pods that the watch may not have shown
            self._specs[key] = (_spec_version(job), job.get("spec", {}))
            self._jobs.written(job, report=False)
        elif (known := self._jobs.get((key.namespace, key.name))) is not None:
            self._jobs.deleted((key.namespace, key.name), known["metadata"]["uid"])
        return trimmed_job(job) if job is not None else None

    def _job_changed(self, change: Change) -> None:
        job = change.after or change.before
        assert job is not None
        key = JobKey.of(job)
        if key in self._meanwhile:
            first = self._meanwhile[key] or change
            self._meanwhile[key] = Change(before=first.before, after=change.after)
            return
        if change.after is None:
            self._specs.pop(key, None)
            self._unsure_pods.add(key)  # Kubernetes may have orphaned them just before
        elif self._is_synced and (change.before is None or _spec_version(change.before) != _spec_version(job)):
            self._unsure_jobs.add(key)
        if change.before is not None and _last_sequence(job) > _last_sequence(change.before):
            self._unsure_pods.add(key)
        self._on_change(Kind.JOBS, change)

    def _pod_changed(self, change: Change) -> None:
        if change.before is None and change.after is not None:
            key = job_of(change.after)
            job = self._jobs.get((key.namespace, key.name))
            if job is not None and sequence_of(change.after) > _last_sequence(job):
                self._unsure_jobs.add(key)
        self._on_change(Kind.PODS, change)

    async def list_jobs(self) -> Iterable[Manifest]:
        return self._jobs.all()

    async def list_pods(self, namespace: str, *, labels: dict[str, str]) -> list[Manifest]:
        key = JobKey(namespace=namespace, name=labels[LABEL_JOB])
        index = (LABEL_JOB, namespace, key.name)
        if key in self._unsure_pods:
            listing = await self._watches.list_kind(
                Kind.PODS, namespace=namespace, labels={LABEL_JOB: key.name}, keep=trimmed_pod
            )
            self._unsure_pods.discard(key)
            self._pods.read(index, listing)
        pods = self._pods.found_by(index)
        return [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]

    async def get_nodes(self, names: Collection[str]) -> list[Manifest]:
        """Return the nodes, from the cache if it holds them.

        Others are read: a pod may have been seen before its node.
        """
        cached = {name: node for name in sorted(set(names)) if (node := self._nodes.get(("", name))) is not None}
        missing = set(names) - cached.keys()
        read = await self._cluster.get_nodes(missing) if missing else []
        return [*cached.values(), *read]

    async def events_about(self, namespace: str, *, uid: str) -> list[Manifest]:
        return await self._cluster.events_about(namespace, uid=uid)

    # --- writes -------------------------------------------------------------------------------------------

    async def replace_job_status(self, job: Manifest) -> Manifest:
        key = JobKey.of(job)
        self._meanwhile[key] = None
        written = None
        try:
            answer = await _or_unsure(self._cluster.replace_job_status(job), self._unsure_jobs, key)
            self._jobs.written(answer, report=False)
            written = trimmed_job(answer)
            return answer
        finally:
            # The watch may be ahead of the answer.
            shown = self._meanwhile.pop(key)
            is_own = written is not None and shown is not None and shown.after == written
            if shown is not None and not is_own and (shown.before or shown.after):
                self._job_changed(shown)

    async def delete_job(self, key: JobKey, *, uid: str) -> None:
        self._unsure_jobs.add(key)  # the answer doesn't say whether it is gone
        await self._cluster.delete_job(key, uid=uid)

    async def create_pod(self, pod: Manifest) -> Manifest:
        answer = await _or_unsure(self._cluster.create_pod(pod), self._unsure_pods, job_of(pod))
        self._pods.written(answer)
        return answer

    async def delete_pod(
        self, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Manifest | None:
        key = JobKey.of_pod(namespace, name)
        deleting = self._cluster.delete_pod(namespace, name, uid=uid, grace_seconds=grace_seconds)
        answer = await _or_unsure(deleting, self._unsure_pods, key)
        if answer is None:
            self._unsure_pods.add(key)
        elif is_gone(answer):
            self._pods.deleted((namespace, name), uid)
        else:
            self._pods.written(answer)
        return answer

    async def annotate_pod(
        self, namespace: str, name: str, *, uid: str, annotations: Mapping[str, str | None]
    ) -> Manifest | None:
        key = JobKey.of_pod(namespace, name)
        annotating = self._cluster.annotate_pod(namespace, name, uid=uid, annotations=annotations)
        answer = await _or_unsure(annotating, self._unsure_pods, key)
        if answer is None:
            self._unsure_pods.add(key)
        else:
            self._pods.written(answer)
        return answer

    async def create_event(self, event: Manifest) -> None:
        await self._cluster.create_event(event)


def _spec_version(job: Manifest) -> SpecVersion:
    return job["metadata"]["uid"], job["metadata"].get("generation", 0)


def _last_sequence(job: Manifest) -> int:
    """The number of the last pod that the job's status counts."""
    return int((job.get("status") or {}).get("lastSequence", 0))


def job_of(pod: Manifest) -> JobKey:
    """The job whose label the pod bears."""
    meta = pod["metadata"]
    return JobKey(namespace=meta["namespace"], name=meta["labels"].get(LABEL_JOB, ""))


async def _or_unsure(writing: Awaitable[Answer], unsure: set[JobKey], key: JobKey) -> Answer:
    """Await a write, and note its job if the outcome is unsure.

    A write that fails may have taken effect all the same, or may show that a cache is behind.
    """
    try:
        return await writing
    except RefusedError:
        raise
    except (AlreadyExistsError, ClusterError, asyncio.CancelledError):
        unsure.add(key)
        raise


async def _list(watches: WatchClient, kind: Kind, cache: ObjectCache) -> int:
    """Take a list, and return its version.

    Nothing else of it is kept: it may hold thousands of objects.
    """
    listing = await watches.list_kind(kind, keep=cache.trim)
    cache.replace_all(listing)
    return listing.version


async def _follow(watches: WatchClient, kind: Kind, cache: ObjectCache, is_synced: asyncio.Event) -> None:
    """List once, then watch.

    Each watch continues from the end of the last one. If the server no longer knows that version, list again.
    """
    version: int | None = None
    pause = FIRST_PAUSE_SECONDS
    while True:
        begun, before = time.monotonic(), version
        try:
            if version is None:
                version = await _list(watches, kind, cache)
                is_synced.set()
            async for event in watches.watch_kind(kind, version):
                cache.apply(event)
                version = event.version
        except ExpiredError as error:
            logger.info("the %s are listed again: %s", kind, error)
            version = None
        except ClusterError as error:
            logger.warning("the %s can't be watched; retrying: %s", kind, error)
            await asyncio.sleep(error.retry_after or 0.0)
        if version != before or time.monotonic() - begun > SHORTEST_WATCH_SECONDS:
            pause = FIRST_PAUSE_SECONDS
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
