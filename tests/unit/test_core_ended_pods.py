"""Truth tables of `plan` for pods of members that have ended."""

from __future__ import annotations

from typing import Any

import pytest

from scene import (
    Change,
    Scene,
    failed,
    notice,
    training_job,
)
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.notices import NoticeKind
from spottrain_api.contract.reports import FailureReason
from spottrain_operator.core.model import DeletePod


def test_a_pod_that_ended_explains_the_failures_of_its_peers() -> None:
    """Such as one whose container was killed as a whole for its memory."""
    scene = failed(training_job(), FailureReason.LOST_PEER)
    killed = scene.says(4, phase=AgentPhase.RUNNING, failure=None).pod(
        4, phase="Failed", exit_code=137, exit_reason="OOMKilled"
    )
    [event] = [e for e in killed.decided().later(6).plan().events if e.reason == "Failure"]
    assert event.message.startswith("Generation 1 has ended: pod job-4 ")
    assert "OOMKilled" in event.message


SIGTERM = notice(4, source="sigterm", kind=NoticeKind.EVICT)
TOO_MUCH_DISK: dict[str, Any] = {
    "phase": "Failed",
    "exit_code": 137,
    "exit_reason": "Error",
    "kubelet_reason": "Evicted",
    "kubelet_message": "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi.",
}


def silent(scene: Scene) -> Scene:
    """Two members have lost the fourth, which is silent."""
    return (
        failed(scene, FailureReason.LOST_PEER)
        .says(3, phase=AgentPhase.RUNNING)
        .says(4, age=5, phase=AgentPhase.RUNNING)
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s, None),
        (lambda s: s.says(4, notices=(SIGTERM,)), "Preempted"),
        (silent, "NodeLost"),
    ],
    ids=["at once", "after its SIGTERM", "after a silence"],
)
def test_a_pod_that_is_evicted_for_its_own_use_of_disk_counts_as_a_failure(
    change: Change, reason: str | None
) -> None:
    scene = change(training_job()).decided()
    generation = scene.observed.job.status.generation
    assert generation is not None
    assert generation.reason == reason
    scene = scene.pod(4, **TOO_MUCH_DISK).decided().later(6)
    for sequence in (1, 2, 3):
        scene = scene.says(sequence, phase=AgentPhase.STOPPED)
    plan = scene.plan()
    said = (
        "the kubelet of node n4 ended pod job-4: Evicted: Pod ephemeral local storage usage exceeds the total limit "
        "of containers 10Gi"
    )
    assert (plan.status.transitions[-1].reason, plan.status.transitions[-1].message) == ("Failure", said)
    assert (plan.status.failures, plan.status.preemptions) == (1, 0)
    assert f"Generation 1 has ended: {said}" in [event.message for event in plan.events]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pod(4, disruption="TerminationByKubelet"),
        lambda s: s.node(4, ready=False),
        lambda s: s.node(4, notice=notice(4)),
        lambda s: s.pod(4, kubelet_reason="UnexpectedAdmissionError"),
    ],
    ids=["its node lacks disk", "its node is lost", "its node goes", "its kubelet restarted"],
)
def test_a_pod_that_a_kubelet_ends_for_its_node_counts_as_lost(change: Change) -> None:
    scene = change(training_job().pod(4, **TOO_MUCH_DISK)).decided().later(6)
    for sequence in (1, 2, 3):
        scene = scene.says(sequence, phase=AgentPhase.STOPPED)
    assert scene.plan().status.failures == 0
    assert scene.plan().status.preemptions == 1


@pytest.mark.parametrize(("lingers", "grace"), [(False, 0), (True, None)], ids=["alone", "beside another container"])
def test_a_pod_whose_trainer_has_ended_is_deleted_and_containers_that_run_have_their_grace(
    lingers: bool, grace: int | None
) -> None:
    ended = {"phase": "Failed", "exit_code": 137, "exit_reason": "OOMKilled", "lingers": lingers}
    scene = failed(training_job(), FailureReason.LOST_PEER).pod(4, **ended).decided().later(6)
    deleted = [action for action in scene.plan().actions if isinstance(action, DeletePod)]
    assert [(action.name, action.grace_seconds) for action in deleted] == [("job-4", grace)]


FOUND_DEAD = [
    {"exit_code": 255, "exit_reason": "Unknown"},
    {"exit_code": 128, "exit_reason": "Unknown"},
    {"exit_code": 137, "exit_reason": "ContainerStatusUnknown"},
]


def after_its_peers(scene: Scene) -> Scene:
    return failed(scene, FailureReason.LOST_PEER).says(4, phase=AgentPhase.RUNNING, failure=None)


@pytest.mark.parametrize("ended", FOUND_DEAD, ids=str)
@pytest.mark.parametrize("change", [lambda s: s, after_its_peers], ids=["at once", "after its peers"])
def test_a_container_that_its_kubelet_finds_dead_counts_as_lost(change: Change, ended: dict[str, Any]) -> None:
    """As after a reboot of the node, or a restart of its container runtime."""
    scene = change(training_job()).pod(4, phase="Failed", **ended).decided().later(6)
    for sequence in (1, 2, 3):
        scene = scene.says(sequence, phase=AgentPhase.STOPPED)
    plan = scene.plan()
    assert (plan.status.failures, plan.status.preemptions) == (0, 1)
