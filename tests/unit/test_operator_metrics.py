"""Prometheus can rely on the metrics' names, labels and types."""

from __future__ import annotations

import inspect
import re
import subprocess
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from measured_job import (
    GENERATION,
    KEY,
    NOW,
    STATUS,
    ending,
    families,
    heard,
    metrics_after_a_drain,
    report,
    seen,
    watcher_metrics,
)
from prometheus_binaries import find_prometheus
from spottrain_api.contract.assignments import CapacityType, Member
from spottrain_api.contract.notices import NodeWatch, NoticeKind, WatchState
from spottrain_api.v1alpha1.spending import CostStatus
from spottrain_api.v1alpha1.status import GenerationState, Phase, TrainingJobStatus, Transition
from spottrain_operator import process
from spottrain_operator.core.model import NodeView, ReportView
from spottrain_operator.job_families import JOB
from spottrain_operator.job_histograms import JobHistogram
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.metrics import Metrics, drain_latency
from spottrain_watcher.metrics import Metrics as WatcherMetrics

UNITS = ("_seconds", "_bytes", "_ratio", "_total")
# Names that Prometheus and its operator give to targets; a sample with one of them is renamed.
TARGET_LABELS = {"job", "instance", "namespace", "pod", "container", "service", "endpoint"}

AN_HOUR_AGO = NOW - timedelta(hours=1)
HINT = heard(id="hint", kind=NoticeKind.REBALANCE, observed_at=AN_HOUR_AGO)


@pytest.fixture
def metrics() -> Metrics:
    return metrics_after_a_drain()


@pytest.fixture
def watcher() -> WatcherMetrics:
    return watcher_metrics()


def test_a_drain_is_timed_from_the_notice_that_made_it() -> None:
    taken_back = heard(id="false alarm", cancelled=True, observed_at=AN_HOUR_AGO)
    reports = {"p": report(HINT, taken_back, heard()), "no member": report(heard(observed_at=AN_HOUR_AGO))}
    assert drain_latency(seen(STATUS, reports), ending()) == 0.2


def test_a_drain_is_timed_also_if_the_node_shows_the_notice_before_the_agent_says_it() -> None:
    nodes = {"spot-0": NodeView(name="spot-0", notice=heard())}
    assert drain_latency(seen(STATUS, {"p": report()}, nodes=nodes), ending()) == 0.2


def test_a_drain_is_not_timed_from_a_notice_about_an_earlier_node_of_that_name() -> None:
    nodes = {"spot-0": NodeView(name="spot-0", notice=heard(id="old", deadline=AN_HOUR_AGO, observed_at=AN_HOUR_AGO))}
    assert drain_latency(seen(STATUS, {"p": report(heard())}, nodes=nodes), ending()) == 0.2


@pytest.mark.parametrize("reason", ["Grow", "Edited", "Suspended", "NodeLost", "Failure"])
def test_the_end_of_a_generation_for_another_reason_is_not_timed(reason: str) -> None:
    assert drain_latency(seen(STATUS, {"p": report(HINT, heard())}), ending(reason)) is None


def test_a_stop_after_a_drain_is_not_timed_again() -> None:
    assert drain_latency(seen(ending(), {"p": report(heard())}), ending(seconds=25)) is None


def test_every_metric_has_a_sample_a_help_and_a_conventional_name(metrics: Metrics, watcher: WatcherMetrics) -> None:
    found = [*families(metrics), *families(watcher)]
    assert all(family.samples for family in found), [family.name for family in found if not family.samples]
    for family in found:
        assert family.documentation.endswith("."), family.name
        assert re.fullmatch(r"(spottrain|process)(_[a-z]+)+", family.name)
        assert not (family.type == "gauge" and family.name.endswith("_total")), family.name
        assert family.type != "histogram" or family.name.endswith("_seconds"), family.name
        # What is measured in a unit names the base unit at its end.
        assert all(unit not in family.name or family.name.endswith(unit) for unit in UNITS), family.name


