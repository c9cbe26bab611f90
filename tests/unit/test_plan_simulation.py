"""Whole lives of a job, with disturbances from a seed.

The job always ends Succeeded, and holds nothing then.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from simulation.world import World
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.reports import CommitRef
from spottrain_api.v1alpha1.status import Phase
from spottrain_simulator.machines import Node
from world.jobs import spec_of

pytestmark = pytest.mark.no_cover

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
DISTURBED_SECONDS = 160.0


def world_of(seed: int, **options: object) -> World:
    """Two on-demand and four spot nodes, and a job.

    Undisturbed, the job takes about 150 s.
    """
    world = World(spec_of(), seed=seed, total_steps=240, **options)  # type: ignore[arg-type]
    for capacity_type in (ON_DEMAND, ON_DEMAND, SPOT, SPOT, SPOT, SPOT):
        world.add_node(capacity_type)
    return world


def disturb(world: World, kinds: list[str], num: int = 8) -> None:
    """Disturb the world `num` times at random moments, and wait for the job's end.

    Capacity comes back after the last disturbance.
    """
    rng = random.Random(world.seed + 1)
    moments = sorted(rng.uniform(1.0, DISTURBED_SECONDS) for _ in range(num))
    for moment in moments:
        world.run(max(0.0, moment - world.time))
        disturb_once(world, rng, rng.choice(kinds))
    world.run(max(0.0, DISTURBED_SECONDS - world.time))
    for capacity_type in (ON_DEMAND, SPOT, SPOT):
        world.add_node(capacity_type)
    world.run_until_finished(1500)


def disturb_once(world: World, rng: random.Random, kind: str) -> None:
    alive = [node for node in world.nodes.values() if node.alive]
    some = rng.sample(alive, min(len(alive), rng.randint(1, 3)))
    DISTURBANCES[kind](world, rng, some)


def preempt(world: World, some: list[Node], lead: float) -> None:
    for node in some:
        world.preempt(node, lead)


def kill(world: World, some: list[Node]) -> None:
    for node in some:
        world.kill(node)


def hint(world: World, some: list[Node]) -> None:
    for node in some:
        world.hint(node, stands=node.hint is None)


def cancel(world: World) -> None:
    for node in world.nodes.values():
        world.cancel(node)


def restart_an_agent(world: World, rng: random.Random) -> None:
    if world.pods:
        world.restart_agent(rng.choice(list(world.pods.values())))


def break_the_script(world: World) -> None:
    generation = world.status.generation
    world.training.fail_next_step = generation.number if generation is not None else None


DISTURBANCES: dict[str, Callable[[World, random.Random, list[Node]], object]] = {
    "notice": lambda world, rng, some: preempt(world, some, rng.choice([15.0, 30.0, 120.0])),
    "short-notice": lambda world, rng, some: preempt(world, some, rng.uniform(0.0, 8.0)),
    "kill": lambda world, _, some: kill(world, some),
    "cancel": lambda world, *_: cancel(world),
    "hint": lambda world, _, some: hint(world, some),
    "capacity": lambda world, rng, _: world.add_node(rng.choice([SPOT, SPOT, ON_DEMAND])),
    "operator": lambda world, rng, _: world.stop_operator(rng.choice([2.0, 10.0, 90.0])),
    "agent": lambda world, rng, _: restart_an_agent(world, rng),
    "revive": lambda world, *_: [world.revive(node) for node in list(world.nodes.values())],
    "script": lambda world, *_: break_the_script(world),
}
PREWARMS = {"onDemand": {"min": 2}, "spot": {"maxPrewarmed": 2}}
NOTICES = ["notice", "notice", "capacity", "cancel", "operator"]
PREEMPTIONS = ["notice", "short-notice", "kill", "capacity", "cancel", "operator", "revive"]
EVERYTHING = [*PREEMPTIONS, "agent", "script"]


def holds_nothing(world: World) -> bool:
    """A pod that has ended, or was found dead on a node that came back, stays for its log."""
    return all(pod.exit_code is not None for pod in world.pods.values())


def assert_ended_well(world: World) -> None:
    status = world.status
    assert not world.problems, world.story()
    assert status.phase is Phase.SUCCEEDED, f"{status.phase} {status.message}\n{world.story()}"
    world.run(120)
    assert holds_nothing(world), f"{world.pods}\n{world.story()}"
    assert world.training.head is not None
    assert world.training.head.step == world.total_steps
    assert all(t.seconds_without_step is not None for t in status.transitions), world.story()
    assert sum(t.steps_redone or 0 for t in status.transitions) == status.steps_redone


@settings(max_examples=6, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_notices_never_redo_a_step(seed: int) -> None:
    world = world_of(seed)
    disturb(world, NOTICES)
    assert_ended_well(world)
    assert world.status.failures == 0, world.story()
    assert world.status.steps_redone == 0, world.story()


@settings(max_examples=10, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6), crashes=st.sampled_from([0.0, 0.02]))
@example(seed=174571, crashes=0.0)  # a pod without a node is deleted in the pass that would report it
@example(seed=724190, crashes=0.0)  # the job succeeds while nodes with its pods are away, and they come back
def test_preemptions_of_all_kinds_are_never_failures(seed: int, crashes: float) -> None:
    world = world_of(seed, crashes=crashes)
    disturb(world, PREEMPTIONS, num=12)
    assert_ended_well(world)
    assert world.status.failures == 0, world.story()


@settings(max_examples=6, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6), crashes=st.sampled_from([0.0, 0.02]))
def test_failures_and_preemptions_together_end_well(seed: int, crashes: float) -> None:
    world = world_of(seed, crashes=crashes)
    world.edit(runPolicy={"failureBudget": 50})
    disturb(world, EVERYTHING, num=12)
    assert_ended_well(world)


@settings(max_examples=6, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_peers_that_hang_and_nodes_that_stay_open_change_nothing(seed: int) -> None:
    world = world_of(seed, peers_hang=True, taints=False)
    disturb(world, PREEMPTIONS, num=12)
    assert_ended_well(world)
    assert world.status.failures == 0, world.story()


@settings(max_examples=6, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6), crashes=st.sampled_from([0.0, 0.02]))
def test_hints_among_preemptions_of_all_kinds_end_well(seed: int, crashes: float) -> None:
    world = world_of(seed, crashes=crashes)
    world.edit(capacity=PREWARMS)
    world.add_node(SPOT)
    disturb(world, [*PREEMPTIONS, "hint", "hint", "hint"], num=16)
    assert_ended_well(world)
    assert world.status.failures == 0, world.story()


def test_a_hint_that_comes_and_goes_ends_no_generation_and_creates_few_pods() -> None:
    world = World(spec_of(capacity=PREWARMS), seed=12, total_steps=10**6)
    for capacity_type in (ON_DEMAND, ON_DEMAND, SPOT, SPOT, SPOT, SPOT, SPOT, SPOT):
        world.add_node(capacity_type)
    world.run(60)
    for _ in range(7):
        world.hint(world.nodes["spot-4"])
        world.run(60)
        world.hint(world.nodes["spot-4"], stands=False)
        world.run(60)
    assert len(world.created) == 6 + 2, world.story()  # at 1 and at 13 minutes
    assert world.status.generation is not None
    assert world.status.generation.number == 1
    assert not world.problems


def test_a_notice_after_a_hint_finds_a_pod_that_is_up() -> None:
    world = World(spec_of(capacity=PREWARMS), seed=13, total_steps=10**6)
    for capacity_type in (ON_DEMAND, ON_DEMAND, SPOT, SPOT, SPOT, SPOT, SPOT):
        world.add_node(capacity_type)
    world.run(60)
    world.hint(world.nodes["spot-4"])
    world.run(60)
    world.preempt(world.nodes["spot-4"], 120)
    world.run(15)
    assert world.status.members.world_size == 6, world.story()
    world.run(120)
    assert [t.reason for t in world.status.transitions] == ["Preempted"], world.story()
    assert len(world.created) == 7, world.story()
    assert not world.problems


def test_peers_that_hang_are_freed_within_seconds() -> None:
    world = world_of(11, peers_hang=True)
    world.run(40)
    world.kill(world.nodes["spot-4"])
    world.run(20)
    assert [t.reason for t in world.status.transitions] == ["NodeLost"]
    gap = world.status.transitions[0].seconds_without_step
    assert gap is not None
    assert gap < 13


def test_an_undisturbed_job_is_left_alone() -> None:
    world = world_of(1)
    world.run(60)
    created, number = len(world.created), world.status.generation and world.status.generation.number
    world.run(40)
    assert (
        (len(world.created), world.status.generation and world.status.generation.number)
        == (created, number)
        == (6, 1)
    )


def test_capacity_that_is_missing_for_long_causes_no_churn() -> None:
    world = World(spec_of(), seed=3, total_steps=10**6)
    for capacity_type in (ON_DEMAND, SPOT):
        world.add_node(capacity_type)
    world.run(60)
    created = len(world.created)
    world.run(200)
    assert len(world.created) == created == 6
    assert world.status.generation is not None
    assert world.status.generation.number == 1
    assert not world.problems


def test_spot_that_cannot_be_had_falls_back_to_on_demand_and_returns() -> None:
    fallback = {"afterSeconds": 30, "returnAfterSeconds": 120}
    capacity = {"onDemand": {"min": 1, "max": 4}, "fallback": fallback}
    world = World(spec_of(nodes={"min": 2, "max": 4}, capacity=capacity), seed=4, total_steps=10**6)
    for _ in range(4):
        world.add_node(ON_DEMAND)
    world.run(60)
    assert world.status.fallback_since is not None
    assert world.status.members.on_demand == 4, world.story()
    for _ in range(3):
        world.add_node(SPOT)
    world.run(200)
    assert (world.status.members.on_demand, world.status.members.spot) == (1, 3), world.story()
    assert len(world.pods) == 4, world.story()
    number = world.status.generation and world.status.generation.number
    world.run(300)
    assert world.status.generation is not None
    assert world.status.generation.number == number
    assert not world.problems


@pytest.mark.parametrize("crashes", [0.0, 0.02])
def test_a_pool_without_nodes_keeps_no_job_from_those_of_another(crashes: float) -> None:
    pools = [{"name": name, "capacityType": "spot", "provider": "gke"} for name in ("a", "b", "c")]
    spec = spec_of(nodes={"min": 4, "max": 4}, capacity={"pools": pools})
    world = World(spec, seed=5, total_steps=10**6, crashes=crashes)
    for _ in range(4):
        world.add_node(SPOT, "c")
    world.run(280)
    assert world.status.phase is Phase.PENDING
    assert len(world.created) == 4, world.story()
    world.run(100)
    assert world.status.members.spot == 4, world.story()
    assert len(world.created) == 7, world.story()
    assert not world.problems


def test_a_job_without_a_node_tries_its_pools_in_turn_and_calmly() -> None:
    pools = [{"name": name, "capacityType": "spot", "provider": "gke"} for name in ("a", "b", "c")]
    world = World(spec_of(nodes={"max": 1}, capacity={"pools": pools}), seed=6, total_steps=10**6)
    tried = []
    for _ in range(6):
        world.run(300)
        tried += [pod.pool for pod in world.pods.values()]
    assert tried == ["b", "a", "c", "b", "a", "c"]
    assert len(world.created) == 6, world.story()
    world.add_node(SPOT, "b")
    world.run(330)
    assert world.status.members.spot == 1, world.story()
    assert not world.problems


def test_suspend_drains_and_resume_continues_from_the_commit() -> None:
    world = world_of(5)
    world.run(40)
    world.edit(runPolicy={"suspend": True})
    world.run(20)
    assert world.status.phase is Phase.SUSPENDED
    assert not world.pods
    world.run(100)
    assert not world.pods
    world.edit(runPolicy={"suspend": False})
    world.run_until_finished(300)
    assert_ended_well(world)
    assert world.status.steps_redone == 0
    assert world.status.generation is not None
    assert world.status.generation.number == 2


def test_an_edited_template_replaces_the_pods_without_losing_a_step() -> None:
    world = world_of(6)
    world.run(40)
    old = set(world.pods)
    world.edit(image="train:2")
    world.run_until_finished(400)
    assert not old & set(world.pods)
    assert_ended_well(world)
    assert world.status.steps_redone == 0


def test_a_smaller_limit_drains_the_newest_spot_pods_away() -> None:
    world = world_of(7)
    world.run(40)
    world.edit(nodes={"min": 1, "max": 3})
    world.run(30)
    generation = world.status.generation
    assert generation is not None
    assert [m.pod for m in generation.members] == ["job-1", "job-2", "job-3"], world.story()
    assert len(world.pods) == 3
    world.run_until_finished(400)
    assert_ended_well(world)


def test_a_script_that_always_fails_is_not_tried_for_ever() -> None:
    world = world_of(8)
    while world.status.phase is not Phase.FAILED and world.time < 600:
        break_the_script(world)
        world.run(0.25)
    assert world.status.phase is Phase.FAILED
    assert "ValueError: x" in world.status.message
    world.run(30)
    assert holds_nothing(world)
    assert world.status.failures <= 4


def test_a_hang_is_stopped_and_resumed() -> None:
    world = world_of(9)
    world.edit(runPolicy={"hangTimeoutSeconds": 20})
    world.run(40)
    world.training.hang(1, world.now)
    world.run(40)
    assert world.status.failures == 1, world.story()
    assert [t.reason for t in world.status.transitions] == ["Hang"]
    world.run_until_finished(300)
    assert_ended_well(world)


def test_a_commit_that_an_earlier_job_left_is_not_fenced_out() -> None:
    world = world_of(10)
    world.training.head = CommitRef(generation=7, step=100, manifest="old", committed_at=world.now)
    world.run_until_finished(300)
    assert_ended_well(world)


@settings(max_examples=6, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6), moments=st.tuples(st.floats(1, 120), st.floats(0.5, 60)))
@example(seed=32, moments=(9.0, 26.0))  # the agents run a later generation than that of the backup
@example(seed=90, moments=(4.0, 1.0))  # some members of the backup's generation are gone
def test_a_status_that_goes_back_costs_no_commit(seed: int, moments: tuple[float, float]) -> None:
    """etcd is restored from a backup. Agents and commits know of later generations."""
    world = world_of(seed)
    world.edit(checkpoint={"uri": "s3://bucket/job", "peerReplicas": 1})  # settings that depend on all members
    rng = random.Random(seed)
    backed_up, age = moments
    disturb_until(world, rng, backed_up)
    world.back_up()
    disturb_until(world, rng, backed_up + age)
    assume(world.status.phase is not Phase.SUCCEEDED)  # the world's pods outlive the end of their agents
    newest, head = max(numbers_of(world), default=0), world.training.head
    world.restore_backup()
    known = any(pod.agent is not None and pod.agent.state.generation == newest for pod in world.pods.values())
    world.run_until_finished(1500)
    assert_ended_well(world)
    # If no pod knows of the newest generation, the fence of its commits tells, which counts.
    assert world.status.failures <= (not known), world.story()
    later = [number for number in numbers_of(world) if number > newest]
    assert world.training.head is not None
    assert world.training.head.generation in (newest, *later), world.story()
    assert head is None or (head.generation, head.step) <= (
        world.training.head.generation,
        world.training.head.step,
    )


def numbers_of(world: World) -> list[int]:
    return [ranks.number for ranks in world.training.of.values()]


def disturb_until(world: World, rng: random.Random, moment: float) -> None:
    while world.time < moment and world.status.phase is not Phase.SUCCEEDED:
        world.run(min(rng.uniform(5, 30), moment - world.time))
        disturb_once(world, rng, rng.choice(NOTICES))
        world.add_node(SPOT)
