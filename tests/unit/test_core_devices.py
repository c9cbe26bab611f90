"""A node whose GPU fails: the job goes on without it, and a new job fails."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from scene import Scene, starting_job, training_job
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.reports import Failure, FailureReason
from spottrain_api.v1alpha1.status import Phase
from spottrain_operator.core.model import CreatePod, DeletePod

ECC = Failure(reason=FailureReason.DEVICE_FAILED, message="CUDA error: uncorrectable ECC error encountered")
PEER = Failure(reason=FailureReason.LOST_PEER, message="The rank lost another rank")


def broken(scene: Scene) -> Scene:
    """The fourth member's GPU has failed, and its peers have noticed."""
    for sequence in (1, 2, 3):
        scene = scene.says(sequence, phase=AgentPhase.FAILED, failure=PEER)
    return scene.says(4, phase=AgentPhase.FAILED, failure=ECC)


def test_a_device_that_fails_costs_its_node_and_no_failure() -> None:
    scene = broken(training_job())
    decided = scene.plan()
    assert "DeviceFailed" in [event.reason for event in decided.events]
    [avoided] = decided.status.avoided_nodes
    assert (avoided.name, avoided.until - scene.now) == ("n4", timedelta(hours=1))
    assert "job-4: CUDA error: uncorrectable ECC error" in avoided.message
    created = [action for action in decided.actions if isinstance(action, CreatePod)]
    assert [(action.name, action.avoided) for action in created] == [("job-5", ("n4",))]

    plan = scene.decided().later(6).plan()
    assert (plan.status.failures, plan.status.preemptions) == (0, 1)
    assert [action.name for action in plan.actions if isinstance(action, DeletePod)] == ["job-4"]


def test_the_node_is_tried_again_after_an_hour() -> None:
    scene = broken(training_job()).decided().later(6).decided()
    gone = scene.without_pod(4)
    created = [action for action in gone.plan().actions if isinstance(action, CreatePod)]
    assert all(action.avoided == ("n4",) for action in created)
    later = dataclasses.replace(gone, now=gone.now + timedelta(seconds=3601))
    assert all(action.avoided == () for action in later.plan().actions if isinstance(action, CreatePod))


def test_a_new_job_whose_device_fails_fails() -> None:
    plan = broken(starting_job()).plan()
    assert plan.status.phase is Phase.FAILED
    condition = plan.status.condition("Failed")
    assert condition is not None
    assert condition.reason == "DeviceFailed"
    assert plan.status.avoided_nodes == ()
