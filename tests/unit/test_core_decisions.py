"""Truth tables of `plan`: one observation that differs from a training job in one thing, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from simulation import spec_of
from spottrain_api.contract import (
    AgentPhase,
    AgentReport,
    AssignmentAction,
    CapacityType,
    CommitRef,
    Failure,
    FailureReason,
    Interruptions,
    LossSpikeConfig,
    MemoryCheckpoint,
    MemoryEstimate,
    MemoryStep,
    Notice,
    NoticeKind,
    Progress,
    StabilityAction,
    StabilityConfig,
    StrategyChoice,
    TrainerPhase,
)
from spottrain_api.v1alpha1 import Checkpoint, GenerationState, Phase, TrainingJobSpec, TrainingJobStatus, Transition
from spottrain_operator.core.assignments import assignment_for
from spottrain_operator.core.model import (
    CreatePod,
    DeleteJob,
    DeletePod,
    JobView,
    NodeView,
    Observed,
    Plan,
    PodView,
    Refusal,
    ReportView,
    Rival,
)
from spottrain_operator.core.plan import plan
from spottrain_operator.core.situation import Situation

START = datetime(2026, 1, 1, tzinfo=UTC)
NOW = START + timedelta(seconds=100)
ACTIVE, DRAINING, STOPPING, ENDED = GenerationState


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def pod(sequence: int, **changes: Any) -> PodView:
    """A pod that is up; the first two are on-demand."""
    fields: dict[str, Any] = {
        "name": f"job-{sequence}",
        "uid": f"u{sequence}",
        "sequence": sequence,
        "capacity_type": CapacityType.ON_DEMAND if sequence <= 2 else CapacityType.SPOT,
        "template_hash": "t1",
        "created_at": START,
        "phase": "Running",
        "ready": True,
        "ready_since": at(2),
        "node": f"n{sequence}",
        "scheduled_at": START,
        "ip": f"10.0.0.{sequence}",
        "container_started": True,
    }
    return PodView(**(fields | changes))


def report(sequence: int, generation: int, phase: AgentPhase, **changes: Any) -> AgentReport:
    fields: dict[str, Any] = {
        "pod": f"job-{sequence}",
        "pod_uid": f"u{sequence}",
        "generation": generation,
        "phase": phase,
        "warm": True,
        "rendezvous_port": 29000 + sequence,
        "sent_at": NOW,
    }
    return AgentReport(**(fields | changes))


def commit(generation: int, step: int) -> CommitRef:
    return CommitRef(generation=generation, step=step, manifest=f"m{generation}-{step}", committed_at=NOW)


def training(step: int = 50) -> Progress:
    return Progress(
        generation=1,
        phase=TrainerPhase.TRAINING,
        step=step,
        total_steps=1000,
        step_seconds=1.0,
        first_step_at=at(10),
        last_step_at=at(99),
        updated_at=NOW,
    )


def notice(sequence: int, lead: float = 30.0, **changes: Any) -> Notice:
    fields: dict[str, Any] = {
        "id": f"notice-{sequence}",
        "node": f"n{sequence}",
        "source": "ec2",
        "deadline": NOW + timedelta(seconds=lead),
        "observed_at": NOW,
    }
    return Notice(**(fields | changes))


@dataclass(frozen=True)
class Scene:
    """One observation; its methods change one thing each."""

    observed: Observed
    now: datetime = NOW

    def plan(self) -> Plan:
        return plan(self.observed, self.now)

    def decided(self) -> Scene:
        """After the plan's status was written; nothing else has happened."""
        return self.job(status=self.plan().status)

    def job(self, **changes: Any) -> Scene:
        return replace(self, observed=replace(self.observed, job=replace(self.observed.job, **changes)))

    def spec(self, **changes: Any) -> Scene:
        return self.job(spec=spec_of(**changes))

    def status(self, **changes: Any) -> Scene:
        return self.job(status=self.observed.job.status.model_copy(update=changes))

    def generation(self, **changes: Any) -> Scene:
        generation = self.observed.job.status.generation
        assert generation is not None
        return self.status(generation=generation.model_copy(update=changes))

    def pod(self, sequence: int, **changes: Any) -> Scene:
        pods = tuple(replace(p, **changes) if p.sequence == sequence else p for p in self.observed.pods)
        return replace(self, observed=replace(self.observed, pods=pods))

    def with_pod(self, new: PodView) -> Scene:
        nodes = dict(self.observed.nodes)
        if new.node is not None:
            nodes[new.node] = NodeView(name=new.node)
        return replace(self, observed=replace(self.observed, pods=(*self.observed.pods, new), nodes=nodes))

    def without_pod(self, sequence: int) -> Scene:
        pods = tuple(p for p in self.observed.pods if p.sequence != sequence)
        return replace(self, observed=replace(self.observed, pods=pods))

    def node(self, sequence: int, **changes: Any) -> Scene:
        node = replace(self.observed.nodes[f"n{sequence}"], **changes)
        return replace(self, observed=replace(self.observed, nodes={**self.observed.nodes, node.name: node}))

    def says(self, sequence: int, *, age: float = 0.0, **changes: Any) -> Scene:
        """The newest report of a pod's agent, changed in some fields, as old as `age`."""
        uid = f"u{sequence}"
        known = self.observed.reports.get(uid)
        base = known.report if known is not None else report(sequence, 0, AgentPhase.IDLE)
        view = ReportView(report=base.model_copy(update=changes), received_at=self.now - timedelta(seconds=age))
        return replace(self, observed=replace(self.observed, reports={**self.observed.reports, uid: view}))

    def all_say(self, **changes: Any) -> Scene:
        scene = self
        for each in self.observed.pods:
            scene = scene.says(each.sequence, **changes)
        return scene

    def forgets(self, sequence: int) -> Scene:
        reports = {uid: view for uid, view in self.observed.reports.items() if uid != f"u{sequence}"}
        return replace(self, observed=replace(self.observed, reports=reports))

    def later(self, seconds: float) -> Scene:
        """Time passes; all agents go on reporting the same."""
        now = self.now + timedelta(seconds=seconds)
        reports = {uid: replace(view, received_at=now) for uid, view in self.observed.reports.items()}
        return replace(self, observed=replace(self.observed, reports=reports), now=now)


