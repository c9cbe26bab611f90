"""Metrics that a scrape reads from the newest pass over each job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from spottrain_api.v1alpha1 import Phase
from spottrain_operator.cluster.client import JobKey
from spottrain_operator.job_families import FAMILIES, JOB, PHASE_FAMILY, Family, JobNow, Sample

# Time for which a job that is over keeps all its series.
OVER = timedelta(hours=1)


@dataclass(slots=True)
class _Kept:
    """What is kept of a job. `job` is None once it has been over for long."""

    phase: Phase
    job: JobNow | None

    def samples(self, family: Family) -> Iterable[Sample]:
        if self.job is not None:
            return family.samples(self.job)
        return [((self.phase.value,), 1.0)] if family.name == PHASE_FAMILY else []


class JobMetrics(Collector):
    """Reads the jobs at each scrape.

    Of a job that was over for an hour only the phase is left: there may be thousands of these.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._jobs: dict[JobKey, _Kept] = {}

    def put(self, key: JobKey, job: JobNow) -> None:
        """Set what the newest pass over a job found."""
        kept = _Kept(job.status.phase, job)
        self._trim(kept)
        self._jobs[key] = kept

    def forget(self, key: JobKey) -> None:
        self._jobs.pop(key, None)

    def has_all_series(self, key: JobKey) -> bool:
        kept = self._jobs.get(key)
        return kept is not None and kept.job is not None

    def _trim(self, kept: _Kept) -> None:
        completed = kept.job.status.completion_time if kept.job is not None else None
        if completed is not None and self._now() - completed > OVER:
            kept.job = None

    def collect(self) -> Iterator[Metric]:
        """All families, also those without a sample.

        A scrape runs in a thread, while passes put and forget jobs. So it changes what is kept of a job, but not
        which jobs are.
        """
        jobs = list(self._jobs.items())
        for _, kept in jobs:
            self._trim(kept)
        for family in FAMILIES:
            metric = family.kind(family.name, family.documentation, labels=(*JOB, *family.labels))
            for key, kept in jobs:
                for labels, value in kept.samples(family):
                    metric.add_metric((key.namespace, key.name, *labels), value)
            yield metric
