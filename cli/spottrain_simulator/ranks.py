"""The ranks of a job: they meet, make steps, commit and end.

They only count. `explorer` runs the real step loop and the real commit protocol instead, for some steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol

from spottrain_agent.agent_state import AgentState, DrainSeen, Event, GenerationEnded, ProcessesGone, RanksStarted
from spottrain_api.contract.assignments import AgentPhase, GenerationAssignment
from spottrain_api.contract.reports import CommitRef, Failure, FailureReason, Progress, TrainerPhase

NOW, NEVER = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
LOST_PEER = Failure(reason=FailureReason.LOST_PEER, message="a peer left")
SCRIPT_ERROR = Failure(reason=FailureReason.SCRIPT_ERROR, message="ValueError: x")


class Member(Protocol):
    """What ranks need of their agent."""

    state: AgentState

    def dispatch(self, event: Event) -> None: ...

    def report_soon(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things take, in seconds.

    Attributes:
        start: From the rendezvous to the first step.
        step: A step.
        nodes: On so many nodes. On others it takes as much longer or shorter. None: on any number.
        save: The save at the end of a drain.
        commit_every: Steps from commit to commit.
        wait: Of each step, for data.
        stall: Of each step, for saves.
    """

    start: float = 3.0
    step: float = 0.5
    nodes: int | None = None
    save: float = 0.75
    commit_every: int = 20
    wait: float = 0.125
    stall: float = 0.0625

    def step_on(self, num_nodes: int) -> float:
        """Seconds of a step on so many nodes."""
        return self.step if self.nodes is None else self.step * self.nodes / num_nodes


@dataclass(eq=False, kw_only=True)
class Ranks:
    """The ranks of one generation, which share all that they do.

    Attributes:
        number: Of the generation.
        num_members: How many agents have to come.
        members: The agents whose ranks run.
        joined_at: When all had come.
        due: When they do something next, if nothing happens to them.
        drain_seen_at: When they saw that one of them drains. They save and end then.
    """

    number: int
    num_members: int
    members: list[Member] = field(default_factory=list)
    due: datetime = NOW
    phase: TrainerPhase = TrainerPhase.STARTING
    joined_at: datetime | None = None
    start_step: int = 0
    step: int = 0
    first_step_at: datetime | None = None
    last_step_at: datetime | None = None
    drain_seen_at: datetime | None = None
    commit: CommitRef | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.num_members


