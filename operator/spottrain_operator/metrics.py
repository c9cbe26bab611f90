"""Prometheus metrics.

A scrape reads the gauges and counters of a job from its status, so that they survive a restart of the operator and
vanish with the job. Histograms collect what happens while this operator runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from spottrain_api.v1alpha1 import FINISHED_PHASES, GenerationState, Phase, TrainingJobStatus
from spottrain_operator.cluster.client import JobKey
from spottrain_operator.core.model import JobView, ReportView
from spottrain_operator.core.watching import spot_watches

# Not "job" and "namespace": Prometheus uses these names for the target, and its values would win.
JOB = ("job_namespace", "job_name")
GAP_BUCKETS = (0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300)
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30)


def world_size(status: TrainingJobStatus) -> int:
    """Number of ranks that train together now."""
    generation = status.generation
    return 0 if generation is None or generation.state is GenerationState.ENDED else generation.world_size


Read = Callable[[TrainingJobStatus], float | None]
# Name, description, how to read it from the status (None: no sample).
GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("spottrain_job_step", "Completed optimizer steps.", lambda s: s.progress.step),
    ("spottrain_job_target_steps", "Steps of the whole run.", lambda s: s.progress.total_steps),
    ("spottrain_job_loss", "Newest training loss.", lambda s: s.progress.loss),
    ("spottrain_job_tokens_per_second", "Tokens a second of all ranks.", lambda s: s.progress.tokens_per_second),
    (
        "spottrain_job_data_wait_ratio",
        "Share of a step in which training waits for data, 0 to 1.",
        lambda s: s.progress.data_wait_ratio,
    ),
    (
        "spottrain_job_generation",
        "Number of the newest generation.",
        lambda s: s.generation.number if s.generation else None,
    ),
    ("spottrain_job_world_size", "Ranks that train together; 0 between generations.", world_size),
    ("spottrain_job_committed_step", "Step of the newest commit.", lambda s: s.commit.step if s.commit else None),
    ("spottrain_job_goodput_ratio", "Share of the time in which steps were made, 0 to 1.", lambda s: s.goodput),
    ("spottrain_job_waiting_pods", "Pods that wait, warm, for the next generation.", lambda s: s.members.waiting),
    # A gauge, because steps that have to be redone are subtracted.
    (
        "spottrain_job_productive_seconds",
        "Seconds in which steps were made that were not redone.",
        lambda s: s.productive_seconds,
    ),
)
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("spottrain_job_steps_redone", "Steps that were redone after a loss.", lambda s: s.steps_redone),
    ("spottrain_job_skipped_steps", "Steps that stability skipped.", lambda s: s.progress.skipped_steps),
    ("spottrain_job_rollbacks", "Rollbacks by stability.", lambda s: s.progress.rollbacks),
    ("spottrain_job_failures", "Failures that count against runPolicy.failureBudget.", lambda s: s.failures),
)


@dataclass(slots=True, eq=False)
class _Jobs(Collector):
    """Reads the statuses at each scrape."""

    statuses: dict[JobKey, TrainingJobStatus]

    def collect(self) -> Iterator[Metric]:
        yield from self._plain(GaugeMetricFamily, GAUGES)
        yield from self._plain(CounterMetricFamily, COUNTERS)
        members = GaugeMetricFamily(
            "spottrain_job_members", "Members of the generation.", labels=(*JOB, "capacity_type")
        )
        preemptions = CounterMetricFamily(
            "spottrain_job_preemptions", "Preemptions of members, with and without notice.", labels=(*JOB, "notice")
        )
        phases = GaugeMetricFamily(
            "spottrain_job_phase", "1 for the phase that the job is in.", labels=(*JOB, "phase")
        )
        cost = CounterMetricFamily("spottrain_job_cost", "Money spent.", labels=(*JOB, "currency"))
        on_demand_only = GaugeMetricFamily(
            "spottrain_job_cost_on_demand_only",
            "What as many on-demand nodes would have cost so far.",
            labels=(*JOB, "currency"),
        )
        for key, status in self.statuses.items():
            job = (key.namespace, key.name)
            if status.cost is not None:
                cost.add_metric((*job, status.cost.currency), status.cost.total)
                on_demand_only.add_metric((*job, status.cost.currency), status.cost.on_demand_only)
            members.add_metric((*job, "on-demand"), status.members.on_demand)
            members.add_metric((*job, "spot"), status.members.spot)
            without = status.preemptions_without_notice
            preemptions.add_metric((*job, "without"), without)
            preemptions.add_metric((*job, "with"), max(0, status.preemptions - without))
            for phase in Phase:
                phases.add_metric((*job, phase.value), float(status.phase is phase))
        yield from (members, preemptions, phases, cost, on_demand_only)

    def _plain(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        rows: tuple[tuple[str, str, Read], ...],
    ) -> Iterator[Metric]:
        for name, documentation, read in rows:
            metric = family(name, documentation, labels=JOB)
            for key, status in self.statuses.items():
                value = read(status)
                if value is not None:
                    metric.add_metric((key.namespace, key.name), value)
            yield metric


class Metrics:
    """All metrics of the operator, in their own registry."""

    def __init__(self, *, num_agents: Callable[[], int]) -> None:
        # Creation times of counters would double the number of series, and nobody asks for them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._jobs = _Jobs(statuses={})
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
        agents = Gauge("spottrain_agents_connected", "Agents that hold a long poll.", registry=self.registry)
        agents.set_function(num_agents)
        self.leader = Gauge("spottrain_leader", "1 while this operator leads.", registry=self.registry)
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
        self._unwatched = Gauge(
            "spottrain_job_unwatched_members",
            "Members on spot nodes whose notices nobody hears: the node's watcher is missing or blind.",
            JOB,
            registry=self.registry,
        )
        self._seen_commits: dict[JobKey, tuple[int, int]] = {}

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"spottrain_job_{name}", documentation, JOB, buckets=buckets, registry=self.registry)

    def passed(
        self, key: JobKey, before: JobView, after: TrainingJobStatus, reports: Mapping[str, ReportView]
    ) -> None:
        """Record a pass that turned the status of `before` into `after`."""
        self._jobs.statuses[key] = after
        labels = (key.namespace, key.name)
        for seconds in gaps_closed(before.status, after):
            self._gap.labels(*labels).observe(seconds)
        latency = drain_latency(before.status, after, reports)
        if latency is not None:
            self._drain.labels(*labels).observe(latency)
        generation = after.generation if world_size(after) else None
        self._unwatched.labels(*labels).set(sum(each.unheard for each in spot_watches(generation, reports)))
        self._observe_checkpoint(key, reports)
        if after.phase in FINISHED_PHASES:
            self._seen_commits.pop(key, None)

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
                    self._checkpoint[part].labels(key.namespace, key.name).observe(seconds)
                if timings.forecast_seconds is not None and timings.total_seconds > 0:
                    ratio = timings.forecast_seconds / timings.total_seconds
                    self._forecast.labels(key.namespace, key.name).set(ratio)
        self._seen_commits[key] = newest

    def forget(self, key: JobKey) -> None:
        """Drop the series of a deleted job."""
        self._jobs.statuses.pop(key, None)
        self._seen_commits.pop(key, None)
        for metric in (self._gap, self._drain, self._forecast, self._unwatched, *self._checkpoint.values()):
            metric.remove_by_labels({"job_namespace": key.namespace, "job_name": key.name})

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of /metrics."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


def gaps_closed(before: TrainingJobStatus, after: TrainingJobStatus) -> list[float]:
    """Seconds without a step of the transitions that were completed between the two statuses."""

    def known(status: TrainingJobStatus) -> dict[tuple[int, datetime], float]:
        return {
            (each.generation, each.at): each.seconds_without_step
            for each in status.transitions
            if each.seconds_without_step is not None
        }

    old = known(before)
    return [seconds for which, seconds in known(after).items() if which not in old]


def drain_latency(
    before: TrainingJobStatus, after: TrainingJobStatus, reports: Mapping[str, ReportView]
) -> float | None:
    """Seconds from the oldest notice of an agent to the drain that this pass decided; None without one."""
    generation = after.generation
    if generation is None or generation.requested_at is None:
        return None
    if before.generation is not None and before.generation.requested_at == generation.requested_at:
        return None
    observed = [notice.observed_at for view in reports.values() for notice in view.report.notices]
    return max(0.0, (generation.requested_at - min(observed)).total_seconds()) if observed else None
