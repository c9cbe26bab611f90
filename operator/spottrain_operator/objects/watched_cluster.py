"""A Cluster that reads jobs, pods and nodes from caches, and sees its own writes at once.

Lists and watches fill the caches.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TypeVar

from spottrain_api.contract.names import LABEL_JOB, LABEL_MANAGED_BY, LABEL_NAMESPACE, MANAGED_BY
from spottrain_operator.kube.cache import Change, ObjectCache
from spottrain_operator.kube.cluster import ALL, Cluster, Fields, Keep, Labels, Listing, WatchEvent, as_it_is, is_gone
from spottrain_operator.kube.errors import (
    AlreadyExistsError,
    ClusterError,
    ExpiredError,
    NotFoundError,
    RefusedError,
)
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import JOBS, NODE_POOLS, NODES, PODS, WORKLOADS, Manifest, Resource
from spottrain_operator.objects.kept_away import TAINTED, node_indices
from spottrain_operator.objects.node_pools import trimmed_node_pool
from spottrain_operator.objects.observe import sequence_of
from spottrain_operator.objects.trimmed import job_indices, pod_indices, trimmed_job, trimmed_node, trimmed_pod
from spottrain_operator.objects.workloads import trimmed_workload

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
# Until a resource may have been installed that the cluster doesn't have.
MISSING_SECONDS = 30.0
# A watch that ends sooner and shows nothing counts as failed.
SHORTEST_WATCH_SECONDS = 1.0
# What the caches hold. A pod that names no job, or an empty one, is somebody else's.
OURS: Labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_JOB: None}
WATCHED: Mapping[Resource, Labels] = {NODES: ALL, JOBS: ALL, PODS: OURS, WORKLOADS: OURS, NODE_POOLS: OURS}
# A cluster may not have these.
OPTIONAL: Mapping[Resource, Keep] = {WORKLOADS: trimmed_workload, NODE_POOLS: trimmed_node_pool}

OnChange = Callable[[Resource, Change], None]
Watch = Callable[[int], AsyncIterator[WatchEvent]]
"""Watches a resource from a version on."""
Answer = TypeVar("Answer")
SpecVersion = tuple[str, int]
"""A job's uid, and the generation of its metadata."""


