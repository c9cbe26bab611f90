"""What happens to the job: faults, the cloud, Kubernetes, and time."""

from __future__ import annotations

from collections.abc import Iterator

from explorer import agents, operating, training
from explorer.store import is_visible
from explorer.world import Node, Operator, Run, World
from spottrain_simulator.clock import NOT_READY_AFTER

Moves = Iterator[tuple[str, World]]
NOTICE_SECONDS = training.ENOUGH_SECONDS
SHORT_NOTICE_SECONDS = 2
CRASH_SECONDS = 20
# How long a request that its sender has given up may still arrive.
LATE_SECONDS = 4
# While nothing but the clock moves, it moves in steps that grow, up to the next deadline. They are shorter than the
# durations on which decisions depend, as long as those are short. After the last one, nothing more can happen.
TICKS = (2, 2, 2, 4, 5, 5, 10, 10, 20, 40, 60, 120)


def forced(world: World) -> Moves:
    """What Kubernetes and the cloud do before time goes on."""
    for node in world.nodes:
        if node.deadline is not None and not node.cancelled and node.alive and world.time >= node.deadline:
            yield f"node {node.name} is taken", _died(world, node, excuse=False)
            return
        if node.deadline is not None and not node.shown and node.reachable:
            yield f"node {node.name} shows its notice", world.with_node(node._replace(shown=True))
    for pod in world.pods:
        if pod.deleted_by is not None and pod.agent is not None and world.time >= pod.deleted_by:
            gone = agents.kill_ranks(world, pod.sequence)
            yield f"pod {pod.name} is killed at the end of its grace period", operating.without_pod(gone, pod)
        if pod.node is None and (free := _free(world)) is not None:
            placed = pod._replace(node=free.name, placed=world.time, agent=agents.NEW)
            yield f"pod {pod.name} starts on {free.name}", world.with_pod(placed)
            return
    if not world.operator.up and world.time >= world.operator.since + CRASH_SECONDS:
        yield from restarts(world)


def restarts(world: World) -> Moves:
    """A new operator starts."""
    if not world.operator.up:
        yield "a new operator starts", world._replace(operator=Operator(since=world.time))


def _free(world: World) -> Node | None:
    taken = {pod.node for pod in world.pods}
    free = (n for n in world.nodes if n.reachable and n.name not in taken and (n.deadline is None or n.cancelled))
    return next(free, None)


def passes(world: World) -> Moves:
    """A pass of the operator, if it changes anything, and its actions."""
    if not world.operator.up:
        return
    if world.operator.pending:
        yield "the operator creates and deletes pods", operating.act(world)
        return
    decided = operating.decide(world)
    is_published = world.operator.published
    if decided.problem is not None:
        yield "a pass of the operator", world._replace(problem=decided.problem)
    elif decided.status != world.job or decided.actions or not is_published:
        operator = world.operator._replace(published=True, pending=decided.actions)
        yield _described(world, decided), world._replace(job=decided.status, operator=operator)


def _described(world: World, decided: operating.Decision) -> str:
    status, generation = decided.status.value, decided.status.value.generation
    of = f", generation {generation.number} {generation.state}" if generation is not None else ""
    why = f" ({generation.reason})" if generation is not None and generation.reason is not None else ""
    return f"a pass of the operator: {status.phase}{of}{why}"


# --- faults --------------------------------------------------------------------------------------------------


def faults(world: World) -> Moves:
    """What the budget still allows."""
    if operating.is_finished(world.job):
        return
    yield from _hints(world)
    yield from _faults_of_nodes(world)
    yield from _faults_of_messages(world)
    yield from _faults_of_the_store(world)
    if world.budget.crashes and world.operator.up:
        crashed = operating.crashed(world.operator, world.time)
        # With the reports whose tokens it checks: these are late for that.
        yield "the operator crashes", world.spend(crashes=1)._replace(operator=crashed, late_report=None)
    if world.budget.nodes and any(not node.alive for node in world.nodes):
        new = Node(f"n{len(world.nodes) + 1}")
        yield f"node {new.name} joins", world.spend(nodes=1)._replace(nodes=(*world.nodes, new))


def _faults_of_nodes(world: World) -> Moves:
    budget = world.budget
    for node in _distinct(world):
        if not node.reachable:
            continue
        if node.deadline is None:
            if budget.notices:
                yield _noticed(world.spend(notices=1), node, NOTICE_SECONDS)
            if budget.short_notices:
                yield _noticed(world.spend(short_notices=1)._replace(excuse=True), node, SHORT_NOTICE_SECONDS)
        elif budget.cancels and not node.cancelled:
            back = world.spend(cancels=1).with_node(node._replace(cancelled=True))
            yield f"the notice for {node.name} is taken back", back
        if budget.losses:
            yield f"node {node.name} is lost without notice", _died(world.spend(losses=1), node, excuse=True)
        if budget.cuts:
            yield f"node {node.name} is cut off", _cut(world.spend(cuts=1), node)
        if budget.frozen and (frozen := _frozen(world, node)) != world:
            cut = _cut(frozen.spend(frozen=1), node)
            yield f"node {node.name} is cut off, and rank 0 there freezes during a save", cut


