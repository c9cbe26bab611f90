"""A job's life in a trace, by the operator's rules and by others beside which these can be seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.capacity import OnDemandCapacity, Pool, SpotCapacity
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_simulator.clock import at
from spottrain_simulator.oracle import least_cost
from spottrain_simulator.ranks import Pace
from spottrain_simulator.trace import HOUR
from spottrain_simulator.traced import Cloud, TracedWorld

# The operator's records of what changes all the time don't change what it decides, so they wait for a decision.
_TIMING = replace(DEFAULT_TIMING, record_interval=1000 * HOUR)
# Seconds from one look of Uniform Progress to the next.
_LOOK = 300.0
_Priced = TypeVar("_Priced", OnDemandCapacity, SpotCapacity, Pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the job has to do, in seconds.

    Attributes:
        steps: Number of steps.
        step_seconds: A step on nodes.max nodes. On half as many it takes twice as long.
        restart_seconds: From the start of a generation to its first step.
        save_seconds: A commit, of which a drain waits for one.
        commit_seconds: From one commit to the next.
    """

    steps: int
    step_seconds: float
    restart_seconds: float = 30.0
    save_seconds: float = 10.0
    commit_seconds: float = 600.0

    def pace(self, spec: TrainingJobSpec) -> Pace:
        commit_every = max(1, round(self.commit_seconds / self.step_seconds))
        return Pace(
            start=self.restart_seconds,
            step=self.step_seconds,
            nodes=spec.nodes.max,
            save=self.save_seconds,
            commit_every=commit_every,
            wait=0.0,
            stall=0.0,
        )

    def node_hours(self, spec: TrainingJobSpec) -> float:
        """Node hours that the steps take."""
        return self.steps * self.step_seconds * spec.nodes.max / HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The job at a time, in seconds, for pictures."""

    time: float
    on_demand: int
    spot: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job fared.

    Attributes:
        finish: Seconds until it had succeeded; None if it hadn't by the end of the trace.
        interruptions: How often a node that was taken ended a generation.
        steps_redone: Steps that were made twice.
        goodput: Share of the time since its first generation that went into lasting steps.
        spot_hours, on_demand_hours: Node hours that were paid for.
    """

    name: str
    finish: float | None
    cost: float
    interruptions: int = 0
    steps_redone: int = 0
    goodput: float | None = None
    spot_hours: float = 0.0
    on_demand_hours: float = 0.0
    course: tuple[Moment, ...] = ()


def simulate(name: str, spec: TrainingJobSpec, cloud: Cloud, work: Work, *, seed: int = 0) -> Outcome:
    """Let the operator run the job in the trace. The job's prices follow those of the trace."""
    return _live(name, _world(spec, cloud, work, seed), _follow_prices)


def uniform_progress(spec: TrainingJobSpec, cloud: Cloud, work: Work, deadline: float, *, seed: int = 0) -> Outcome:
    """Run the job by the rule of Wu et al., "Can't Be Late" (NSDI 2024), node by node.

    On-demand nodes fill up what spot nodes leave free whenever the job is behind an even progress towards the
    deadline, and until it is two changes of nodes ahead. Once no more than that is left, they stay to the end.
    """
    rule = _UniformProgress(spec, work, deadline, cloud.boot_seconds + work.restart_seconds)
    world = _world(rule.spot_alone, cloud, work, seed)
    return _live("Uniform Progress", world, rule.look)


def oracle(spec: TrainingJobSpec, cloud: Cloud, work: Work, deadline: float) -> Outcome | None:
    """The least cost by the deadline for who knows the future; None if the deadline can't be met.

    It waits for the first nodes and for the first step, as everybody does.
    """
    start = cloud.boot_seconds + work.restart_seconds
    cost = least_cost(spec, cloud, work.node_hours(spec), start, min(deadline, cloud.trace.end))
    return None if cost is None else Outcome(name="oracle", finish=deadline, cost=cost)


def with_deadline(spec: TrainingJobSpec, seconds: float | None) -> TrainingJobSpec:
    """The job with so many seconds until capacity.finishBy, or without one."""
    finish_by = None if seconds is None else at(seconds)
    return spec.model_copy(update={"capacity": spec.capacity.model_copy(update={"finish_by": finish_by})})


def all_on_demand(spec: TrainingJobSpec) -> TrainingJobSpec:
    """The job on on-demand nodes alone, as many as it may have."""
    return _with_capacity(spec, onDemand={"min": 0, "max": None}, spot={"max": 0})


def without_fallback(spec: TrainingJobSpec) -> TrainingJobSpec:
    """The job on spot nodes alone above its on-demand floor, for which it waits."""
    return _with_capacity(spec, fallback={"policy": "None"})