def waiting_job(num_pods: int = 4, **spec: Any) -> Scene:
    """A new job whose pods are up and warm; nothing was started yet."""
    pods = tuple(pod(sequence) for sequence in range(1, num_pods + 1))
    job = JobView(
        namespace="default",
        name="job",
        uid="0123456789ab",
        spec=spec_of(**({"nodes": {"min": 2, "max": 4}} | spec)),
        metadata_generation=1,
        created_at=START,
        status=TrainingJobStatus(last_sequence=num_pods),
    )
    observed = Observed(
        job=job,
        pods=pods,
        nodes={f"n{p.sequence}": NodeView(name=f"n{p.sequence}") for p in pods},
        template_hash="t1",
        operator_started_at=START,
    )
    return Scene(observed).all_say(phase=AgentPhase.IDLE)


def starting_job(**spec: Any) -> Scene:
    """Generation 1 was started 100 s ago and is about to make its first step."""
    scene = replace(waiting_job(**spec), now=at(3)).all_say(phase=AgentPhase.IDLE).decided()
    return replace(scene, now=at(4)).all_say(generation=1, phase=AgentPhase.STARTING, step_age_seconds=1.0)


def training_job(**spec: Any) -> Scene:
    """Generation 1 with four members has made 50 steps and committed 40."""
    scene = replace(starting_job(**spec), now=NOW)
    running = {"generation": 1, "phase": AgentPhase.RUNNING, "step_age_seconds": 1.0, "progress": training()}
    return scene.all_say(**running, commit=commit(1, 40)).decided()


def test_a_new_job_gets_its_floor_and_its_surplus() -> None:
    scene = replace(waiting_job(0), now=START)
    decided = scene.plan()
    created = [action for action in decided.actions if isinstance(action, CreatePod)]
    assert [c.name for c in created] == ["job-1", "job-2", "job-3", "job-4"]
    assert [c.capacity_type.value for c in created] == ["on-demand", "on-demand", "spot", "spot"]
    assert decided.status.last_sequence == 4


DEMANDS = [
    pytest.param({}, ["on-demand"] * 2 + ["spot"] * 2, id="floor-and-surplus"),
    pytest.param({"capacity": {"spot": {"max": 0}}}, ["on-demand"] * 4, id="no-spot-is-all-on-demand"),
    pytest.param({"capacity": {}}, ["spot"] * 4, id="no-floor-is-all-spot"),
    pytest.param({"capacity": {"spot": {"max": 1}}}, ["on-demand", "spot"], id="on-demand-fills-up-to-min"),
    pytest.param({"runPolicy": {"suspend": True}}, [], id="suspended"),
]


@pytest.mark.parametrize(("spec", "types"), DEMANDS)
def test_demand(spec: dict[str, Any], types: list[str]) -> None:
    decided = replace(waiting_job(0, **spec), now=START).plan()
    assert [a.capacity_type.value for a in decided.actions if isinstance(a, CreatePod)] == types


Change = Callable[[Scene], Scene]
STARTS: list[Any] = [
    pytest.param(lambda s: s, 4, id="all-ready"),
    pytest.param(lambda s: s.says(4, warm=False), None, id="waits-for-one-that-gets-warm"),
    pytest.param(lambda s: replace(s, now=at(60)).all_say().says(4, warm=False), 3, id="patience-is-over"),
    pytest.param(lambda s: s.pod(3, ready=False).pod(4, ready=False).pod(2, ready=False), None, id="below-min"),
    pytest.param(lambda s: s.says(4, age=10), 3, id="silent-one-is-left-out"),
    pytest.param(lambda s: s.node(4, notice=notice(4)), 3, id="doomed-by-annotation-is-left-out"),
    pytest.param(lambda s: s.says(4, notices=(notice(4),)), 3, id="doomed-by-its-agent-is-left-out"),
    pytest.param(lambda s: s.node(4, taints=("karpenter.sh/disrupted",)), 3, id="doomed-by-taint-is-left-out"),
    pytest.param(lambda s: s.pod(4, deleting=True), 3, id="deleting-is-left-out"),
    pytest.param(lambda s: s.pod(4, disruption="EvictionByEvictionAPI"), 3, id="evicted-is-left-out"),
    pytest.param(lambda s: s.pod(4, template_hash="old"), 3, id="outdated-is-left-out"),
    pytest.param(lambda s: s.node(4, notice=notice(4, kind=NoticeKind.REBALANCE)), 4, id="rebalance-only-warns"),
    pytest.param(lambda s: s.node(4, notice=notice(4, cancelled=True)), 4, id="cancelled-notice"),
    pytest.param(lambda s: s.node(4, notice=notice(4, lead=-200)), 4, id="notice-for-an-earlier-node"),
    pytest.param(lambda s: s.says(4, notices=(notice(4, lead=-200),)), 3, id="its-agent-holds-an-old-notice-true"),
]


