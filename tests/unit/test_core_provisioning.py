"""A job whose pools have NodePools of Karpenter of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scene import Scene, training_job, waiting_job
from spottrain_api.contract.conditions import ConditionReason
from spottrain_api.v1alpha1.status import Phase
from spottrain_operator.core.model import ProfileView
from spottrain_operator.core.node_pools import DeleteNodePool, NodePoolsView, NodePoolView, WriteNodePool
from spottrain_operator.core.trouble import Trouble

MADE = NodePoolView(name="job-a", uid="uid-a", content="c1")
OLD = NodePoolView(name="job-old", uid="uid-old", content="c0")
WANTED = {"job-a": "c1"}
MISSING = Trouble(reason=ConditionReason.KARPENTER_MISSING, message="Karpenter is not installed: install it")


def with_pools(scene: Scene, *found: NodePoolView, wanted: dict[str, str] = WANTED, **changes: Any) -> Scene:
    view = NodePoolsView(wanted=wanted, found=found, **changes)
    return replace(scene, observed=replace(scene.observed, node_pools=view))


def asked(scene: Scene) -> list[WriteNodePool | DeleteNodePool]:
    return [each for each in scene.plan().actions if isinstance(each, WriteNodePool | DeleteNodePool)]


def said(scene: Scene) -> tuple[str, str, str] | None:
    condition = scene.plan().status.condition("NodePoolsReady")
    return None if condition is None else (condition.status, condition.reason, condition.message)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((), [WriteNodePool(name="job-a")]),
        ((MADE,), []),
        ((replace(MADE, content="c0"),), [WriteNodePool(name="job-a")]),
        ((MADE, OLD), [DeleteNodePool(name="job-old", uid="uid-old")]),
    ],
    ids=["missing", "there", "changed", "of a pool that was removed"],
)
def test_there_is_what_the_pools_ask_for(found: tuple[NodePoolView, ...], expected: list[Any]) -> None:
    for scene in (waiting_job(num_pods=0), training_job()):
        assert asked(with_pools(scene, *found)) == expected
    assert said(with_pools(training_job(), *found)) is None


def test_a_job_without_such_pools_asks_for_nothing() -> None:
    assert asked(training_job()) == []


def test_a_node_pool_stays_while_a_pod_is_on_its_nodes() -> None:
    scene = with_pools(training_job(), MADE, OLD).node(3, labels={"karpenter.sh/nodepool": "job-old"})
    assert asked(scene) == []
    assert asked(scene.without_pod(3)) == [DeleteNodePool(name="job-old", uid="uid-old")]


def finished(*found: NodePoolView) -> Scene:
    return with_pools(training_job().status(phase=Phase.SUCCEEDED), *found)


def test_they_go_once_the_jobs_pods_have_ended() -> None:
    scene = finished(MADE, OLD)
    assert asked(scene) == []
    for each in scene.observed.pods:
        scene = scene.pod(each.sequence, phase="Succeeded", ready=False)
    assert asked(scene) == [
        DeleteNodePool(name="job-a", uid="uid-a"),
        DeleteNodePool(name="job-old", uid="uid-old"),
    ]


@pytest.mark.parametrize(
    "scene",
    [
        with_pools(waiting_job(num_pods=0).job(not_understood=("capacity.pools",)), OLD),
        replace(
            with_pools(waiting_job(num_pods=0), OLD),
            observed=replace(with_pools(waiting_job(num_pods=0), OLD).observed, profile=ProfileView(name="gpu")),
        ),
    ],
    ids=["not understood", "waits for its profile"],
)
def test_nothing_is_made_or_deleted_for_a_spec_that_is_not_whole(scene: Scene) -> None:
    assert asked(scene) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trouble": MISSING}, ("False", "KarpenterMissing", MISSING.message)),
        (
            {},
            (
                "False",
                "NodePoolNotReady",
                "Karpenter makes no nodes of NodePool job-a: there is no node class gpu",
            ),
        ),
    ],
    ids=["missing", "not ready"],
)
def test_a_job_says_why_karpenter_makes_no_nodes_and_when_that_is_over(
    changes: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    stuck = replace(MADE, not_ready="there is no node class gpu")
    scene = with_pools(waiting_job(), stuck, **changes)
    assert said(scene) == expected
    after = with_pools(scene.decided(), MADE)
    assert said(after) == ("True", "NodePoolsMade", "Karpenter can make nodes for the job's pools")
    over = with_pools(scene.decided().status(phase=Phase.FAILED))
    assert said(over) == ("False", "Finished", "The job has finished, and needs no NodePools")


def test_a_node_pool_that_is_no_longer_wanted_is_no_trouble() -> None:
    assert said(with_pools(training_job(), MADE, replace(OLD, not_ready="gone"))) is None
