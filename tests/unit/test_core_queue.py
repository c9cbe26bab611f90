"""A job in a queue of Kueue: it asks for quota, runs on what it is granted, and gives back what Kueue takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scene import Scene, pod, training, training_job, waiting_job
from spottrain_api.contract.assignments import AgentPhase, CapacityType
from spottrain_api.contract.conditions import ConditionReason
from spottrain_api.v1alpha1.status import GenerationState, Phase
from spottrain_operator.core.facts.pools import pool_hash
from spottrain_operator.core.model import Action, CreatePod, DeletePod, Rival
from spottrain_operator.core.trouble import Trouble
from spottrain_operator.core.workloads import (
    CreateWorkload,
    DeleteWorkload,
    FinishWorkload,
    Part,
    QueueView,
    ReadyWorkload,
    ReleaseWorkload,
    WorkloadView,
)

OD, SPOT = CapacityType.ON_DEMAND, CapacityType.SPOT
CONTENT = "c1"


def workload(name: str, *, on_demand: int = 0, spot: int = 0, **changes: Any) -> WorkloadView:
    """A Workload that Kueue has admitted."""
    fields: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "part": Part.MINIMUM if name.startswith("min") else Part.MORE,
        "content": CONTENT,
        "nodes": {OD: on_demand, SPOT: spot},
        "reserved": True,
        "admitted": True,
        "ready": True,
    }
    return WorkloadView(**(fields | changes))


# The scenes' job: two on-demand and two spot nodes, of which it needs two.
MINIMUM = workload("min", on_demand=2)
MORE = (workload("more-1", spot=1), workload("more-2", spot=1))
WAITING: dict[str, Any] = {"reserved": False, "admitted": False, "ready": False}
PENDING: dict[str, Any] = WAITING | {
    "reason": "Pending",
    "message": "insufficient unused quota for gpu, 2 more needed",
}
EVICTED: dict[str, Any] = {
    "evicted": True,
    "reason": "Preempted",
    "message": "to accommodate a workload of higher priority",
}


def queued(scene: Scene, *workloads: WorkloadView, **changes: Any) -> Scene:
    queue = QueueView(name="team-a", content=CONTENT, workloads=workloads)
    return replace(scene, observed=replace(scene.observed, queue=replace(queue, **changes)))


def acts(scene: Scene, *kinds: type[Action]) -> list[Action]:
    return [action for action in scene.plan().actions if isinstance(action, kinds)]


def asked(scene: Scene) -> list[Action]:
    return acts(scene, CreateWorkload, ReadyWorkload, ReleaseWorkload, FinishWorkload, DeleteWorkload)


def said(scene: Scene) -> tuple[str, str, str]:
    condition = scene.plan().status.condition("Admitted")
    assert condition is not None
    return condition.status, condition.reason, condition.message


def new_job(*workloads: WorkloadView, **changes: Any) -> Scene:
    """A job without pods."""
    return queued(waiting_job(num_pods=0), *workloads, **changes)


def without_pods(scene: Scene) -> Scene:
    for each in scene.observed.pods:
        scene = scene.without_pod(each.sequence)
    return scene


def drained(scene: Scene) -> Scene:
    return scene.decided().all_say(phase=AgentPhase.DRAINED, progress=training(50)).decided()


def test_a_new_job_asks_for_the_nodes_that_it_needs_and_creates_no_pods() -> None:
    scene = new_job()
    nodes = {OD: 2, SPOT: 0}
    assert scene.plan().actions == (
        CreateWorkload(name=f"job-{CONTENT}", part=Part.MINIMUM, content=CONTENT, nodes=nodes),
    )
    assert scene.plan().status.phase is Phase.SUSPENDED


@pytest.mark.parametrize(
    ("workloads", "expected"),
    [
        ((), "it waits for its place in queue team-a"),
        (
            (workload("min", on_demand=2, **WAITING),),
            "it waits in queue team-a. Kueue has not said yet for what: if it never does, see whether it runs",
        ),
        (
            (workload("min", on_demand=2, **PENDING),),
            "it waits for quota in queue team-a: insufficient unused quota for gpu, 2 more needed",
        ),
        (
            (workload("min", on_demand=2, **PENDING, active=False),),
            "its Workload min was deactivated. To let it wait in queue team-a again, set the Workload's spec.active "
            "to true",
        ),
    ],
    ids=["nothing asked yet", "Kueue is silent", "no quota", "deactivated"],
)
def test_a_job_without_quota_says_what_it_waits_for(workloads: tuple[WorkloadView, ...], expected: str) -> None:
    scene = new_job(*workloads)
    assert scene.plan().status.message == f"Suspended: {expected}"
    assert said(scene) == ("False", "WaitsForQuota", expected[0].upper() + expected[1:])
    assert not acts(scene, CreatePod)


def test_what_keeps_a_job_from_asking_is_its_condition() -> None:
    trouble = Trouble(reason=ConditionReason.KUEUE_MISSING, message="Kueue is not installed: install it")
    scene = new_job(trouble=trouble)
    assert said(scene) == ("False", "KueueMissing", "Kueue is not installed: install it")
    assert scene.plan().status.message == "Suspended: Kueue is not installed: install it"


def test_an_admitted_job_creates_the_granted_pods_and_asks_for_one_more() -> None:
    scene = new_job(MINIMUM)
    assert [action.capacity_type for action in acts(scene, CreatePod)] == [OD, OD]  # type: ignore[union-attr]
    assert asked(scene) == [
        CreateWorkload(name=f"job-{CONTENT}-spot-1", part=Part.MORE, content=CONTENT, nodes={OD: 0, SPOT: 1})
    ]
    assert said(scene) == ("True", "Admitted", "Kueue grants the job 2 nodes in queue team-a")


def test_a_job_asks_for_one_node_after_the_other() -> None:
    assert not asked(new_job(MINIMUM, workload("more-1", spot=1, **PENDING)))
    [second] = asked(new_job(MINIMUM, MORE[0]))
    assert isinstance(second, CreateWorkload)
    assert not asked(new_job(MINIMUM, *MORE)), "it has all that it wants"
    waiting = new_job(MINIMUM, workload("more-1", spot=1, **PENDING))
    assert said(waiting)[2].endswith("For one more, it waits: insufficient unused quota for gpu, 2 more needed")


def test_a_job_trains_on_all_that_is_granted() -> None:
    scene = queued(training_job(), MINIMUM, *MORE)
    assert not scene.plan().actions
    generation = scene.plan().status.generation
    assert generation is not None
    assert generation.state is GenerationState.ACTIVE


def test_a_node_that_kueue_takes_back_is_given_after_a_drain_and_the_job_trains_on_without() -> None:
    scene = queued(training_job(), MINIMUM, MORE[0], workload("more-2", spot=1, **EVICTED))
    plan = scene.plan()
    assert plan.status.generation is not None
    assert (plan.status.generation.state, plan.status.generation.reason) == (GenerationState.DRAINING, "QuotaTaken")
    [event] = [event for event in plan.events if event.reason == "QuotaTaken"]
    assert event.message == (
        "Generation 1 drains: Kueue takes the quota of a node back (Preempted): "
        "to accommodate a workload of higher priority"
    )
    assert not asked(scene), "its pod is there"
    ended = drained(scene)
    [gone] = acts(ended, DeletePod) or acts(scene.decided().all_say(phase=AgentPhase.DRAINED), DeletePod)
    assert isinstance(gone, DeletePod)
    left = ended.without_pod(int(gone.name.removeprefix("job-")))
    assert asked(left) == [ReleaseWorkload(name="more-2", uid="uid-more-2")]
    generation = left.all_say(phase=AgentPhase.IDLE).decided().observed.job.status.generation
    assert generation is not None
    assert len(generation.members) == 3


def test_a_job_whose_quota_kueue_takes_back_drains_ends_its_pods_and_then_releases_it() -> None:
    scene = queued(training_job(), workload("min", on_demand=2, **EVICTED), *MORE)
    plan = scene.plan()
    assert plan.status.generation is not None
    assert (plan.status.generation.state, plan.status.generation.reason) == (GenerationState.DRAINING, "QuotaTaken")
    assert said(scene)[:2] == ("False", "QuotaTaken")
    assert not asked(scene)
    end = scene.decided().all_say(phase=AgentPhase.DRAINED, progress=training(50))
    assert len(acts(end, DeletePod)) == 4
    assert not asked(end), "the pods are there"
    ended = without_pods(end.decided())
    assert asked(ended) == [
        DeleteWorkload(name="more-1", uid="uid-more-1"),
        DeleteWorkload(name="more-2", uid="uid-more-2"),
        ReleaseWorkload(name="min", uid="uid-min"),
    ]
    assert ended.plan().status.phase is Phase.SUSPENDED


def test_quota_is_released_as_far_as_pods_have_ended() -> None:
    """Of the pods, those of a node that goes and of one that stays are there."""
    evicted = [workload(f"more-{number}", spot=1, **EVICTED) for number in (1, 2)]
    scene = queued(training_job(), MINIMUM, *evicted)
    one_left = drained(scene).without_pod(4)
    assert [action.name for action in asked(one_left)] == ["more-1"]  # type: ignore[union-attr]


def test_a_pod_that_terminates_holds_its_quota() -> None:
    scene = drained(queued(training_job(), MINIMUM, MORE[0], workload("more-2", spot=1, **EVICTED)))
    assert not asked(scene.pod(4, deleting=True))
    assert asked(scene.pod(4, deleting=True, phase="Succeeded"))


def test_pods_are_reported_ready_those_of_the_minimum_once_they_train_and_all_once_all_are_up() -> None:
    new = [replace(each, ready=False) for each in (MINIMUM, *MORE)]
    starting = queued(waiting_job(num_pods=1), *new)
    assert not acts(queued(waiting_job(num_pods=0), *new), ReadyWorkload)
    assert acts(queued(training_job(), *new), ReadyWorkload) == [
        ReadyWorkload(name=each.name, uid=each.uid) for each in new
    ]
    fewer = queued(training_job().pod(4, ready=False, ready_since=None), *new)
    assert acts(fewer, ReadyWorkload) == [ReadyWorkload(name="min", uid="uid-min")]
    assert not acts(queued(training_job(), MINIMUM, *MORE), ReadyWorkload), "it is said once"
    assert not acts(starting, ReadyWorkload)


NO_NODES: dict[str, Callable[[Scene], Scene]] = {
    "suspended by its user": lambda s: s.spec(nodes={"min": 2, "max": 4}, runPolicy={"suspend": True}),
    "another job has its folder": lambda s: replace(
        s, observed=replace(s.observed, rival=Rival(namespace="default", name="first"))
    ),
    "out of its queue": lambda s: replace(
        s, observed=replace(s.observed, queue=replace(s.observed.queue or QueueView(name=""), name=""))
    ),
}


@pytest.mark.parametrize("change", NO_NODES.values(), ids=NO_NODES)
def test_a_job_that_wants_no_nodes_holds_no_quota(change: Callable[[Scene], Scene]) -> None:
    scene = change(new_job(MINIMUM, *MORE))
    assert {type(action) for action in asked(scene)} == {DeleteWorkload}
    assert len(asked(scene)) == 3
    assert not asked(change(new_job())), "and asks for none"


def test_a_suspended_job_says_that_it_gives_its_quota_back() -> None:
    scene = NO_NODES["suspended by its user"](new_job(MINIMUM))
    assert said(scene) == (
        "False",
        "AsksForNoNodes",
        "The job asks for no nodes, and gives back what it holds in queue team-a",
    )
    assert scene.plan().status.message == "Suspended: set runPolicy.suspend to false to go on"


def test_a_job_out_of_its_queue_runs_without_one() -> None:
    scene = new_job(MINIMUM).decided()
    out = replace(scene, observed=replace(scene.observed, queue=None))
    assert len(acts(out, CreatePod)) == 4
    assert said(out) == ("True", "NoQueue", "The job is in no queue")


def edited(*new: WorkloadView) -> Scene:
    return queued(training_job(), MINIMUM, *MORE, *new, content="c2")


def test_an_edit_asks_anew_and_trains_on_until_kueue_has_decided() -> None:
    assert asked(edited()) == [CreateWorkload(name="job-c2", part=Part.MINIMUM, content="c2", nodes={OD: 2, SPOT: 0})]
    for scene in (edited(), edited(workload("min2", on_demand=2, content="c2", **WAITING))):
        generation = scene.plan().status.generation
        assert generation is not None
        assert generation.state is GenerationState.ACTIVE


def test_an_edit_for_which_there_is_no_quota_gives_the_old_quota_back() -> None:
    refused = workload("min2", on_demand=2, content="c2", **PENDING)
    scene = drained(edited(refused))
    assert scene.observed.job.status.phase is Phase.SUSPENDED
    assert [action.name for action in asked(without_pods(scene))] == ["more-1", "more-2", "min"]  # type: ignore[union-attr]


def test_an_edit_with_quota_replaces_the_old_quota() -> None:
    scene = edited(workload("min2", on_demand=2, content="c2"))
    ended = drained(scene)
    assert ended.observed.job.status.phase is not Phase.SUSPENDED
    two = ended.without_pod(3).without_pod(4)
    assert {action.name for action in asked(two) if isinstance(action, DeleteWorkload)} == {"min", "more-1", "more-2"}


def test_stand_ins_for_spot_nodes_need_quota_of_their_type() -> None:
    scene = new_job(MINIMUM, *MORE).with_pod(pod(1)).with_pod(pod(2))
    fallen = scene.spec(nodes={"min": 2, "max": 4}, capacity={"onDemand": {"min": 2, "max": 4}}).status(
        fallback_since=scene.now
    )
    created = [action for action in asked(fallen) if isinstance(action, CreateWorkload)]
    assert [action.nodes for action in created] == [{OD: 1, SPOT: 0}]
    assert OD not in {action.capacity_type for action in acts(fallen, CreatePod)}  # type: ignore[union-attr]


def test_no_pod_asks_for_a_cheaper_node_beyond_the_quota() -> None:
    pools = [
        {"name": name, "capacityType": kind, "provider": "gke", "pricePerHour": price}
        for name, kind, price in [("cheap", "spot", 0.1), ("dear", "spot", 9.0), ("base", "on-demand", 9.0)]
    ]
    capacity = {"onDemand": {"min": 2, "max": 2}, "pools": pools}
    scene = training_job(capacity=capacity)
    for number, pool in [(1, "base"), (2, "base"), (3, "dear"), (4, "dear")]:
        spec = scene.spec(nodes={"min": 2, "max": 4}, capacity=capacity).observed.job.spec
        kind = OD if number < 3 else SPOT
        scene = scene.pod(number, pool=pool, pool_hash=pool_hash(spec, kind, pool))
    assert [action.pool for action in acts(scene, CreatePod)] == ["cheap"]  # type: ignore[union-attr]
    assert not acts(queued(scene, MINIMUM, *MORE), CreatePod)


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_job_that_is_over_gives_its_quota_back_once_its_pods_have_ended(succeeded: bool) -> None:
    phase = Phase.SUCCEEDED if succeeded else Phase.FAILED
    scene = queued(training_job(), MINIMUM, *MORE).status(phase=phase, message="It ended", completion_time=None)
    assert not asked(scene)
    assert asked(without_pods(scene)) == [
        FinishWorkload(name="min", uid="uid-min", succeeded=succeeded, message="It ended"),
        DeleteWorkload(name="more-1", uid="uid-more-1"),
        DeleteWorkload(name="more-2", uid="uid-more-2"),
    ]