def _hints(world: World) -> Moves:
    for node in _distinct(world) if world.budget.hints else ():
        if node.reachable and node.deadline is None:
            what = "no longer recommends" if node.hinted else "recommends"
            hinted = world.spend(hints=1).with_node(node._replace(hinted=not node.hinted))
            yield f"the cloud {what} to leave {node.name}", hinted


def _distinct(world: World) -> Iterator[Node]:
    """The nodes that differ from those before them.

    n2 and n3 are alike until something happens to one of them: by symmetry, that is n2.
    """
    untouched = [n for n in world.nodes[1:] if n in (Node("n2"), Node("n3"))]
    for node in world.nodes:
        if node not in untouched[1:]:
            yield node


def _noticed(world: World, node: Node, seconds: int) -> tuple[str, World]:
    new = node._replace(deadline=world.time + seconds, announced=world.time)
    return f"the cloud announces that it takes {node.name} in {seconds} s", world.with_node(new)


def _died(world: World, node: Node, *, excuse: bool) -> World:
    world = world.with_node(node._replace(died=world.time))
    for pod in world.pods:
        if pod.node == node.name:
            world = agents.kill_ranks(world.with_pod(pod._replace(agent=None)), pod.sequence)
    return world._replace(excuse=world.excuse or excuse)


def _cut(world: World, node: Node) -> World:
    """Nobody but the store hears of the node any more; for Kubernetes, it is gone."""
    return world.with_node(node._replace(died=world.time, cut=True))._replace(excuse=True)


def _frozen(world: World, node: Node) -> World:
    """Freeze what rank 0 on the node does with the store.

    Its operations in the save under way come at any later time.
    """
    on_node = {pod.sequence for pod in world.pods if pod.node == node.name}
    runs = tuple(run._replace(frozen=run.frozen or _saves_on(run, on_node)) for run in world.runs)
    return world._replace(runs=runs)


def _saves_on(run: Run, pods: set[int]) -> bool:
    task = run.saving.tasks[0] if run.saving is not None else None
    return run.ranks[0].sequence in pods and task is not None and not task.over


def _faults_of_messages(world: World) -> Moves:
    if world.late_report is not None:
        sequence, report, since = world.late_report
        if world.operator.up and world.pod(sequence) is not None:
            late = agents.delivered(world, sequence, report, since)._replace(late_report=None)
            yield f"a late report of job-{sequence} arrives: {agents.said(report)}", late
    for pod in world.pods:
        if pod.agent is not None and pod.agent.held is not None:
            yield agents.late_answer(world, pod, pod.agent, pod.agent.held[0])
    if not world.budget.late or not world.operator.up:
        return
    for pod in world.pods:
        agent, node = pod.agent, world.node(pod.node)
        if agent is None or node is None or not node.reachable:
            continue
        report = agents.newest_report(world, pod, agent)
        held = world.spend(late=1)._replace(late_report=(pod.sequence, report, world.time))
        yield f"a report of {pod.name} is on its way for long: {agents.said(report)}", held
        if world.operator.published and agent.held is None:
            assigned = operating.assignment(world.job, pod.sequence)
            answered = pod._replace(agent=agent._replace(held=(assigned, world.time)))
            yield f"an answer to {pod.name} is late: {agents.named(assigned)}", world.spend(late=1).with_pod(answered)


def _faults_of_the_store(world: World) -> Moves:
    if not world.budget.store_faults:
        return
    for run in world.runs:
        for rank, task in enumerate(run.saving.tasks if run.saving is not None else ()):
            if task is None or not training.may_go_on(world, run, rank):
                continue
            request = task.at.request
            assert request is not None
            if request[0] == "pause":
                continue
            effects = (False, True) if request[0] == "put" and is_visible(request) else (False,)
            for took_effect in effects:
                after = training.failed_operation(world.spend(store_faults=1), run, rank, took_effect=took_effect)
                what = "fails, but has taken effect" if took_effect else "fails"
                yield f"generation {run.generation}: an operation of rank {rank} on the store {what}", after


# --- time ----------------------------------------------------------------------------------------------------


def ticks(world: World) -> Moves:
    """Time goes on to the next deadline, or by a step that grows."""
    if world.idle >= len(TICKS):
        return
    timers = [t for t in _timers(world) if t > world.time]
    time = min([world.time + TICKS[world.idle], *timers])
    idle = 0 if time in timers else world.idle + 1
    yield f"{time - world.time} s pass", _beaten(world._replace(time=time, idle=idle))


def _timers(world: World) -> Iterator[int]:
    for node in world.nodes:
        if node.alive and node.deadline is not None and not node.cancelled:
            yield node.deadline
        if node.died is not None:
            yield node.died + int(NOT_READY_AFTER)
    for pod in world.pods:
        if pod.deleted_by is not None:
            yield pod.deleted_by
    for run in world.runs:
        if run.due is not None:
            yield run.due
    if not world.operator.up:
        yield world.operator.since + CRASH_SECONDS


def _beaten(world: World) -> World:
    """Deliver the reports of the agents that the operator hears.

    A report that was on its way is lost.
    """
    if world.late_report is not None and world.time > world.late_report[2] + LATE_SECONDS:
        world = world._replace(late_report=None)
    if not world.operator.up:
        return world
    nodes = {node.name for node in world.nodes if node.reachable}
    for pod in world.pods:
        if pod.agent is not None and pod.node in nodes:
            world = agents.delivered(world, pod.sequence, agents.newest_report(world, pod, pod.agent))
    return world
