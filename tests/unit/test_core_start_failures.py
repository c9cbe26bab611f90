"""Truth tables of `plan` for pods that end, or wait, before they can train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scene import (
    ENDED,
    Change,
    Scene,
    at,
    notice,
    pod,
    training_job,
    waiting_job,
)
from spottrain_api.v1alpha1.status import Condition, Phase
from spottrain_operator.core.model import CreatePod, DeletePod, Plan, PodView


def test_an_image_that_cannot_be_pulled_ends_a_new_job() -> None:
    scene = waiting_job()
    for sequence in range(1, 5):
        broken = {"ready": False, "container_started": False, "phase": "Pending"}
        scene = scene.pod(sequence, **broken, waiting_reason="ErrImagePull", waiting_message="no such image")
        scene = scene.forgets(sequence)
    status = scene.plan().status
    assert status.phase is Phase.FAILED
    assert "no such image" in status.message


CREATING = {"phase": "Pending", "ready": False, "ready_since": None, "container_started": False}
PULLS = CREATING | {"waiting_reason": "ContainerCreating"}
NO_PULL = CREATING | {"waiting_reason": "ErrImagePull", "waiting_message": "unexpected EOF"}
NO_START = CREATING | {
    "phase": "Failed",
    "exit_code": 128,
    "exit_reason": "StartError",
    "waiting_reason": "StartError",
}


@pytest.mark.parametrize("error", [NO_PULL, NO_START], ids=["image", "start"])
def test_a_new_job_waits_as_long_as_one_of_its_pods_may_start(error: dict[str, Any]) -> None:
    scene = waiting_job()
    for sequence in range(1, 5):
        scene = scene.pod(sequence, **PULLS).forgets(sequence)
    one = scene.pod(4, **error)
    assert (one.plan().status.phase, "The job fails" in one.plan().status.message) == (Phase.PENDING, False)
    for sequence in range(1, 4):
        scene = scene.pod(sequence, **error)
    assert scene.pod(4, **error).plan().status.phase is Phase.FAILED
    assert scene.pod(4, **PULLS).node(4, ready=False).plan().status.phase is Phase.FAILED, "its node is gone"
    assert scene.pod(4, **PULLS, node=None).plan().status.phase is Phase.FAILED, "it has no node"


def test_a_new_job_is_patient_from_the_first_error_on() -> None:
    """Its node may have pulled the image for minutes before."""
    scene = waiting_job(1).forgets(1).pod(1, **NO_PULL, waiting_since=at(90))
    status = scene.plan().status
    assert status.phase is Phase.PENDING
    assert "The job fails at 00:01:50 UTC if no pod starts before" in status.message
    assert replace(scene, now=at(111)).plan().status.phase is Phase.FAILED


def test_a_pod_that_cannot_start_is_replaced_long_after_its_first_error() -> None:
    scene = replace(training_job(), now=at(400)).with_pod(pod(5, **NO_PULL, waiting_since=at(390)))
    scene = scene.spec(nodes={"min": 2, "max": 5}).all_say()
    assert scene.plan().actions == ()
    assert [type(action) for action in replace(scene, now=at(700)).all_say().plan().actions] == [DeletePod, CreatePod]


MISSING = 'secret "keys" not found'


WAITS = {"ready": False, "container_started": False, "waiting_reason": "FailedMount"}


@pytest.mark.parametrize(
    ("said", "seconds", "fails", "until"),
    [(MISSING, 10, False, "00:00:20"), (MISSING, 25, True, ""), ("waiting for attachment", 25, False, "00:05:00")],
)
def test_a_volume_that_is_not_there_ends_a_new_job_and_a_slow_one_does_not(
    said: str, seconds: float, fails: bool, until: str
) -> None:
    scene = replace(waiting_job(1), now=at(seconds)).pod(1, **WAITS, waiting_message=f"{said}.")
    status = scene.plan().status
    assert (status.phase is Phase.FAILED) == fails
    assert said in status.message
    told = f"{said}. The job fails at {until} UTC if no pod starts before"
    assert (told in status.message) == (not fails)


def test_what_one_pod_cannot_mount_the_others_cannot_either() -> None:
    """Only its events are read."""
    scene = waiting_job(3)
    for sequence in range(1, 4):
        scene = scene.pod(sequence, **PULLS).forgets(sequence)
    missing = scene.pod(1, **WAITS, waiting_message=MISSING)
    assert missing.plan().status.phase is Phase.FAILED
    assert missing.pod(2, initializing_since=at(5)).plan().status.phase is Phase.PENDING


def test_containers_that_end_before_they_train_are_not_replaced_for_ever() -> None:
    scene = waiting_job()
    for sequence in range(1, 4):
        ended = {"phase": "Failed", "ready": False, "exit_code": 1, "exit_reason": "Error"}
        scene = scene.pod(sequence, **ended).forgets(sequence)
    scene = scene.without_pod(4)
    assert scene.plan().status.phase is Phase.FAILED


def pause_after(*created: float) -> float:
    """Seconds from the last of these ends before training to the next pod."""
    last_try = sum(max(created) - seconds <= 5 for seconds in created)
    scene = training_job(nodes={"min": 1, "max": last_try}).generation(
        state=ENDED, ended_at=at(100), reason="NodeLost"
    )
    for sequence in range(1, 5):
        scene = scene.without_pod(sequence)
    for sequence, seconds in enumerate(created, start=5):
        ended = {"phase": "Failed", "ready": False, "exit_code": 1, "exit_reason": "Error"}
        scene = scene.with_pod(pod(sequence, created_at=at(seconds), **ended))
    last = max(created)
    tried = (each for each in range(600) if any_created(replace(scene, now=at(last + each))))
    return next(tried)


def any_created(scene: Scene) -> bool:
    return any(isinstance(action, CreatePod) for action in scene.plan().actions)


@pytest.mark.parametrize(
    ("created", "pause"),
    [((110,), 10), ((110,) * 32, 10), ((110, 112, 117), 10), ((110, 120), 20), ((110, 110, 120, 121, 141), 40)],
    ids=["one", "many at once", "many in a row", "two tries", "three tries"],
)
def test_pods_that_were_created_together_and_end_early_count_as_one_try(
    created: tuple[float, ...], pause: float
) -> None:
    assert pause_after(*created) == pause


def test_pods_that_end_early_are_known_by_their_uids(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare all that is known of the pods takes seconds in a large job."""
    scene = training_job()
    for sequence in range(5, 9):
        ended = {"phase": "Failed", "ready": False, "exit_code": 1, "exit_reason": "Error"}
        scene = scene.with_pod(pod(sequence, created_at=at(50), **ended))
    compared: list[object] = []

    def equal(one: object, other: object) -> bool:
        compared.append(one)
        return one is other

    monkeypatch.setattr(PodView, "__eq__", equal)
    scene.plan()
    assert compared == []


