"""Members ask autoscalers to leave their nodes alone until a notice comes, and new pods for some minutes."""

from __future__ import annotations

from datetime import timedelta

import pytest

from scene import ENDED, NOW, Change, Scene, notice, pod, training_job, waiting_job
from spottrain_operator.core.model import PROTECTION, STARTING, AnnotatePod
from spottrain_operator.core.timing import DEFAULT_TIMING

KARPENTER, AUTOSCALER = "karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/safe-to-evict"
REMOVED = dict.fromkeys(PROTECTION)


def annotated(scene: Scene) -> dict[str, dict[str, str | None]]:
    """What the plan annotates, by pod."""
    return {each.name: dict(each.annotations) for each in scene.plan().actions if isinstance(each, AnnotatePod)}


def bare(scene: Scene) -> Scene:
    for sequence in range(1, 5):
        scene = scene.pod(sequence, protection={})
    return scene


def test_what_autoscalers_read() -> None:
    assert PROTECTION == {KARPENTER: "true", AUTOSCALER: "false"}


def test_members_are_protected_once() -> None:
    scene = bare(training_job())
    assert annotated(scene) == {f"job-{sequence}": PROTECTION for sequence in range(1, 5)}
    assert annotated(scene.decided()) == {}


GOES = pytest.mark.parametrize(
    "goes",
    [
        lambda scene: scene.says(4, notices=(notice(4),)),
        lambda scene: scene.node(4, notice=notice(4)),
        lambda scene: scene.node(4, taints=("karpenter.sh/disrupted",)),
        lambda scene: scene.node(4, deleting=True),
        lambda scene: scene.pod(4, disruption="EvictionByEvictionAPI"),
    ],
    ids=["the agent's", "the node's", "a taint", "the node is deleted", "an eviction"],
)


@GOES
def test_a_notice_ends_it_for_its_pod_alone(goes: Change) -> None:
    assert annotated(goes(training_job())) == {"job-4": REMOVED}


def test_a_recommendation_is_no_notice() -> None:
    assert annotated(training_job().says(4, notices=(notice(4, kind="rebalance"),))) == {}


def test_a_false_alarm_brings_it_back() -> None:
    leaving = training_job().node(4, notice=notice(4)).decided()
    assert annotated(leaving.node(4, notice=notice(4, cancelled=True))) == {"job-4": PROTECTION}
    expired = notice(
        4, deadline=NOW - timedelta(seconds=DEFAULT_TIMING.notice_expiry), observed_at=NOW - timedelta(seconds=120)
    )
    assert annotated(leaving.node(4, notice=expired)) == {"job-4": PROTECTION}


def test_pods_that_wait_for_a_generation_ask_for_nothing() -> None:
    one_more = training_job(nodes={"min": 2, "max": 5}).with_pod(pod(5))
    assert annotated(one_more) == {}
    assert annotated(waiting_job(1)) == {}


def starting(scene: Scene, *sequences: int) -> Scene:
    """These pods are as they were created."""
    for sequence in sequences:
        scene = scene.pod(sequence, protection=STARTING)
    return scene


def test_a_new_pods_node_stays_for_some_minutes_and_a_members_until_a_notice() -> None:
    assert STARTING == {KARPENTER: "10m"}
    assert annotated(starting(waiting_job(1), 1)) == {}
    assert annotated(starting(training_job(), 4)) == {"job-4": PROTECTION}
    one_more = training_job(nodes={"min": 2, "max": 5}).with_pod(pod(5))
    assert annotated(starting(one_more, 5)) == {}


@GOES
def test_a_notice_ends_it_for_a_new_pod_too(goes: Change) -> None:
    assert annotated(starting(goes(training_job()), 4)) == {"job-4": {KARPENTER: None}}


def test_members_keep_it_between_generations_and_those_that_are_left_out_lose_it() -> None:
    ended = training_job().generation(state=ENDED, ended_at=NOW)
    assert annotated(ended) == {}
    generation = ended.observed.job.status.generation
    assert generation is not None
    assert annotated(ended.generation(number=2, members=generation.members[:3])) == {"job-4": REMOVED}


def test_a_pod_that_leaves_is_not_annotated() -> None:
    scene = bare(training_job())
    assert "job-4" not in annotated(scene.pod(4, deleting=True))
    assert "job-4" not in annotated(scene.pod(4, phase="Failed"))


def test_other_values_are_somebodys_decision() -> None:
    mine = {KARPENTER: "true", AUTOSCALER: "true"}
    assert annotated(training_job().pod(4, protection=mine)) == {}
    leaving = training_job().pod(4, protection=mine).says(4, notices=(notice(4),))
    assert annotated(leaving) == {"job-4": {KARPENTER: None}}


def test_the_pod_template_decides() -> None:
    scene = training_job(podTemplate={"annotations": {KARPENTER: "true"}})
    assert annotated(bare(scene)) == {f"job-{sequence}": {AUTOSCALER: "false"} for sequence in range(1, 5)}
    assert annotated(scene.says(4, notices=(notice(4),))) == {"job-4": {AUTOSCALER: None}}
