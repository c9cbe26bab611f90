"""The agent's shell, which feeds events to the state machine and carries out its commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import assert_never

import aiohttp

from spottrain_agent.agent_state import (
    SIGTERM_SOURCE,
    AgentState,
    AssignmentReceived,
    CancelDrain,
    Command,
    DrainSeen,
    Event,
    GenerationEnded,
    KillGeneration,
    Leave,
    NoticesChanged,
    ProcessesGone,
    RanksStarted,
    RequestDrain,
    SigtermReceived,
    StartGeneration,
    transition,
)
from spottrain_agent.contact import Contact
from spottrain_agent.control_client import ControlClient
from spottrain_agent.generation_run import GenerationRun, missing_entrypoint
from spottrain_agent.notice_client import NoticeClient
from spottrain_agent.ports import ReservedPort
from spottrain_agent.processes import Reaper, kill_descendants
from spottrain_agent.replica_process import ReplicaProcess
from spottrain_agent.report_rhythm import Milestones
from spottrain_agent.routes import IDLE_SECONDS
from spottrain_agent.run_directory import newest_generation
from spottrain_agent.settings import AgentSettings
from spottrain_agent.verdict import judge, unexplained_end
from spottrain_agent.zygote_process import LaunchFailed, SpawnZygote, ZygoteProcess
from spottrain_api.contract.assignments import (
    AgentPhase,
    AgentReport,
    Assignment,
    AssignmentAction,
    GenerationAssignment,
)
from spottrain_api.contract.notices import POD_NOTICE_PREFIX, Notice, NoticeKind, NoticeList
from spottrain_api.contract.reports import Failure, FailureReason
from spottrain_runtime.logs import remember
from spottrain_runtime.processes import become_subreaper

logger = logging.getLogger(__name__)

OBSERVE_INTERVAL_SECONDS = 0.05
# After its ranks have succeeded, torchrun waits at its exit barrier for the other members, which may still need the
# rendezvous store. The next assignment ends that wait.
LINGER_SECONDS = 60.0
# How long an agent that leaves waits for its loops, and tries to send its last report.
CANCEL_SECONDS = 1.0
LAST_REPORT_SECONDS = 3.0
# torchrun looks every 0.1 s how its ranks are.
EXPLAIN_SECONDS = 2.0


def initial_state(settings: AgentSettings) -> AgentState:
    """The state of a new agent. If it follows a different agent in the same pod, that one's generation has failed."""
    generation = newest_generation(settings.run_root)
    if generation == 0:
        return AgentState()
    failure = Failure(reason=FailureReason.KILLED, message="The agent restarted, and its ranks were killed with it.")
    return AgentState(generation=generation, phase=AgentPhase.FAILED, failure=failure)


@dataclass(slots=True)
class _Activity:
    """The tasks and times of the current generation."""

    run: GenerationRun
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    start: asyncio.Task[None] | None = None
    kill: asyncio.Task[None] | None = None


