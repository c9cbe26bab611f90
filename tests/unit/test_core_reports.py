"""The job's settings for ranks, and the ranks' reports in the status."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from scene import (
    NOW,
    START,
    at,
    commit,
    pod,
    starting_job,
    training,
    training_job,
    waiting_job,
)
from spottrain_api.contract.assignments import AgentPhase, AssignmentAction
from spottrain_api.contract.configuration import Interruptions, TrainerConfig
from spottrain_api.contract.replicas import HeldShards, ReplicatedStep
from spottrain_api.contract.reports import (
    Failure,
    FailureReason,
    MemoryEstimate,
    Progress,
    StrategyChoice,
    TrainerPhase,
)
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import LossSpikeConfig, StabilityConfig
from spottrain_api.v1alpha1.checkpoint import Checkpoint
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.spending import TimeStatus
from spottrain_api.v1alpha1.status import GenerationState, Transition
from spottrain_operator.core.assignments import assignment_for
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import MAX_TRANSITIONS
from spottrain_operator.core.timing import DEFAULT_TIMING


def test_ranks_get_the_interruptions_before_their_generation() -> None:
    def ended(generation: int, reason: str, with_notice: bool) -> Transition:
        return Transition(generation=generation, reason=reason, with_notice=with_notice, at=at(50))

    transitions = (ended(1, "Preempted", True), ended(2, "Grow", False), ended(3, "NodeLost", False))
    scene = training_job().status(transitions=transitions, start_time=START)
    scene = scene.generation(number=4, started_at=at(60))
    told = assignment_for(scene.observed.job, "u1")
    assert told.generation is not None
    interruptions = TrainerConfig.model_validate(told.generation.trainer).interruptions
    assert interruptions == Interruptions(num=2, num_noticed=1, observed_seconds=60.0)
    # What happens to the generation itself changes nothing in what it was told: an assignment is told once.
    own_end = scene.status(transitions=(*transitions, ended(4, "Preempted", True)))
    assert assignment_for(own_end.observed.job, "u1").revision == told.revision


def test_interruptions_are_counted_since_the_oldest_that_is_remembered() -> None:
    transitions = tuple(Transition(generation=n, reason="Preempted", at=at(n)) for n in range(1, MAX_TRANSITIONS + 1))
    scene = training_job().status(transitions=transitions, start_time=START)
    told = assignment_for(scene.generation(number=MAX_TRANSITIONS + 1, started_at=at(60)).observed.job, "u1")
    assert told.generation is not None
    interruptions = TrainerConfig.model_validate(told.generation.trainer).interruptions
    assert interruptions == Interruptions(num=MAX_TRANSITIONS, num_noticed=0, observed_seconds=59.0)


@pytest.mark.parametrize(("first", "observed"), [(1, 30.0), (MAX_TRANSITIONS, 29.5)], ids=["all", "the-newest"])
def test_interruptions_are_counted_in_the_time_with_members(first: int, observed: float) -> None:
    """That is half of it here. When the other half was, is not known."""
    numbers = range(1, first + 1)
    transitions = tuple(Transition(generation=n, reason="NodeLost", at=at(n)) for n in numbers)
    time = TimeStatus(until=at(60), suspended_seconds=20.0, capacity_seconds=10.0)
    scene = training_job().status(transitions=transitions, start_time=START, time=time)
    told = assignment_for(scene.generation(number=first + 1, started_at=at(60)).observed.job, "u1")
    assert told.generation is not None
    interruptions = TrainerConfig.model_validate(told.generation.trainer).interruptions
    assert interruptions == Interruptions(num=first, observed_seconds=observed)


def test_a_member_that_waits_for_the_next_generation_is_assigned_the_same_all_the_time() -> None:
    scene = training_job().status(start_time=START).generation(state=GenerationState.ENDED, started_at=at(60))
    time = TimeStatus(until=NOW, productive_seconds=90.0)
    told = assignment_for(scene.status(time=time).observed.job, "u1")
    waited = time.model_copy(update={"until": at(200), "capacity_seconds": 100.0})
    assert assignment_for(scene.status(time=waited).observed.job, "u1") == told


def test_a_member_is_asked_to_stop_once() -> None:
    ended = Transition(generation=1, at=at(50), reason="Preempted")
    scene = training_job().status(start_time=START, transitions=(ended,)).generation(number=2, started_at=at(60))
    stops = scene.generation(state=GenerationState.STOPPING).observed.job
    told = assignment_for(stops, "u1")
    assert told.action is AssignmentAction.STOP
    assert assignment_for(scene.generation(state=GenerationState.ENDED).observed.job, "u1") == told


@pytest.mark.parametrize(("replicas", "covered"), [(1, 1), (0, 0)], ids=["with-replicas", "not-any-more"])
def test_ranks_get_what_replicas_covered(replicas: int, covered: int) -> None:
    def ended(generation: int, **said: Any) -> Transition:
        return Transition(generation=generation, at=at(50), **said)

    transitions = (
        ended(1, reason="NodeLost"),
        ended(2, reason="NodeLost", from_replicas=True),
        ended(3, reason="Preempted", with_notice=True, from_replicas=True),  # its drain wasn't done in time
        ended(4, reason="Failure", from_replicas=True),
    )
    scene = training_job(checkpoint={"uri": "s3://bucket/run", "peerReplicas": replicas})
    scene = scene.status(transitions=transitions, start_time=START).generation(number=5, started_at=at(60))
    told = assignment_for(scene.observed.job, "u1")
    assert told.generation is not None
    interruptions = TrainerConfig.model_validate(told.generation.trainer).interruptions
    assert interruptions == Interruptions(num=3, num_noticed=1, num_covered=covered, observed_seconds=60.0)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1, 2)], ids=["complete", "a-member-and-its-peer-at-once"])
def test_a_generation_that_starts_from_replicas_covers_the_loss_before_it(ranks: tuple[int, ...]) -> None:
    held = HeldShards(generation=1, sequence=3, step=48, world_size=4, ranks=ranks)
    scene = training_job(checkpoint={"uri": "s3://bucket/run", "peerReplicas": 1}).without_pod(4).decided()
    scene = scene.all_say(phase=AgentPhase.STOPPED, replica_port=9000, held=(held,)).decided()
    status = scene.later(6).plan().status
    assert status.generation is not None
    assert (status.generation.number, status.generation.replicated_step is not None) == (2, len(ranks) == 4)
    [transition] = status.transitions
    assert (transition.reason, transition.from_replicas) == ("NodeLost", len(ranks) == 4)


@pytest.mark.parametrize("holder", [3, 2], ids=["a-member", "a-pod-that-goes"])
def test_replicas_are_read_from_members_of_the_generation_that_starts(holder: int) -> None:
    """The on-demand pod 2 stands in for a spot pod.

    That comes up as pod 4 while the generation fails.
    """
    scene = waiting_job(
        num_pods=3,
        nodes={"min": 2, "max": 3},
        capacity={"onDemand": {"min": 1}},
        checkpoint={"uri": "s3://bucket/run", "peerReplicas": 1},
    )
    scene = scene.later(400).all_say(phase=AgentPhase.IDLE, replica_port=9000).decided()
    failure = Failure(reason=FailureReason.SCRIPT_ERROR, message="it broke")
    scene = scene.all_say(generation=1, phase=AgentPhase.FAILED, failure=failure, replica_port=9000)
    for sequence, ranks in ((1, (0, 1)), (holder, (2,))):
        held = HeldShards(generation=1, sequence=3, step=48, world_size=3, ranks=ranks)
        scene = scene.says(sequence, held=(held,))
    scene = scene.with_pod(pod(4)).says(4, generation=0, phase=AgentPhase.IDLE, warm=True, replica_port=9000)
    started = scene.decided().later(DEFAULT_TIMING.culprit_grace).decided().plan().status.generation
    assert started is not None
    assert [member.pod for member in started.members] == ["job-1", "job-3", "job-4"]
    assert (started.replicated_step is not None) == (holder == 3)


@pytest.mark.parametrize(("start_step", "covered"), [(48, True), (40, False)], ids=["from-replicas", "fell-back"])
def test_a_loss_is_covered_if_training_resumed_from_replicas(start_step: int, covered: bool) -> None:
    lost = Transition(
        generation=1, reason="NodeLost", at=at(50), last_step=50, world_size_after=4, from_replicas=True
    )
    replicated = ReplicatedStep(generation=1, sequence=3, step=48, world_size=4, holders=())
    scene = (
        training_job()
        .status(transitions=(lost,))
        .generation(number=2, replicated_step=replicated, first_step_at=at(90))
    )
    resumed = training(start_step + 2).model_copy(update={"generation": 2, "start_step": start_step})
    status = scene.all_say(generation=2, progress=resumed).plan().status
    [transition] = status.transitions
    assert (transition.from_replicas, transition.steps_redone) == (covered, 50 - start_step)


@pytest.mark.parametrize("reporting", range(4))
def test_a_commits_time_is_corrected_by_the_clock_of_node_rank_0(reporting: int) -> None:
    """It is by that clock, whoever reports the commit first."""
    scene = training_job()
    assert scene.observed.job.status.generation is not None
    members = sorted(scene.observed.job.status.generation.members, key=lambda member: member.node_rank)
    offsets = {member.pod_uid: timedelta(minutes=10 - member.node_rank) for member in members}
    new = commit(1, 50)
    reports = {
        uid: replace(
            view,
            clock_offset=offsets[uid],
            report=view.report.model_copy(update={"commit": new if uid == members[reporting].pod_uid else None}),
        )
        for uid, view in scene.observed.reports.items()
    }
    status = replace(scene, observed=replace(scene.observed, reports=reports)).plan().status
    assert status.commit == new.model_copy(update={"committed_at": new.committed_at + timedelta(minutes=10)})


def test_the_time_of_a_commit_that_was_found_is_as_it_was_written() -> None:
    """By whose clock is not known."""
    scene = starting_job().all_say(commit=commit(7, 300))
    reports = {uid: replace(view, clock_offset=timedelta(hours=1)) for uid, view in scene.observed.reports.items()}
    status = replace(scene, observed=replace(scene.observed, reports=reports)).plan().status
    assert status.commit == commit(7, 300)


def test_cost_and_goodput_are_of_the_time_between_passes() -> None:
    scene = training_job()
    before = scene.observed.job.status.cost
    after = scene.later(3600).plan().status.cost
    assert before is not None
    assert after is not None
    assert after.total - before.total == pytest.approx(2 * 3.0 + 2 * 1.0)
    assert after.on_demand_only - before.on_demand_only == pytest.approx(4 * 3.0)
    assert (after.currency, after.display) == ("USD", "8.22 USD (saved 33%)")


def test_an_operator_whose_clock_is_behind_charges_no_time_twice() -> None:
    """The operator before it has charged the hour to come."""
    scene = training_job().later(3600).decided()
    behind = replace(scene, now=at(160)).all_say(progress=training(60)).decided()
    assert behind.observed.job.status.progress.step == 60
    assert replace(behind, now=scene.now).plan().status.cost == scene.observed.job.status.cost


def test_a_node_costs_from_when_its_pod_was_placed() -> None:
    """The record before was hours ago: nobody led meanwhile."""
    scene = training_job()
    before = scene.observed.job.status.cost
    scene = scene.pod(2, scheduled_at=NOW + timedelta(hours=7)).pod(4, scheduled_at=NOW + timedelta(hours=7.5))
    after = scene.later(8 * 3600).plan().status.cost
    assert before is not None
    assert after is not None
    assert after.total - before.total == pytest.approx((8 + 1) * 3.0 + (8 + 0.5) * 1.0)
    assert after.on_demand_only - before.on_demand_only == pytest.approx((8 + 1 + 8 + 0.5) * 3.0)


@pytest.mark.parametrize(
    ("lingers", "hourly"), [(False, 7.0), (True, 8.0)], ids=["alone", "beside another container"]
)
def test_a_node_costs_as_long_as_a_container_of_its_pod_runs(lingers: bool, hourly: float) -> None:
    scene = training_job().pod(4, phase="Failed", exit_code=1, lingers=lingers).decided()
    before = scene.observed.job.status.cost
    after = scene.later(3600).plan().status.cost
    assert before is not None
    assert after is not None
    assert after.total - before.total == pytest.approx(hourly)


def test_a_pod_placed_by_a_clock_that_is_ahead_costs_nothing_yet() -> None:
    scene = training_job()
    for sequence in range(1, 5):
        scene = scene.pod(sequence, scheduled_at=NOW + timedelta(hours=2))
    cost = scene.later(3600).plan().status.cost
    assert cost == scene.observed.job.status.cost


def test_a_job_without_a_step_has_saved_nothing() -> None:
    cost = replace(starting_job(), now=NOW).later(3600).plan().status.cost
    assert cost is not None
    assert cost.on_demand_only > cost.total
    assert re.fullmatch(r"\d+\.\d\d USD", cost.display)


def test_cost_is_in_the_currency_of_the_prices() -> None:
    prices = {"currency": "EUR", "onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}}
    cost = training_job(capacity=prices).later(3600).plan().status.cost
    assert cost is not None
    assert (cost.currency, cost.display) == ("EUR", "8.22 EUR (saved 33%)")
    on_demand = {"currency": "EUR", "onDemand": {"min": 4, "pricePerHour": 1.0}, "spot": {"pricePerHour": 1.0}}
    cost = training_job(capacity=on_demand).later(3600).plan().status.cost
    assert cost is not None
    assert re.fullmatch(r"\d+\.\d\d EUR", cost.display)


def test_after_an_edit_of_the_currency_the_cost_starts_anew() -> None:
    prices = {"onDemand": {"min": 2, "pricePerHour": 450.0}, "spot": {"pricePerHour": 150.0}}
    edited = {"nodes": {"min": 2, "max": 4}, "capacity": prices | {"currency": "JPY"}}
    cost = training_job().later(36000).decided().spec(**edited).later(3600).plan().status.cost
    assert cost is not None
    assert (cost.total, cost.on_demand_only) == (1200.0, 1800.0)
    assert cost.display == "1200.00 JPY (saved 33%)"


@pytest.mark.parametrize(("pool", "hourly"), [("cheap", 0.5), ("plain", 1.0)], ids=["its-own", "of-its-type"])
def test_a_pool_with_a_price_of_its_own_costs_that(pool: str, hourly: float) -> None:
    plain = {"name": "plain", "capacityType": "spot", "provider": "eks"}
    pools = [plain, plain | {"name": "cheap", "pricePerHour": 0.5}]
    capacity = {"onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}, "pools": pools}
    scene = training_job(capacity=capacity).pod(3, pool=pool).pod(4, pool=pool)
    before, after = scene.observed.job.status.cost, scene.later(3600).plan().status.cost
    assert before is not None
    assert after is not None
    assert after.total - before.total == pytest.approx(2 * 3.0 + 2 * hourly)


@pytest.mark.parametrize("order", [1, -1], ids=["spot first", "on-demand first"])
def test_a_pool_of_each_type_may_have_the_same_name(order: int) -> None:
    spot = {"name": "h100", "capacityType": "spot", "provider": "karpenter", "pricePerHour": 1.0}
    pools = [spot, spot | {"capacityType": "on-demand", "pricePerHour": 3.0}][::order]
    scene = training_job(capacity={"onDemand": {"min": 2}, "pools": pools})
    for sequence in range(1, 5):
        scene = scene.pod(sequence, pool="h100")
    before, after = scene.observed.job.status.cost, scene.later(3600).plan().status.cost
    assert before is not None
    assert after is not None
    assert after.total - before.total == pytest.approx(2 * 3.0 + 2 * 1.0)
    assert after.on_demand_only - before.on_demand_only == pytest.approx(4 * 3.0)


@pytest.mark.parametrize(
    ("capacity", "display"),
    [
        ({"spot": {"pricePerHour": 0.9}}, "0.00 USD"),
        ({"spot": {"pricePerHour": 0}}, "0.00 USD"),
        ({"pools": [{"name": "a", "capacityType": "spot", "provider": "karpenter", "pricePerHour": 0}]}, "0.00 USD"),
        ({}, None),
    ],
    ids=["spot", "free", "a-free-pool", "none"],
)
def test_a_job_with_a_price_has_a_cost_before_it_has_a_node(capacity: dict[str, Any], display: str | None) -> None:
    scene = waiting_job(capacity=capacity)
    for sequence in range(1, 5):
        scene = scene.pod(sequence, node=None, ready=False, phase="Pending", scheduled_at=None)
    cost = scene.plan().status.cost
    assert (None if cost is None else cost.display) == display


def test_an_operator_that_knows_more_optional_fields_leaves_jobs_alone() -> None:
    class NewerCheckpoint(Checkpoint):
        compression: str = "none"

    class NewerSpec(TrainingJobSpec):
        checkpoint: NewerCheckpoint

    scene = training_job()
    newer = NewerSpec.model_validate(scene.observed.job.spec.to_dict())
    upgraded = replace(scene.observed, job=replace(scene.observed.job, spec=newer))
    assert Situation(upgraded, NOW).run_hash == Situation(scene.observed, NOW).run_hash


def test_what_auto_came_to_is_in_the_status_and_reported_once() -> None:
    memory = MemoryEstimate(total=3, available=4, parameters=1, gradients=1, optimizer=1, activations=0, working=0)
    choice = StrategyChoice(strategy="fsdp", name="fsdp", reason="It fits.", memory=memory)
    scene = training_job().all_say(progress=training(60).model_copy(update={"strategy": choice}))
    first = scene.status(accounted_at=None).plan()
    assert first.status.strategy == choice
    assert [event.message for event in first.events if event.reason == "StrategyChosen"] == ["It fits."]
    again = scene.job(status=first.status).status(accounted_at=None).plan()
    assert again.status.strategy == choice
    assert not [event for event in again.events if event.reason == "StrategyChosen"]


def test_ranks_get_the_smallest_world_that_they_may_become() -> None:
    job = training_job(processesPerNode=2).observed.job
    assert job.status.generation is not None
    told = assignment_for(job, job.status.generation.members[0].pod_uid).generation
    assert told is not None
    assert TrainerConfig.model_validate(told.trainer).min_world_size == job.spec.nodes.min * 2


def test_steps_that_were_left_out_are_reported_once() -> None:
    message = "The loss of step 52 is nan. The step was skipped."
    told = training(60).model_copy(update={"skipped_steps": 1, "message": message})
    first = training_job().status(accounted_at=None).all_say(progress=told).plan()
    assert first.status.progress.skipped_steps == 1
    assert [(event.type, event.reason, event.message) for event in first.events] == [
        ("Warning", "StepSkipped", message)
    ]
    scene = training_job().status(accounted_at=None, progress=first.status.progress)
    assert scene.all_say(progress=told).plan().events == ()
    rolled_back = told.model_copy(update={"skipped_steps": 9, "rollbacks": 1})
    assert [event.reason for event in scene.all_say(progress=rolled_back).plan().events] == ["RolledBack"]


def test_the_wait_for_data_is_that_of_the_rank_that_waits_longest() -> None:
    scene = training_job().status(accounted_at=None)
    for sequence, seconds in ((1, 0.1), (2, 0.4)):
        scene = scene.says(sequence, progress=training(60).model_copy(update={"data_wait_seconds": seconds}))
    assert scene.plan().status.progress.data_wait_ratio == 0.4
    longer_than_a_step = training(60).model_copy(update={"data_wait_seconds": 9.0})
    assert scene.says(3, progress=longer_than_a_step).plan().status.progress.data_wait_ratio == 1.0
    unknown = training_job().status(accounted_at=None).all_say(progress=training(60))
    assert unknown.plan().status.progress.data_wait_ratio is None


def test_a_generation_that_waits_long_for_data_says_so_once() -> None:
    def waits(seconds: float, after: float) -> Progress:
        first = training(60).model_copy(update={"step_seconds": 1.0, "waited_seconds": seconds})
        return first.model_copy(update={"last_step_at": at(10 + after)})

    scene = training_job().status(accounted_at=None)
    assert scene.all_say(progress=waits(20, after=59)).plan().events == ()  # workers start in the first minute
    assert scene.all_say(progress=waits(9, after=100)).plan().events == ()
    said = scene.all_say(progress=waits(24, after=100)).plan()
    [event] = said.events
    assert (event.type, event.reason) == ("Warning", "WaitsForData")
    assert event.message.startswith(
        "The slowest rank of generation 1 waits for data for 24% of a step. Raise num_workers"
    )
    again = training_job().status(accounted_at=None, progress=said.status.progress)
    assert again.all_say(progress=waits(30, after=120)).plan().events == ()


def test_only_a_large_loss_loses_digits() -> None:
    said = training().model_copy(update={"loss": 1234567.0, "tokens_per_second": 1234567.26})
    progress = training_job().all_say(progress=said).later(60).plan().status.progress
    assert (progress.loss, progress.tokens_per_second) == (1235000.0, 1234567.3)


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(12.345678, 12.3457), (0.0123456, 0.01235), (-0.0123456, -0.01235), (3.2164e-5, 3.216e-5), (0.0, 0.0)],
)
def test_a_small_loss_keeps_four_digits(loss: float, shown: float) -> None:
    said = training().model_copy(update={"loss": loss})
    assert training_job().all_say(progress=said).later(60).plan().status.progress.loss == shown


def test_what_went_other_than_planned_is_reported_once() -> None:
    message = "Step 60 was not committed before the end of this generation: a checkpoint takes about 5.1 s."
    told = training(60).model_copy(update={"message": message})
    first = training_job().status(accounted_at=None).all_say(progress=told).plan()
    assert [(event.type, event.reason, event.message) for event in first.events] == [
        ("Warning", "NotAsPlanned", message)
    ]
    ready = first.status.condition("Ready")
    assert ready is not None
    assert ready.message == f"Training in generation 1 with 4 nodes. {message}"
    scene = training_job().status(accounted_at=None, progress=first.status.progress)
    assert scene.all_say(progress=told).plan().events == ()


def test_ranks_get_what_to_do_about_bad_steps() -> None:
    spike = {"factor": 3, "window": 20}
    job = training_job(stability={"nonFinite": "skip", "lossSpike": spike}).observed.job
    assert job.status.generation is not None
    told = assignment_for(job, job.status.generation.members[0].pod_uid).generation
    assert told is not None
    assert TrainerConfig.model_validate(told.trainer).stability == StabilityConfig(
        non_finite=StabilityAction.SKIP,
        loss_spike=LossSpikeConfig(factor=3, window=20, action=StabilityAction.ROLLBACK),
    )


def test_a_drain_during_the_start_takes_no_step_back() -> None:
    """As where a generation waits for its store.

    Its ranks say step 0, as they have loaded none.
    """
    scene = training_job().generation(number=2, state=GenerationState.DRAINING, reason="Edited", first_step_at=None)
    said = Progress(generation=2, phase=TrainerPhase.DONE, updated_at=NOW)
    status = scene.all_say(generation=2, phase=AgentPhase.DRAINED, progress=said).plan().status
    assert (status.transitions[-1].generation, status.transitions[-1].last_step) == (2, 50)
    assert status.progress.display == "50/1000"
    assert status.failures == status.generations_without_progress == 0


def test_a_job_that_does_not_train_has_no_ranks() -> None:
    scene = training_job()
    assert scene.plan().status.members.world_size == 4
    assert scene.all_say(phase=AgentPhase.SUCCEEDED).plan().status.members.world_size == 0
