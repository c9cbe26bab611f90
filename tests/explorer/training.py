"""The ranks of a generation: their collectives, their saves, and how they end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from explorer.ranks import stand_of_rank
from explorer.replay import Raised
from explorer.store import (
    CleanUp,
    Committed,
    Fence,
    Save,
    Task,
    advance,
    head_of,
    is_whole,
    new_objects,
    newest_of,
    perform,
)
from explorer.world import RankAt, Run, Saving, World
from spottrain.checkpoint.errors import SaveFailed, StorageUnavailable
from spottrain.world.stop_agreement import Ballot, Decision

STEP_SECONDS = 10
# A notice that just misses a step boundary reaches the ranks' agreement at the second one from there.
ENOUGH_SECONDS = 2 * STEP_SECONDS + 5
# What all ranks of a generation do together. Everything else that a rank asks is answered at once.
_TOGETHER = frozenset(
    {"read", "least", "step", "save", "save in background", "settle saves", "share failures", "sleep"}
)

Moves = Iterator[tuple[str, World]]


def moves(world: World) -> Moves:
    """What ranks can do now, without a fault."""
    for run in world.runs:
        who = f"generation {run.generation}"
        if _is_complete(run):
            if run.fence is None and not run.joined:
                yield (
                    f"{who}: the ranks have joined",
                    world.with_run(run._replace(fence=Task.of(Fence(run.generation)))),
                )
            elif run.due is not None and world.time >= run.due:
                yield f"{who}: {_what_is_due(run)}", _end_wait(world, run)
        for number, rank in enumerate(run.ranks):
            if rank.alive and rank.outcome == "succeeded":  # until then the script does what comes after its session
                ranks = tuple(r._replace(alive=False) if r is rank else r for r in run.ranks)
                yield f"{who}: the script of rank {number} ends", world.with_run(run._replace(ranks=ranks))
        yield from _store_moves(world, run, who)


def _is_complete(run: Run) -> bool:
    return all(rank.alive and rank.outcome is None for rank in run.ranks)


def _what_is_due(run: Run) -> str:
    at = run.ranks[0].at
    return (
        f"step {run.ranks[0].reported.step + 1}"
        if at is not None and at.request == ("step",)
        else "the pause is over"
    )


def peer_errors(world: World) -> Moves:
    """Ranks whose peer is gone fail, or hang until they are stopped."""
    for run in world.runs:
        gone = any(rank.launched and not rank.alive for rank in run.ranks)
        waiting = [n for n, rank in enumerate(run.ranks) if rank.alive and rank.outcome is None]
        # All fail with the first: their order changes nothing.
        if gone and waiting:
            ranks = tuple(r._replace(outcome="lost") if n in waiting else r for n, r in enumerate(run.ranks))
            label = f"generation {run.generation}: the other ranks report a lost peer"
            yield label, world.with_run(run._replace(ranks=ranks))


# --- the store -----------------------------------------------------------------------------------------------


def _store_moves(world: World, run: Run, who: str) -> Moves:
    """One operation of each process that isn't frozen."""
    if not run.frozen:
        yield from _of_rank_0(world, run, who)
    for rank, task in enumerate(run.saving.tasks if run.saving is not None else ()):
        if rank > 0 and task is not None and may_go_on(world, run, rank):
            yield _label(run, who, rank, task), _save(world, run, rank, task)
            break  # parts of other ranks are alike


def late_writes(world: World) -> Moves:
    """What frozen processes may do."""
    for run in world.runs:
        if run.frozen:
            yield from _of_rank_0(world, run, f"generation {run.generation}")


def _of_rank_0(world: World, run: Run, who: str) -> Moves:
    if run.fence is not None and run.ranks[0].alive:
        yield f"{who}: rank 0 {_verb(run.fence)}", _fence(world, run, run.fence)
    task = run.saving.tasks[0] if run.saving is not None else None
    if task is not None and may_go_on(world, run, 0):
        yield _label(run, who, 0, task), _save(world, run, 0, task)
    if run.clean_up is not None:
        yield f"{who}: rank 0 {_verb(run.clean_up)} (clean-up)", _clean_up(world, run, run.clean_up)


