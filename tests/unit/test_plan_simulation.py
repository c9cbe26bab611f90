"""Whole lives of a job, with disturbances from a seed: it always ends Succeeded, and holds nothing then."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import World, spec_of
from spottrain_api.contract import CapacityType
from spottrain_api.v1alpha1 import Phase

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
DISTURBED_SECONDS = 160.0


def world_of(seed: int, **options: object) -> World:
    """Two on-demand and four spot nodes, and a job that takes about 150 s undisturbed."""
    world = World(spec_of(), seed=seed, total_steps=240, **options)  # type: ignore[arg-type]
    for capacity_type in (ON_DEMAND, ON_DEMAND, SPOT, SPOT, SPOT, SPOT):
        world.add_node(capacity_type)
    return world


def disturb(world: World, kinds: list[str], num: int = 8) -> None:
    """`num` disturbances at random moments; then capacity comes back, and the job is left to end."""
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
    if kind == "notice":
        lead = rng.choice([15.0, 30.0, 120.0])
        for node in some:
            world.preempt(node, lead)
    elif kind == "short-notice":
        for node in some:
            world.preempt(node, rng.uniform(0.0, 8.0))
    elif kind == "kill":
        for node in some:
            world.kill(node)
    elif kind == "cancel":
        for node in alive:
            world.cancel(node)
    elif kind == "capacity":
        world.add_node(rng.choice([SPOT, SPOT, ON_DEMAND]))
    elif kind == "operator":
        world.stop_operator(rng.choice([2.0, 10.0, 90.0]))
    elif kind == "agent":
        world.restart_agent(rng.choice(list(world.pods.values())))
    elif kind == "script":
        generation = world.status.generation
        world.fail_next_step = generation.number if generation is not None else None


def assert_ended_well(world: World) -> None:
    status = world.status
    assert not world.problems, world.story()
    assert status.phase is Phase.SUCCEEDED, f"{status.phase} {status.message}\n{world.story()}"
    world.run(120)
    assert not world.pods, f"{world.pods}\n{world.story()}"
    assert world.head is not None
    assert world.head.step == world.total_steps
    assert all(t.seconds_without_step is not None for t in status.transitions), world.story()
    assert sum(t.steps_redone or 0 for t in status.transitions) == status.steps_redone


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_notices_never_redo_a_step(seed: int) -> None:
    world = world_of(seed)
    disturb(world, ["notice", "notice", "capacity", "cancel", "operator"])
    assert_ended_well(world)
    assert world.status.failures == 0, world.story()
    assert world.status.steps_redone == 0, world.story()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_preemptions_of_all_kinds_are_never_failures(seed: int) -> None:
    world = world_of(seed)
    disturb(world, ["notice", "short-notice", "kill", "capacity", "cancel", "operator"], num=12)
    assert_ended_well(world)
    assert world.status.failures == 0, world.story()