@dataclass(kw_only=True)
class Training:
    """The ranks of all generations of a job, and the checkpoints that they share.

    Attributes:
        total_steps: After this step, the script ends.
        of: The ranks of each generation, by the id of their rendezvous.
        head: The newest commit.
        fence: The newest generation that has resumed.
        num_steps: Number of steps made, repeated ones included.
        fail_next_step: The generation in which a rank raises on its next step.
        hanging: Generations that make no step, and don't notice a lost peer.
        peers_hang: No generation notices a lost peer, as with NCCL.
        jumps: Time passes in jumps, in which they make many steps. Otherwise they make one at a time.
        due: When ranks do something next.
    """

    total_steps: int
    pace: Pace = Pace()
    of: dict[str, Ranks] = field(default_factory=dict)
    head: CommitRef | None = None
    fence: int = 0
    num_steps: int = 0
    fail_next_step: int | None = None
    hanging: set[int] = field(default_factory=set)
    peers_hang: bool = False
    jumps: bool = False
    due: datetime = NEVER

    @property
    def newest(self) -> Ranks | None:
        return max(self.of.values(), key=lambda ranks: ranks.number, default=None)

    @property
    def news_at(self) -> datetime:
        """When ranks next do something that anybody has to know of, if nothing happens to them."""
        if self.due in (NOW, NEVER):
            return self.due
        train = (each for each in self.of.values() if each.is_complete and each.number not in self.hanging)
        later = (
            each.due + timedelta(seconds=self._seconds_of(each) * (self._num_quiet_steps(each) - 1)) for each in train
        )
        return min(later, default=NEVER)

    @property
    def is_committed(self) -> bool:
        """Whether the newest step is committed."""
        return self.head is not None and self.newest is not None and self.head.step == self.newest.step

    # --- what happens to the ranks ------------------------------------------------------------------------

    def start(self, member: Member, assignment: GenerationAssignment) -> Ranks:
        """An agent starts its ranks. They wait for the others."""
        new = Ranks(number=assignment.number, num_members=assignment.num_nodes)
        ranks = self.of.setdefault(assignment.rendezvous_id, new)
        ranks.members.append(member)
        self.wake()
        return ranks

    def lose(self, member: Member) -> None:
        """An agent and its ranks are gone."""
        for ranks in self.of.values():
            if member in ranks.members:
                ranks.members.remove(member)
        self.wake()

    def wake(self) -> None:
        """Something has happened to some of the agents."""
        self.due = NOW

    def hang(self, number: int, since: datetime) -> None:
        """Let a generation that trains make no step after this time."""
        self.hanging.add(number)
        for ranks in self.of.values():
            ranks.last_step_at = since if ranks.number == number else ranks.last_step_at

    def finish(self) -> None:
        """Let the script end at its next step."""
        if self.newest is not None:
            self.total_steps = self.newest.step

    def advance(self, now: datetime) -> None:
        """Let time pass up to now."""
        if now < self.due:
            return
        self.due = NEVER
        for ranks in list(self.of.values()):
            self._clear(ranks)
            self._advance(ranks, now)
            if ranks.is_complete:
                self.due = min(self.due, ranks.due)

    # --- what they do -------------------------------------------------------------------------------------

    def _clear(self, ranks: Ranks) -> None:
        """Processes that were killed or have ended are gone."""
        for member in list(ranks.members):
            if not member.state.is_active or member.state.generation != ranks.number:
                ranks.members.remove(member)
                member.dispatch(ProcessesGone(generation=ranks.number))

    def _advance(self, ranks: Ranks, now: datetime) -> None:
        hangs = ranks.number in self.hanging
        if ranks.joined_at is None:
            if ranks.is_complete:
                self._join(ranks, now)
        elif ranks.is_complete:
            if now >= ranks.due and not hangs:
                self._train(ranks, now)
        elif ranks.members and not hangs and not self.peers_hang:
            self._end(ranks, AgentPhase.FAILED, LOST_PEER)

    def _join(self, ranks: Ranks, now: datetime) -> None:
        if ranks.number < self.fence:
            fenced = LOST_PEER.model_copy(update={"message": "fenced", "fence": self.fence})
            return self._end(ranks, AgentPhase.FAILED, fenced)
        self.fence = ranks.number
        ranks.joined_at, ranks.due = now, now + timedelta(seconds=self.pace.start)
        ranks.commit = self.head
        ranks.step = ranks.start_step = self.head.step if self.head is not None else 0
        for member in ranks.members:
            member.dispatch(RanksStarted(generation=ranks.number))

    def _train(self, ranks: Ranks, now: datetime) -> None:
        if ranks.drain_seen_at is not None:
            self._commit(ranks, now)
            self._end(ranks, AgentPhase.DRAINED)
        elif self.fail_next_step == ranks.number:
            self.fail_next_step = None
            self._end(ranks, AgentPhase.FAILED, SCRIPT_ERROR, num=1)
        elif ranks.step >= self.total_steps:
            self._commit(ranks, now)
            ranks.phase = TrainerPhase.DONE
            self._end(ranks, AgentPhase.SUCCEEDED)
        else:
            self._step(ranks, now)

    def _seconds_of(self, ranks: Ranks) -> float:
        return self.pace.step_on(ranks.num_members)

    def _drains(self, ranks: Ranks) -> bool:
        return any(member.state.drain is not None for member in ranks.members)

    def _num_quiet_steps(self, ranks: Ranks) -> int:
        """How many steps they make up to one that somebody has to know of. Commits can be reported later."""
        if ranks.first_step_at is None or ranks.drain_seen_at is not None or self._drains(ranks):
            return 1
        return max(1, self.total_steps - ranks.step)

    def _steps_by(self, ranks: Ranks, now: datetime) -> tuple[int, datetime | None]:
        """How many steps they have made by this time, if nothing happens to them, and when they made the last."""
        if not (self.jumps and ranks.is_complete) or now < ranks.due or ranks.drain_seen_at is not None:
            return 0, ranks.last_step_at
        seconds = self._seconds_of(ranks)
        num = min(1 + int((now - ranks.due).total_seconds() / seconds), self._num_quiet_steps(ranks))
        return num, ranks.due + timedelta(seconds=seconds * (num - 1))

    def _step(self, ranks: Ranks, now: datetime) -> None:
        num, made_at = self._steps_by(ranks, now) if self.jumps else (1, now)
        assert made_at is not None
        self.num_steps += num
        ranks.step += num
        ranks.last_step_at, ranks.due = made_at, made_at + timedelta(seconds=self._seconds_of(ranks))
        if self._drains(ranks):
            ranks.drain_seen_at, ranks.due = made_at, made_at + timedelta(seconds=self.pace.save)
            for member in ranks.members:
                member.dispatch(DrainSeen(generation=ranks.number))
        elif (num_since := ranks.step % self.pace.commit_every) < num:
            self._commit(ranks, made_at - timedelta(seconds=self._seconds_of(ranks) * num_since), num_since)
        if ranks.first_step_at is None:
            ranks.first_step_at, ranks.phase = made_at, TrainerPhase.TRAINING
            self._report_soon(ranks)

    def _commit(self, ranks: Ranks, now: datetime, num_since: int = 0) -> None:
        """Commit the newest step, or the one that came so many steps before it."""
        if ranks.number < self.fence:
            return  # HEAD names a newer generation
        step = ranks.step - num_since
        self.head = ranks.commit = CommitRef(
            generation=ranks.number, step=step, manifest=f"g{ranks.number}-s{step}", committed_at=now
        )
        self._report_soon(ranks)

    def _report_soon(self, ranks: Ranks) -> None:
        for member in ranks.members:
            member.report_soon()

    def _end(
        self, ranks: Ranks, phase: AgentPhase, failure: Failure | None = None, *, num: int | None = None
    ) -> None:
        commit = ranks.commit if failure is None else None
        end = GenerationEnded(generation=ranks.number, phase=phase, commit=commit, failure=failure)
        for member in ranks.members[:num]:
            member.dispatch(end)
        self.wake()

    # --- what they report ---------------------------------------------------------------------------------

    def step_age(self, ranks: Ranks, now: datetime) -> float:
        """Seconds since the last step, or since the ranks joined."""
        _, last_step_at = self._steps_by(ranks, now)
        return (now - (last_step_at or ranks.joined_at or now)).total_seconds()

    def progress(self, ranks: Ranks, now: datetime) -> Progress | None:
        """What the ranks report to their agents."""
        if ranks.joined_at is None:
            return None
        num_new, last_step_at = self._steps_by(ranks, now)
        step = ranks.step + num_new
        num_later_steps = max(0, step - ranks.start_step - 1)
        return Progress(
            generation=ranks.number,
            phase=ranks.phase,
            step=step if ranks.first_step_at is not None else 0,
            start_step=ranks.start_step,
            total_steps=self.total_steps,
            step_seconds=self._seconds_of(ranks),
            waited_seconds=self.pace.wait * num_later_steps,
            stalled_seconds=self.pace.stall * num_later_steps,
            first_step_at=ranks.first_step_at,
            last_step_at=last_step_at,
            drain_seen_at=ranks.drain_seen_at,
            updated_at=now,
            commit=ranks.commit,
        )