def _label(run: Run, who: str, rank: int, task: Task) -> str:
    assert run.saving is not None
    return f"{who}: rank {rank} {_verb(task)} (save of step {run.saving.step})"


def _verb(task: Task) -> str:
    request = task.at.request
    assert request is not None
    match request:
        case ("put", key, *_):
            return f"writes {key.rpartition('/')[2]}"
        case ("get", key):
            return f"reads {key.rpartition('/')[2]}"
        case ("list", _):
            return "lists objects"
        case ("delete", _):
            return "deletes objects"
    return "gives up"


def may_go_on(world: World, run: Run, rank: int) -> bool:
    """Whether a rank's part of the save has something to do."""
    saving = run.saving
    task = saving.tasks[rank] if saving is not None else None
    if saving is None or task is None or task.over:
        return False
    if task.at.request != ("pause",):
        return True
    # Rank 0 polls: there is something new if a receipt has come, or if a rank has failed.
    return _has_failed(saving) or new_objects(task, world.store)


def _has_failed(saving: Saving) -> bool:
    return any(task is not None and task.at.error is not None for task in saving.tasks[1:])


def _stored(world: World, objects: Any) -> World:
    """With the new objects, and what must hold of them."""
    if objects == world.store:
        return world
    before, after = head_of(world.store), head_of(objects)
    problem = world.problem
    if _order(newest_of(after)) < _order(newest_of(before)):
        problem = "HEAD went back"
    elif before is not None and (after is None or after.fence < before.fence):
        problem = "the fence went back"
    elif _is_fenced(world, newest_of(before), newest_of(after)):
        problem = "a generation commits although a newer one has resumed"
    elif _order(newest_of(after)) < _order(world.acknowledged):
        problem = "an acknowledged commit was lost"
    elif after is not None and not all(is_whole(objects, commit, _world_size(commit)) for commit in after.commits):
        problem = "HEAD names a commit that is not whole"
    return world._replace(store=objects, problem=problem)


@lru_cache(maxsize=4096)
def _world_size(commit: Any) -> int:
    """The prefix ends with it."""
    return int(commit.attempt.rstrip("/").rpartition("x")[2])


def _is_fenced(world: World, before: Committed | None, after: Committed | None) -> bool:
    joined = max((run.generation for run in world.runs if run.joined), default=0)
    return after is not None and after != before and after.generation < joined


def _order(commit: Committed | None) -> tuple[int, int]:
    return (commit.generation, commit.step) if commit is not None else (0, 0)


def _fence(world: World, run: Run, task: Task) -> World:
    task, objects = advance(task, world.store)
    world = _stored(world, objects)
    if not task.over:
        return world.with_run(run._replace(fence=task))
    if task.at.error is not None:
        ranks = tuple(rank._replace(outcome="fenced") for rank in run.ranks)
        return world.with_run(run._replace(fence=None, ranks=ranks))
    start: Committed | None = task.at.result
    run = run._replace(fence=None, start=start, joined=True)
    problem = world.problem
    if _order(start) < max(_order(world.acknowledged), _order(run.resume)):
        problem = "a generation resumes from before an acknowledged commit"
    elif start is not None and (lost := world.trained[1] - start.step) > 0 and not world.excuse:
        problem = f"{lost} steps are lost, although there was time to commit them"
    elif start is None and world.trained[1] > 0 and not world.excuse:
        problem = f"{world.trained[1]} steps are lost, although there was time to commit them"
    step = start.step if start is not None else 0
    world = world._replace(problem=problem, excuse=_is_doomed(world, run), trained=(world.trained[0], step))
    return _go_on(world, run)


def _is_doomed(world: World, run: Run) -> bool:
    """Whether a member's node goes without a notice in time, or has gone."""
    members = {rank.sequence for rank in run.ranks}
    nodes = (world.node(pod.node) for pod in world.pods if pod.sequence in members)
    return len(members - {pod.sequence for pod in world.pods}) > 0 or any(
        node is None
        or not node.reachable
        or (node.deadline is not None and node.deadline - node.announced < ENOUGH_SECONDS)
        for node in nodes
    )