class Agent:
    """One per trainer pod, for its whole life."""

    def __init__(self, settings: AgentSettings, spawn_zygote: SpawnZygote) -> None:
        self._settings = settings
        self._state = initial_state(settings)
        self._reaper = Reaper()
        self._contact = Contact(settings.pod_ip, self._report)
        self._zygote = ZygoteProcess(self._reaper, self._contact.report_soon, spawn_zygote)
        self._replicas = ReplicaProcess(self._reaper, settings.pod_ip)
        self._activity: _Activity | None = None
        self._port = ReservedPort(settings.pod_ip)
        self._used_port: ReservedPort | None = None
        self._milestones = Milestones()
        self._shutdown_grace: float | None = None
        self._stop: asyncio.Task[None] | None = None
        self._notices: NoticeClient | None = None
        self._leave = asyncio.Event()

    async def run(self) -> int:
        """Serve until the operator or a SIGTERM ends it.

        Returns:
            The exit code: 1 if the operator ended it after its ranks had failed, so that Kubernetes shows which pod
            failed first. Otherwise 0.

        Raises:
            LaunchFailed: The image can't import torch.
        """
        become_subreaper()
        loop = asyncio.get_running_loop()
        self._reaper.attach(loop)
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._on_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # __main__.py has blocked them
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=IDLE_SECONDS)) as session:
            settings = self._settings
            control = ControlClient(
                session,
                settings.control_dir,
                settings.token_file,
                pod_uid=settings.pod_uid,
            )
            loops = [
                self._zygote.run(),
                self._replicas.run(),
                self._contact.keep(control, self._on_assignment),
                self._observe_forever(),
            ]
            if self._settings.watcher_url:
                self._notices = NoticeClient(session, self._settings.watcher_url)
                loops.append(self._notices.follow(self._on_notices))
            await self._run_until_leave([asyncio.create_task(coroutine) for coroutine in loops])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_REPORT_SECONDS):
                    await self._contact.report_last(control)
        await kill_descendants()
        return int(self._state.failure is not None and self._state.sigterm is None)

    async def _run_until_leave(self, tasks: list[asyncio.Task[None]]) -> None:
        leave = asyncio.create_task(self._leave.wait())
        done, others = await asyncio.wait({leave, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        if others:  # what they use is closed after them
            ended, _ = await asyncio.wait(others, timeout=CANCEL_SECONDS)
            for task in ended:
                if not task.cancelled() and (error := task.exception()) is not None:
                    logger.warning("a loop of the agent failed while it ended", exc_info=error)
        for task in done - {leave}:
            # These loops never end, so this is a bug, or torch can't be imported. A pod that fails is better than one
            # that only seems to work.
            task.result()

    # --- events ------------------------------------------------------------------------------------------

    def _on_assignment(self, assignment: Assignment) -> None:
        number = assignment.generation.number if assignment.generation else None
        logger.info("assignment: %s generation %s", assignment.action, number)
        if assignment.shutdown_grace_seconds is not None:  # a node may still run after its object is deleted
            self._shutdown_grace = assignment.shutdown_grace_seconds
        if self._notices is not None:
            self._notices.expect(assignment.watcher)
        activity = self._activity
        if activity is not None and self._state.is_active and assignment.action is AssignmentAction.STOP:
            self._stop = asyncio.create_task(self._stop_once_explained(assignment, activity))
        else:
            self._dispatch(AssignmentReceived(assignment=assignment))

    async def _stop_once_explained(self, assignment: Assignment, activity: _Activity) -> None:
        """Follow a STOP, but first wait for torchrun to say how a rank has just ended.

        The ranks that lost it may be the reason for the STOP, and the operator needs the cause.
        """
        for _ in range(round(EXPLAIN_SECONDS / OBSERVE_INTERVAL_SECONDS)):
            if not (self._state.is_active and activity.run.observe().is_unexplained):
                break
            await asyncio.sleep(OBSERVE_INTERVAL_SECONDS)
        if self._activity is activity:
            self._observe(activity)
        if self._state.is_active and (failure := unexplained_end(activity.run.observe())) is not None:
            number = activity.run.assignment.number
            self._dispatch(GenerationEnded(generation=number, phase=AgentPhase.FAILED, failure=failure))
        self._dispatch(AssignmentReceived(assignment=assignment))

    def _on_notices(self, notices: NoticeList) -> None:
        ours = f"{POD_NOTICE_PREFIX}{self._settings.pod_uid}"
        concerning = tuple(n for n in notices.notices if not n.id.startswith(POD_NOTICE_PREFIX) or n.id == ours)
        self._dispatch(NoticesChanged(notices=concerning, now=datetime.now(UTC)))

    def _on_sigterm(self) -> None:
        now = datetime.now(UTC)
        notice = Notice(
            id=f"sigterm-{self._settings.pod_uid}",
            node=self._settings.node,
            kind=NoticeKind.EVICT,
            source=SIGTERM_SOURCE,
            deadline=now + timedelta(seconds=self._grace_seconds()),
            observed_at=now,
        )
        logger.info("SIGTERM: leaving by %s", notice.deadline.isoformat())
        self._dispatch(SigtermReceived(notice=notice))

    def _grace_seconds(self) -> float:
        """Seconds that a SIGTERM leaves: nothing says whether the pod is deleted or the node shuts down."""
        grace = self._settings.grace_seconds
        return grace if self._shutdown_grace is None else min(grace, self._shutdown_grace)

    def _dispatch(self, event: Event) -> None:
        step = transition(self._state, event)
        if step.state != self._state:
            self._state = step.state
            self._contact.report_soon()
        for command in step.commands:
            self._perform(command)

    # --- commands ----------------------------------------------------------------------------------------

    def _perform(self, command: Command) -> None:
        match command:
            case StartGeneration(assignment=assignment):
                self._start(assignment)
            case RequestDrain(request=request):
                logger.info("drain: %s, by %s", request.reason, request.deadline.isoformat())
                if self._activity:
                    self._activity.run.request_drain(request)
            case CancelDrain():
                logger.info("drain: cancelled")
                if self._activity:
                    self._activity.run.cancel_drain()
            case KillGeneration(show_stacks=show_stacks):
                self._kill(show_stacks=show_stacks)
            case Leave():
                self._leave.set()
            case _:
                assert_never(command)

    def _start(self, assignment: GenerationAssignment) -> None:
        remember(generation=assignment.number)
        self._activity = _Activity(run=GenerationRun(assignment, self._settings, self._grace_seconds()))
        self._activity.start = asyncio.create_task(self._launch(self._activity.run))

    async def _launch(self, run: GenerationRun) -> None:
        try:
            if run.assignment.node_rank == 0:
                self._used_port, self._port = self._port, ReservedPort(self._settings.pod_ip)
            failure = missing_entrypoint(run.assignment.entrypoint)
            if failure is None:
                if run.assignment.replica_token is not None:
                    await self._replicas.open(run.assignment.replica_token)
                await run.start(self._zygote, self._reaper)
                return
            # An agent that follows this one in the pod finds the generation by its run directory.
            run.directory.create(run.assignment.trainer)
        except (LaunchFailed, OSError) as error:
            failure = Failure(reason=FailureReason.START_FAILED, message=str(error))
        except Exception as error:
            # A bug. Nobody awaits this task, so that the operator would never learn of it.
            logger.exception("generation %d can't start", run.assignment.number)
            failure = Failure(reason=FailureReason.START_FAILED, message=f"The agent failed: {error!r}")
        ended = GenerationEnded(generation=run.assignment.number, phase=AgentPhase.FAILED, failure=failure)
        self._dispatch(ended)

    def _kill(self, *, show_stacks: bool = False) -> None:
        if self._activity is not None and self._activity.kill is None:
            self._activity.kill = asyncio.create_task(self._kill_all(self._activity, show_stacks=show_stacks))

    async def _kill_all(self, activity: _Activity, *, show_stacks: bool) -> None:
        if show_stacks:
            await activity.run.log_stacks()
        if activity.start is not None and not activity.start.done():
            activity.start.cancel()
            # The launch itself may have asked for the kill: let it return first.
            await asyncio.wait({activity.start})
        await self._zygote.settle()
        await kill_descendants(keep={pid for pid in (self._zygote.pid, self._replicas.pid) if pid is not None})
        if self._used_port is not None:
            self._used_port.release()
            self._used_port = None
        self._dispatch(ProcessesGone(generation=activity.run.assignment.number))

    # --- observation -------------------------------------------------------------------------------------

    async def _observe_forever(self) -> None:
        while True:
            if self._state.has_processes and self._activity is not None:
                self._observe(self._activity)
            await asyncio.sleep(OBSERVE_INTERVAL_SECONDS)

    def _observe(self, activity: _Activity) -> None:
        run = activity.run
        number = run.assignment.number
        if not self._state.is_active:
            self._clear_away(activity)
            return
        if self._state.phase is AgentPhase.STARTING and run.has_started():
            self._dispatch(RanksStarted(generation=number))
        run.terminate_for_drain()
        run.show_risk(self._state.is_at_risk)
        if self._state.drain is not None and not self._state.drain_seen and run.drain_seen():
            self._dispatch(DrainSeen(generation=number))
        if self._milestones.reach(run.progress()):
            self._contact.report_soon()
        verdict = judge(run.observe())
        if verdict is not None:
            logger.info("generation %d: %s", number, verdict)
            self._dispatch(
                GenerationEnded(
                    generation=number, phase=verdict.phase, commit=verdict.commit, failure=verdict.failure
                )
            )

    def _clear_away(self, activity: _Activity) -> None:
        """After the ranks have ended, kill what is left.

        That waits until torchrun has ended or has lingered too long.
        """
        activity.ended_at = activity.ended_at or time.monotonic()
        if activity.run.is_launcher_gone() or time.monotonic() - activity.ended_at > LINGER_SECONDS:
            self._kill()

    # --- reports -----------------------------------------------------------------------------------------

    def _report(self) -> AgentReport:
        state = self._state
        activity = self._activity
        run = activity.run if activity and activity.run.assignment.number == state.generation else None
        progress = run.progress() if run else None
        return AgentReport(
            pod=self._settings.pod,
            pod_uid=self._settings.pod_uid,
            generation=state.generation,
            phase=state.phase,
            warm=self._zygote.is_warm,
            rendezvous_port=self._port.number,
            progress=progress,
            step_age_seconds=run.step_age_seconds() if run and state.is_active else None,
            commit=state.commit or (progress.commit if progress else None),
            failure=state.failure,
            notices=state.all_notices,
            replica_port=self._replicas.port,
            held=self._replicas.held,
            watch=self._notices.watch if self._notices else None,
            sent_at=datetime.now(UTC),
        )