@pytest.mark.parametrize(("change", "num_members"), STARTS)
def test_first_generation(change: Change, num_members: int | None) -> None:
    generation = change(replace(waiting_job(), now=at(5)).all_say()).plan().status.generation
    if num_members is None:
        assert generation is None
        return
    assert generation is not None
    assert len(generation.members) == num_members
    assert generation.rendezvous_endpoint == "10.0.0.1:29001"
    assert generation.rendezvous_id == "job-01234567-g1"


ENDS: list[Any] = [
    pytest.param(lambda s: s, ACTIVE, None, id="steady"),
    pytest.param(lambda s: s.node(4, notice=notice(4)), DRAINING, "Preempted", id="notice-on-the-node"),
    pytest.param(lambda s: s.says(4, notices=(notice(4),)), DRAINING, "Preempted", id="notice-from-the-agent"),
    pytest.param(lambda s: s.pod(4, deleting=True), DRAINING, "Preempted", id="pod-deleted"),
    pytest.param(lambda s: s.pod(1, disruption="Preemption"), DRAINING, "Preempted", id="rank-0-evicted"),
    pytest.param(
        lambda s: s.says(4, phase=AgentPhase.DRAINED), DRAINING, "Preempted", id="an-agent-drained-by-itself"
    ),
    pytest.param(lambda s: s.without_pod(4), STOPPING, "NodeLost", id="pod-gone"),
    pytest.param(lambda s: s.node(4, ready=False).says(4, age=5), STOPPING, "NodeLost", id="node-not-ready"),
    pytest.param(lambda s: s.node(4, ready=False), ACTIVE, None, id="node-not-ready-but-heard"),
    pytest.param(lambda s: s.says(4, age=60), ACTIVE, None, id="silent-while-others-step"),
    pytest.param(
        lambda s: s.all_say(step_age_seconds=40.0).says(4, age=40), STOPPING, "NodeLost", id="silent-and-nobody-steps"
    ),
    pytest.param(
        lambda s: s.all_say().says(1, age=40).says(2, age=40).says(3, age=40).says(4, age=40),
        ACTIVE,
        None,
        id="nobody-is-heard",
    ),
    pytest.param(lambda s: s.says(3, phase=AgentPhase.FAILED), STOPPING, "Failure", id="failed"),
    pytest.param(
        lambda s: s.says(3, phase=AgentPhase.FAILED).says(4, age=5), STOPPING, "NodeLost", id="failed-peer-lost"
    ),
    pytest.param(
        lambda s: s.says(3, phase=AgentPhase.FAILED).node(4, notice=notice(4)),
        STOPPING,
        "Preempted",
        id="failed-doomed",
    ),
    pytest.param(
        lambda s: s.says(4, generation=0, phase=AgentPhase.IDLE, progress=None),
        STOPPING,
        "Failure",
        id="agent-restarted",
    ),
    pytest.param(lambda s: s.all_say(step_age_seconds=700.0), STOPPING, "Hang", id="hang"),
    pytest.param(
        lambda s: s.all_say(step_age_seconds=700.0).says(2, step_age_seconds=1.0), ACTIVE, None, id="one-steps"
    ),
    pytest.param(
        lambda s: s.job(spec=spec_of(nodes={"min": 2, "max": 4}, runPolicy={"suspend": True})),
        DRAINING,
        "Suspended",
        id="suspend",
    ),
    pytest.param(lambda s: s.job(spec=spec_of(nodes={"min": 2, "max": 3})), DRAINING, "ScaleDown", id="fewer-nodes"),
    pytest.param(
        lambda s: s.job(spec=spec_of(nodes={"min": 2, "max": 4}, entrypoint={"script": "b.py"})),
        DRAINING,
        "Edited",
        id="entrypoint-edited",
    ),
    pytest.param(
        lambda s: s.job(spec=spec_of(nodes={"min": 2, "max": 4}, runPolicy={"activeDeadlineSeconds": 10})),
        DRAINING,
        "DeadlineExceeded",
        id="deadline",
    ),
]


@pytest.mark.parametrize(("change", "state", "reason"), ENDS)
def test_what_ends_a_training_generation(change: Change, state: GenerationState, reason: str | None) -> None:
    scene = change(training_job())
    decided = scene.plan()
    assert decided.status.generation is not None
    assert (decided.status.generation.state, decided.status.generation.reason) == (state, reason)
    assert not [a for a in decided.actions if isinstance(a, DeletePod)]
    again = scene.decided().plan()
    assert again.status.generation == decided.status.generation