def _save(world: World, run: Run, rank: int, task: Task) -> World:
    saving = run.saving
    assert saving is not None
    if task.at.request == ("pause",):
        answer = Raised(SaveFailed, ("another rank failed",)) if _has_failed(saving) else None
        task, objects = task.answered(answer), world.store
    else:
        task, objects = advance(task, world.store)
    return _saved(_stored(world, objects), run, rank, task)


def failed_operation(world: World, run: Run, rank: int, *, took_effect: bool) -> World:
    """The next operation of a save fails; a write may have taken effect."""
    assert run.saving is not None
    task, objects = run.saving.tasks[rank], world.store
    assert task is not None
    if took_effect and task.at.request is not None:
        _, objects = perform(objects, task.at.request)
    failure = Raised(StorageUnavailable, ("the store does not answer",))
    return _saved(_stored(world, objects), run, rank, task.answered(failure))


def _saved(world: World, run: Run, rank: int, task: Task) -> World:
    saving = run.saving
    assert saving is not None
    tasks = tuple(task if n == rank else other for n, other in enumerate(saving.tasks))
    saving = saving._replace(tasks=tasks)
    if task.over and task.at.result is not None:
        if _order(task.at.result) > _order(world.acknowledged):
            world = world._replace(acknowledged=task.at.result)
        if saving.is_background and run.clean_up is None:
            run = run._replace(clean_up=Task.of(CleanUp(run.generation)))
    return _go_on(world, run._replace(saving=saving))


def _clean_up(world: World, run: Run, task: Task) -> World:
    task, objects = advance(task, world.store)
    world = _stored(world, objects)
    return world.with_run(run._replace(clean_up=None if task.over else task))


# --- collectives ---------------------------------------------------------------------------------------------


def _end_wait(world: World, run: Run) -> World:
    """A step, or the pause before a retry, is over."""
    if run.ranks[0].at is not None and run.ranks[0].at.request == ("step",):
        step = run.ranks[0].reported.step + 1
        if world.trained[0] > run.generation:
            world = world._replace(problem=f"generation {run.generation} trains beside a newer one")
        world = world._replace(trained=(run.generation, max(step, world.trained[1])))
        run = run._replace(first_step=run.first_step or world.time, last_step=world.time)
    return _go_on(world, _answered(world, run._replace(due=None), [None] * len(run.ranks)))


def _go_on(world: World, run: Run) -> World:
    """Let the ranks go on until they wait for a step, a save or a lost rank."""
    if not run.joined or not _is_complete(run):
        return world.with_run(run)
    if any(rank.at is None for rank in run.ranks):
        run = _settled(world, run)
    while _is_complete(run):
        requests = [rank.at.request for rank in run.ranks if rank.at is not None]
        kinds = {request[0] for request in requests if request is not None}
        if len(kinds) != 1 or len(requests) != len(run.ranks):
            return world.with_run(run)._replace(problem=f"the ranks wait for each other: {sorted(map(str, kinds))}")
        run, answers = _together(world, run, kinds.pop(), requests)
        if answers is None:
            break
        run = _answered(world, run, answers)
    return world.with_run(run)


def _answered(world: World, run: Run, answers: list[Any]) -> Run:
    ranks = zip(run.ranks, answers, strict=True)
    return _settled(world, run._replace(ranks=tuple(r._replace(log=(*r.log, a), at=None) for r, a in ranks)))


def _settled(world: World, run: Run) -> Run:
    """Each rank has gone on to the next collective, or to its end."""
    return run._replace(ranks=tuple(_settle(world, run, n, rank) for n, rank in enumerate(run.ranks)))


def _settle(world: World, run: Run, number: int, rank: RankAt) -> RankAt:
    if rank.outcome is not None:
        return rank
    log, seen = rank.log, rank.drain_seen
    while True:
        at, reported = stand_of_rank(number, run.start, log)
        if at.request is None:
            return rank._replace(log=log, at=at, reported=reported, drain_seen=seen, outcome=_outcome(at))
        if at.request[0] in _TOGETHER:
            return rank._replace(log=log, at=at, reported=reported, drain_seen=seen)
        answer = _alone(world, run, number, rank, at.request)
        if at.request == ("flag",) and answer and seen is None:
            seen = world.time
        log = (*log, answer)


