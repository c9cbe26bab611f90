"""The control API's address reaches the pods that run."""

from __future__ import annotations

from operator_world import KEY, CrashingCluster, World, job
from spottrain_api.contract.names import ANNOTATION_CONTROL_CA, ANNOTATION_CONTROL_URL
from spottrain_operator.kube.errors import ForbiddenError
from spottrain_operator.kube.resources import PODS
from spottrain_operator.objects.control_address import ControlAddress
from world.faults import Fault

MOVED = ControlAddress(url="https://control:9443", ca="OLD\nNEW")


async def started(cluster: CrashingCluster) -> World:
    cluster.put_job(job())
    world = World(cluster)
    for _ in range(5):
        await world.turn()
    assert len(cluster.pods) == 3
    return world


def addresses(world: World) -> set[tuple[str | None, str | None]]:
    pods = world.cluster.pods.values()
    found = [pod["metadata"].get("annotations", {}) for pod in pods]
    return {(each.get(ANNOTATION_CONTROL_URL), each.get(ANNOTATION_CONTROL_CA)) for each in found}


async def test_a_new_port_and_a_new_authority_reach_pods_that_run() -> None:
    world = await started(CrashingCluster())
    assert addresses(world) == {("https://control:8443", "CA")}
    uids = {pod["metadata"]["uid"] for pod in world.cluster.pods.values()}
    world.control = MOVED
    await world.turn()
    assert addresses(world) == {("https://control:9443", "OLD\nNEW")}
    assert {pod["metadata"]["uid"] for pod in world.cluster.pods.values()} == uids
    writes = world.cluster.num_writes - world.cluster.num_status_writes
    await world.turn()
    assert world.cluster.num_writes - world.cluster.num_status_writes == writes, "once is enough"


async def test_a_new_operator_reaches_the_pods_of_the_old_one() -> None:
    world = await started(CrashingCluster())
    world.control = MOVED
    world.start_operator()
    await world.turn()
    assert addresses(world) == {("https://control:9443", "OLD\nNEW")}


async def test_a_job_of_a_newer_release_hears_of_it_too() -> None:
    world = await started(CrashingCluster())
    stored = world.cluster.jobs[KEY]
    world.cluster.put_job(stored | {"spec": stored["spec"] | {"colour": "red", "strategy": "telepathy"}})
    world.control = MOVED
    world.start_operator()
    await world.turn()
    assert addresses(world) == {("https://control:9443", "OLD\nNEW")}


async def test_a_pod_that_has_lost_the_annotations_gets_them_again() -> None:
    world = await started(CrashingCluster())
    for pod in world.cluster.pods.values():
        pod["metadata"]["annotations"] = {}
    await world.turn()
    assert addresses(world) == {("https://control:8443", "CA")}


async def test_an_operator_that_may_not_patch_goes_on() -> None:
    cluster = CrashingCluster()
    cluster.before.append(Fault(error=ForbiddenError("may not patch pods"), verbs=("patch",), resource=PODS))
    world = await started(cluster)
    world.control = MOVED
    await world.until_finished()
    assert world.num_crashes == 0
