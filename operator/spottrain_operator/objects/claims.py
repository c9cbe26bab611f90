"""Index of the unfinished jobs by checkpoint folder.

It says which job comes first at a folder.
"""

from __future__ import annotations

import contextlib
from bisect import insort
from dataclasses import dataclass, field
from datetime import datetime

from spottrain_api.v1alpha1.status import FINISHED_PHASES
from spottrain_operator.core.facts.folders import Folder, folder_of
from spottrain_operator.core.model import JobView, Rival
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import JOBS, Manifest
from spottrain_operator.objects.observe import NotUnderstoodError, job_view


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Claim:
    """An unfinished job's claim to its folder.

    The smaller one wins: a job that has started, then the older one.
    """

    is_new: bool  # whether it never had a generation
    created_at: datetime
    uid: str
    key: JobKey = field(compare=False)
    folder: Folder


class FolderClaims:
    """The claims of all jobs that it was shown."""

    def __init__(self) -> None:
        self._claims: dict[JobKey, Claim] = {}
        self._by_folder: dict[Folder, list[Claim]] = {}  # sorted

    def note(self, job: JobView) -> None:
        """Update the claim of a job, as it was read last."""
        key = JobKey.of_view(job)
        claim = _claim(key, job)
        if self._claims.get(key) == claim:
            return
        self.forget(key)
        if claim is not None:
            self._claims[key] = claim
            insort(self._by_folder.setdefault(claim.folder, []), claim)

    def forget(self, key: JobKey) -> None:
        """Drop the claim of a job that is gone, or that no longer claims one."""
        claim = self._claims.pop(key, None)
        if claim is None:
            return
        self._by_folder[claim.folder].remove(claim)
        if not self._by_folder[claim.folder]:
            del self._by_folder[claim.folder]

    def first(self, folder: Folder) -> JobKey | None:
        """The job that comes first at this folder."""
        return self._by_folder[folder][0].key if folder in self._by_folder else None


def _claim(key: JobKey, job: JobView) -> Claim | None:
    if job.deleting or job.status.phase in FINISHED_PHASES:
        return None
    return Claim(
        is_new=job.status.generation is None,
        created_at=job.created_at,
        uid=job.uid,
        key=key,
        folder=folder_of(job),
    )


class RivalFinder:
    """Finds the job for which another one has to wait.

    Each pass over a job updates its claim.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._claims = FolderClaims()
        self._knows_all = False

    async def rival_of(self, job: JobView) -> Rival | None:
        """The unfinished job that comes first at this job's checkpoint folder; None if that is the job itself."""
        if not self._knows_all:  # a new operator, which may not have passed over the others yet
            for manifest in (await self._cluster.list(JOBS)).items:
                self.note(manifest)
            self._knows_all = True
        self._claims.note(job)
        if job.status.phase in FINISHED_PHASES:
            return None
        own, folder = JobKey.of_view(job), folder_of(job)
        while (first := self._claims.first(folder)) not in (None, own):
            # It may be gone: a broken watch misses deletions.
            await self._read(first)
            if self._claims.first(folder) == first:
                return Rival(namespace=first.namespace, name=first.name)
        return None

    def note(self, manifest: Manifest) -> None:
        """Update the claim of a job without a pass over it.

        If it can't be read, the job keeps its old claim, as it may well run.
        """
        if (manifest.get("status") or {}).get("phase") in FINISHED_PHASES:  # thousands of these may lie about
            self._claims.forget(JobKey.of(manifest))
            return
        with contextlib.suppress(NotUnderstoodError):
            self._claims.note(job_view(manifest))

    def forget(self, key: JobKey) -> None:
        """Drop everything about a job that is gone."""
        self._claims.forget(key)

    async def _read(self, key: JobKey) -> None:
        manifest = await self._cluster.get(JOBS, key.name, namespace=key.namespace)
        if manifest is None:
            self._claims.forget(key)
        else:
            self.note(manifest)
