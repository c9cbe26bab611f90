"""Jobs that each hold a part of the nodes that they need."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from scene import Scene, waiting_job
from simulation.world import World
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.status import FINISHED_PHASES, GenerationState, HoldOff, Phase
from spottrain_operator.core.model import DeletePod, Refusal
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.objects.waiting_jobs import WaitingJobs
from timing_scenes import ago, too_few_since
from world.jobs import spec_of

PATIENCE = DEFAULT_TIMING.gang_patience


def beside_younger(num: int, scene: Scene) -> Scene:
    return replace(scene, observed=replace(scene.observed, num_younger_waiting=num))


def test_a_job_that_gives_its_nodes_back_says_so_deletes_its_pods_and_asks_for_none() -> None:
    plan = too_few_since(PATIENCE).plan()
    assert {action.name for action in plan.actions if isinstance(action, DeletePod)} == {"job-1", "job-2"}
    assert len(plan.actions) == 2
    [event] = [event for event in plan.events if event.reason == "NodesGivenBack"]
    assert event.message == (
        "The job has 1 of at least 2 nodes, and no other has come for 900 s. It gives them back for jobs that can "
        "start with them, and asks again at 00:06:40 UTC"
    )
    assert plan.status.message == (
        "Waiting for nodes: fewer than nodes.min (2) came, and the job gave them back for others. It asks again at "
        "00:06:40 UTC. To start with fewer, lower nodes.min"
    )


@pytest.mark.parametrize(("num_younger", "turns"), [(0, 1), (1, 2), (7, 8), (100, 8)])
def test_an_older_job_waits_longer(num_younger: int, turns: int) -> None:
    def gives_back(seconds: float) -> bool:
        return beside_younger(num_younger, too_few_since(seconds)).plan().status.hold_off is not None

    assert not gives_back(turns * PATIENCE - 1)
    assert gives_back(turns * PATIENCE)


KEEPS: dict[str, Scene] = {
    "it has enough nodes": waiting_job(2).pod(1, scheduled_at=ago(10**6)).pod(2, scheduled_at=ago(10**6)),
    "it has none": too_few_since(10**6).without_pod(1),
    "its other pod waits for a claim": too_few_since(10**6).pod(
        2, waiting_message='persistentvolumeclaim "data" not found. not found'
    ),
    "it is suspended": too_few_since(10**6).spec(nodes={"min": 2, "max": 4}, runPolicy={"suspend": True}),
}


@pytest.mark.parametrize("scene", KEEPS.values(), ids=KEEPS)
def test_a_job_has_nothing_to_give_back(scene: Scene) -> None:
    assert scene.plan().status.hold_off is None


def refused_beside(seconds: float, **changes: Any) -> Scene:
    """One of two nodes that the job needs, since then, and a pod that can't be created."""
    scene = waiting_job(2).pod(1, scheduled_at=ago(seconds)).without_pod(2)
    refusal = {"message": "exceeded quota: compute", "since": ago(seconds), "tried_at": ago(1), "lasting": False}
    refused = Refusal(metadata_generation=scene.observed.job.metadata_generation, **refusal | changes)
    return replace(scene, observed=replace(scene.observed, refusal=refused))


def test_a_quota_of_which_others_hold_the_rest_is_waited_for_as_a_node_is() -> None:
    assert refused_beside(PATIENCE, by_quota=True).plan().status.hold_off is not None
    assert refused_beside(PATIENCE - 1, by_quota=True).plan().status.hold_off is None
    assert refused_beside(10**6, by_quota=False).plan().status.hold_off is None, "somebody has to mend that"


def test_a_job_that_starts_has_not_given_back_nodes_lately() -> None:
    """Its next pause is short again."""
    scene = waiting_job(2).status(hold_off=HoldOff(until=ago(1), times=5)).decided()
    generation = scene.observed.job.status.generation
    assert generation is not None
    assert generation.state is GenerationState.ACTIVE
    assert scene.plan().status.hold_off is None