def test_a_notice_before_the_ranks_are_up_stops_at_once() -> None:
    decided = starting_job().node(4, notice=notice(4, lead=-60)).plan()
    assert decided.status.generation is not None
    assert decided.status.generation.state is STOPPING


def test_a_notice_to_a_script_that_tells_nothing_drains_it() -> None:
    scene = starting_job().all_say(generation=1, phase=AgentPhase.RUNNING, step_age_seconds=1.0)
    decided = scene.node(4, notice=notice(4, lead=60)).plan()
    assert decided.status.generation is not None
    assert decided.status.generation.state is DRAINING


def test_a_second_notice_brings_the_deadline_nearer() -> None:
    scene = training_job().node(4, notice=notice(4, lead=60)).decided().node(3, notice=notice(3, lead=15))
    generation = scene.plan().status.generation
    assert generation is not None
    assert generation.deadline == NOW + timedelta(seconds=15)


def test_a_drain_that_takes_too_long_is_stopped() -> None:
    scene = training_job().node(4, notice=notice(4, lead=10)).decided().later(16)
    generation = scene.plan().status.generation
    assert generation is not None
    assert (generation.state, generation.reason) == (STOPPING, "Preempted")


def test_a_drained_generation_is_followed_at_once_by_the_next() -> None:
    scene = training_job().node(4, notice=notice(4)).decided()
    decided = scene.all_say(phase=AgentPhase.DRAINED, commit=commit(1, 51), progress=training(51)).plan()
    generation = decided.status.generation
    assert generation is not None
    assert (generation.number, generation.state, len(generation.members)) == (2, ACTIVE, 3)
    assert generation.resume == commit(1, 51)
    assert [t.reason for t in decided.status.transitions] == ["Preempted"]
    assert decided.status.transitions[0].with_notice
    assert decided.status.preemptions == 1
    assert [a.name for a in decided.actions if isinstance(a, DeletePod)] == ["job-4"]


def test_an_older_commit_is_not_believed() -> None:
    scene = training_job().status(commit=commit(2, 90))
    assert scene.plan().status.commit == commit(2, 90)


def failed(scene: Scene, reason: FailureReason, message: str = "it broke") -> Scene:
    failure = Failure(reason=reason, message=message)
    return scene.all_say(phase=AgentPhase.FAILED, failure=failure)


def test_a_failure_waits_for_a_culprit_before_it_counts() -> None:
    scene = failed(training_job(), FailureReason.LOST_PEER).decided()
    assert scene.plan().status.failures == 0
    assert scene.later(3).plan().status.failures == 0
    later = scene.later(6).plan().status
    assert later.failures == 1
    assert later.transitions[0].message == "it broke"


def test_a_failure_without_peers_counts_at_once() -> None:
    alone = replace(waiting_job(1, nodes={"min": 1, "max": 1}), now=at(3)).all_say(phase=AgentPhase.IDLE).decided()
    failed = alone.later(5).all_say(generation=1, phase=AgentPhase.FAILED)
    assert failed.plan().status.failures == 1


def test_a_lost_node_explains_the_failures_of_its_peers() -> None:
    scene = (
        failed(training_job(), FailureReason.SCRIPT_ERROR).decided().says(4, phase=AgentPhase.RUNNING, failure=None)
    )
    status = replace(scene, now=scene.now + timedelta(seconds=5)).plan().status
    assert (status.failures, status.preemptions, status.preemptions_without_notice) == (0, 1, 1)


def test_peers_that_fail_before_their_node_is_missed_are_told_as_one_lost_node() -> None:
    first = failed(training_job(), FailureReason.LOST_PEER).says(4, age=2, phase=AgentPhase.RUNNING, failure=None)
    scene = first.decided()
    gone = replace(scene.node(4, ready=False), now=scene.now + timedelta(seconds=1)).plan()
    told = [(event.reason, event.message) for event in (*first.plan().events, *gone.events)]
    warnings = [(reason, message) for reason, message in told if reason in ("Failure", "NodeLost")]
    assert warnings == [("NodeLost", "Generation 1 is stopped: node n4 with pod job-4 is gone or not ready")]
    assert (gone.status.failures, gone.status.preemptions_without_notice) == (0, 1)


def test_a_failure_is_told_once_when_it_is_known_to_be_one() -> None:
    scene = failed(training_job(), FailureReason.SCRIPT_ERROR, "ValueError: x")
    assert "Failure" not in [event.reason for event in scene.plan().events]
    told = scene.decided().later(6).plan().events
    failures = [event.message for event in told if event.reason == "Failure"]
    assert failures == ["Generation 1 has ended: ValueError: x"]


@pytest.mark.parametrize(
    "reason", [FailureReason.ENTRYPOINT_NOT_FOUND, FailureReason.CHECKPOINT_ACCESS_DENIED], ids=lambda r: r.value
)
def test_what_would_fail_again_is_not_tried_again(reason: FailureReason) -> None:
    decided = failed(training_job(), reason, "change this").plan()
    assert decided.status.phase is Phase.FAILED
    assert decided.status.message == "change this"
    assert len([a for a in decided.actions if isinstance(a, DeletePod)]) == 4


