"""A job whose metrics are read: its statuses, its reports, and a drain."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from memory_signals import MemorySource
from scene import pod
from spottrain_api.contract.assignments import AgentReport, CapacityType, Member
from spottrain_api.contract.notices import Notice
from spottrain_api.contract.reports import CheckpointTimings, CommitRef, Progress
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.spending import CostStatus, PoolCost, TimeStatus
from spottrain_api.v1alpha1.status import (
    Condition,
    Counts,
    GenerationState,
    GenerationStatus,
    Phase,
    ProgressStatus,
    TrainingJobStatus,
    Transition,
)
from spottrain_operator.core.model import JobView, Observed, ReportView
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.metrics import Metrics
from spottrain_watcher.metrics import Metrics as WatcherMetrics

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = JobKey(namespace="research", name="gpt")

COMMIT = CommitRef(generation=2, step=10, manifest="m", committed_at=NOW)
GENERATION = GenerationStatus(
    number=2,
    state=GenerationState.ACTIVE,
    rendezvous_id="gpt-2",
    rendezvous_endpoint="10.0.0.1:29400",
    world_size=4,
    members=(
        Member(
            pod="gpt-7",
            pod_uid="p",
            address="10.0.0.1",
            node="spot-0",
            node_rank=0,
            capacity_type=CapacityType.SPOT,
        ),
    ),
    started_at=NOW,
    first_step_at=NOW,
)
STATUS = TrainingJobStatus(
    phase=Phase.RUNNING,
    generation=GENERATION,
    progress=ProgressStatus(
        step=10,
        total_steps=100,
        loss=1.5,
        tokens_per_second=900.0,
        samples_per_second=9.0,
        epoch=0.75,
        data_wait_ratio=0.2,
        eta_seconds=90.0,
        checkpoint_interval_seconds=30.0,
        last_step_at=NOW,
    ),
    conditions=(
        Condition(type="Ready", status="True", reason="Running", message="", last_transition_time=NOW),
        Condition(type="Blocked", status="False", reason="Free", message="", last_transition_time=NOW),
    ),
    start_time=NOW,
    time=TimeStatus(until=NOW, productive_seconds=8.0, restart_seconds=2.0),
    commit=COMMIT,
    members=Counts(on_demand=1, spot=3),
    preemptions=3,
    preemptions_without_notice=1,
    goodput=0.9,
    cost=CostStatus(
        total=1.0, on_demand_only=2.0, currency="EUR", pools=(PoolCost(capacity_type="spot", pool="a", total=1.0),)
    ),
)


def view(status: TrainingJobStatus) -> JobView:
    spec: dict[str, Any] = {
        "image": "i",
        "entrypoint": {"script": "train.py"},
        "checkpoint": {"uri": "s3://b/c"},
        "batch": {"global": 8},
    }
    spec["runPolicy"] = {"activeDeadlineSeconds": 3600}
    spec["budget"] = {"maxCost": 10.0}
    spec["capacity"] = {"currency": "EUR"}
    return JobView(
        namespace=KEY.namespace,
        name=KEY.name,
        uid="u",
        spec=TrainingJobSpec.model_validate(spec | {"nodes": {"min": 1, "max": 4}}),
        metadata_generation=1,
        created_at=NOW,
        status=status,
    )


def heard(**changes: Any) -> Notice:
    fields: dict[str, Any] = {"id": "n", "node": "spot-0", "source": "ec2", "deadline": NOW, "observed_at": NOW}
    return Notice(**(fields | changes))


def report(*notices: Notice) -> ReportView:
    """Of an agent that has heard notices and seen a commit."""
    timings = CheckpointTimings(staging_seconds=0.1, upload_seconds=1.0, commit_seconds=0.1, forecast_seconds=1.8)
    agent = AgentReport(
        pod="gpt-0",
        pod_uid="p",
        rendezvous_port=1,
        progress=Progress(
            generation=2,
            updated_at=NOW,
            commit=COMMIT,
            checkpoint=timings,
            step_seconds=1.0,
            waited_seconds=3.0,
            stalled_seconds=1.0,
            memory_bytes=2**30,
            undecodable_samples=4,
            fetched_bytes=5000,
            late_bytes=1000,
        ),
        notices=notices,
        sent_at=NOW,
    )
    return ReportView(report=agent, received_at=NOW)


def seen(status: TrainingJobStatus, reports: Mapping[str, ReportView], **more: Any) -> Observed:
    """What a pass saw of the job with this status."""
    member = pod(7, uid="p", node="spot-0", created_at=NOW - timedelta(minutes=1))
    return Observed(job=view(status), pods=(member,), reports=reports, template_hash="t", listening_since=NOW, **more)


def ending(reason: str = "Preempted", *, seconds: float = 0.2) -> TrainingJobStatus:
    changes = {"reason": reason, "requested_at": NOW + timedelta(seconds=seconds)}
    return STATUS.model_copy(update={"generation": GENERATION.model_copy(update=changes)})


def metrics_after_a_drain() -> Metrics:
    """After a drain for a preemption and the next generation's first step."""
    metrics = Metrics(num_agents=lambda: 4, last_contact={"p": NOW}.get)
    gap = Transition(generation=1, reason="Preempted", at=NOW, seconds_without_step=1.5)
    after = ending().model_copy(update={"transitions": (gap,)})
    metrics.passed(KEY, seen(STATUS, {"p": report(heard())}), after)
    metrics.reconcile_seconds.observe(0.01)
    metrics.reconcile_errors.labels("conflict").inc()
    return metrics


def watcher_metrics() -> WatcherMetrics:
    return WatcherMetrics([MemorySource("ec2"), MemorySource("kubernetes")])


def families(metrics: Metrics | WatcherMetrics) -> list[Metric]:
    return list(text_string_to_metric_families(metrics.exposition()[0].decode()))