@pytest.mark.parametrize(
    ("container", "code", "reason", "said"),
    [
        ("trainer", 1, "Error", "the container of pod job-3 ended with exit code 1 (Error)"),
        ("fetch", 3, "Error", "container fetch of pod job-3 ended with exit code 3 (Error)"),
        (
            "fetch",
            137,
            "OOMKilled",
            "container fetch of pod job-3 ran out of memory (OOMKilled); raise its resources.limits.memory",
        ),
    ],
)
def test_a_job_whose_containers_end_too_early_says_how_to_see_the_log(
    container: str, code: int, reason: str, said: str
) -> None:
    scene = waiting_job().without_pod(4)
    for sequence in range(1, 4):
        ended = {"phase": "Failed", "ready": False, "exit_code": code, "exit_reason": reason, "container": container}
        scene = scene.pod(sequence, **ended).forgets(sequence)
    log = f"See its log (kubectl logs -n {scene.observed.job.namespace} job-3 -c {container})"
    assert f"3 pods ended before they could train; the last: {said}. {log}" in scene.plan().status.message


NO_AGENT = "python: No module named spottrain_agent"


LACKING = "The image lacks spottrain's agent: build it on the spottrain-trainer image, or install spottrain "


@pytest.mark.parametrize(
    ("said", "is_lacking"),
    [
        (NO_AGENT, True),
        ("ModuleNotFoundError: No module named 'spottrain_api'", True),
        ("ModuleNotFoundError: No module named 'numpy'.", False),
    ],
)
def test_a_container_that_ends_too_early_is_quoted_and_an_image_without_the_agent_named(
    said: str, is_lacking: bool
) -> None:
    scene = waiting_job().without_pod(4)
    for sequence in range(1, 4):
        ended = {"phase": "Failed", "ready": False, "exit_code": 1, "exit_reason": "Error", "exit_message": said}
        scene = scene.pod(sequence, **ended).forgets(sequence)
    message = scene.plan().status.message
    quote = f"pod job-3 ended with exit code 1 (Error): {said.removesuffix('.')}. "
    advice = f"{LACKING}there, with its extra 'trainer'. " if is_lacking else ""
    assert f"{quote}{advice}See its log (kubectl logs" in message


