"""Prometheus metrics.

A scrape reads the gauges and counters of a job from its newest pass (`status_metrics`), while this operator leads.
Histograms collect what happens while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from datetime import UTC, datetime

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.core.facts.notices import notice_of_end
from spottrain_operator.core.model import Observed, ReportView
from spottrain_operator.core.policies.transitions import completed
from spottrain_operator.job_families import JOB, JobNow
from spottrain_operator.job_histograms import JobHistogram
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.status_metrics import JobMetrics

ERROR_KINDS = ("conflict", "cluster", "internal")
# Up to a day: the job may have waited for nodes, or been suspended.
GAP_BUCKETS = (0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300, 900, 3600, 14400, 86400)
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """All metrics of the operator, in their own registry."""

    def __init__(
        self,
        *,
        num_agents: Callable[[], int],
        leads: Callable[[], bool] = lambda: True,
        last_contact: Callable[[str], datetime | None] = lambda _: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        # Creation times of counters would double the number of series, and nobody asks for them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._jobs = JobMetrics(now, leads=leads, last_contact=last_contact, on_over=self._forget_course)
        self.registry.register(self._jobs)
        self.reconcile_seconds = Histogram(
            "spottrain_reconcile_duration_seconds",
            "Seconds that one pass over one job takes.",
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.reconcile_errors = Counter(
            "spottrain_reconcile_errors", "Passes that ended with an error.", ("kind",), registry=self.registry
        )
        for kind in ERROR_KINDS:
            self.reconcile_errors.labels(kind)  # from 0, because increase() leaves out the first value
        agents = Gauge("spottrain_agents_connected", "Agents that hold a long poll.", registry=self.registry)
        agents.set_function(num_agents)
        leader = Gauge("spottrain_leader", "1 while this operator leads.", registry=self.registry)
        leader.set_function(leads)
        self._gap = self._histogram(
            "gap_seconds", "Seconds without a step, from one generation to the next.", GAP_BUCKETS
        )
        self._drain = self._histogram(
            "notice_to_drain_seconds", "Seconds from a notice to the drain that it leads to.", LATENCY_BUCKETS
        )
        self._checkpoint = {
            part: self._histogram(
                f"checkpoint_{part}_seconds", f"Seconds that a checkpoint takes for {what}.", SECONDS_BUCKETS
            )
            for part, what in (
                ("staging", "copying out of the accelerator, for which training waits"),
                ("upload", "writing the shards"),
                ("commit", "verifying and committing"),
            )
        }
        self._forecast = Gauge(
            "spottrain_job_checkpoint_forecast_ratio",
            "Forecast duration of the newest checkpoint, divided by the real one.",
            JOB,
            registry=self.registry,
        )
        self._seen_commits: dict[JobKey, tuple[int, int]] = {}

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> JobHistogram:
        return JobHistogram(f"spottrain_job_{name}", documentation, buckets, self.registry)

    def passed(self, key: JobKey, observed: Observed, after: TrainingJobStatus) -> None:
        """Record a pass that decided on `after` by what it had observed."""
        job, reports = observed.job, observed.reports
        knows_budget = job.understands("runPolicy.failureBudget")
        self._jobs.put(
            key,
            JobNow(spec=job.spec, status=after, reports=reports, knows_budget=knows_budget, timing=observed.timing),
        )
        for histogram in (self._gap, self._drain, *self._checkpoint.values()):
            histogram.show(key)
        for transition in completed(job.status, after):
            self._gap.observe(key, transition.seconds_without_step or 0.0)
        latency = drain_latency(observed, after)
        if latency is not None:
            self._drain.observe(key, latency)
        self._observe_checkpoint(key, reports)
        # Last, as a scrape may find meanwhile that the job is long over.
        if not self._jobs.has_all_series(key):
            self._forget_course(key)

    def _observe_checkpoint(self, key: JobKey, reports: Mapping[str, ReportView]) -> None:
        newest = self._seen_commits.get(key, (0, -1))
        for view in reports.values():
            progress = view.report.progress
            if progress is None or progress.commit is None or progress.checkpoint is None:
                continue
            if progress.checkpoint.commit_seconds == 0:
                continue  # only rank 0 commits, so only it knows the whole
            commit = (progress.commit.generation, progress.commit.step)
            if commit > newest:
                newest = commit
                timings = progress.checkpoint
                for part, seconds in (
                    ("staging", timings.staging_seconds),
                    ("upload", timings.upload_seconds),
                    ("commit", timings.commit_seconds),
                ):
                    self._checkpoint[part].observe(key, seconds)
                if timings.forecast_seconds is not None and timings.total_seconds > 0:
                    ratio = timings.forecast_seconds / timings.total_seconds
                    self._forecast.labels(key.namespace, key.name).set(ratio)
        self._seen_commits[key] = newest

    @property
    def jobs(self) -> Set[JobKey]:
        """The jobs that have series."""
        return self._jobs.keys

    def forget(self, key: JobKey) -> None:
        """Drop the series of a deleted job."""
        self._jobs.forget(key)
        self._forget_course(key)

    def _forget_course(self, key: JobKey) -> None:
        self._seen_commits.pop(key, None)
        for histogram in (self._gap, self._drain, *self._checkpoint.values()):
            histogram.forget(key)
        self._forecast.remove_by_labels({"job_namespace": key.namespace, "job_name": key.name})

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of /metrics."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


def drain_latency(observed: Observed, after: TrainingJobStatus) -> float | None:
    """Seconds from the oldest notice to the drain for it that this pass decided; None without such a drain."""
    known, generation = observed.job.status.generation, after.generation
    if generation is None or generation.requested_at is None:
        return None
    if known is not None and known.number == generation.number and known.requested_at is not None:
        return None  # a stop may follow the drain
    notice = notice_of_end(generation, observed)
    return max(0.0, (generation.requested_at - notice.observed_at).total_seconds()) if notice is not None else None
