"""The profiles that jobs take."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from spottrain_api.tolerant import read_known
from spottrain_api.v1alpha1.profile import DEFAULT_PROFILE, ProfileSpec
from spottrain_api.v1alpha1.status import FINISHED_PHASES
from spottrain_operator.core.model import JobView, ProfileView
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import RefusedError
from spottrain_operator.kube.resources import PROFILES, Manifest

logger = logging.getLogger(__name__)

# Many jobs take the same one, and few jobs are new: what was read counts for so long.
FRESH = timedelta(seconds=5)


class ProfileFinder:
    """Finds the profile that a job is yet to take."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, tuple[datetime, Manifest | None]] = {}

    async def profile_of(self, job: JobView, now: datetime) -> ProfileView | None:
        """The profile, which may be missing; None if the job takes none, or has taken it.

        A job that has run without one doesn't take the default one.
        """
        status, name = job.status, job.spec.profile
        if status.profile is not None or status.phase in FINISHED_PHASES or job.deleting:
            return None
        if name is None and status.generation is not None:
            return None
        found = await self._read(name or DEFAULT_PROFILE, now)
        if found is None:
            return ProfileView(name=name) if name is not None else None
        spec, _ = read_known(ProfileSpec, found.get("spec") or {})
        meta = found["metadata"]
        return ProfileView(name=meta["name"], generation=meta.get("generation", 0), spec=spec)

    async def _read(self, name: str, now: datetime) -> Manifest | None:
        read_at, found = self._known.get(name, (None, None))
        if read_at is not None and now - read_at < FRESH:
            return found
        try:
            found = await self._cluster.get(PROFILES, name)
        except RefusedError as error:  # the roles are of an older chart
            logger.warning("the TrainingProfile %s can't be read, and counts as missing: %s", name, error)
            found = None
        self._known = {each: (at, known) for each, (at, known) in self._known.items() if now - at < FRESH}
        self._known[name] = (now, found)
        return found
