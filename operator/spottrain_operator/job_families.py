"""The metrics of a job.

They show the job's spec, its status and its agents' reports. Values of the status survive a restart of the operator.
They vanish with the job, and all but its phase an hour after its end. An operator that doesn't lead shows none.
Those of a member are of the newest report of its agent, and reset with each generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from spottrain_api.contract.assignments import Member
from spottrain_api.contract.reports import Progress
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import Phase, TrainingJobStatus
from spottrain_operator.core.facts.watching import spot_watches
from spottrain_operator.core.model import ReportView
from spottrain_operator.core.timing import Timing, after

# Not "job", "namespace", "pod" and "node": Prometheus uses these names for the target, and its values would win.
JOB = ("job_namespace", "job_name")
PHASE_FAMILY = "spottrain_job_phase"
_SECONDS = "_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNow:
    """A job after its newest pass.

    Attributes:
        reports: The newest reports, by pod uid.
    """

    spec: TrainingJobSpec
    status: TrainingJobStatus
    reports: Mapping[str, ReportView] = field(default_factory=dict)
    timing: Timing
    knows_budget: bool = True

    @property
    def deadline(self) -> datetime | None:
        """Time at which runPolicy.activeDeadlineSeconds fails the job."""
        limit, since = self.spec.run_policy.active_deadline_seconds, self.status.start_time
        return None if limit is None or since is None else after(since, limit)

    @property
    def makes_steps(self) -> bool:
        """Whether the running generation has made a step.

        Otherwise the progress is that of an earlier one.
        """
        return self.status.running is not None and self.status.running.first_step_at is not None

    def members(self) -> Iterator[tuple[Member, ReportView, Progress]]:
        """The members of the running generation that have reported in it."""
        running = self.status.running
        members, number = (running.members, running.number) if running is not None else ((), 0)
        for member in members:
            view = self.reports.get(member.pod_uid)
            progress = view.report.progress if view is not None else None
            if view is not None and progress is not None and progress.generation == number:
                yield member, view, progress


Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
Sample = tuple[tuple[str, ...], float]
"""Values of a family's own labels, and the sample's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric.

    Attributes:
        labels: Labels in addition to the job's.
        samples: Reads the samples of a job.
    """

    kind: Kind
    name: str
    documentation: str
    labels: tuple[str, ...] = ()
    samples: Callable[[JobNow], Iterable[Sample]]


def _of_job(kind: Kind, name: str, documentation: str, read: Callable[[JobNow], float | None]) -> Family:
    """One value a job, if it has one."""

    def samples(job: JobNow) -> Iterator[Sample]:
        if (value := read(job)) is not None:
            yield (), value

    return Family(kind=kind, name=name, documentation=documentation, samples=samples)


def _of_member(
    kind: Kind, name: str, documentation: str, read: Callable[[ReportView, Progress], float | None]
) -> Family:
    """One value for each member that reports it."""

    def samples(job: JobNow) -> Iterator[Sample]:
        for member, view, progress in job.members():
            if (value := read(view, progress)) is not None:
                yield (str(member.node_rank),), value

    return Family(kind=kind, name=name, documentation=documentation, labels=("node_rank",), samples=samples)


def _moment(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _times(job: JobNow) -> Iterator[Sample]:
    for name, value in job.status.time or ():
        if name.endswith(_SECONDS):
            yield (name.removesuffix(_SECONDS),), value


def _conditions(job: JobNow) -> Iterator[Sample]:
    for each in job.status.conditions:
        yield (each.type,), float(each.status == "True")


def _phases(job: JobNow) -> Iterator[Sample]:
    for phase in Phase:
        yield (phase.value,), float(job.status.phase is phase)


def _members(job: JobNow) -> Iterator[Sample]:
    yield ("on-demand",), job.status.members.on_demand
    yield ("spot",), job.status.members.spot


def _preemptions(job: JobNow) -> Iterator[Sample]:
    without = job.status.preemptions_without_notice
    yield ("without",), without
    yield ("with",), max(0, job.status.preemptions - without)


def _cost(job: JobNow) -> Iterator[Sample]:
    if job.status.cost is not None:
        yield (job.status.cost.currency,), job.status.cost.total


def _pool_cost(job: JobNow) -> Iterator[Sample]:
    if job.status.cost is not None:
        for each in job.status.cost.pools:
            yield (job.status.cost.currency, each.capacity_type, each.pool), each.total


def _budget(job: JobNow) -> Iterator[Sample]:
    if job.spec.budget is not None:
        yield (job.spec.capacity.currency,), job.spec.budget.max_cost


def _cost_on_demand_only(job: JobNow) -> Iterator[Sample]:
    cost = job.status.cost
    if cost is not None and cost.on_demand_only > 0:  # otherwise there is nothing to compare with
        yield (cost.currency,), cost.on_demand_only


def _infos(job: JobNow) -> Iterator[Sample]:
    for each in job.status.running.members if job.status.running is not None else ():
        yield (str(each.node_rank), each.pod, each.node, each.capacity_type.value), 1.0


_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
FAMILIES = (
    _of_job(_GAUGE, "spottrain_job_step", "Completed optimizer steps.", lambda j: j.status.progress.step),
    _of_job(_GAUGE, "spottrain_job_target_steps", "Steps of the whole run.", lambda j: j.status.progress.total_steps),
    _of_job(_GAUGE, "spottrain_job_loss", "Newest training loss.", lambda j: j.status.progress.loss),
    _of_job(
        _GAUGE,
        "spottrain_job_tokens_per_second",
        "Tokens a second of all ranks, while a generation makes steps.",
        lambda j: j.status.progress.tokens_per_second if j.makes_steps else None,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_samples_per_second",
        "Samples a second of all ranks, while a generation makes steps.",
        lambda j: j.status.progress.samples_per_second if j.makes_steps else None,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_epoch",
        "Epochs of the data that are used, with the share of the one under way, if the data have epochs.",
        lambda j: j.status.progress.epoch,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_data_wait_ratio",
        "Share of a step in which training waits for data, 0 to 1, while a generation makes steps.",
        lambda j: j.status.progress.data_wait_ratio if j.makes_steps else None,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_remaining_seconds",
        "Seconds until the last step, at the current time per step and without interruptions.",
        lambda j: j.status.progress.eta_seconds,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_generation",
        "Number of the newest generation.",
        lambda j: j.status.generation.number if j.status.generation else None,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_world_size",
        "Ranks that train together; 0 between generations.",
        lambda j: j.status.running.world_size if j.status.running else 0,
    ),
    _of_job(
        _GAUGE, "spottrain_job_min_nodes", "Nodes with which the job starts: nodes.min.", lambda j: j.spec.nodes.min
    ),
    _of_job(
        _GAUGE, "spottrain_job_max_nodes", "Nodes to which the job grows: nodes.max.", lambda j: j.spec.nodes.max
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_waiting_pods",
        "Pods that wait, warm, for the next generation.",
        lambda j: j.status.members.waiting,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_unwatched_members",
        "Members on spot nodes whose notices nobody hears: the node's watcher is missing or blind.",
        lambda j: sum(each.unheard for each in spot_watches(j.status.running, j.reports, j.timing)),
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_committed_step",
        "Step of the newest commit.",
        lambda j: j.status.commit.step if j.status.commit else None,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_checkpoint_interval_seconds",
        "Planned seconds from one commit to the next.",
        lambda j: j.status.progress.checkpoint_interval_seconds,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_goodput_ratio",
        "Share of the time since the first generation that went into lasting steps, 0 to 1. Steps that a rollback "
        "undid count as lasting. The time of a script without the library is left out.",
        lambda j: j.status.goodput,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_failure_budget",
        "Failures that are retried: runPolicy.failureBudget.",
        lambda j: j.spec.run_policy.failure_budget if j.knows_budget else None,
    ),
    # Times are Unix times, as Prometheus asks for: an alert subtracts them from time().
    _of_job(
        _GAUGE,
        "spottrain_job_deadline_timestamp_seconds",
        "Time at which runPolicy.activeDeadlineSeconds fails the job.",
        lambda j: _moment(j.deadline),
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_first_step_timestamp_seconds",
        "Time of the running generation's first step.",
        lambda j: _moment(j.status.running.first_step_at) if j.status.running else None,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_last_step_timestamp_seconds",
        "Time of the newest step.",
        lambda j: _moment(j.status.progress.last_step_at),
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_commit_timestamp_seconds",
        "Time of the newest commit.",
        lambda j: _moment(j.status.commit.committed_at) if j.status.commit else None,
    ),
    _of_job(
        _COUNTER,
        "spottrain_job_steps_redone",
        "Steps that were redone after a loss.",
        lambda j: j.status.steps_redone,
    ),
    # No counters: a commit holds them, and after a loss they are those of an older one.
    _of_job(
        _GAUGE,
        "spottrain_job_skipped_steps",
        "Steps up to the newest one that left no trace in the model: stability skipped or undid them.",
        lambda j: j.status.progress.skipped_steps,
    ),
    _of_job(
        _GAUGE,
        "spottrain_job_rollbacks",
        "Rollbacks by stability up to the newest step.",
        lambda j: j.status.progress.rollbacks,
    ),
    _of_job(
        _COUNTER,
        "spottrain_job_failures",
        "Failures that count against runPolicy.failureBudget.",
        lambda j: j.status.failures,
    ),
    Family(
        kind=_COUNTER,
        name="spottrain_job_time_seconds",
        documentation="Seconds since the first generation by what they went into: productive, redone, data_wait, "
        "commit_stall, start_up, restart, capacity, suspended or unreported. They add up to the job's time.",
        labels=("cause",),
        samples=_times,
    ),
    Family(
        kind=_GAUGE,
        name=PHASE_FAMILY,
        documentation="1 for the phase that the job is in.",
        labels=("phase",),
        samples=_phases,
    ),
    Family(
        kind=_GAUGE,
        name="spottrain_job_condition",
        documentation="1 for a condition that is True, otherwise 0.",
        labels=("condition",),
        samples=_conditions,
    ),
    Family(
        kind=_GAUGE,
        name="spottrain_job_members",
        documentation="Members of the generation.",
        labels=("capacity_type",),
        samples=_members,
    ),
    Family(
        kind=_COUNTER,
        name="spottrain_job_preemptions",
        documentation="Preemptions of members, with and without notice.",
        labels=("notice",),
        samples=_preemptions,
    ),
    Family(
        kind=_COUNTER,
        name="spottrain_job_cost",
        documentation="Money spent.",
        labels=("currency",),
        samples=_cost,
    ),
    Family(
        kind=_COUNTER,
        name="spottrain_job_pool_cost",
        documentation="Money spent on nodes of a capacity type and pool. Nodes without a pool have an empty one.",
        labels=("currency", "capacity_type", "pool"),
        samples=_pool_cost,
    ),
    Family(
        kind=_GAUGE,
        name="spottrain_job_budget",
        documentation="Money that the job may cost: budget.maxCost.",
        labels=("currency",),
        samples=_budget,
    ),
    Family(
        kind=_COUNTER,
        name="spottrain_job_cost_on_demand_only",
        documentation="What as many on-demand nodes would have cost so far, if their price is known.",
        labels=("currency",),
        samples=_cost_on_demand_only,
    ),
    Family(
        kind=_GAUGE,
        name="spottrain_job_member_info",
        documentation="1 for each member of the running generation: to join its pod and its node to its node rank.",
        labels=("node_rank", "pod_name", "node_name", "capacity_type"),
        samples=_infos,
    ),
    _of_member(
        _GAUGE,
        "spottrain_job_member_step_duration_seconds",
        "Mean seconds of a step on the member's first rank.",
        lambda _, p: p.step_seconds,
    ),
    _of_member(
        _COUNTER,
        "spottrain_job_member_data_wait_seconds",
        "Seconds that the member's first rank has waited for data since the generation's first step.",
        lambda _, p: p.waited_seconds,
    ),
    _of_member(
        _COUNTER,
        "spottrain_job_member_commit_stall_seconds",
        "Seconds that saves have kept the member's first rank from training since the generation's first step.",
        lambda _, p: p.stalled_seconds,
    ),
    _of_member(
        _GAUGE,
        "spottrain_job_member_memory_bytes",
        "Peak memory of the member's first rank in this generation: on its accelerator or, without one, on the CPU.",
        lambda _, p: p.memory_bytes,
    ),
    _of_member(
        _GAUGE,
        "spottrain_job_member_undecodable_samples",
        "Samples of shards that the member's node has left out because they could not be decoded.",
        lambda _, p: p.undecodable_samples,
    ),
    _of_member(
        _COUNTER,
        "spottrain_job_member_fetched_bytes",
        "Bytes of shards that the member's node has fetched into its cache.",
        lambda _, p: p.fetched_bytes,
    ),
    _of_member(
        _COUNTER,
        "spottrain_job_member_late_bytes",
        "Of these, bytes of shards for which a rank or a worker has waited, as nothing had fetched them ahead.",
        lambda _, p: p.late_bytes,
    ),
    _of_member(
        _GAUGE,
        "spottrain_job_member_upload_duration_seconds",
        "Seconds that the member's first rank took to write its newest shard.",
        lambda _, p: p.checkpoint.upload_seconds if p.checkpoint else None,
    ),
)