def test_saves_that_fail_are_a_condition_and_training_goes_on() -> None:
    message = "The bucket of s3://b/run is gone: make it again."
    failure = Failure(reason=FailureReason.CHECKPOINT_STORAGE_MISSING, message=message)
    # Only the member that was told of it says so, and it isn't the one that is furthest.
    failing = training_job().says(2, progress=training(49).model_copy(update={"checkpoint_failure": failure}))

    decided = failing.plan()
    condition = next(c for c in decided.status.conditions if c.type == "CheckpointsHealthy")
    assert (condition.status, condition.reason, condition.message) == ("False", failure.reason.value, message)
    assert decided.status.phase is Phase.RUNNING
    assert [(e.type, e.reason) for e in decided.events] == [("Warning", failure.reason.value)]

    # Rank 0 says later that it has given up the save; the reason stays.
    told = Failure(reason=FailureReason.CHECKPOINT_SAVE_FAILED, message="given up, as rank 2 failed")
    again = failing.decided().later(5).says(0, progress=training(50).model_copy(update={"checkpoint_failure": told}))
    assert again.plan().events == ()
    healed = again.says(2, progress=training(60)).plan().status
    assert next(c for c in healed.conditions if c.type == "CheckpointsHealthy").status == "True"


def test_a_job_that_goes_on_with_the_checkpoints_of_a_deleted_one_is_numbered_above_it() -> None:
    fenced = Failure(reason=FailureReason.LOST_PEER, message="generation 7 has taken over this job", fence=7)
    scene = starting_job(runPolicy={"failureBudget": 0}).all_say(phase=AgentPhase.FAILED, failure=fenced)
    status = scene.decided().later(6).plan().status
    assert status.failures == 0
    assert status.generation is not None
    assert status.generation.number == 8


def test_a_script_without_the_library_is_not_taken_for_one_that_hangs() -> None:
    silent = {"generation": 1, "phase": AgentPhase.RUNNING, "progress": None, "step_age_seconds": 2000.0}
    scene = replace(starting_job(), now=at(2000)).all_say(**silent)
    status = scene.plan().status
    assert status.phase is Phase.RUNNING
    assert status.message == "Training in generation 1 with 4 nodes; its script doesn't report steps"
    hung = scene.all_say(
        progress=training().model_copy(update={"phase": TrainerPhase.STARTING, "first_step_at": None})
    )
    generation = hung.plan().status.generation
    assert generation is not None
    assert generation.reason == "Hang"


@pytest.mark.parametrize("says", [True, False], ids=["is-going-to-open-a-session", "may-not-use-the-library"])
def test_a_script_that_opens_no_session_hangs_only_if_it_was_going_to(says: bool) -> None:
    progress = Progress(generation=1, updated_at=at(5)) if says else None
    scene = replace(starting_job(runPolicy={"startTimeoutSeconds": 10, "failureBudget": 0}), now=at(20))
    status = scene.all_say(phase=AgentPhase.RUNNING, progress=progress).plan().status
    assert status.generation is not None
    assert status.generation.reason == ("Hang" if says else None)
    assert status.phase is (Phase.RECOVERING if says else Phase.STARTING)
    if says:
        ended = replace(scene.status(**dict(status)), now=at(22)).all_say(phase=AgentPhase.STOPPED, progress=progress)
        failed_status = ended.later(10).plan().status
        assert failed_status.phase is Phase.FAILED
        assert "no rank made a first step within runPolicy.startTimeoutSeconds (10)" in failed_status.message


def test_the_failure_budget_is_spent() -> None:
    scene = failed(training_job().status(failures=3), FailureReason.SCRIPT_ERROR, "ValueError").decided().later(6)
    status = scene.plan().status
    assert status.phase is Phase.FAILED
    assert "ValueError" in status.message
    assert "failureBudget" in status.message


def test_three_generations_without_a_step_end_the_job() -> None:
    scene = failed(starting_job().status(generations_without_progress=2), FailureReason.SCRIPT_ERROR).decided()
    status = scene.later(6).plan().status
    assert status.phase is Phase.FAILED
    assert {c.type: c.reason for c in status.conditions}["Failed"] == "NoProgress"


def test_whether_a_script_without_the_library_made_progress_is_left_open() -> None:
    """It ran for a minute: only the failure budget ends it."""
    silent = failed(starting_job().status(generations_without_progress=2), FailureReason.SCRIPT_ERROR)
    scene = replace(silent.all_say(progress=None), now=at(90)).decided()
    status = scene.later(6).plan().status
    assert status.phase is not Phase.FAILED
    assert (status.failures, status.generations_without_progress) == (1, 2)


SUCCESSES: list[Any] = [
    pytest.param(lambda s: s, True, id="all"),
    pytest.param(lambda s: s.says(4, phase=AgentPhase.RUNNING), False, id="one-still-runs"),
    pytest.param(lambda s: s.forgets(4).without_pod(4), True, id="one-was-lost-at-the-end"),
    pytest.param(lambda s: s.forgets(1).without_pod(1), False, id="rank-0-was-lost-at-the-end"),
    pytest.param(lambda s: s.says(4, phase=AgentPhase.FAILED), False, id="one-failed"),
]


