"""Pods that are created ahead of time.

Meanwhile, a cloud recommends to leave a member's node.
"""

from __future__ import annotations

from typing import Any

import pytest

from scene import ACTIVE, DRAINING, ENDED, NOW, START, Change, Scene, at, commit, notice, pod, training, training_job
from spottrain_api.contract.assignments import AgentPhase, CapacityType
from spottrain_api.contract.notices import NoticeKind
from spottrain_api.v1alpha1.status import GenerationStatus
from spottrain_operator.core.model import CreatePod, DeletePod, Plan
from spottrain_operator.core.timing import DEFAULT_TIMING

NO_NODE: dict[str, Any] = {
    "phase": "Pending",
    "ready": False,
    "ready_since": None,
    "node": None,
    "scheduled_at": None,
    "ip": None,
    "container_started": False,
    "waiting_reason": "Unschedulable",
    "waiting_message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
    "unschedulable_since": NOW,
}


def job(max_prewarmed: int = 1, **spot: Any) -> Scene:
    """Pods 1 and 2 on on-demand nodes and 3 and 4 on spot nodes train.

    nodes.max is 4.
    """
    spot = {"pricePerHour": 1.0, "maxPrewarmed": max_prewarmed, **spot}
    return training_job(capacity={"onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": spot})


def hinted(scene: Scene, *sequences: int, **changes: Any) -> Scene:
    """The cloud recommends to leave the nodes of these pods."""
    for sequence in sequences:
        scene = scene.node(sequence, notice=notice(sequence, 600, kind=NoticeKind.REBALANCE, **changes))
    return scene


def unhinted(scene: Scene, sequence: int) -> Scene:
    return scene.node(sequence, notice=None)


def with_spare(scene: Scene, sequence: int = 5, **changes: Any) -> Scene:
    """A pod that was created just now is up and warm."""
    spare = pod(sequence, **({"created_at": NOW, "ready_since": NOW} | changes))
    return scene.with_pod(spare).says(sequence, generation=0, phase=AgentPhase.IDLE)


def created(plan: Plan) -> list[tuple[str, CapacityType]]:
    return [(action.name, action.capacity_type) for action in plan.actions if isinstance(action, CreatePod)]


def deleted(plan: Plan) -> list[str]:
    return [action.name for action in plan.actions if isinstance(action, DeletePod)]


def generation_of(plan: Plan) -> GenerationStatus:
    generation = plan.status.generation
    assert generation is not None
    return generation


def below_max() -> Scene:
    """Pod 3 waits for a node, and joins the others once it has one."""
    scene = hinted(job(), 4)
    members = tuple(member for member in generation_of(scene.plan()).members if member.pod != "job-3")
    return scene.generation(members=members).pod(3, **NO_NODE).forgets(3)


SPOT = CapacityType.SPOT
CREATED: list[Any] = [
    pytest.param(lambda: hinted(job(), 4), [("job-5", SPOT)], id="one hint"),
    pytest.param(job, [], id="no hint"),
    pytest.param(lambda: hinted(job(0), 4), [], id="maxPrewarmed 0"),
    pytest.param(lambda: hinted(training_job(), 4), [], id="maxPrewarmed is not set"),
    pytest.param(lambda: hinted(job(), 3, 4), [("job-5", SPOT)], id="as many as the limit"),
    pytest.param(lambda: hinted(job(5), 3, 4), [("job-5", SPOT), ("job-6", SPOT)], id="one for each hint"),
    pytest.param(lambda: hinted(job(), 4, cancelled=True), [], id="the hint was taken back"),
    pytest.param(lambda: hinted(job(), 1), [], id="an on-demand node"),
    pytest.param(lambda: with_spare(hinted(job(), 4)), [], id="it is there already"),
    pytest.param(lambda: with_spare(hinted(job(), 4), **NO_NODE), [], id="it waits for a node"),
    pytest.param(lambda: hinted(with_spare(hinted(job(5), 4)), 5), [], id="the spare's node is at risk, too"),
    pytest.param(below_max, [], id="below nodes.max"),
    pytest.param(lambda: hinted(job(), 4).without_pod(3), [("job-5", SPOT)], id="a member went"),
    pytest.param(lambda: hinted(job(), 4).node(4, notice=notice(4)), [("job-5", SPOT)], id="a notice instead"),
    pytest.param(lambda: hinted(job(), 4).status(fallback_since=NOW), [], id="spot is short"),
    pytest.param(lambda: hinted(job(), 4).job(not_understood=("spec.new",)), [], id="a newer version's job"),
]


@pytest.mark.parametrize(("scene", "wanted"), CREATED)
def test_what_is_created(scene: Any, wanted: list[tuple[str, CapacityType]]) -> None:
    assert created(scene().plan()) == wanted


def test_an_event_says_why_there_is_one_more() -> None:
    events = [event.message for event in hinted(job(), 4).plan().events if event.reason == "PodsCreated"]
    assert events == ["Creating 1 spot pod ahead of time: the cloud recommends to leave a member's node"]


