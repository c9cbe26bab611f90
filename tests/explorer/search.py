"""Breadth-first search over all states of a world.

So a counterexample is as short as it can be.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from explorer import agents, environment, training
from explorer.operating import is_finished
from explorer.ranks import TOTAL_STEPS
from explorer.store import head_of, newest_of
from explorer.world import World
from spottrain_api.v1alpha1.status import Phase

REACTIONS = (environment.forced, agents.moves, training.moves, environment.passes)
OPTIONS = (training.peer_errors, training.late_writes, environment.restarts, environment.faults)


def successors(world: World) -> Iterator[tuple[str, World]]:
    """What can happen next: a label for people, and the state after it.

    Reactions take no time: the clock moves only when nobody has anything to do. Faults come at any moment.
    """
    is_busy = False
    for label, after in _reactions(world):
        is_busy = True
        yield label, _awake(world, after)
    for moves in OPTIONS:
        for label, after in moves(world):
            yield label, after._replace(idle=0)
    if not is_busy:
        for label, after in environment.ticks(world):
            yield label, after._replace(delayed=())


def _reactions(world: World) -> Iterator[tuple[str, World]]:
    reactions = (move for moves in REACTIONS for move in moves(world))
    if world.budget.delays is None:
        return reactions
    return _in_order(world, reactions, world.budget.delays)


def _in_order(world: World, reactions: Iterator[tuple[str, World]], delays: int) -> Iterator[tuple[str, World]]:
    """The reaction of the first process that isn't slow.

    Alternatively, that process is slow, too. With a number of delays, this is the delay-bounded scheduling of Emmi,
    Qadeer and Rakamaric (POPL 2011).
    """
    slow, skipped = world.delayed, []
    for label, after in reactions:
        who = process(label)
        if who in slow:
            skipped.append((slow.index(who), label, after))
            continue
        yield label, after
        if delays and (skipped or any(process(other) != who for other, _ in reactions)):
            yield f"{who} is slow", world.spend(delays=1)._replace(delayed=(*slow, who))
        return
    for _, label, after in sorted(skipped, key=lambda move: move[0])[:1]:
        yield label, after


def process(label: str) -> str:
    """Who acts: the label starts with it."""
    return " ".join(label.split()[:2]).rstrip(":")


def _awake(before: World, after: World) -> World:
    """The clock counts as idle if the operator has only brought its books up to date."""
    if before.idle and before.job != after.job and _but_books(before, after):
        return after
    return after._replace(idle=0)


def _but_books(before: World, after: World) -> bool:
    bookless = before._replace(job=after.job) == after
    return bookless and before.job.key[:-1] == after.job.key[:-1]


def end_problem(world: World) -> str | None:
    """What is wrong with a state in which nothing can happen any more."""
    if is_finished(world.job):
        newest = newest_of(head_of(world.store))
        if newest is None or newest.step != TOTAL_STEPS or world.job.value.phase is not Phase.SUCCEEDED:
            return f"the job ends as {world.job.value.phase}, and the newest commit is {newest}"
        left = [pod.name for pod in world.pods if pod.ended is None and not _on_lost_node(world, pod.node)]
        return f"the job is over, but {left} are still there" if left else None
    status = world.job.value
    free = [node for node in world.nodes if node.reachable and (node.deadline is None or node.cancelled)]
    if len(free) < 2 and status.message.startswith("Waiting for nodes"):
        return None
    return f"the job neither ends nor waits for something that it names: {status.phase}: {status.message!r}"


def _on_lost_node(world: World, name: str | None) -> bool:
    node = world.node(name)
    return node is None or not node.reachable


@dataclass(slots=True, kw_only=True)
class Found:
    """A problem, and the shortest way to it."""

    problem: str
    trace: list[tuple[str, World]]


@dataclass(slots=True, kw_only=True)
class Result:
    """What a search has seen. `complete`: all states of the world."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    ends: int = 0
    seconds: float = 0.0
    complete: bool = False
    found: Found | None = None

    def __str__(self) -> str:
        speed = self.states / self.seconds if self.seconds else 0.0
        extent = "all states" if self.complete else "up to the limit"
        return (
            f"{self.states:,} states, {self.transitions:,} transitions, depth {self.depth}, {self.ends:,} ends, "
            f"{self.seconds:.0f} s ({speed:,.0f} states/s), {extent}"
        )


def explore(start: World, *, max_states: int = 10**9, max_seconds: float = 1e9) -> Result:
    """Visit the states of a world, nearest first, until one has a problem."""
    began, result = time.monotonic(), Result(states=1)
    seen = {hash(start)}
    parents, choices = array("q", [-1]), array("h", [0])
    queue = deque([(0, 0, start)])
    while queue:
        index, depth, world = queue.popleft()
        result.depth = max(result.depth, depth)
        num = 0
        for choice, (_, after) in enumerate(successors(world)):
            num += 1
            fingerprint = hash(after)
            if fingerprint in seen:
                continue
            seen.add(fingerprint)
            parents.append(index)
            choices.append(choice)
            queue.append((len(parents) - 1, depth + 1, after))
            if after.problem is not None:
                result.found = Found(problem=after.problem, trace=_trace(start, parents, choices, len(parents) - 1))
                break
        result.transitions += num
        if num == 0:
            result.ends += 1
            if (problem := end_problem(world)) is not None:
                result.found = Found(problem=problem, trace=_trace(start, parents, choices, index))
        result.states = len(parents)
        if result.found or result.states >= max_states or time.monotonic() - began > max_seconds:
            break
    result.complete = not queue and result.found is None
    result.seconds = time.monotonic() - began
    return result


def _trace(start: World, parents: array[int], choices: array[int], index: int) -> list[tuple[str, World]]:
    path = []
    while index > 0:
        path.append(choices[index])
        index = parents[index]
    world, trace = start, []
    for choice in reversed(path):
        label, world = next(move for number, move in enumerate(successors(world)) if number == choice)
        trace.append((label, world))
    return trace


def described(found: Found) -> str:
    """Format the counterexample for people.

    It has the time and who did what, and at the end what is wrong.
    """
    lines, time_of = [], 0
    for label, world in found.trace:
        lines.append(f"  {time_of:4d} s  {label}")
        time_of = world.time
    return "\n".join([*lines, f"  => {found.problem}"])
