"""Who comes first at a checkpoint folder: an index of the unfinished jobs by checkpoint.uri."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from spottrain_api.v1alpha1 import FINISHED_PHASES, Checkpoint

from .cluster import ClusterClient, JobKey, Manifest
from .core.model import JobView, Rival
from .observe import InvalidJobError, job_view

Folder = tuple[str, ...]  # the endpoint, the scheme, the bucket (or the first folder), and what follows
OUTERMOST = 3


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Claim:
    """An unfinished job's claim to its folder. The smaller one comes first: a job that has begun, then the older."""

    is_new: bool  # it never had a generation
    created_at: datetime
    uid: str
    key: JobKey = field(compare=False)
    folder: Folder = field(compare=False)


class Claims:
    """The claims of all jobs, as far as it was told. A look-up takes as long as the folder is deep."""

    def __init__(self) -> None:
        self._claims: dict[JobKey, Claim] = {}
        # Sorted; by folder, and whether they are claims to it or to folders inside of it.
        self._by_place: dict[tuple[Folder, bool], list[Claim]] = {}

    def note(self, job: JobView) -> None:
        """The job as it was read last."""
        key = JobKey(namespace=job.namespace, name=job.name)
        claim = _claim(key, job)
        if self._claims.get(key) == claim:
            return
        self.forget(key)
        if claim is not None:
            self._claims[key] = claim
            for place in _places(claim.folder):
                insort(self._by_place.setdefault(place, []), claim)

    def forget(self, key: JobKey) -> None:
        """The job is gone, or claims nothing any more."""
        claim = self._claims.pop(key, None)
        if claim is None:
            return
        for place in _places(claim.folder):
            self._by_place[place].remove(claim)
            if not self._by_place[place]:
                del self._by_place[place]

    def first(self, folder: Folder) -> JobKey | None:
        """The job that comes first at this folder, at one that it lies in, or inside of it."""
        places = [(outer, False) for outer in _outer(folder)] + [(folder, False), (folder, True)]
        firsts = (self._by_place[place][0] for place in places if place in self._by_place)
        first = min(firsts, default=None)
        return first.key if first is not None else None


def folder_of(checkpoint: Checkpoint) -> Folder:
    """Slashes at the end, or two in a row, make no other folder."""
    endpoint = (checkpoint.endpoint_url or "").rstrip("/")
    return (endpoint, *(part for part in checkpoint.uri.split("/") if part))


def _claim(key: JobKey, job: JobView) -> Claim | None:
    if job.status.phase in FINISHED_PHASES:
        return None
    return Claim(
        is_new=job.status.generation is None,
        created_at=job.created_at,
        uid=job.uid,
        key=key,
        folder=folder_of(job.spec.checkpoint),
    )


def _places(folder: Folder) -> Iterator[tuple[Folder, bool]]:
    """Where a claim to the folder is found."""
    yield folder, False
    for outer in _outer(folder):
        yield outer, True


def _outer(folder: Folder) -> Iterator[Folder]:
    """The folders that it lies in, a bucket as well."""
    return (folder[:length] for length in range(OUTERMOST, len(folder)))


class RivalFinder:
    """Finds the job that another has to wait for. It is told of jobs by the passes over them."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster
        self._claims = Claims()
        self._knows_all = False

    async def rival_of(self, job: JobView) -> Rival | None:
        """The unfinished job that comes first at this job's checkpoint folder, if that isn't the job itself."""
        if not self._knows_all:  # a new operator: the passes over the others may be yet to come
            for manifest in await self._cluster.list_jobs():
                self._note(manifest)
            self._knows_all = True
        self._claims.note(job)
        if job.status.phase in FINISHED_PHASES:
            return None
        own, folder = JobKey(namespace=job.namespace, name=job.name), folder_of(job.spec.checkpoint)
        while (first := self._claims.first(folder)) not in (None, own):
            # It may be over: a watch that breaks off misses deletions.
            other = await self._read(first)
            if other is not None and self._claims.first(folder) == first:
                return Rival(namespace=other.namespace, name=other.name, uri=other.spec.checkpoint.uri)
        return None

    def forget(self, key: JobKey) -> None:
        """The job is gone, or can't be run."""
        self._claims.forget(key)

    async def _read(self, key: JobKey) -> JobView | None:
        manifest = await self._cluster.get_job(key)
        view = self._note(manifest) if manifest is not None else None
        if view is None:
            self._claims.forget(key)
        return view

    def _note(self, manifest: Manifest) -> JobView | None:
        try:
            view = job_view(manifest)
        except InvalidJobError:  # the pass over it says so
            return None
        self._claims.note(view)
        return view
