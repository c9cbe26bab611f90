"""A walk through every field of the spec of a job that trains.

Each field gets valid changes and invalid values, and finds the way back. The operator, its pods and its assignments
are real. Agents and the API server are in memory, and this API server refuses nothing, as one with a newer or a
broken CRD would. tests/integration/test_field_walk_on_cluster.py has a real one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from field_steps import Field, Step, fields
from field_values import BROKEN_RULES, INSTEAD, OTHER, spec_schema
from operator_world import KEY, CrashingCluster, World
from spottrain_api.contract.names import LABEL_TEMPLATE_HASH
from spottrain_api.settings.training import TrainingSettings
from spottrain_api.tolerant import dotted
from spottrain_api.v1alpha1.pod_template import Network
from spottrain_operator.objects.observe import job_view
from spottrain_operator.objects.pods import template_hash

pytestmark = pytest.mark.no_cover

MOST_TURNS = 60
TOTAL_STEPS = 100_000
# Enough for the operator to see what has changed, and for its agents to do as it says.
A_WHILE = 2
# Valid edits that end a job, as its user wishes.
ENDS_THE_JOB = {"runPolicy.activeDeadlineSeconds = 1"}
TOLD_TO_RANKS = [each.alias or name for name, each in TrainingSettings.model_fields.items()]


def manifest(spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"namespace": KEY.namespace, "name": KEY.name}, "spec": spec}


@dataclass
class Walk:
    """A job that trains while one field of its spec changes."""

    of: Field
    world: World = field(init=False)
    problems: list[str] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.world = World(CrashingCluster(), last_step=TOTAL_STEPS, allowed_networks=frozenset(Network))
        self.world.cluster.profiles["gpu"] = {"metadata": {"name": "gpu"}, "spec": {}}
        self.world.cluster.put_job(manifest(self.of.base))

    async def walk(self) -> None:
        """From the job's start to its end."""
        assert await self.until(self.trains), f"{self.of.name}: {self.world.status}"
        for step in self.of.valid:
            if step.name not in ENDS_THE_JOB:
                await self._take(step, self._follows)
        for step in self.of.refused:
            await self._take(step, self._trains_on)
        for step in (*self.of.breaking, *self.of.fixed):
            await self._take(step, self._loses_nothing)
        self.world.training.finish()
        if not await self.until(lambda: self.world.status["phase"] == "Succeeded"):
            self.problems.append(f"{self.of.name}: the job doesn't end: {self.world.status}")

    async def _take(self, step: Step, check: Callable[[Step], Awaitable[str]]) -> None:
        """A step, and the way back."""
        self.world.cluster.put_job(manifest(step.spec))
        problem = await check(step)
        self.world.cluster.put_job(manifest(self.of.base))
        if not await self.until(self.trains):
            problem = f"{problem} does not recover;"
        status = self.world.status
        if status["failures"] or status["stepsRedone"] or status["phase"] == "Failed":
            problem = f"{problem} is not left whole;"
        if self.world.condition("SpecNotUnderstood").get("status") == "True":
            problem = f"{problem} is still not understood;"
        if problem:
            self.problems.append(f"{step.name}: {problem} {status}")
        self.steps += 2

    async def until(self, condition: Callable[[], bool]) -> bool:
        for _ in range(MOST_TURNS):
            await self.world.turn()
            if condition():
                return True
        return False

    def trains(self) -> bool:
        """Whether pods and ranks of the stored spec train."""
        world, spec = self.world, job_view(self.world.cluster.jobs[KEY]).spec
        hashes = {pod["metadata"]["labels"][LABEL_TEMPLATE_HASH] for pod in world.cluster.pods.values()}
        training = [a for a in world.agents.values() if a.trains and a.state.generation == world.generation["number"]]
        told = training[0].assigned if training else None
        if told is None or world.generation["state"] != "Active" or hashes != {template_hash(spec)}:
            return False
        wanted = spec.to_dict()
        same = all(told.trainer.get(name) == wanted.get(name) for name in TOLD_TO_RANKS)
        return same and told.entrypoint == spec.entrypoint and told.processes_per_node == spec.processes_per_node

    def is_suspended(self) -> bool:
        """Whether it holds no pods, and has committed its newest step."""
        return (
            self.world.status["phase"] == "Suspended"
            and not self.world.cluster.pods
            and self.world.training.is_committed
        )

    async def _follows(self, step: Step) -> str:
        """It trains with the new value, or pauses."""
        number = self.world.generation["number"]
        suspended = step.spec.get("runPolicy", {}).get("suspend")
        if not await self.until(self.is_suspended if suspended else self.trains):
            return "is not followed;"
        of_policy = step.path[0] in ("runPolicy", "budget") and not suspended
        return "ends a generation;" if of_policy and self.world.generation["number"] != number else ""

    async def _trains_on(self, step: Step) -> str:
        """The generation trains on with all pods, and a condition names the field."""
        before, steps = self._undisturbed(), self.world.training.num_steps
        for _ in range(A_WHILE):
            await self.world.turn()
        after = self._undisturbed()
        if (after, self.world.training.num_steps) != (before, steps + A_WHILE):
            return f"disturbs: {before} -> {after};"
        condition = self.world.condition("SpecNotUnderstood")
        named = f"spec.{dotted(step.path)}" in condition.get("message", "")
        return "" if condition.get("status") == "True" and named else f"is not reported: {condition};"

    def _undisturbed(self) -> tuple[Any, ...]:
        """What stays if a change is refused."""
        return self.world.generation["number"], self.world.generation["state"], set(self.world.cluster.pods)

    async def _loses_nothing(self, step: Step) -> str:
        """Only the API server knows the rule. The operator takes the value for an edit."""
        for _ in range(2 * A_WHILE):
            await self.world.turn()
        active = self.world.generation["state"] == "Active"
        return "" if active or self.world.training.is_committed else f"{step.rule}: loses steps;"


def test_a_new_field_needs_a_value() -> None:
    schema = spec_schema()
    schema["properties"]["nodes"]["properties"]["colour"] = {"type": "string", "maxLength": 8}
    with pytest.raises(AssertionError, match=r"spec\.nodes\.colour is not in EVERYTHING"):
        list(fields(schema))


def test_the_tables_are_about_fields_that_exist() -> None:
    known = {each.name for each in fields()}
    assert known >= {*INSTEAD, *OTHER, *(name for name, _, _ in BROKEN_RULES)}


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.nightly)], ids=["a fifth", "all"])
async def test_a_job_that_trains_survives_every_value_of_every_field(share: int) -> None:
    """The gate walks the same fifth each time, so that a run can be repeated."""
    problems, num_fields, num_steps = [], 0, 0
    for each in list(fields())[::share]:
        walk = Walk(each)
        await walk.walk()
        problems += walk.problems
        num_fields += 1
        num_steps += walk.steps
    print(f"{num_steps} steps through {num_fields} fields")
    assert not problems, "\n".join(problems)
    assert num_steps >= 300