class WatchedCluster:
    """Implements Cluster.

    The answer to a write goes into the caches before the call returns, so that a pass never decides on what it has
    changed itself. If a write fails, nobody knows whether it took effect: the next pass over its job reads afresh. So
    it does after a conflict, which means that a watch is behind. With a job that has a status, its pods are
    read, too. The watches may also differ: then a pod appears that the job's status does not count yet, or the status
    counts one that has not appeared.

    The spec of a job that is new or edited is read once by itself: a watch that is older than a change of the CRD
    leaves out the fields that the change has added.

    Args:
        cluster: Fills the caches, writes, and reads what no cache holds.
        on_change: Called with each change, except about the status that this client writes itself.
        watch_jobs: Watches the jobs in the cluster's place.
        optional: What to watch, too, of what a cluster may not have. Nobody waits for it.
    """

    def __init__(
        self,
        cluster: Cluster,
        on_change: OnChange,
        *,
        watch_jobs: Watch | None = None,
        optional: Collection[Resource] = (),
    ) -> None:
        self._cluster = cluster
        self._on_change = on_change
        self._watch_jobs = watch_jobs

        # kopf has a queue for each job.
        self._jobs = ObjectCache(trim=trimmed_job, on_change=self._job_changed, ordered=False)
        self._pods = ObjectCache(trim=trimmed_pod, index=pod_indices, on_change=self._pod_changed)
        self._nodes = ObjectCache(
            trim=trimmed_node, index=node_indices, on_change=lambda change: on_change(NODES, change)
        )
        self._optional = {
            each: ObjectCache(trim=OPTIONAL[each], index=job_indices, on_change=partial(on_change, each))
            for each in optional
        }
        self._has: dict[Resource, bool] = {}  # whether the cluster has a resource, once that is known
        self._caches = {NODES: self._nodes, JOBS: self._jobs, PODS: self._pods, **self._optional}
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
        synced = {resource: asyncio.Event() for resource in self._caches}

        async def wait() -> None:
            for resource, each in synced.items():
                if resource not in OPTIONAL:
                    await each.wait()
            self._is_synced = True
            is_synced.set()

        await asyncio.gather(wait(), *(self._follow(resource, event) for resource, event in synced.items()))

    async def _follow(self, resource: Resource, is_synced: asyncio.Event) -> None:
        """List once, then watch.

        Each watch continues from the end of the last one. If the server no longer knows that version, list again.
        """
        cache = self._caches[resource]
        version: int | None = None
        pause = FIRST_PAUSE_SECONDS
        while True:
            begun, before = time.monotonic(), version
            try:
                if version is None:
                    version = await self._fill(resource)
                    is_synced.set()
                    self._has[resource] = True
                async for event in self.watch(resource, version, labels=WATCHED[resource]):
                    cache.apply(event)
                    version = event.version
            except ExpiredError as error:
                logger.info("the %s are listed again: %s", resource, error)
                version = None
            except ClusterError as error:
                is_missing = resource in OPTIONAL and isinstance(error, NotFoundError)
                if is_missing:
                    version, self._has[resource] = None, False
                logger.warning("the %s can't be watched; retrying: %s", resource, error)
                await asyncio.sleep(MISSING_SECONDS if is_missing else error.retry_after or 0.0)
            if version != before or time.monotonic() - begun > SHORTEST_WATCH_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _fill(self, resource: Resource) -> int:
        """Take a list, and return its version.

        Nothing else of it is kept: it may hold thousands of objects.
        """
        cache = self._caches[resource]
        listing = await self._cluster.list(resource, labels=WATCHED[resource], keep=cache.trim)
        cache.replace_all(listing)
        return listing.version

    def jobs_on(self, node: str) -> set[JobKey]:
        """The jobs that have a pod on the node."""
        return {job_of(pod) for pod in self._pods.found_by(("node", node))}

    def nodes(self) -> Iterable[Manifest]:
        """All nodes."""
        return self._nodes.all()

    def tainted_nodes(self) -> list[Manifest]:
        """The nodes with taints that may keep pods away that ask for their labels."""
        return self._nodes.found_by(TAINTED)

    def jobs_that_left_something(self) -> set[JobKey]:
        """The jobs of which there are pods or NodePools, whether or not there are the jobs."""
        indices = [*self._pods.indices]
        if NODE_POOLS in self._optional:
            indices += self._optional[NODE_POOLS].indices
        return {JobKey(namespace=index[1], name=index[2]) for index in indices if index[0] == LABEL_JOB}

    # --- reads --------------------------------------------------------------------------------------------

    async def get(self, resource: Resource, name: str, *, namespace: str = "") -> Manifest | None:
        """Return an object, from the cache if it holds it.

        Others are read: a pod may have been seen before its node.
        """
        if resource == JOBS:
            return await self._job(JobKey(namespace, name))
        cached = self._nodes.get(("", name)) if resource == NODES else None
        return cached if cached is not None else await self._cluster.get(resource, name, namespace=namespace)

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str = "",
        labels: Labels = ALL,
        fields: Fields = ALL,
        keep: Keep = as_it_is,
    ) -> Listing:
        """List all jobs, or the pods with a job's label in a namespace, from the caches. Other lists are read."""
        job = labels.get(LABEL_JOB)
        if resource == PODS and namespace and job and not fields:
            pods = await self._pods_of(JobKey(namespace, job), labels)
            return Listing(items=map(keep, pods), version=self._pods.version)
        if resource == JOBS and not (namespace or labels or fields):
            return Listing(items=map(keep, self._jobs.all()), version=self._jobs.version)
        if self._has.get(resource) is False:
            raise NotFoundError(f"the cluster has no {resource}")
        of_job = namespace or labels.get(LABEL_NAMESPACE)
        if resource in self._optional and self._has.get(resource) and of_job and job:
            cache = self._optional[resource]
            return Listing(items=map(keep, cache.found_by((LABEL_JOB, of_job, job))), version=cache.version)
        return await self._cluster.list(resource, namespace=namespace, labels=labels, fields=fields, keep=keep)

    def watch(self, resource: Resource, version: int, *, labels: Labels = ALL) -> AsyncIterator[WatchEvent]:
        if resource == JOBS and self._watch_jobs is not None:
            return self._watch_jobs(version)
        return self._cluster.watch(resource, version, labels=labels)

    async def _job(self, key: JobKey) -> Manifest | None:
        """Return the job, from the cache if it holds it.

        Others are read: the pods of a job that is gone are deleted, and they may have been seen before the job.
        """
        cached = self._jobs.get(key)
        if cached is not None and key not in self._unsure_jobs:
            version, spec = self._specs.get(key, (None, None))
            return cached | {"spec": spec} if _spec_version(cached) == version else cached
        job = await self._cluster.get(JOBS, key.name, namespace=key.namespace)
        self._unsure_jobs.discard(key)
        if job is not None:
            if job.get("status"):
                self._unsure_pods.add(key)  # it counts pods that the watch may not have shown
            self._specs[key] = (_spec_version(job), job.get("spec", {}))
            self._jobs.written(job, report=False)
        elif (known := self._jobs.get(key)) is not None:
            self._jobs.deleted(key, known["metadata"]["uid"])
        return trimmed_job(job) if job is not None else None

    async def _pods_of(self, key: JobKey, labels: Labels) -> Iterable[Manifest]:
        """The pods of a job with these labels."""
        index = (LABEL_JOB, *key)
        if key in self._unsure_pods:
            listing = await self._cluster.list(
                PODS, namespace=key.namespace, labels={**OURS, LABEL_JOB: key.name}, keep=trimmed_pod
            )
            self._unsure_pods.discard(key)
            self._pods.read(index, listing)
        pods = self._pods.found_by(index)
        return [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]

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
        self._on_change(JOBS, change)

    def _pod_changed(self, change: Change) -> None:
        if change.before is None and change.after is not None:
            key = job_of(change.after)
            job = self._jobs.get(key)
            if job is not None and sequence_of(change.after) > _last_sequence(job):
                self._unsure_jobs.add(key)
        self._on_change(PODS, change)

    # --- writes -------------------------------------------------------------------------------------------

    async def create(self, resource: Resource, manifest: Manifest) -> Manifest:
        if resource in self._optional:
            return self._written(resource, await self._cluster.create(resource, manifest))
        if resource != PODS:
            return await self._cluster.create(resource, manifest)
        answer = await _or_unsure(self._cluster.create(PODS, manifest), self._unsure_pods, job_of(manifest))
        self._pods.written(answer)
        return answer

    async def patch(
        self, resource: Resource, name: str, patch: Manifest, *, namespace: str = "", uid: str = ""
    ) -> Manifest | None:
        patching = self._cluster.patch(resource, name, patch, namespace=namespace, uid=uid)
        if resource != PODS:
            return await patching
        key = JobKey.of_pod(namespace, name)
        answer = await _or_unsure(patching, self._unsure_pods, key)
        if answer is None:
            self._unsure_pods.add(key)
        else:
            self._pods.written(answer)
        return answer

    async def replace(self, resource: Resource, manifest: Manifest, *, subresource: str = "") -> Manifest:
        replacing = self._cluster.replace(resource, manifest, subresource=subresource)
        if resource in self._optional:
            return self._written(resource, await replacing)
        if resource != JOBS:
            return await replacing
        key = JobKey.of(manifest)
        self._meanwhile[key] = None
        written = None
        try:
            answer = await _or_unsure(replacing, self._unsure_jobs, key)
            self._jobs.written(answer, report=False)
            written = trimmed_job(answer)
            return answer
        finally:
            # The watch may be ahead of the answer.
            shown = self._meanwhile.pop(key)
            is_own = written is not None and shown is not None and shown.after == written
            if shown is not None and not is_own and (shown.before or shown.after):
                self._job_changed(shown)

    async def delete(
        self, resource: Resource, name: str, *, namespace: str = "", uid: str, grace_seconds: int | None = None
    ) -> Manifest | None:
        deleting = self._cluster.delete(resource, name, namespace=namespace, uid=uid, grace_seconds=grace_seconds)
        if resource == JOBS:
            self._unsure_jobs.add(JobKey(namespace, name))  # the answer doesn't say whether it is gone
        if resource in self._optional:
            gone = await deleting
            self._optional[resource].deleted((namespace, name), uid)
            return gone
        if resource != PODS:
            return await deleting
        key = JobKey.of_pod(namespace, name)
        answer = await _or_unsure(deleting, self._unsure_pods, key)
        if answer is None:
            self._unsure_pods.add(key)
        elif is_gone(answer):
            self._pods.deleted((namespace, name), uid)
        else:
            self._pods.written(answer)
        return answer

    def _written(self, resource: Resource, item: Manifest) -> Manifest:
        self._optional[resource].written(item, report=False)
        return item


def _spec_version(job: Manifest) -> SpecVersion:
    return job["metadata"]["uid"], job["metadata"].get("generation", 0)


def _last_sequence(job: Manifest) -> int:
    """The number of the last pod that the job's status counts."""
    return int((job.get("status") or {}).get("lastSequence", 0))


def job_of(item: Manifest) -> JobKey:
    """The job whose labels the object bears."""
    meta = item["metadata"]
    namespace = meta.get("namespace") or meta["labels"].get(LABEL_NAMESPACE, "")
    return JobKey(namespace=namespace, name=meta["labels"].get(LABEL_JOB, ""))


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
