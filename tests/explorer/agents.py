"""The agents of the small world: the real state machine and verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from explorer.operating import assignment, commit_ref, notice_of, without_pod
from explorer.ranks import TOTAL_STEPS
from explorer.store import Committed
from explorer.training import STEP_SECONDS
from explorer.world import Agent, Keyed, Pod, RankAt, Run, World
from spottrain_agent import agent_state
from spottrain_agent.agent_state import AgentState, Command, Event, transition
from spottrain_agent.records import WorkerStarted
from spottrain_agent.verdict import GenerationObservation, RankObservation, judge
from spottrain_api.contract.assignments import GenerationAssignment
from spottrain_api.contract.reports import Failure, FailureReason, Outcome, OutcomeKind, Progress, TrainerPhase
from spottrain_operator.control_api.agents import is_overtaken
from spottrain_operator.core.model import ReportView
from spottrain_simulator.agents import report_of
from spottrain_simulator.clock import at
from spottrain_simulator.notices import sigterm

Moves = Iterator[tuple[str, World]]
STARTED = WorkerStarted(pid=1, started_at=at(0), expects_session=True)


def key_of(state: AgentState) -> tuple[Any, ...]:
    return (
        state.generation,
        state.phase,
        state.has_processes,
        state.pending and state.pending.number,
        state.abandoned,
        state.drain and (state.drain.deadline, state.drain.is_preemption),
        state.drain_is_local,
        state.drain_seen,
        state.leaving,
        tuple((notice.deadline, notice.cancelled) for notice in state.notices),
        state.sigterm and state.sigterm.deadline,
        state.commit and (state.commit.generation, state.commit.step),
        state.failure and state.failure.reason,
    )


def keyed(state: AgentState) -> Keyed:
    return Keyed(key_of(state), state)


NEW = Agent(keyed(AgentState()))


def moves(world: World) -> Moves:
    """What agents can do now."""
    for pod in world.pods:
        if pod.agent is None:
            continue
        yield from _hear(world, pod, pod.agent)
        yield from _observe(world, pod, pod.agent)
        node = world.node(pod.node)
        if world.operator.up and node is not None and node.reachable:
            yield from _talk(world, pod, pod.agent)


def _hear(world: World, pod: Pod, agent: Agent) -> Moves:
    node, now = world.node(pod.node), at(world.time)
    if node is not None and node.deadline is not None:
        notice = notice_of(node.name, node.deadline, node.announced, node.cancelled)
        if agent.real.notices != (notice,):
            label = "hears that the notice is cancelled" if node.cancelled else "hears the notice"
            heard = agent_state.NoticesChanged(notices=(notice,), now=now)
            yield f"agent {pod.name} {label}", dispatch(world, pod.sequence, heard)
    if pod.deleted_by is not None and agent.real.sigterm is None:
        notice = sigterm(pod.node or "", deadline=at(pod.deleted_by), now=now)
        ended = agent_state.SigtermReceived(notice=notice)
        yield f"agent {pod.name} gets SIGTERM", dispatch(world, pod.sequence, ended)


# --- what it sees of its ranks -------------------------------------------------------------------------------


def _observe(world: World, pod: Pod, agent: Agent) -> Moves:
    state = agent.real
    if agent.killing or (state.has_processes and not state.is_active):
        yield f"processes {pod.name}: those of generation {state.generation} are gone", _gone(world, pod, agent)
        return
    run = world.run(state.generation)
    rank = next((r for r in run.ranks if r.sequence == pod.sequence), None) if run is not None else None
    if run is None or rank is None or not state.is_active:
        return
    for event, label in _events(run, rank, agent):
        after = dispatch(world, pod.sequence, event)
        if after != world:
            yield f"agent {pod.name} {label}", after
            return


def _events(run: Run, rank: RankAt, agent: Agent) -> Iterator[tuple[Event, str]]:
    number = run.generation
    if agent.real.phase.value == "starting" and rank.launched:
        yield agent_state.RanksStarted(generation=number), "sees that its rank has started"
    if agent.real.drain is not None and not agent.real.drain_seen and rank.drain_seen is not None:
        yield agent_state.DrainSeen(generation=number), "sees that its rank drains"
    verdict = judge(_observation(rank, run))
    if verdict is not None:
        end = agent_state.GenerationEnded(
            generation=number, phase=verdict.phase, commit=verdict.commit, failure=verdict.failure
        )
        why = f" ({verdict.failure.message})" if verdict.failure is not None else ""
        yield end, f"sees that its rank has ended: {verdict.phase}{why}"


def _observation(rank: RankAt, run: Run) -> GenerationObservation:
    known = RankObservation(
        rank=0, local_rank=0, started=STARTED, outcome=_outcome(rank, run.generation), is_alive=rank.alive
    )
    return GenerationObservation(ranks=(known,), is_settled=True, drain_requested=rank.drain is not None)


def _outcome(rank: RankAt, generation: int) -> Outcome | None:
    if rank.outcome is None:
        return None
    kind = {"drained": OutcomeKind.DRAINED, "succeeded": OutcomeKind.SUCCEEDED}.get(rank.outcome, OutcomeKind.FAILED)
    failure = None
    if kind is OutcomeKind.FAILED:
        # Being fenced is reported as the loss of the peers, which went on without this rank.
        reason = FailureReason.LOST_PEER if rank.outcome in ("lost", "fenced") else FailureReason.SCRIPT_ERROR
        failure = Failure(reason=reason, message=rank.outcome)
    commit = rank.reported.commit
    return Outcome(
        generation=generation,
        kind=kind,
        step=rank.reported.step,
        commit=commit_ref(commit) if commit is not None else None,
        failure=failure,
    )


def _gone(world: World, pod: Pod, agent: Agent) -> World:
    number = agent.real.generation
    world = kill_ranks(world, pod.sequence, number)
    world = world.with_pod(pod._replace(agent=agent._replace(killing=False)))
    return dispatch(world, pod.sequence, agent_state.ProcessesGone(generation=number))


def kill_ranks(world: World, sequence: int, generation: int | None = None) -> World:
    """The ranks of a pod are gone, and with them what they were doing."""
    for run in world.runs:
        places = [n for n, rank in enumerate(run.ranks) if rank.sequence == sequence]
        if not places or (generation is not None and run.generation != generation):
            continue
        place = places[0]
        ranks = tuple(r._replace(alive=False) if n == place else r for n, r in enumerate(run.ranks))
        saving = run.saving
        if saving is not None:
            tasks = tuple(None if n == place else task for n, task in enumerate(saving.tasks))
            saving = saving._replace(tasks=tasks)
        run = run._replace(ranks=ranks, saving=saving)
        world = world.with_run(run._replace(fence=None, clean_up=None) if place == 0 else run)
    return world._replace(runs=tuple(run for run in world.runs if _is_there(world, run)))


def _is_there(world: World, run: Run) -> bool:
    """Whether anything of a run may still happen or be asked."""
    return any(rank.alive for rank in run.ranks) or any(
        pod.agent is not None and pod.agent.real.generation == run.generation for pod in world.pods
    )


# --- events and commands -------------------------------------------------------------------------------------


def dispatch(world: World, sequence: int, event: Event) -> World:
    """Feed an event to the state machine, and carry out its commands."""
    pod = world.pod(sequence)
    assert pod is not None
    assert pod.agent is not None
    reaction = transition(pod.agent.real, event)
    state = keyed(reaction.state)
    if state != pod.agent.state:
        world = world.with_pod(pod._replace(agent=pod.agent._replace(state=state)))
    for command in reaction.commands:
        world = _perform(world, sequence, command)
    return world


def _perform(world: World, sequence: int, command: Command) -> World:
    pod = world.pod(sequence)
    assert pod is not None
    assert pod.agent is not None
    match command:
        case agent_state.StartGeneration(assignment=assigned):
            return _launched(world, sequence, assigned)
        case agent_state.RequestDrain(generation=number, request=request):
            return _with_drain(world, sequence, number, int((request.deadline - at(0)).total_seconds()))
        case agent_state.CancelDrain(generation=number):
            return _with_drain(world, sequence, number, None)
        case agent_state.KillGeneration():
            return world.with_pod(pod._replace(agent=pod.agent._replace(killing=True)))
        case agent_state.Leave():
            return _left(world, pod, pod.agent)


def _launched(world: World, sequence: int, assigned: GenerationAssignment) -> World:
    run = world.run(assigned.number)
    if run is None:
        generation = world.job.value.generation
        resume = generation.resume
        known = Committed(resume.generation, resume.step, resume.manifest) if resume is not None else None
        members = tuple(RankAt(int(member.pod_uid[1:])) for member in generation.members)
        run = Run(assigned.number, known, members)
        world = world._replace(runs=(*world.runs, run))
    problem = world.problem
    others = [r for each in world.runs for r in each.ranks if r.sequence == sequence and r.alive]
    if others:
        problem = f"agent job-{sequence} runs two generations at once"
    ranks = tuple(r._replace(launched=True, alive=True) if r.sequence == sequence else r for r in run.ranks)
    return world.with_run(run._replace(ranks=ranks))._replace(problem=problem)


def _with_drain(world: World, sequence: int, number: int, deadline: int | None) -> World:
    run = world.run(number)
    if run is None:
        return world
    ranks = tuple(r._replace(drain=deadline) if r.sequence == sequence else r for r in run.ranks)
    return world.with_run(run._replace(ranks=ranks))


def _left(world: World, pod: Pod, agent: Agent) -> World:
    """The agent reports once more and exits, and its pod has ended."""
    node = world.node(pod.node)
    if world.operator.up and node is not None and node.reachable:
        world = delivered(world, pod.sequence, newest_report(world, pod, agent))
    world = kill_ranks(world, pod.sequence)
    ended = pod._replace(agent=None, ended=int(agent.real.failure is not None and agent.real.sigterm is None))
    return without_pod(world, pod) if pod.deleted_by is not None else world.with_pod(ended)


# --- the operator's control API ------------------------------------------------------------------------------


def _talk(world: World, pod: Pod, agent: Agent) -> Moves:
    operator = world.operator
    if agent.held is not None:
        if world.time > agent.held[1]:
            yield late_answer(world, pod, agent, agent.held[0])
    elif operator.published:
        assigned = assignment(world.job, pod.sequence)
        if assigned.key != agent.assignment:
            yield f"agent {pod.name} is assigned: {named(assigned)}", received(world, pod, assigned)
    report = newest_report(world, pod, agent)
    known = next((each for sequence, each, _ in operator.reports if sequence == pod.sequence), None)
    if known is None or (report.value[0].news != known.value[0].news):
        yield f"agent {pod.name} reports: {said(report)}", delivered(world, pod.sequence, report)


def late_answer(world: World, pod: Pod, agent: Agent, assigned: Keyed) -> tuple[str, World]:
    after = world.with_pod(pod._replace(agent=agent._replace(held=None)))
    return f"agent {pod.name} receives a late answer: {named(assigned)}", received(after, pod, assigned)


def named(assigned: Keyed) -> str:
    action, generation, *_ = assigned.key
    return f"{action} generation {generation[0]}" if generation else str(action)


def said(report: Keyed) -> str:
    value = report.value[0]
    step = f", step {value.progress.step}" if value.progress is not None else ""
    return f"{value.phase} in generation {value.generation}{step}"


def received(world: World, pod: Pod, assigned: Keyed) -> World:
    """An agent receives an assignment, new or repeated."""
    pod = world.pod(pod.sequence) or pod
    assert pod.agent is not None
    world = world.with_pod(pod._replace(agent=pod.agent._replace(assignment=assigned.key)))
    return dispatch(world, pod.sequence, agent_state.AssignmentReceived(assignment=assigned.value))


def delivered(world: World, sequence: int, report: Keyed, since: int | None = None) -> World:
    """The operator has read a report, whose request came now or at `since`."""
    received = world.time if since is None else since
    for known, _, at_time in world.operator.reports:
        newest = ReportView(report=report.value[0], received_at=at(at_time))
        if known == sequence and is_overtaken(newest, at(received)):
            return world
    others = tuple(each for each in world.operator.reports if each[0] != sequence)
    reports = tuple(sorted((*others, (sequence, report, received)), key=lambda each: each[0]))
    return world._replace(operator=world.operator._replace(reports=reports))


def newest_report(world: World, pod: Pod, agent: Agent) -> Keyed:
    """The agent's state, as it would report it now."""
    run = world.run(agent.real.generation)
    rank = next((r for r in run.ranks if r.sequence == pod.sequence), None) if run is not None else None
    times = (run.first_step, run.last_step) if run is not None else (None, None)
    reported = (rank.reported, rank.drain_seen, rank.launched) if rank is not None else None
    return _report(pod.sequence, agent.state, times, reported, run.joined if run is not None else False)