@pytest.mark.parametrize(("change", "succeeded"), SUCCESSES)
def test_success(change: Change, succeeded: bool) -> None:
    status = change(training_job().all_say(phase=AgentPhase.SUCCEEDED)).plan().status
    assert (status.phase is Phase.SUCCEEDED) is succeeded


def test_a_finished_job_tells_its_agents_to_leave_and_expires() -> None:
    scene = training_job(runPolicy={"ttlSecondsAfterFinished": 60}).all_say(phase=AgentPhase.SUCCEEDED).decided()
    assert assignment_for(scene.observed.job, "u1").action is AssignmentAction.EXIT
    gone = replace(scene, observed=replace(scene.observed, pods=()))
    assert gone.plan().requeue_after == pytest.approx(60)
    assert [type(a) for a in replace(gone, now=gone.now + timedelta(seconds=61)).plan().actions] == [DeleteJob]


GROWTH: list[Any] = [
    pytest.param(lambda s: s, "Grow", id="all-are-ready"),
    pytest.param(lambda s: s.generation(first_step_at=at(90)), None, id="too-soon-after-the-first-step"),
    pytest.param(lambda s: s.all_say(progress=training(980)).status(accounted_at=None), None, id="nearly-done"),
    pytest.param(lambda s: s.says(4, warm=False), None, id="not-warm"),
    pytest.param(lambda s: s.node(4, notice=notice(4)), None, id="doomed"),
]


@pytest.mark.parametrize(("change", "reason"), GROWTH)
def test_growth(change: Change, reason: str | None) -> None:
    scene = training_job()
    generation = scene.observed.job.status.generation
    assert generation is not None
    smaller = scene.generation(members=generation.members[:3])
    waiting = smaller.says(4, generation=0, phase=AgentPhase.IDLE, progress=None)
    decided = change(waiting).plan().status.generation
    assert decided is not None
    assert decided.reason == reason


def test_an_image_that_cannot_be_pulled_ends_a_new_job() -> None:
    scene = waiting_job()
    for sequence in range(1, 5):
        broken = {"ready": False, "container_started": False, "phase": "Pending"}
        scene = scene.pod(sequence, **broken, waiting_reason="ErrImagePull", waiting_message="no such image")
        scene = scene.forgets(sequence)
    status = scene.plan().status
    assert status.phase is Phase.FAILED
    assert "no such image" in status.message


MISSING = 'secret "keys" not found'
WAITS = {"ready": False, "container_started": False, "waiting_reason": "FailedMount"}


@pytest.mark.parametrize(
    ("said", "seconds", "fails"),
    [(MISSING, 10, False), (MISSING, 25, True), ("waiting for attachment", 25, False)],
)
def test_a_volume_that_is_not_there_ends_a_new_job_and_a_slow_one_does_not(
    said: str, seconds: float, fails: bool
) -> None:
    scene = replace(waiting_job(1), now=at(seconds)).pod(1, **WAITS, waiting_message=said)
    status = scene.plan().status
    assert (status.phase is Phase.FAILED) == fails
    assert said in status.message


@pytest.mark.parametrize(
    ("lasting", "seconds", "fails"), [(True, 5, False), (True, 15, True), (False, 600, False)], ids=str
)
def test_pods_that_the_cluster_does_not_admit(lasting: bool, seconds: float, fails: bool) -> None:
    refusal = Refusal(since=START, message='serviceaccount "trainer" not found', lasting=lasting)
    scene = replace(waiting_job(0), now=at(seconds))
    status = replace(scene, observed=replace(scene.observed, refusal=refusal)).plan().status
    assert (status.phase is Phase.FAILED) == fails
    assert refusal.message in status.message


def test_a_hang_says_which_limit_it_broke() -> None:
    scene = training_job(runPolicy={"failureBudget": 0}).all_say(step_age_seconds=700.0).decided()
    status = scene.all_say(phase=AgentPhase.STOPPED).later(10).plan().status
    assert status.phase is Phase.FAILED
    assert "no rank made a step within runPolicy.hangTimeoutSeconds (600)" in status.message


def test_containers_that_end_before_they_train_are_not_replaced_for_ever() -> None:
    scene = waiting_job()
    for sequence in range(1, 4):
        ended = {"phase": "Failed", "ready": False, "exit_code": 1, "exit_reason": "Error"}
        scene = scene.pod(sequence, **ended).forgets(sequence)
    scene = scene.without_pod(4)
    assert scene.plan().status.phase is Phase.FAILED


ASSIGNMENTS: list[Any] = [
    pytest.param(lambda s: s, "u1", AssignmentAction.RUN, id="member"),
    pytest.param(lambda s: s, "stranger", AssignmentAction.WAIT, id="not-a-member"),
    pytest.param(lambda s: s.generation(state=DRAINING), "u1", AssignmentAction.DRAIN, id="draining"),
    pytest.param(lambda s: s.generation(state=STOPPING), "u1", AssignmentAction.STOP, id="stopping"),
    pytest.param(lambda s: s.generation(state=ENDED), "u1", AssignmentAction.STOP, id="ended"),
    pytest.param(lambda s: s.status(phase=Phase.FAILED), "u1", AssignmentAction.EXIT, id="failed"),
]