def jobs_of(needed: list[int], seed: int = 1) -> list[World]:
    """Jobs that need so many spot nodes each, the oldest first. Their patience is short."""
    timing = replace(DEFAULT_TIMING, gang_patience=40.0, gang_pause=15.0, gang_max_pause=120.0)
    worlds = [
        World(
            spec_of(nodes={"min": least, "max": least}, capacity={"fallback": {"policy": "None"}}),
            seed=seed + number,
            total_steps=60,
            timing=timing,
            num_nodes=100 * number,  # names of nodes are those of its own
        )
        for number, least in enumerate(needed)
    ]
    for world in worlds:
        world.rivals = [other for other in worlds if other is not world]
    return worlds


def share_nodes(worlds: list[World]) -> None:
    shared = {name: node for world in worlds for name, node in world.nodes.items()}
    for world in worlds:
        world.nodes = shared


def run(worlds: list[World], seconds: float) -> None:
    """Time passes for all jobs, and each knows how many younger ones wait."""
    end = worlds[0].time + seconds
    while worlds[0].time < end and not all(has_ended(world) for world in worlds):
        waiting = [world.status.phase in (Phase.PENDING, Phase.RECOVERING) for world in worlds]
        for number, world in enumerate(worlds):
            world.num_younger_waiting = sum(waiting[number + 1 :])
            world.tick()


def has_ended(world: World) -> bool:
    return world.status.phase in FINISHED_PHASES


def num_held(world: World) -> int:
    return sum(each.node is not None and each.exit_code is None for each in world.pods.values())


def story_of(worlds: list[World]) -> str:
    return "\n\n".join(world.story() for world in worlds)


def test_two_jobs_that_each_hold_half_of_the_nodes_both_end_the_older_one_first() -> None:
    older, younger = worlds = jobs_of([4, 4])
    for world in worlds:
        for _ in range(3):
            world.add_node(CapacityType.SPOT)
    older.run(10)  # it would lose patience first, if both had the same
    run(worlds, 10)
    assert [num_held(each) for each in worlds] == [3, 3]
    share_nodes(worlds)
    run(worlds, 50)
    assert older.status.phase is Phase.RUNNING, story_of(worlds)
    assert num_held(younger) <= 2
    run(worlds, 600)
    assert [each.status.phase for each in worlds] == [Phase.SUCCEEDED] * 2, story_of(worlds)
    assert not any("NodesGivenBack" in event for event in older.events), older.story()
    assert [each.problems for each in worlds] == [[], []]
    assert [each.status.hold_off for each in worlds] == [None, None]


@pytest.mark.parametrize("crashes", [0.0, 0.01])
@pytest.mark.parametrize("seed", range(4))
def test_jobs_never_wait_for_each_other_for_ever(seed: int, crashes: float) -> None:
    """However few nodes there are beyond those of the largest job, and whoever gets which first."""
    rng = random.Random(seed)
    needed = [rng.randint(2, 6) for _ in range(rng.randint(2, 3))]
    spare = rng.randint(0, 2)
    worlds = jobs_of(needed, seed)
    for world in worlds:
        world.crashes = crashes
    for number in range(max(needed) + spare):
        worlds[(seed + number) % len(worlds)].add_node(CapacityType.SPOT)
    run(worlds, 10)
    share_nodes(worlds)
    run(worlds, 2000)
    assert all(each.status.phase is Phase.SUCCEEDED for each in worlds), story_of(worlds)
    assert not any(each.problems for each in worlds), story_of(worlds)


def test_waiting_jobs_are_counted_by_age() -> None:
    index = WaitingJobs()
    jobs = [
        replace(waiting_job(0).observed.job, name=f"job-{number}", uid=f"u{number}", created_at=ago(100 - number))
        for number in range(3)
    ]
    for job in jobs:
        index.note(job)
    assert [index.num_younger(job) for job in jobs] == [2, 1, 0]
    status = jobs[2].status
    index.note(replace(jobs[2], status=status.model_copy(update={"phase": Phase.RUNNING})))
    assert [index.num_younger(job) for job in jobs] == [1, 0, 0]
    index.note(jobs[2])
    index.note(jobs[2])
    index.forget(JobKey.of_view(jobs[1]))
    index.note(replace(jobs[0], deleting=True))
    assert [index.num_younger(job) for job in jobs] == [1, 1, 0]
