"""PodsHealthy shows within one pass why a pod doesn't start.

It quotes the source.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scene import NOW, Change, Scene, at, pod, training_job, waiting_job
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.status import Condition, Phase
from spottrain_operator.core.model import PodView
from spottrain_operator.objects.observe import pod_view

NO_SECRET = 'secret "keys" not found'
NOT_UP = {"phase": "Pending", "ready": False, "ready_since": None, "container_started": False}
NO_KEYS = {"waiting_reason": "CreateContainerConfigError", "waiting_message": NO_SECRET}
TOO_LARGE = "0/6 nodes are available: 6 Insufficient nvidia.com/gpu. preemption: 0/6 nodes are available."


def from_kubelet(status: dict[str, Any]) -> PodView:
    """The fifth pod, as the API server has it."""
    labels = {
        "spottrain.dev/sequence": "5",
        "spottrain.dev/capacity-type": "spot",
        "spottrain.dev/template-hash": "t1",
    }
    created = {"creationTimestamp": at(98).isoformat()}
    return pod_view({"metadata": {"name": "job-5", "uid": "u5", "labels": labels} | created, "spec": {}} | status)


def waits(reason: str, message: str) -> PodView:
    state = {"waiting": {"reason": reason, "message": message}}
    return from_kubelet({"status": {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": state}]}})


def unplaced(message: str) -> PodView:
    since = {"lastTransitionTime": at(99).isoformat()}
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return from_kubelet({"status": {"phase": "Pending", "conditions": [scheduled | since]}})


def restarted(last: dict[str, Any]) -> PodView:
    """A node waits before it restarts the sidecar once more."""
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    proxy = {"name": "proxy", "restartCount": 2, "state": state, "lastState": {"terminated": last}}
    view = from_kubelet({"status": {"phase": "Pending", "initContainerStatuses": [proxy]}})
    return replace(view, node="n5", capacity_type=CapacityType.ON_DEMAND)


def condition(scene: Scene) -> Condition:
    found = scene.plan().status.condition("PodsHealthy")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("CreateContainerConfigError", NO_SECRET),
        ("ErrImagePull", "no such image"),
        ("ErrImageNeverPull", "the image is not present with pull policy of Never"),
        ("InvalidImageName", "couldn't parse image name"),
    ],
)
@pytest.mark.parametrize("begun", [False, True], ids=["a new job", "one that trains"])
def test_a_container_that_cannot_start(reason: str, message: str, begun: bool) -> None:
    largest = {"nodes": {"min": 2, "max": 5}}
    scene = training_job(**largest) if begun else replace(waiting_job(0, **largest), now=NOW)
    broken = scene.with_pod(waits(reason, message))
    said = condition(broken)
    assert (said.status, said.reason) == ("False", reason)
    assert said.message == f"pod job-5 can't start: {reason}: {message}"
    assert [event.message for event in broken.plan().events if event.reason == reason] == [said.message]
    assert broken.plan().status.phase is (Phase.RUNNING if begun else Phase.PENDING)
    again = broken.decided().without_pod(5).with_pod(waits("ImagePullBackOff", message))
    assert "ImagePullBackOff" not in [event.reason for event in again.plan().events], "it is told once"
    healed = broken.decided().without_pod(5).with_pod(pod(5))
    assert condition(healed).status == "True"


def test_a_sidecar_that_ends_again_and_again_keeps_the_trainer_waiting_and_its_log_is_named() -> None:
    failing = restarted({"exitCode": 3, "reason": "Error"})
    said = (
        "CrashLoopBackOff: container proxy has ended 3 times, last with exit code 3 (Error). "
        "See its log (kubectl logs -n default job-5 -c proxy)"
    )
    scene = training_job(nodes={"min": 2, "max": 5}).with_pod(failing)
    assert condition(scene).message == f"pod job-5 can't start: {said}"
    new = replace(waiting_job(0, nodes={"min": 1, "max": 2}), now=at(99)).with_pod(failing)
    assert new.plan().status.message.startswith(f"Waiting for pods: 0 of at least 1 ready; job-5: {said}. The job f")
    lacking = replace(waiting_job(0, nodes={"min": 2, "max": 2}), now=at(99)).with_pod(failing)
    assert f"Waiting for nodes: 0 of at least 2 ready; job-5: {said}" in lacking.plan().status.message


def test_a_sidecar_whose_command_does_not_exist_is_quoted_and_has_no_log() -> None:
    missing = restarted({"exitCode": 128, "reason": "StartError", "message": "exec: no such file"})
    scene = replace(waiting_job(0, nodes={"min": 1, "max": 2}), now=at(99)).with_pod(missing)
    assert scene.plan().status.message == (
        "Waiting for pods: 0 of at least 1 ready; job-5: CrashLoopBackOff: container proxy: exec: no such file. "
        "The job fails at 00:01:58 UTC if no pod starts before"
    )
    assert (
        scene.later(60)
        .plan()
        .status.message.startswith("pod job-5 can't start: CrashLoopBackOff: container proxy: exec: no such file")
    )


def test_a_pod_that_only_takes_its_time_is_no_trouble() -> None:
    assert condition(training_job().with_pod(waits("ContainerCreating", ""))).status == "True"


NO_SUCH_DEVICE = (
    "A pod asks for 1 nvidia.com/gpu, as processesPerNode is 1. If no {} node offers any, install its device plugin, "
    "add such a node, or {} capacity.onDemand.min. "
)
NO_DEVICE_SPOT = NO_SUCH_DEVICE.format("spot", "raise")
NO_DEVICE_OF_ON_DEMAND = NO_SUCH_DEVICE.format("on-demand", "lower")
TOO_LARGE_ADVICE = (
    "Lower processesPerNode or resources if no node is that large. Otherwise the pod waits until a node is free "
    "(kubectl describe node shows how full each is)"
)
CLAIM_ADVICE = "Create and bind the claim, or correct podTemplate.volumes"
ONE_A_NODE = "2 node(s) didn't match pod anti-affinity rules"
OTHER_TYPE = "4 node(s) didn't match Pod's node affinity/selector"
ON_DEMAND_ALONE = {"nodes": {"min": 1, "max": 5}, "capacity": {"spot": {"max": 0}}}


def test_a_pod_for_which_no_node_is_large_enough_says_what_to_change() -> None:
    scene = replace(waiting_job(0, nodes={"min": 1, "max": 5}), now=NOW).with_pod(unplaced(TOO_LARGE))
    said = condition(scene)
    assert (said.status, said.reason) == ("False", "Unschedulable")
    assert said.message == (
        "pod job-5 has no spot node: 0/6 nodes are available: 6 Insufficient nvidia.com/gpu. "
        f"{NO_DEVICE_SPOT}{TOO_LARGE_ADVICE}. The job has 0 of 3 spot nodes. On-demand nodes stand in from 00:06:39 "
        "UTC (capacity.fallback), if any fits"
    )
    assert (
        f"6 Insufficient nvidia.com/gpu. {NO_DEVICE_SPOT}{TOO_LARGE_ADVICE}. The job has"
        in scene.plan().status.message
    )


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (
            f"0/7 nodes are available: 1 Insufficient nvidia.com/gpu, {ONE_A_NODE}, {OTHER_TYPE}.",
            "A job runs one pod a node: add nodes, or lower nodes.min to train with fewer. Nodes with Insufficient "
            "are full with others' pods, or too small: kubectl describe node shows which",
        ),
        (
            f"0/7 nodes are available: {ONE_A_NODE}, {OTHER_TYPE}.",
            "A job runs one pod a node: add nodes, or lower nodes.min to train with fewer",
        ),
        (
            "0/7 nodes are available: 3 Insufficient cpu, 4 Insufficient nvidia.com/gpu.",
            f"{TOO_LARGE_ADVICE}. {NO_DEVICE_OF_ON_DEMAND.removesuffix('. ')}",
        ),
        (
            f"0/7 nodes are available: 3 Insufficient nvidia.com/gpu, {OTHER_TYPE}.",
            NO_DEVICE_OF_ON_DEMAND + TOO_LARGE_ADVICE,
        ),
        ("0/7 nodes are available: 3 Insufficient cpu.", TOO_LARGE_ADVICE),
        (
            "0/6 nodes are available: 3 node(s) didn't match pod affinity rules.",
            "The job's other pods are in a zone without such a node: add nodes there, or change podTemplate.sameZone",
        ),
        (
            f"0/4 nodes are available: {OTHER_TYPE}. no new claims to deallocate, preemption: 0/4 nodes are "
            "available: 4 Preemption is not helpful for scheduling.",
            "No on-demand node has the labels in the pod's nodeSelector and affinity: wait for such a node, add one, "
            "or correct capacity",
        ),
        ('persistentvolumeclaim "data" not found. not found.', CLAIM_ADVICE),
        ("0/6 nodes are available: pod has unbound immediate PersistentVolumeClaims.", CLAIM_ADVICE),
    ],
    ids=[
        "one pod a node, or full",
        "one pod a node",
        "too few processors",
        "used up",
        "no processors",
        "one zone",
        "no such node",
        "no claim",
        "unbound claim",
    ],
)
def test_the_advice_follows_the_last_check_that_a_node_failed(said: str, advice: str) -> None:
    """The advice doesn't mean nodes of the other capacity type.

    Nor does it mean small ones, such as those of the system.
    """
    lacking = replace(unplaced(said), capacity_type=CapacityType.ON_DEMAND)
    message = condition(replace(waiting_job(0, **ON_DEMAND_ALONE), now=NOW).with_pod(lacking)).message
    quoted, _, _ = said.partition(". n")
    node = "node" if advice == CLAIM_ADVICE else "on-demand node"
    assert message == f"pod job-5 has no {node}: {quoted.removesuffix('.')}. {advice}"


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        (
            {"processesPerNode": 16},
            "A pod asks for 16 nvidia.com/gpu, as processesPerNode is 16. If no on-demand node offers any, install "
            "its device plugin, add such a node, or lower capacity.onDemand.min",
        ),
        (
            {"processesPerNode": 16, "resources": {"limits": {"nvidia.com/gpu": 16}}},
            "If no on-demand node offers this device, correct its name in resources, install its device plugin, add "
            "such a node, or lower capacity.onDemand.min",
        ),
    ],
    ids=["by default", "in resources"],
)
def test_the_advice_names_where_the_job_asks_for_devices(spec: dict[str, Any], device: str) -> None:
    lacking = replace(unplaced(TOO_LARGE), capacity_type=CapacityType.ON_DEMAND)
    message = condition(replace(waiting_job(0, **ON_DEMAND_ALONE, **spec), now=NOW).with_pod(lacking)).message
    assert message.endswith(f"6 Insufficient nvidia.com/gpu. {device}. {TOO_LARGE_ADVICE}")


DEVICE = {"resources": {"limits": {"nvidia.com/gpu": 16}}}
PLUGIN = "install its device plugin"


@pytest.mark.parametrize("spec", [{}, DEVICE], ids=["by default", "in resources"])
def test_a_device_that_nodes_have_offered_needs_no_plugin(spec: dict[str, Any]) -> None:
    scene = training_job(**ON_DEMAND_ALONE, **spec)
    for sequence in range(1, 5):
        scene = scene.without_pod(sequence)
    lost = scene.with_pod(replace(unplaced(TOO_LARGE), capacity_type=CapacityType.ON_DEMAND))
    assert TOO_LARGE_ADVICE in lost.plan().status.message
    assert PLUGIN not in lost.plan().status.message
    assert PLUGIN in lost.generation(template_hash="another").plan().status.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.says(1, warm=False).says(2, warm=False), "0 of at least 2 ready; 2 pods loading torch"),
        (lambda s: s.says(1, warm=False), "1 of at least 2 ready; 1 pod loading torch"),
        (
            lambda s: s.forgets(1).says(2, warm=False),
            "0 of at least 2 ready; 1 pod loading torch; 1 pod not heard yet",
        ),
        (
            lambda s: s.pod(1, ready=False, ready_since=None).forgets(1),
            "1 of at least 2 ready; 1 pod creating the container",
        ),
        (
            lambda s: s.says(1, warm=False).pod(2, **NOT_UP, **NO_KEYS),
            f"0 of at least 2 ready; 1 pod loading torch; job-2: CreateContainerConfigError: {NO_SECRET}",
        ),
        (
            lambda s: s.pod(1, **NOT_UP, **NO_KEYS).pod(2, **NOT_UP, **NO_KEYS),
            f"0 of at least 2 ready; job-1: CreateContainerConfigError: {NO_SECRET}. The job fails at 00:00:20 UTC "
            "if no pod starts before",
        ),
    ],
    ids=["both", "one", "silent", "container", "secret", "secrets"],
)
def test_a_job_whose_pods_start_gets_no_advice_about_nodes(change: Change, said: str) -> None:
    """Also if further pods find no node."""
    scene = change(replace(waiting_job(2, nodes={"min": 2, "max": 5}), now=at(5)).all_say())
    assert scene.with_pod(unplaced(TOO_LARGE)).plan().status.message == f"Waiting for pods: {said}"


INITIALIZING: dict[str, Any] = NOT_UP | {"container": "fetch", "initializing_since": at(3)}


def test_an_init_container_that_runs_is_named_with_its_log() -> None:
    scene = replace(waiting_job(3, nodes={"min": 3, "max": 3}), now=at(200)).all_say().says(1, warm=False)
    for sequence in (2, 3):
        scene = scene.pod(sequence, **INITIALIZING)
    assert scene.plan().status.message == (
        "Waiting for pods: 0 of at least 3 ready; 1 pod in an init container; 1 pod loading torch; job-2: its init "
        "container fetch has run since 00:00:03 UTC. See its log (kubectl logs -n default job-2 -c fetch)"
    )
    stuck = scene.pod(3, **NOT_UP, **NO_KEYS).plan().status.message
    assert "1 pod in an init container; 1 pod loading torch; job-3: CreateContainerConfigError: " in stuck


@pytest.mark.parametrize("begun", [False, True], ids=["a new job", "one that has trained"])
def test_an_init_container_that_fails_again_and_again_is_named_before_the_job_gives_up(begun: bool) -> None:
    failed: dict[str, Any] = {
        "phase": "Failed",
        "ready": False,
        "container": "fetch",
        "exit_code": 3,
        "exit_reason": "Error",
    }
    scene = training_job() if begun else replace(waiting_job(4), now=at(30)).all_say()
    for sequence in range(1, 5):
        scene = scene.without_pod(sequence)
    scene = scene.decided().later(30) if begun else scene
    for sequence in (5, 6):
        scene = scene.with_pod(replace(pod(sequence), **failed))
    status = scene.plan().status
    assert status.phase is (Phase.RECOVERING if begun else Phase.PENDING)
    assert (
        "2 pods ended before they could train; the last: container fetch of pod job-6 ended with exit code 3 "
        "(Error). See its log (kubectl logs -n default job-6 -c fetch)"
    ) in status.message


def test_an_init_container_without_its_command_is_quoted() -> None:
    ended = {"exitCode": 128, "reason": "StartError", "message": "exec: no such file"}
    entries = [{"name": "fetch", "state": {"terminated": ended}}]
    failed = from_kubelet({"status": {"phase": "Failed", "initContainerStatuses": entries}})
    scene = replace(waiting_job(0, nodes={"min": 1, "max": 1}), now=at(99)).with_pod(failed)
    said = "pod job-5 can't start: StartError: container fetch: exec: no such file"
    assert f"1 pod ended before it could train; the last: {said}" in scene.plan().status.message
    assert condition(scene).message == said


def test_a_job_with_too_few_nodes_gets_the_advice_although_a_pod_starts() -> None:
    scene = replace(waiting_job(1, nodes={"min": 2, "max": 5}), now=at(5)).all_say().says(1, warm=False)
    message = scene.with_pod(unplaced(TOO_LARGE)).plan().status.message
    assert message.startswith("Waiting for nodes: 0 of at least 2 ready; no node has room for 1 spot pod; job-5: ")


def test_a_job_that_trains_is_not_asked_to_lower_its_smallest_size() -> None:
    lacking = unplaced(f"0/7 nodes are available: {ONE_A_NODE}, {OTHER_TYPE}.")
    message = condition(training_job(nodes={"min": 2, "max": 5}).with_pod(lacking)).message
    assert message.endswith("Training continues on 4 nodes, and the pod joins it once a node is free")


def test_an_edited_image_that_cannot_be_pulled_does_not_end_a_job_that_has_trained() -> None:
    scene = training_job()
    for sequence in range(1, 5):
        scene = scene.without_pod(sequence)
    scene = replace(scene, observed=replace(scene.observed, template_hash="t2"))
    edited = replace(waits("ErrImagePull", "no such image"), template_hash="t2")
    scene = scene.decided().later(30).with_pod(edited).decided().later(60)
    status = scene.plan().status
    assert status.phase is Phase.RECOVERING
    assert "no such image" in status.message
    new = replace(waiting_job(0, nodes={"min": 1, "max": 5}), now=NOW).with_pod(
        waits("ErrImagePull", "no such image")
    )
    assert new.later(60).plan().status.phase is Phase.FAILED