def test_neither_the_hint_nor_the_pod_ends_the_generation() -> None:
    scene = with_spare(hinted(job(), 4)).later(10 * DEFAULT_TIMING.prewarmed_stay)
    plan = scene.plan()
    assert (generation_of(plan).state, generation_of(plan).number) == (ACTIVE, 1)
    assert (created(plan), deleted(plan)) == ([], [])
    assert plan.status.members.waiting == 1


def test_a_notice_lets_the_pod_join_and_creates_no_other() -> None:
    noticed = with_spare(hinted(job(), 4)).node(4, notice=notice(4, 120))
    plan = noticed.plan()
    assert generation_of(plan).state is DRAINING
    assert (created(plan), deleted(plan)) == ([], [])
    scene = noticed.decided()
    for sequence in (1, 2, 3, 4):
        scene = scene.says(sequence, phase=AgentPhase.DRAINED, commit=commit(1, 51), progress=training(51))
    plan = scene.plan()
    assert (generation_of(plan).number, generation_of(plan).state) == (2, ACTIVE)
    assert [member.pod for member in generation_of(plan).members] == ["job-1", "job-2", "job-3", "job-5"]
    assert (created(plan), deleted(plan)) == ([], ["job-4"])


def test_a_loss_without_notice_lets_the_pod_join_at_once() -> None:
    """Kubernetes doesn't know of the loss yet, so the lost pod still has its place."""
    scene = with_spare(hinted(job(), 4)).generation(state=ENDED, ended_at=NOW, reason="NodeLost")
    scene = scene.all_say(phase=AgentPhase.IDLE, progress=None).says(4, age=DEFAULT_TIMING.candidate_report_age + 1)
    plan = scene.plan()
    assert [member.pod for member in generation_of(plan).members] == ["job-1", "job-2", "job-3", "job-5"]


def test_members_come_first_even_if_they_are_warm_a_little_later() -> None:
    scene = with_spare(hinted(job(), 4)).generation(state=ENDED, ended_at=NOW, reason="Failure")
    scene = scene.all_say(phase=AgentPhase.IDLE, progress=None)
    assert generation_of(scene.says(3, warm=False).plan()).number == 1
    plan = scene.plan()
    assert [member.pod for member in generation_of(plan).members] == ["job-1", "job-2", "job-3", "job-4"]


def test_a_pod_on_demand_has_no_stand_in() -> None:
    """Otherwise the generation would have too many spot nodes.

    It would be drained for that.
    """
    scene = with_spare(hinted(job(), 4)).generation(state=ENDED, ended_at=NOW, reason="NodeLost")
    scene = scene.all_say(phase=AgentPhase.IDLE, progress=None).says(2, age=DEFAULT_TIMING.candidate_report_age + 1)
    plan = scene.plan()
    assert [member.pod for member in generation_of(plan).members] == ["job-1", "job-3", "job-4"]


GONE: list[Any] = [
    pytest.param(lambda s: unhinted(s, 4), id="the hint is gone"),
    pytest.param(lambda s: hinted(s, 4, cancelled=True), id="the hint was taken back"),
    pytest.param(lambda s: s.spec(nodes={"min": 2, "max": 4}), id="maxPrewarmed is 0 again"),
]


@pytest.mark.parametrize("change", GONE)
def test_it_is_deleted_once_and_not_sooner_than_promised(change: Change) -> None:
    scene = change(with_spare(hinted(job(), 4)))
    is_off = scene.observed.job.spec.capacity.spot.max_prewarmed == 0
    assert deleted(scene.later(DEFAULT_TIMING.prewarmed_stay - 1).plan()) == (["job-5"] if is_off else [])
    late = scene.later(DEFAULT_TIMING.prewarmed_stay)
    plan = late.plan()
    assert (deleted(plan), created(plan)) == (["job-5"], [])
    assert generation_of(plan).state is ACTIVE
    again = late.pod(5, deleting=True, deletion_deadline=late.now).plan()
    assert (deleted(again), created(again)) == ([], [])


def test_a_smaller_job_deletes_what_its_limit_no_longer_covers() -> None:
    scene = with_spare(with_spare(hinted(job(2), 3, 4)), 6)
    scene = scene.spec(nodes={"min": 2, "max": 4}, capacity={"onDemand": {"min": 2}, "spot": {"maxPrewarmed": 1}})
    assert deleted(scene.plan()) == ["job-6"]


def test_a_pod_without_a_node_is_no_lack_of_spot_nodes() -> None:
    scene = with_spare(hinted(job(), 4), **NO_NODE).forgets(5)
    for each in (scene, scene.decided().later(1000)):
        plan = each.plan()
        healthy, spot = (plan.status.condition(kind) for kind in ("PodsHealthy", "SpotAvailable"))
        assert healthy is not None
        assert spot is not None
        assert healthy.message.endswith("Training continues on 4 nodes, and the pod would only replace one of them")
        assert spot.status == "True"
        assert (plan.status.fallback_since, created(plan)) == (None, [])


def test_it_costs_as_much_as_a_member() -> None:
    def cost(scene: Scene) -> float:
        status = scene.status(accounted_at=START, cost=None).plan().status
        assert status.cost is not None
        return status.cost.total

    scene = hinted(job(), 4)
    hours = (NOW - at(0)).total_seconds() / 3600
    assert cost(with_spare(scene)) - cost(scene) == pytest.approx(1.0 * hours)