@pytest.mark.parametrize(("change", "uid", "action"), ASSIGNMENTS)
def test_assignments(change: Change, uid: str, action: AssignmentAction) -> None:
    assert assignment_for(change(training_job()).observed.job, uid).action is action


def test_ranks_are_told_of_the_interruptions_before_their_generation() -> None:
    def ended(generation: int, reason: str, with_notice: bool) -> Transition:
        return Transition(generation=generation, reason=reason, with_notice=with_notice, at=at(50))

    transitions = (ended(1, "Preempted", True), ended(2, "Grow", False), ended(3, "NodeLost", False))
    scene = training_job().status(transitions=transitions, start_time=START)
    scene = scene.generation(number=4, started_at=at(60))
    told = assignment_for(scene.observed.job, "u1")
    assert told.generation is not None
    interruptions = told.generation.trainer.checkpoint.interruptions
    assert interruptions == Interruptions(num=2, num_noticed=1, observed_seconds=60.0)
    # What happens to the generation itself changes nothing in what it was told: an assignment is told once.
    own_end = scene.status(transitions=(*transitions, ended(4, "Preempted", True)))
    assert assignment_for(own_end.observed.job, "u1").revision == told.revision


@pytest.mark.parametrize(("replicas", "covered"), [(1, 1), (0, 0)], ids=["with-replicas", "not-any-more"])
def test_ranks_are_told_what_members_memory_covered(replicas: int, covered: int) -> None:
    def ended(generation: int, **said: Any) -> Transition:
        return Transition(generation=generation, at=at(50), **said)

    transitions = (
        ended(1, reason="NodeLost"),
        ended(2, reason="NodeLost", from_memory=True),
        ended(3, reason="Preempted", with_notice=True, from_memory=True),  # its drain wasn't done in time
        ended(4, reason="Failure", from_memory=True),
    )
    scene = training_job(checkpoint={"uri": "s3://bucket/run", "peerReplicas": replicas})
    scene = scene.status(transitions=transitions, start_time=START).generation(number=5, started_at=at(60))
    told = assignment_for(scene.observed.job, "u1")
    assert told.generation is not None
    interruptions = told.generation.trainer.checkpoint.interruptions
    assert interruptions == Interruptions(num=3, num_noticed=1, num_covered=covered, observed_seconds=60.0)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1, 2)], ids=["complete", "a-member-and-its-peer-at-once"])
def test_a_generation_that_begins_in_memory_covers_the_loss_before_it(ranks: tuple[int, ...]) -> None:
    held = MemoryStep(generation=1, sequence=3, step=48, world_size=4, ranks=ranks)
    scene = training_job(checkpoint={"uri": "s3://bucket/run", "peerReplicas": 1}).without_pod(4).decided()
    scene = scene.all_say(phase=AgentPhase.STOPPED, memory_port=9000, held=(held,)).decided()
    status = scene.later(6).plan().status
    assert status.generation is not None
    assert (status.generation.number, status.generation.memory is not None) == (2, len(ranks) == 4)
    [transition] = status.transitions
    assert (transition.reason, transition.from_memory) == ("NodeLost", len(ranks) == 4)


@pytest.mark.parametrize(("start_step", "covered"), [(48, True), (40, False)], ids=["from-memory", "fell-back"])
def test_a_loss_is_covered_where_training_went_on_from_memory(start_step: int, covered: bool) -> None:
    lost = Transition(generation=1, reason="NodeLost", at=at(50), last_step=50, world_size_after=4, from_memory=True)
    memory = MemoryCheckpoint(generation=1, sequence=3, step=48, world_size=4, holders=())
    scene = training_job().status(transitions=(lost,)).generation(number=2, memory=memory, first_step_at=at(90))
    resumed = training(start_step + 2).model_copy(update={"generation": 2, "start_step": start_step})
    status = scene.all_say(generation=2, progress=resumed).plan().status
    [transition] = status.transitions
    assert (transition.from_memory, transition.steps_redone) == (covered, 50 - start_step)


def test_cost_and_goodput_are_of_the_time_between_passes() -> None:
    scene = training_job()
    before = scene.observed.job.status.cost
    after = scene.later(3600).plan().status.cost
    assert before is not None
    assert after is not None
    assert after.total - before.total == pytest.approx(2 * 3.0 + 2 * 1.0)
    assert after.on_demand_only - before.on_demand_only == pytest.approx(4 * 3.0)


def test_an_operator_that_knows_more_optional_fields_leaves_jobs_alone() -> None:
    class NewerCheckpoint(Checkpoint):
        compression: str = "none"

    class NewerSpec(TrainingJobSpec):
        checkpoint: NewerCheckpoint

    scene = training_job()
    newer = NewerSpec.model_validate(scene.observed.job.spec.to_dict())
    upgraded = replace(scene.observed, job=replace(scene.observed.job, spec=newer))
    assert Situation(upgraded, NOW).run_hash == Situation(scene.observed, NOW).run_hash


