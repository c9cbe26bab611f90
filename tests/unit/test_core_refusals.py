"""Truth tables of `plan` for pods that Kubernetes refuses.

Nothing that trains is given up for a refusal.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scene import START, Scene, at, failed, pod, training_job, waiting_job
from spottrain_api.contract.assignments import AgentPhase, CapacityType
from spottrain_api.contract.reports import FailureReason
from spottrain_api.v1alpha1.status import GenerationState, Phase, TrainingJobStatus
from spottrain_operator.core.model import CreatePod, DeletePod, Refusal

ON_DEMAND, SPOT = CapacityType.ON_DEMAND, CapacityType.SPOT
# Two of the four members are on spot nodes.
FOUR = {"onDemand": {"min": 2}}
REFUSED = 'serviceaccount "trainer" not found'


def refused(
    scene: Scene,
    *types: CapacityType,
    generation: int = 1,
    lasting: bool = True,
    by_quota: bool = False,
) -> Scene:
    """Pods of `types` are refused; without any, all are."""
    refusal = Refusal(
        metadata_generation=generation,
        capacity_types=frozenset(types or CapacityType),
        message=REFUSED,
        since=START,
        tried_at=START,
        lasting=lasting,
        by_quota=by_quota,
    )
    return replace(scene, observed=replace(scene.observed, refusal=refusal))


def edited(scene: Scene) -> Scene:
    """Another pod template; the pods that are there are of the old one."""
    edited = scene.job(metadata_generation=2)
    return replace(edited, observed=replace(edited.observed, template_hash="t2"))


def created(scene: Scene) -> list[str]:
    return [action.capacity_type.value for action in scene.plan().actions if isinstance(action, CreatePod)]


def pods_healthy(status: TrainingJobStatus) -> tuple[str, str]:
    condition = status.condition("PodsHealthy")
    assert condition is not None
    return condition.status, condition.reason


@pytest.mark.parametrize(
    ("lasting", "seconds", "fails"), [(True, 5, False), (True, 15, True), (False, 600, False)], ids=str
)
def test_pods_that_the_cluster_does_not_admit(lasting: bool, seconds: float, fails: bool) -> None:
    scene = refused(replace(waiting_job(0), now=at(seconds)), lasting=lasting)
    status = scene.plan().status
    assert (status.phase is Phase.FAILED) == fails
    assert REFUSED in status.message
    assert fails or f"{REFUSED}. The operator retries at least every 30 s" in status.message
    told = "The job fails at 00:00:10 UTC if no pod starts before" in status.message
    assert told == (lasting and not fails)


def test_a_refusal_from_before_an_edit_fails_no_job() -> None:
    """An edit of capacity may mend it, with the same template."""
    scene = refused(replace(waiting_job(0), now=at(600))).job(metadata_generation=2)
    decided = scene.plan()
    assert decided.status.phase is Phase.PENDING
    assert REFUSED not in decided.status.message
    assert [type(action) for action in decided.actions] == [CreatePod] * len(decided.actions) != []


@pytest.mark.parametrize("lasting", [True, False])
def test_a_refused_replacement_disturbs_nobody_who_trains(lasting: bool) -> None:
    scene = refused(training_job(nodes={"min": 2, "max": 5}), lasting=lasting)
    decided = scene.plan()
    assert decided.status.phase is Phase.RUNNING
    assert pods_healthy(decided.status) == ("False", "PodsRefused")
    assert [type(action) for action in decided.actions] == [CreatePod], "it's tried again"
    condition = decided.status.condition("PodsHealthy")
    assert condition is not None
    assert condition.message == f"{REFUSED}. The operator retries at least every 30 s; existing pods continue"
    had_all = refused(training_job(), lasting=lasting).plan().status
    assert pods_healthy(had_all)[0] == "True", "nobody lacks what was refused"


LACKS_BOTH = training_job(nodes={"min": 2, "max": 8}, capacity={"onDemand": {"min": 4}})


def test_while_pods_are_refused_one_of_each_missing_type_is_tried() -> None:
    assert created(LACKS_BOTH) == ["on-demand"] * 2 + ["spot"] * 2
    assert created(refused(LACKS_BOTH)) == ["on-demand", "spot"]
    assert created(replace(refused(LACKS_BOTH), now=START)) == [], "not before the pause is over"


@pytest.mark.parametrize("seconds", [0, 600])
def test_pods_of_one_type_are_created_while_those_of_the_other_are_refused(seconds: float) -> None:
    is_tried = ["on-demand"] if seconds else []
    assert created(replace(refused(LACKS_BOTH, ON_DEMAND), now=at(seconds))) == [*is_tried, "spot", "spot"]


def test_a_refusal_is_no_reason_for_pods_of_the_other_type_to_lack() -> None:
    lacks_spot = training_job(nodes={"min": 2, "max": 5})
    assert pods_healthy(refused(lacks_spot, ON_DEMAND).plan().status)[0] == "True"
    assert pods_healthy(refused(lacks_spot, SPOT).plan().status) == ("False", "PodsRefused")
    assert pods_healthy(refused(LACKS_BOTH, ON_DEMAND).plan().status) == ("False", "PodsRefused")
    waits = waiting_job(2, nodes={"min": 3, "max": 3}, capacity={"onDemand": {"min": 2}})
    assert REFUSED not in refused(waits, ON_DEMAND).plan().status.message
    assert REFUSED in refused(waits, SPOT).plan().status.message


@pytest.mark.parametrize(
    ("types", "lasting", "falls_back"),
    [((SPOT,), False, True), ((SPOT,), True, False), ((), False, False), ((ON_DEMAND,), False, False)],
    ids=["spot pods alone", "for a mistake", "all pods", "on-demand pods alone"],
)
def test_on_demand_nodes_stand_in_for_spot_pods_that_a_quota_refuses(
    types: tuple[CapacityType, ...], lasting: bool, falls_back: bool
) -> None:
    lacks = training_job(nodes={"min": 2, "max": 5}, capacity={})
    scene = replace(refused(lacks, *types, lasting=lasting), now=at(200))
    assert "FellBack" not in [event.reason for event in scene.plan().events], "it waits as long as for nodes"
    later = scene.decided().later(200)
    assert ("FellBack" in [event.reason for event in later.plan().events]) == falls_back
    assert ("on-demand" in created(later.decided())) == falls_back


def test_spot_pods_that_a_quota_refuses_each_time_are_tried_again_ever_more_seldom() -> None:
    """On-demand pods may share the quota. Otherwise the job would change between the two for ever."""
    scene = replace(refused(training_job(nodes={"min": 2, "max": 5}, capacity={}), SPOT, lasting=False), now=at(200))
    pauses = []
    for _ in range(6):
        scene = until("FellBack", scene, steps=150.0)
        began = scene.now
        scene = until("SpotRetried", scene, steps=150.0)
        pauses.append(round((scene.now - began).total_seconds() / 900))
    assert pauses == [1, 2, 4, 8, 8, 8]
    again = until("FellBack", scene, steps=150.0).plan().status.condition("SpotAvailable")
    assert again is not None
    assert "longer each time, as spot pods were refused 7 times in a row)" in again.message


def test_a_job_that_had_all_its_spot_nodes_begins_anew() -> None:
    full = training_job(nodes={"min": 2, "max": 4}, capacity=FOUR).status(refused_spot=5)
    assert full.plan().status.refused_spot == 0
    lacks = training_job(nodes={"min": 2, "max": 5}, capacity=FOUR).status(refused_spot=5)
    assert lacks.plan().status.refused_spot == 5


def until(reason: str, scene: Scene, *, steps: float) -> Scene:
    """The scene after the pass that records the event. Agents report all the time."""
    for _ in range(1000):
        decided = scene.plan()
        scene = scene.decided()
        if reason in [event.reason for event in decided.events]:
            return scene
        scene = scene.later(steps)
    raise AssertionError(f"never {reason}")


@pytest.mark.parametrize(
    ("minimum", "tried"), [(2, ["on-demand", "spot"]), (3, ["on-demand"])], ids=["enough spot pods", "too few"]
)
def test_an_edit_whose_on_demand_pods_are_refused_is_tried_with_spot_pods_if_they_are_enough(
    minimum: int, tried: list[str]
) -> None:
    scene = edited(training_job(nodes={"min": minimum, "max": 4}, capacity={"onDemand": {"min": 2}}))
    assert created(scene) == ["on-demand"]
    assert created(refused(scene, ON_DEMAND, generation=2)) == tried
    lost = refused(scene.without_pod(1), ON_DEMAND, generation=2)
    assert created(lost) == tried, "one that is missing and refused isn't the only one to be tried"


def test_a_job_that_is_over_lacks_no_pod() -> None:
    lacks = refused(training_job(nodes={"min": 2, "max": 5}), lasting=False).decided()
    assert pods_healthy(lacks.observed.job.status) == ("False", "PodsRefused")
    over = failed(lacks, FailureReason.INVALID_CONFIGURATION).plan().status
    assert over.phase is Phase.FAILED
    assert pods_healthy(over) == ("True", "Finished")


def test_a_job_that_could_not_start_keeps_the_reason_and_retries_nothing() -> None:
    waits = refused(replace(waiting_job(0), now=at(5)), lasting=True).decided()
    over = replace(waits, now=at(15)).plan().status
    assert over.phase is Phase.FAILED
    assert pods_healthy(over) == ("False", "PodsRefused")
    condition = over.condition("PodsHealthy")
    assert condition is not None
    assert REFUSED in condition.message
    assert "retries" not in condition.message


def test_a_job_that_has_trained_is_not_failed_by_a_refusal_though_all_its_pods_are_lost() -> None:
    lost = training_job()
    for sequence in range(1, 5):
        lost = lost.without_pod(sequence)
    for scene in (refused(lost), refused(edited(lost), generation=2)):
        later = scene.decided().later(60)
        assert later.plan().status.phase is Phase.RECOVERING
        assert REFUSED in later.plan().status.message


def test_one_pod_of_an_edited_template_is_tried_before_those_of_the_old_one_are_given_up() -> None:
    trying = edited(training_job()).plan()
    assert trying.status.generation is not None
    assert trying.status.generation.state is GenerationState.ACTIVE
    assert [type(action) for action in trying.actions] == [CreatePod]
    accepted = edited(training_job()).with_pod(pod(9, template_hash="t2", node=None, ready=False)).plan()
    assert accepted.status.generation is not None
    assert (accepted.status.generation.state, accepted.status.generation.reason) == (
        GenerationState.DRAINING,
        "Edited",
    )


def test_events_say_that_an_edit_replaces_pods_that_wait() -> None:
    def told(scene: Scene) -> list[str]:
        return [event.message for event in scene.plan().events if event.reason == "PodsCreated"]

    waits = edited(replace(waiting_job(2, nodes={"min": 2, "max": 2}), now=at(8)))
    for sequence in (1, 2):
        waits = waits.pod(sequence, node=None, ready=False)
    assert told(waits) == ["Creating 1 on-demand pod, the first since the job was edited"]
    accepted = waits.decided().with_pod(
        pod(3, capacity_type=CapacityType.ON_DEMAND, template_hash="t2", node=None, ready=False)
    )
    assert told(accepted) == ["Creating 1 on-demand pod in place of pods from before the edit"]
    replaced = accepted.decided().without_pod(1).without_pod(2)
    assert told(replaced) == ["Creating 1 on-demand pod"], "the operator was killed before it created it"


def test_while_an_edited_template_is_refused_the_old_pods_go_on() -> None:
    scene = refused(edited(training_job()), generation=2)
    decided = scene.plan()
    assert decided.status.generation is not None
    assert decided.status.generation.state is GenerationState.ACTIVE
    assert pods_healthy(decided.status) == ("False", "PodsRefused")
    assert not [action for action in decided.actions if isinstance(action, DeletePod)]

    broken = scene.without_pod(4).decided()  # a node is lost: the others begin anew with the template that they have
    ended = broken.all_say(phase=AgentPhase.STOPPED).later(5)
    status = ended.plan().status
    assert status.generation is not None
    assert (status.generation.number, len(status.generation.members)) == (2, 3)
    assert status.generation.template_hash.startswith("t1.")
    assert not [action for action in ended.plan().actions if isinstance(action, DeletePod)]


def test_a_template_that_needs_the_quota_of_the_old_pods_gets_it() -> None:
    scene = refused(edited(training_job()), generation=2, lasting=False, by_quota=True)
    generation = scene.plan().status.generation
    assert generation is not None
    assert (generation.state, generation.reason) == (GenerationState.DRAINING, "Edited")