@pytest.mark.parametrize(
    ("container", "said", "is_lacking"),
    [
        ("trainer", 'runc create failed: exec: "python": executable file not found in $PATH: unknown', True),
        ("trainer", "crun: executable file `python` not found in $PATH: No such file or directory", True),
        ("trainer", "runc create failed: no space left on device", False),
        ("fetch", 'container fetch: exec: "python": executable file not found in $PATH', False),
    ],
)
def test_an_image_without_python_is_named(container: str, said: str, is_lacking: bool) -> None:
    failed = {"phase": "Failed", "ready": False, "exit_code": 128, "exit_reason": "StartError"}
    waits = {"waiting_reason": "StartError", "waiting_message": said, "container": container}
    scene = waiting_job().without_pod(4)
    for sequence in range(1, 4):
        scene = scene.pod(sequence, **failed, **waits).forgets(sequence)
    message = scene.plan().status.message
    assert f"pod job-3 can't start: StartError: {said}" in message
    assert (LACKING in message) == is_lacking


REJECTED: dict[str, Any] = {
    "phase": "Failed",
    "ready": False,
    "ready_since": None,
    "container_started": False,
    "kubelet_reason": "UnexpectedAdmissionError",
    "kubelet_message": "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu.",
}
QUOTED = (
    "the kubelet of node n{0} ended pod job-{0}: UnexpectedAdmissionError: Allocate failed due to requested number"
)


def test_a_new_job_whose_pods_are_rejected_by_a_kubelet_waits_and_says_its_words() -> None:
    scene = waiting_job(3, nodes={"min": 1, "max": 1})
    for sequence in range(1, 4):
        scene = scene.pod(sequence, **REJECTED).forgets(sequence)
    status = scene.plan().status
    assert status.phase is Phase.PENDING, "another node, or the same one later, may take the next"
    assert f"3 pods ended before they could train; the last: {QUOTED.format(3)}" in status.message
    assert "kubectl logs" not in status.message, "no container has run"


def num_created(plan: Plan) -> int:
    return sum(isinstance(action, CreatePod) for action in plan.actions)


def healthy(plan: Plan) -> Condition:
    found = plan.status.condition("PodsHealthy")
    assert found is not None
    return found


def rejected(scene: Scene, sequence: int) -> Scene:
    """A new pod on a node whose kubelet rejects it."""
    created_at = {"created_at": scene.now, "scheduled_at": scene.now}
    return scene.with_pod(pod(sequence, **REJECTED | created_at))


def test_a_job_that_trains_replaces_rejected_pods_ever_more_slowly_and_says_why() -> None:
    scene = training_job(nodes={"min": 2, "max": 5})
    for number, pause in enumerate((10, 20, 40, 80), start=1):
        scene = rejected(scene, 4 + number)
        plan = scene.plan()
        assert (plan.status.phase, plan.actions) == (Phase.RUNNING, ())
        assert (healthy(plan).status, healthy(plan).reason) == ("False", "PodsEndEarly")
        assert QUOTED.format(4 + number) in healthy(plan).message
        assert [event.reason for event in plan.events] == (["PodsEndEarly"] if number == 1 else [])
        scene = scene.decided()
        assert num_created(scene.later(pause - 1).plan()) == 0
        scene = scene.later(pause)
        assert num_created(scene.plan()) == 1
        assert healthy(scene.plan()).status == "False", "the next one may be rejected, too"
        scene = scene.decided()
    up = scene.with_pod(pod(9)).says(9)
    assert healthy(up.plan()).status == "True"


@pytest.mark.parametrize(
    "lose",
    [lambda s: s.node(5, ready=False), lambda s: s.node(5, notice=notice(5)), lambda s: s.pod(5, disruption="x")],
    ids=["not ready", "noticed", "disrupted"],
)
def test_a_pod_that_a_node_takes_along_is_replaced_at_once(lose: Change) -> None:
    scene = lose(rejected(training_job(nodes={"min": 2, "max": 5}), 5))
    assert num_created(scene.plan()) == 1
    assert healthy(scene.plan()).reason != "PodsEndEarly"


def test_a_pod_that_has_trained_is_no_pod_that_ends_early() -> None:
    scene = training_job(nodes={"min": 2, "max": 5}).with_pod(pod(5, phase="Failed", exit_code=137))
    assert healthy(scene.plan()).reason == "PodsEndEarly"
    assert num_created(scene.says(5, generation=1).plan()) == 1