def test_what_auto_came_to_is_in_the_status_and_told_once() -> None:
    memory = MemoryEstimate(total=3, available=4, parameters=1, gradients=1, optimizer=1, activations=0, working=0)
    choice = StrategyChoice(strategy="fsdp", name="fsdp", reason="It fits.", memory=memory)
    scene = training_job().all_say(progress=training(60).model_copy(update={"strategy": choice}))
    first = scene.status(accounted_at=None).plan()
    assert first.status.strategy == choice
    assert [event.message for event in first.events if event.reason == "StrategyChosen"] == ["It fits."]
    again = scene.job(status=first.status).status(accounted_at=None).plan()
    assert again.status.strategy == choice
    assert not [event for event in again.events if event.reason == "StrategyChosen"]


def test_ranks_are_told_the_smallest_world_that_they_may_become() -> None:
    job = training_job(processesPerNode=2).observed.job
    assert job.status.generation is not None
    told = assignment_for(job, job.status.generation.members[0].pod_uid).generation
    assert told is not None
    assert told.trainer.min_world_size == job.spec.nodes.min * 2


def test_steps_that_were_left_out_are_told_once() -> None:
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


def test_ranks_are_told_what_to_do_about_bad_steps() -> None:
    spike = {"factor": 3, "window": 20}
    job = training_job(stability={"nonFinite": "skip", "lossSpike": spike}).observed.job
    assert job.status.generation is not None
    told = assignment_for(job, job.status.generation.members[0].pod_uid).generation
    assert told is not None
    assert told.trainer.stability == StabilityConfig(
        non_finite=StabilityAction.SKIP,
        loss_spike=LossSpikeConfig(factor=3, window=20, action=StabilityAction.ROLLBACK),
    )


RIVAL = Rival(namespace="team", name="older")


def with_rival(scene: Scene) -> Scene:
    return replace(scene, observed=replace(scene.observed, rival=RIVAL))


def blocked(status: TrainingJobStatus) -> str | None:
    return next((c.status for c in status.conditions if c.type == "Blocked"), None)


RIVALRY = {
    "new": (replace(waiting_job(0), now=START), "True", Phase.PENDING),
    "its pods are up": (replace(waiting_job(), now=at(3)), "True", Phase.PENDING),
    "it runs": (training_job(), None, Phase.RUNNING),
    "between generations": (training_job().generation(state=GenerationState.ENDED), "True", Phase.RECOVERING),
    "suspended": (replace(waiting_job(0, runPolicy={"suspend": True}), now=START), None, Phase.SUSPENDED),
}


@pytest.mark.parametrize(("scene", "truth", "phase"), RIVALRY.values(), ids=RIVALRY)
def test_a_job_waits_for_the_one_that_comes_first_at_its_checkpoints(
    scene: Scene, truth: str | None, phase: Phase
) -> None:
    before = scene.observed.job.status.generation
    held = with_rival(scene)
    decided = held.plan()
    status = decided.status
    assert (blocked(status), status.phase) == (truth, phase)
    assert not [action for action in decided.actions if isinstance(action, CreatePod)]
    assert (status.generation and status.generation.number) == (before and before.number)
    if truth is None:
        assert decided.actions == scene.plan().actions
        return
    assert {action.uid for action in decided.actions if isinstance(action, DeletePod)} == set(held.observed.reports)
    assert [(event.type, event.reason) for event in decided.events][-1:] == [("Warning", "CheckpointURIInUse")]
    assert "team/older, which comes first: apply this job anew with another checkpoint.uri" in status.message
    again = held.decided().plan()
    assert (again.status, again.events) == (status, ())
    free = scene.job(status=status).later(6).plan()
    assert blocked(free.status) == "False"
    assert free.actions or free.status.generation != before
    assert "checkpoint.uri" not in free.status.message


NODES = {"min": 2, "max": 4}
NOT_BLOCKED: dict[str, tuple[Change, str, str]] = {
    "the other is over": (
        lambda s: replace(s, observed=replace(s.observed, rival=None)),
        "Free",
        "No other job comes first at checkpoint.uri",
    ),
    "it is suspended": (
        lambda s: s.spec(nodes=NODES, runPolicy={"suspend": True}),
        "Suspended",
        "A suspended job waits for no other",
    ),
    "it runs, and comes second since": (
        lambda s: s.generation(state=GenerationState.ACTIVE),
        "Running",
        "A generation that runs is left alone",
    ),
    "its deadline passes": (
        lambda s: s.spec(nodes=NODES, runPolicy={"activeDeadlineSeconds": 1}),
        "Finished",
        "The job is over",
    ),
    "it was over already": (lambda s: s.status(phase=Phase.FAILED), "Finished", "The job is over"),
}


@pytest.mark.parametrize(("change", "reason", "message"), NOT_BLOCKED.values(), ids=NOT_BLOCKED)
def test_why_a_job_that_was_blocked_is_not(change: Change, reason: str, message: str) -> None:
    held = with_rival(training_job().generation(state=GenerationState.ENDED)).decided()
    assert blocked(held.observed.job.status) == "True"
    status = change(held).plan().status
    told = next(c for c in status.conditions if c.type == "Blocked")
    assert (told.status, told.reason, told.message) == ("False", reason, message)
    assert (status.phase is Phase.FAILED) == (reason == "Finished")