@lru_cache(maxsize=100_000)
def _report(sequence: int, state: Keyed, times: Any, reported: Any, joined: bool) -> Keyed:
    real: AgentState = state.value
    progress = (
        _progress(real.generation, times, reported) if reported is not None and reported[2] and joined else None
    )
    report = report_of(
        real, pod=f"job-{sequence}", uid=f"u{sequence}", progress=progress, now=at(0), port=20000 + sequence
    )
    since = (times[1] or 0) if real.is_active else None
    return Keyed((sequence, state.key, times, reported, joined), (report, since))


def _progress(generation: int, times: Any, reported: Any) -> Progress:
    shown, seen, _ = reported
    first, last = times
    return Progress(
        generation=generation,
        phase=shown.phase if shown.total_steps is not None else TrainerPhase.STARTING,
        step=shown.step,
        start_step=shown.start_step,
        total_steps=TOTAL_STEPS if shown.total_steps is not None else None,
        step_seconds=float(STEP_SECONDS) if last is not None else None,
        first_step_at=at(first) if first is not None else None,
        last_step_at=at(last) if last is not None else None,
        updated_at=at(last or 0),
        commit=commit_ref(shown.commit) if shown.commit is not None else None,
        checkpoint_failure=_SAVE_FAILS if shown.save_fails else None,
        drain_seen_at=at(seen) if seen is not None else None,
    )


_SAVE_FAILS = Failure(reason=FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE, message="The store does not answer.")