def test_prometheus_own_check_of_metrics_finds_nothing(metrics: Metrics, watcher: WatcherMetrics) -> None:
    prometheus = find_prometheus()
    assert prometheus is not None, "Prometheus is not here: run `make prometheus`."
    for exposing in (metrics, watcher):
        text, _ = exposing.exposition()
        done = subprocess.run([prometheus.promtool, "check", "metrics"], input=text, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_forecast_of_a_checkpoint_is_compared_with_what_it_took(metrics: Metrics) -> None:
    (family,) = [family for family in families(metrics) if family.name == "spottrain_job_checkpoint_forecast_ratio"]
    assert family.samples[0].value == pytest.approx(1.5)


def test_members_that_nobody_watches_are_counted(metrics: Metrics) -> None:
    def counted(after: TrainingJobStatus) -> float:
        views = {
            uid: ReportView(
                report=report().report.model_copy(update={"pod_uid": uid, "watch": watch}), received_at=NOW
            )
            for uid, watch in watches.items()
        }
        metrics.passed(KEY, seen(STATUS, views), after)
        (family,) = [each for each in families(metrics) if each.name == "spottrain_job_unwatched_members"]
        return float(family.samples[0].value)

    watches = {
        "watched": NodeWatch(state=WatchState.WATCHED, seconds=3600.0),
        "missing": NodeWatch(state=WatchState.MISSING, seconds=3600.0),
        "blind": NodeWatch(state=WatchState.BLIND, seconds=3600.0),
        "starting": NodeWatch(state=WatchState.STARTING, seconds=100.0),
        "restarts": NodeWatch(state=WatchState.MISSING, seconds=1.0),
        "on-demand": None,
        "old": None,
    }
    members = tuple(
        Member(
            pod=uid,
            pod_uid=uid,
            address="10.0.0.1",
            node=f"node-{uid}",
            node_rank=rank,
            capacity_type=CapacityType.ON_DEMAND if uid == "on-demand" else CapacityType.SPOT,
        )
        for rank, uid in enumerate(watches)
    )
    running = GENERATION.model_copy(update={"members": members})
    assert counted(STATUS.model_copy(update={"generation": running})) == 2.0
    ended = running.model_copy(update={"state": GenerationState.ENDED})
    assert counted(STATUS.model_copy(update={"generation": ended})) == 0.0


def test_money_has_its_currency(metrics: Metrics) -> None:
    costs = [family for family in families(metrics) if "cost" in family.name]
    assert {sample.name: sample.labels["currency"] for family in costs for sample in family.samples} == {
        "spottrain_job_cost_total": "EUR",
        "spottrain_job_cost_on_demand_only_total": "EUR",
        "spottrain_job_pool_cost_total": "EUR",
    }
    assert samples(metrics, "spottrain_job_budget", "currency") == {"EUR": 10.0}
    assert samples(metrics, "spottrain_job_pool_cost_total", "pool") == {"a": 1.0}


def test_a_job_without_an_on_demand_price_is_compared_with_nothing() -> None:
    metrics = Metrics(num_agents=lambda: 1)
    cost = CostStatus(total=1.0, currency="EUR")
    metrics.passed(KEY, seen(STATUS, {}), STATUS.model_copy(update={"cost": cost}))
    assert samples(metrics, "spottrain_job_cost_total", "currency") == {"EUR": 1.0}
    assert samples(metrics, "spottrain_job_cost_on_demand_only_total", "currency") == {}


def samples(metrics: Metrics, name: str, label: str) -> dict[str, float]:
    """The values of a job's metric, by one of its labels."""
    return {s.labels[label]: s.value for f in families(metrics) for s in f.samples if s.name == name}


def test_the_parts_of_the_time_are_one_counter_by_cause(metrics: Metrics) -> None:
    parts = samples(metrics, "spottrain_job_time_seconds_total", "cause")
    assert len(parts) == 9
    assert {cause: seconds for cause, seconds in parts.items() if seconds} == {"productive": 8.0, "restart": 2.0}


@pytest.mark.parametrize("changes", [{"state": GenerationState.ENDED}, {"first_step_at": None}], ids=["ended", "new"])
def test_a_job_has_a_pace_only_while_a_generation_makes_steps(changes: dict[str, object]) -> None:
    """The status still has that of the generation before."""
    metrics = Metrics(num_agents=lambda: 0)
    pace = {
        "spottrain_job_tokens_per_second": 900.0,
        "spottrain_job_samples_per_second": 9.0,
        "spottrain_job_data_wait_ratio": 0.2,
    }
    idle = STATUS.model_copy(update={"generation": GENERATION.model_copy(update=changes)})
    for after, expected in ((STATUS, pace), (idle, {})):
        metrics.passed(KEY, seen(STATUS, {}), after)
        assert {s.name: s.value for f in families(metrics) for s in f.samples if s.name in pace} == expected


def test_what_a_resume_from_an_older_commit_lowers_is_no_counter() -> None:
    metrics = Metrics(num_agents=lambda: 0)
    for skipped, rollbacks in ((40, 2), (38, 1)):
        progress = STATUS.progress.model_copy(update={"skipped_steps": skipped, "rollbacks": rollbacks})
        metrics.passed(KEY, seen(STATUS, {}), STATUS.model_copy(update={"progress": progress}))
        found = {f.name: (f.type, f.samples[0].value) for f in families(metrics) if f.samples}
        assert found["spottrain_job_skipped_steps"] == ("gauge", skipped)
        assert found["spottrain_job_rollbacks"] == ("gauge", rollbacks)


def test_a_condition_is_1_while_it_is_true(metrics: Metrics) -> None:
    assert samples(metrics, "spottrain_job_condition", "condition") == {"Ready": 1.0, "Blocked": 0.0}


def test_a_member_has_values_of_its_own_while_its_generation_runs(metrics: Metrics) -> None:
    def of_members() -> dict[str, float]:
        return {s.name: s.value for f in families(metrics) for s in f.samples if s.labels.get("node_rank") == "0"}

    found = of_members()
    assert found["spottrain_job_member_memory_bytes"] == 2**30
    assert found["spottrain_job_member_undecodable_samples"] == 4
    assert found["spottrain_job_member_fetched_bytes_total"] == 5000
    assert found["spottrain_job_member_late_bytes_total"] == 1000
    assert found["spottrain_job_member_data_wait_seconds_total"] == 3.0
    assert samples(metrics, "spottrain_job_member_info", "pod_name") == {"gpt-7": 1.0}
    ended = GENERATION.model_copy(update={"state": GenerationState.ENDED})
    metrics.passed(KEY, seen(STATUS, {"p": report()}), STATUS.model_copy(update={"generation": ended}))
    assert of_members() == {}


def test_when_a_member_was_heard_is_asked_at_the_scrape() -> None:
    heard_at = {"p": NOW}
    metrics = Metrics(num_agents=lambda: 1, last_contact=heard_at.get)
    metrics.passed(KEY, seen(STATUS, {"p": report()}), STATUS)
    for seconds in (0, 44):
        heard_at["p"] = NOW + timedelta(seconds=seconds)
        found = samples(metrics, "spottrain_job_member_report_timestamp_seconds", "node_rank")
        assert found == {"0": NOW.timestamp() + seconds}


def test_the_deadline_is_a_time(metrics: Metrics) -> None:
    found = samples(metrics, "spottrain_job_deadline_timestamp_seconds", "job_name")
    assert found == {KEY.name: (NOW + timedelta(hours=1)).timestamp()}


def test_no_label_is_one_that_prometheus_gives_to_the_target(metrics: Metrics, watcher: WatcherMetrics) -> None:
    for family in [*families(metrics), *families(watcher)]:
        for sample in family.samples:
            assert not TARGET_LABELS & sample.labels.keys(), sample.name


def test_a_job_has_few_series_and_takes_them_along(metrics: Metrics) -> None:
    def of_job() -> list[str]:
        return [s.name for f in families(metrics) for s in f.samples if s.labels.get("job_name") == KEY.name]

    assert len(of_job()) < 150
    assert not any(name.endswith("_created") for name in of_job())
    metrics.forget(KEY)
    assert of_job() == []


def test_a_failure_budget_that_is_not_understood_is_not_shown() -> None:
    """An alert would say that the next failure beyond the default ends the job."""
    metrics = Metrics(num_agents=lambda: 0)
    observed = seen(STATUS, {})
    metrics.passed(KEY, observed, STATUS)
    assert samples(metrics, "spottrain_job_failure_budget", "job_name") == {KEY.name: 3.0}
    newer = replace(observed.job, not_understood=("spec.runPolicy.failureBudget",))
    metrics.passed(KEY, replace(observed, job=newer), STATUS)
    assert samples(metrics, "spottrain_job_failure_budget", "job_name") == {}


def test_a_job_without_an_incident_has_its_histograms_at_zero() -> None:
    """Prometheus' rate() leaves out the first value of a series."""
    metrics = Metrics(num_agents=lambda: 0)
    metrics.passed(KEY, seen(STATUS, {}), STATUS)
    assert samples(metrics, "spottrain_job_gap_seconds_count", "job_name") == {KEY.name: 0.0}


@pytest.mark.parametrize(("waited", "bound"), [(timedelta(minutes=10), 900), (timedelta(hours=2), 14400)])
def test_a_gap_of_a_job_that_waited_for_nodes_is_distinguished_from_a_longer_one(
    waited: timedelta, bound: float
) -> None:
    metrics = Metrics(num_agents=lambda: 0)
    gap = Transition(generation=1, reason="Preempted", at=NOW, seconds_without_step=waited.total_seconds())
    metrics.passed(KEY, seen(STATUS, {}), STATUS.model_copy(update={"transitions": (gap,)}))
    assert smallest_bucket(metrics, "spottrain_job_gap_seconds_bucket") == bound


def test_a_drain_that_came_late_is_distinguished_from_a_later_one() -> None:
    metrics = Metrics(num_agents=lambda: 0)
    metrics.passed(KEY, seen(STATUS, {"p": report(heard())}), ending(seconds=90))
    assert smallest_bucket(metrics, "spottrain_job_notice_to_drain_seconds_bucket") == 120


def smallest_bucket(metrics: Metrics, name: str) -> float:
    """The upper bound of the first bucket that has a value."""
    return min(float(bound) for bound, number in samples(metrics, name, "le").items() if number)


def test_each_kind_of_error_is_counted_from_0() -> None:
    metrics = Metrics(num_agents=lambda: 0)
    kinds = set(re.findall(r'reconcile_errors\.labels\("(\w+)"\)', inspect.getsource(process)))
    assert samples(metrics, "spottrain_reconcile_errors_total", "kind") == dict.fromkeys(kinds, 0.0)


def test_the_histogram_of_a_job_is_the_one_that_prometheus_client_would_show() -> None:
    bounds, values = (0.5, 1.0, 2.5), [0.2, 0.5, 0.7, 1.0, 2.6, 40.0, 0.0]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = JobHistogram("gap_seconds", "Seconds.", bounds, ours)
    standard = Histogram("gap_seconds", "Seconds.", JOB, buckets=bounds, registry=theirs)
    other = JobKey(namespace="team", name="other")
    for key in (KEY, other):
        histogram.show(key)
        standard.labels(key.namespace, key.name)
    for value in values:
        histogram.observe(KEY, value)
        standard.labels(KEY.namespace, KEY.name).observe(value)
    histogram.show(KEY)
    assert generate_latest(ours) == generate_latest(theirs)
    histogram.forget(other)
    standard.remove(other.namespace, other.name)
    assert generate_latest(ours) == generate_latest(theirs)


def test_a_commit_is_counted_once_though_passes_follow_the_end_of_the_job() -> None:
    """Agents stay for some seconds."""
    metrics = Metrics(num_agents=lambda: 0, now=lambda: NOW)
    over = STATUS.model_copy(update={"phase": Phase.SUCCEEDED, "completion_time": NOW})
    for before in (STATUS, over, over):
        metrics.passed(KEY, seen(before, {"p": report()}), over)
    assert samples(metrics, "spottrain_job_checkpoint_commit_seconds_count", "job_name") == {KEY.name: 1.0}


def test_of_a_job_that_is_long_over_only_the_phase_is_left() -> None:
    """Also of one that a new operator finds so."""
    now = NOW
    metrics = Metrics(num_agents=lambda: 0, now=lambda: now)
    over = STATUS.model_copy(update={"phase": Phase.FAILED, "completion_time": NOW})
    metrics.passed(KEY, seen(STATUS, {"p": report()}), over)

    def series() -> list[tuple[str, str]]:
        samples = [sample for family in families(metrics) for sample in family.samples]
        return [(each.name, each.labels.get("phase", "")) for each in samples if "job_name" in each.labels]

    assert len(series()) > 50
    now = NOW + timedelta(hours=1, seconds=1)
    assert series() == [("spottrain_job_phase", "Failed")], "without another pass"
    metrics.passed(KEY, seen(over, {}), over)
    assert series() == [("spottrain_job_phase", "Failed")]
    metrics.forget(KEY)
    assert series() == []


def test_a_job_that_is_deleted_during_a_scrape_stays_forgotten() -> None:
    """A scrape runs in a thread."""

    def now() -> datetime:
        scraped.forget(KEY)
        return NOW

    scraped = Metrics(num_agents=lambda: 0, now=now)
    ended = STATUS.model_copy(update={"phase": Phase.FAILED, "completion_time": NOW})
    scraped.passed(KEY, seen(STATUS, {}), ended)
    assert families(scraped)
    assert [sample for family in families(scraped) for sample in family.samples if "job_name" in sample.labels] == []