def _outcome(at: Any) -> str:
    if at.error is None:
        return str(at.result)
    return "fenced" if at.error.kind.__name__ == "Fenced" else f"error {at.error}"


def _alone(world: World, run: Run, number: int, rank: RankAt, request: tuple[Any, ...]) -> Any:
    """What a rank finds out without the others."""
    match request:
        case ("flag",):
            return rank.drain is not None
        case ("seconds left",):
            return float("inf") if rank.drain is None else float(rank.drain - world.time)
        case ("cast", ballot):
            return ballot
        case ("has failed",):
            task = run.saving.tasks[number] if run.saving is not None else None
            return number != 0 and task is not None and task.at.error is not None
        case ("done", save):
            if run.saving is None or run.saving.number != save:
                return (True, None, None)
            task = run.saving.tasks[number]
            return (False, None, None) if task is None or not task.over else (True, task.at.result, task.at.error)
    raise ValueError(request)


def _together(world: World, run: Run, kind: str, requests: list[Any]) -> tuple[Run, list[Any] | None]:
    """The answers of a collective, or None if it isn't over."""
    num = len(run.ranks)
    saving = run.saving
    is_busy = saving is not None and any(task is not None and not task.over for task in saving.tasks)
    match kind:
        case "read":
            return run, [_decision(run)] * num
        case "least":
            return run, [min(request[1] for request in requests)] * num
        case "step":
            return run._replace(due=world.time + STEP_SECONDS if run.due is None else run.due), None
        case "sleep":
            return run._replace(due=world.time + max(1, int(requests[0][1])) if run.due is None else run.due), None
        case "share failures":
            return run, [None] * num
        case "settle saves":
            return run, None if is_busy else [None] * num
        case "save in background":
            if is_busy:
                return run, [None] * num
            run = _started(run, requests[0][1], is_background=True)
            return run, [run.saving.number if run.saving is not None else None] * num
    return _together_saved(world, run, requests[0][1], is_busy=is_busy)


def _together_saved(world: World, run: Run, step: int, *, is_busy: bool) -> tuple[Run, list[Any] | None]:
    """`Checkpointer.save`, which waits for the save under way.

    It saves nothing if that save was for this step.
    """
    saving, num = run.saving, len(run.ranks)
    if is_busy:
        return run, None
    if saving is not None and saving.step == step and saving.tasks[0] is not None:
        result, error = saving.tasks[0].at.result, saving.tasks[0].at.error
        newest = newest_of(head_of(world.store))
        if error is not None and newest is not None and (newest.generation, newest.step) == (run.generation, step):
            result, error = newest, None  # HEAD names what was proposed: `Checkpointer._was_committed`
        if error is None:
            return run, [result] * num
        if not saving.is_known:  # this save has failed, and the ranks don't know it yet
            return run._replace(saving=saving._replace(is_known=True)), [error] * num
    return _started(run, step, is_background=False), None


def _started(run: Run, step: int, *, is_background: bool) -> Run:
    number = 1 if run.saving is None else run.saving.number + 1
    num = len(run.ranks)
    resumed_from = run.start.step if run.start is not None else None
    tasks = tuple(
        Task.of(Save(run.generation, step, f"n{number}x{num}", rank, num, resumed_from)) for rank in range(num)
    )
    # A failed save in the background is known to the ranks by their poll.
    return run._replace(saving=Saving(number, step, tasks, is_background, is_known=is_background))


def _decision(run: Run) -> Decision:
    """The sums of the newest ballots, as the ranks read them."""
    ballots = [next(answer for answer in reversed(rank.log) if isinstance(answer, Ballot)) for rank in run.ranks]
    return Decision.from_sums([sum(votes) for votes in zip(*(ballot.votes() for ballot in ballots), strict=True)])
