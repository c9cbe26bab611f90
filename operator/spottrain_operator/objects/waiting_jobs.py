"""Index of the jobs that wait for nodes, by age."""

from __future__ import annotations

from bisect import bisect_right, insort
from datetime import datetime

from spottrain_api.v1alpha1.status import Phase
from spottrain_operator.core.model import JobView
from spottrain_operator.kube.identities import JobKey

Age = tuple[datetime, str]
"""Time of creation, and uid."""
_WAITING = frozenset({Phase.PENDING, Phase.RECOVERING})


class WaitingJobs:
    """The jobs without a running generation that want one. Each pass over a job updates it."""

    def __init__(self) -> None:
        self._ages: dict[JobKey, Age] = {}
        self._sorted: list[Age] = []

    def note(self, job: JobView) -> None:
        """Update a job, as it was read last."""
        waits = not job.deleting and job.status.phase in _WAITING and job.status.running is None
        key, age = JobKey.of_view(job), (job.created_at, job.uid)
        if self._ages.get(key) == (age if waits else None):
            return
        self.forget(key)
        if waits:
            self._ages[key] = age
            insort(self._sorted, age)

    def forget(self, key: JobKey) -> None:
        """Drop a job that is gone."""
        age = self._ages.pop(key, None)
        if age is not None:
            self._sorted.remove(age)

    def num_younger(self, job: JobView) -> int:
        """Number of jobs that wait and are younger than this one."""
        return len(self._sorted) - bisect_right(self._sorted, (job.created_at, job.uid))