def _with_capacity(spec: TrainingJobSpec, **changes: dict[str, Any]) -> TrainingJobSpec:
    capacity = spec.capacity.to_dict()
    merged = {name: capacity.get(name, {}) | fields for name, fields in changes.items()}
    return TrainingJobSpec.model_validate(spec.to_dict() | {"capacity": capacity | merged})


def _world(spec: TrainingJobSpec, cloud: Cloud, work: Work, seed: int) -> TracedWorld:
    return TracedWorld(spec, seed=seed, total_steps=work.steps, pace=work.pace(spec), timing=_TIMING, cloud=cloud)


def _live(name: str, world: TracedWorld, look: Callable[[TracedWorld], float | None]) -> Outcome:
    """Let time pass until the job or the trace ends. `look` says when it wants to look again."""
    course, end = [_moment(world)], world.cloud.trace.end
    while world.time < end and not (world.finished or world.gone):
        again = look(world)
        world.tick(end if again is None else min(end, again))
        moment = _moment(world)
        if (moment.on_demand, moment.spot) != (course[-1].on_demand, course[-1].spot):
            course.append(moment)
    finish = world.time if world.finished else None
    return _outcome(name, world, finish, (*course, _moment(world)))


def _moment(world: TracedWorld) -> Moment:
    generation = world.status.running
    kinds = [member.capacity_type for member in generation.members] if generation is not None else []
    on_demand = sum(kind is CapacityType.ON_DEMAND for kind in kinds)
    return Moment(time=world.time, on_demand=on_demand, spot=len(kinds) - on_demand, step=steps_of(world))


def steps_of(world: TracedWorld) -> int:
    """How many steps last, as far as is known now."""
    ranks = world.training.newest
    return ranks.step if ranks is not None else 0


def _outcome(name: str, world: TracedWorld, finish: float | None, course: tuple[Moment, ...]) -> Outcome:
    held, status = list(world.all_held()), world.status
    hours = {kind: sum(each.hours for each in held if each.capacity_type is kind) for kind in CapacityType}
    return Outcome(
        name=name,
        finish=finish,
        cost=world.cost,
        interruptions=status.preemptions,
        steps_redone=world.training.num_steps - steps_of(world),
        goodput=status.goodput,
        spot_hours=hours[CapacityType.SPOT],
        on_demand_hours=hours[CapacityType.ON_DEMAND],
        course=course,
    )


def _follow_prices(world: TracedWorld) -> float:
    """Edit the job's prices as the trace's change, as whoever knows them does in a cluster."""
    trace, capacity = world.cloud.trace, world.spec.capacity

    def priced(part: _Priced, pool: str) -> _Priced:
        known = pool in trace.offers
        return part.model_copy(update={"price_per_hour": trace.at(pool, world.time).price}) if known else part

    changes: dict[str, object] = {"pools": tuple(priced(each, each.name) for each in capacity.pools)}
    if not capacity.pools:
        on_demand = priced(capacity.on_demand, CapacityType.ON_DEMAND.value)
        changes = {"on_demand": on_demand, "spot": priced(capacity.spot, CapacityType.SPOT.value)}
    current = capacity.model_copy(update=changes)
    if current != capacity:
        world.edit(capacity=current.to_dict())
    return trace.next_change(world.time)


class _UniformProgress:
    """When on-demand nodes fill up. It edits the job, as a user could."""

    def __init__(self, spec: TrainingJobSpec, work: Work, deadline: float, change: float) -> None:
        floor = spec.capacity.on_demand.floor(spec.nodes.max)
        self.spot_alone = _with_capacity(spec, fallback={"policy": "None"}, onDemand={"max": floor})
        self.filled_up = _with_capacity(spec, fallback={"policy": "OnDemand", "afterSeconds": 60})
        self.total, self.step_seconds = work.steps * work.step_seconds, work.step_seconds
        self.deadline, self.change = deadline, change
        self.fills_up = False

    def look(self, world: TracedWorld) -> float:
        if self._is_due(world.time, steps_of(world) * self.step_seconds) != self.fills_up:
            self.fills_up = not self.fills_up
            world.edit(capacity=(self.filled_up if self.fills_up else self.spot_alone).capacity.to_dict())
        return (math.floor(world.time / _LOOK) + 1) * _LOOK

    def _is_due(self, time: float, done: float) -> bool:
        left = self.total - done
        if self.deadline - time <= left + 2 * self.change:
            return True
        ahead = 2 * self.change if self.fills_up else 0.0
        return done < (time + ahead) * self.total / self.deadline
