"""Metrics that a scrape reads from the newest pass over each job.

When a member's agent was last heard is read at the scrape: while a job is at rest, the newest pass is old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from datetime import datetime, timedelta

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spottrain_operator.job_families import FAMILIES, JOB, PHASE_FAMILY, JobNow, Sample
from spottrain_operator.kube.identities import JobKey

# Time for which a job that is over keeps all its series.
OVER = timedelta(hours=1)


Samples = tuple[tuple[Sample, ...], ...]
"""Those of each family, in the order of FAMILIES."""


@dataclass(slots=True)
class _Kept:
    """The values that are kept of a job.

    They take less memory than its status and its agents' reports.

    Attributes:
        completed_at: None until the job is over, and again once it has been over for long.
        agents: Node rank and pod uid of the members that have reported.
    """

    completed_at: datetime | None
    has_all: bool
    samples: Samples
    agents: tuple[tuple[str, str], ...]


class JobMetrics(Collector):
    """Reads the jobs at each scrape.

    Of a job that was over for an hour only the phase is left: there may be thousands of these.

    Args:
        now: The time.
        leads: Whether this operator leads. While it doesn't, what it knows of the jobs is old, and it shows none.
        last_contact: When the agent of a pod, by uid, was last heard; None if it never was.
        on_over: Called with each such job, so that its other metrics can go, too. A scrape may do so, in its thread.
    """

    def __init__(
        self,
        now: Callable[[], datetime],
        *,
        leads: Callable[[], bool],
        last_contact: Callable[[str], datetime | None],
        on_over: Callable[[JobKey], None],
    ) -> None:
        self._now = now
        self._leads = leads
        self._last_contact = last_contact
        self._on_over = on_over
        self._jobs: dict[JobKey, _Kept] = {}

    def put(self, key: JobKey, job: JobNow) -> None:
        """Set what the newest pass over a job found."""
        agents = tuple((str(member.node_rank), member.pod_uid) for member, _, _ in job.members())
        kept = _Kept(job.status.completion_time, has_all=True, samples=_samples(job), agents=agents)
        self._trim(key, kept)
        self._jobs[key] = kept

    @property
    def keys(self) -> Set[JobKey]:
        return self._jobs.keys()

    def forget(self, key: JobKey) -> None:
        self._jobs.pop(key, None)

    def has_all_series(self, key: JobKey) -> bool:
        kept = self._jobs.get(key)
        return kept is not None and kept.has_all

    def _trim(self, key: JobKey, kept: _Kept) -> None:
        if kept.completed_at is not None and self._now() - kept.completed_at > OVER:
            kept.samples = tuple(
                _true(samples) if family.name == PHASE_FAMILY else ()
                for family, samples in zip(FAMILIES, kept.samples, strict=True)
            )
            kept.completed_at, kept.has_all = None, False
            self._on_over(key)

    def collect(self) -> Iterator[Metric]:
        """All families, also those without a sample.

        A scrape runs in a thread, while passes put and forget jobs. So it changes what is kept of a job, but not
        which jobs are.
        """
        jobs = list(self._jobs.items()) if self._leads() else []
        for key, kept in jobs:
            self._trim(key, kept)
        for number, family in enumerate(FAMILIES):
            metric = family.kind(family.name, family.documentation, labels=(*JOB, *family.labels))
            for key, kept in jobs:
                for labels, value in kept.samples[number]:
                    metric.add_metric((key.namespace, key.name, *labels), value)
            yield metric
        contact = GaugeMetricFamily(
            "spottrain_job_member_report_timestamp_seconds",
            "Time at which the operator last heard of the member's agent. One that holds its connection, or whose "
            "relay does, is heard all the time.",
            labels=(*JOB, "node_rank"),
        )
        for key, kept in jobs:
            for node_rank, pod_uid in kept.agents:
                if (heard_at := self._last_contact(pod_uid)) is not None:
                    contact.add_metric((key.namespace, key.name, node_rank), heard_at.timestamp())
        yield contact


def _samples(job: JobNow) -> Samples:
    return tuple(tuple(family.samples(job)) for family in FAMILIES)


def _true(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    return tuple(sample for sample in samples if sample[1])
