"""How a generation ended on this member, by what its processes have left behind. No clock, no I/O.

The ranks' own outcomes come first, then the workers' exits, then torchrun's end. A success is one only once the
process has ended with exit code 0: the script may have more to do after its session.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain_agent.records import LauncherEnded, WorkerEnded, WorkerStarted
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.lost_peers import is_lost_peer, lost_peer_sentence
from spottrain_api.contract.reports import CommitRef, Failure, FailureReason, Outcome, OutcomeKind, is_aborted

_RENDEZVOUS_ERROR = re.compile(r"rendezvous|DistNetworkError|DistStoreError|TCPStore|timed? ?out", re.IGNORECASE)
_ADVICE = {
    "SIGKILL": " The usual cause is memory: that of resources.limits.memory or, without a limit, of the node "
    "(kubectl top pod). If little was used, see in the script what happens at this step.",
    "SIGABRT": " NCCL's watchdog aborts a rank whose peer is lost or hangs, and native code aborts at a failed "
    "assertion: the end of the rank's log says which.",
}
# Exit codes of a rank that SIGTERM ended.
_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """What is known about one local rank.

    Attributes:
        is_alive: Whether its process was seen and still runs.
    """

    rank: int
    local_rank: int
    started: WorkerStarted | None = None
    ended: WorkerEnded | None = None
    outcome: Outcome | None = None
    is_alive: bool = False

    @property
    def is_done(self) -> bool:
        """Whether its session has ended well. The script may go on."""
        return self.outcome is not None and self.outcome.kind is OutcomeKind.SUCCEEDED

    @property
    def is_unexplained(self) -> bool:
        """Whether its process has ended and nothing says yet how."""
        is_gone = self.started is not None and not self.is_alive
        return is_gone and self.ended is None and (self.outcome is None or self.is_done)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationObservation:
    """What is known about all local ranks.

    Attributes:
        is_settled: Whether the launcher has had time to report its workers, or is gone.
    """

    ranks: tuple[RankObservation, ...]
    launcher: LauncherEnded | None = None
    launcher_exit_code: int | None = None
    is_settled: bool = False
    drain_requested: bool = False

    @property
    def is_unexplained(self) -> bool:
        """Whether the launcher is still to report how a rank has ended."""
        return not self.is_settled and any(rank.is_unexplained for rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of a generation on this member."""

    phase: AgentPhase
    commit: CommitRef | None = None
    failure: Failure | None = None

    def __str__(self) -> str:
        """The phase and the failure, as the agent logs them. The script has printed the traceback itself."""
        return f"{self.phase}: {self.failure.reason}: {self.failure.message}" if self.failure else str(self.phase)


def judge(observation: GenerationObservation) -> Verdict | None:
    """How the generation ended, or None while it runs. One failed rank ends the generation."""
    ends = [_rank_end(rank, observation) for rank in observation.ranks]
    failed = [end for end in ends if end is not None and end.phase is AgentPhase.FAILED]
    cause = min(failed, key=_is_a_consequence, default=None)
    # A peer of a killed rank fails before torchrun says that the rank was killed.
    is_unreported = not observation.is_settled and any(
        end is None and rank.is_unexplained for rank, end in zip(observation.ranks, ends, strict=True)
    )
    if cause is not None and not (_is_a_consequence(cause) and is_unreported):
        return cause
    if all(end is not None for end in ends):
        return _together([end for end in ends if end is not None])
    return _launcher_end(observation)


def unexplained_end(observation: GenerationObservation) -> Failure | None:
    """The failure of a rank that has ended, though nothing says how."""
    rank = next((rank for rank in observation.ranks if rank.is_unexplained), None)
    if rank is None:
        return None
    message = "The rank ended without an exception: see in the script what ends it, such as os._exit or a signal."
    return Failure(reason=FailureReason.SCRIPT_ERROR, message=message, rank=rank.rank)


def _is_a_consequence(end: Verdict) -> int:
    """0 for a cause of its own, 1 for a lost peer, and 2 for SIGTERM.

    NCCL's watchdog aborts a rank that has lost a peer. torchrun sends SIGTERM to the others when one has failed.
    """
    if end.failure is None:
        return 0
    if end.failure.exit_code in _SIGTERM:
        return 2
    return int(end.failure.reason is FailureReason.LOST_PEER or is_aborted(end.failure))


def _together(ends: Sequence[Verdict]) -> Verdict:
    drained = [end for end in ends if end.phase is AgentPhase.DRAINED]
    commits = [end.commit for end in ends if end.commit is not None]
    newest = max(commits, key=lambda commit: (commit.generation, commit.step), default=None)
    return Verdict(phase=AgentPhase.DRAINED if drained else AgentPhase.SUCCEEDED, commit=newest)


def _rank_end(rank: RankObservation, observation: GenerationObservation) -> Verdict | None:
    if rank.outcome is not None and not rank.is_done:
        return _of_outcome(rank, rank.outcome)
    if rank.ended is not None:
        return _of_exit(rank, rank.ended, observation)
    if rank.started is None or rank.is_alive:
        return None
    exit_code = observation.launcher.exit_codes.get(rank.local_rank) if observation.launcher else None
    if exit_code is None:
        if not observation.is_settled:
            return None
        # torchrun reports every exit code except 0, with which os._exit may end a worker without a record.
        exit_code = observation.launcher_exit_code or 0
    return _of_exit(rank, WorkerEnded(exit_code=exit_code), observation)


def _of_outcome(rank: RankObservation, outcome: Outcome) -> Verdict:
    """The end of a rank that has drained or failed."""
    if outcome.kind is OutcomeKind.DRAINED:
        return Verdict(phase=AgentPhase.DRAINED, commit=outcome.commit)
    failure = outcome.failure or Failure(
        reason=FailureReason.SCRIPT_ERROR, message=f"The rank failed at step {outcome.step}."
    )
    if rank.ended is not None and failure.exit_code is None:
        failure = failure.model_copy(update={"exit_code": rank.ended.exit_code})
    failure = failure.model_copy(update={"rank": rank.rank})
    return Verdict(phase=AgentPhase.FAILED, commit=outcome.commit, failure=failure)


def _of_exit(rank: RankObservation, ended: WorkerEnded, observation: GenerationObservation) -> Verdict:
    commit = rank.outcome.commit if rank.outcome is not None else None
    if rank.is_done and ended.exit_code == 0:
        return Verdict(phase=AgentPhase.SUCCEEDED, commit=commit)
    if observation.drain_requested and (ended.exit_code == 0 or ended.exit_code in _SIGTERM):
        return Verdict(phase=AgentPhase.DRAINED, commit=commit)
    if ended.exit_code == 0:
        return Verdict(phase=AgentPhase.SUCCEEDED)
    reason, message = _reason(ended), ended.message or _describe_exit(ended.exit_code)
    failure = Failure(
        reason=reason,
        message=lost_peer_sentence(message) if reason is FailureReason.LOST_PEER else message,
        exit_code=ended.exit_code,
        rank=rank.rank,
        traceback=ended.traceback,
    )
    return Verdict(phase=AgentPhase.FAILED, commit=commit, failure=failure)


def _reason(ended: WorkerEnded) -> FailureReason:
    if ended.exit_code < 0:
        return FailureReason.KILLED
    if is_lost_peer(ended.exception or "", ended.message or ""):
        return FailureReason.LOST_PEER
    return FailureReason.SCRIPT_ERROR


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"The rank ended with exit code {exit_code}; the pod's log says why."
    name = _signal_name(-exit_code)
    return f"The rank was killed by {name}.{_ADVICE.get(name, '')}"


def _launcher_end(observation: GenerationObservation) -> Verdict | None:
    """torchrun itself gave up, usually because the other members didn't come."""
    launcher = observation.launcher
    if launcher is None and observation.launcher_exit_code is None:
        return None
    if not observation.is_settled:
        return None
    exception = (launcher.exception if launcher else None) or ""
    message = (launcher.message if launcher else None) or ""
    if _RENDEZVOUS_ERROR.search(f"{exception} {message}"):
        reason = FailureReason.RENDEZVOUS_FAILED
        text = f"The members of the generation didn't come together: {message}"
    elif launcher is None:
        reason = FailureReason.KILLED
        text = _describe_launcher(observation.launcher_exit_code or 0)
    else:
        reason = FailureReason.START_FAILED
        text = f"torchrun could not start the ranks: {exception}: {message}"
    return Verdict(phase=AgentPhase.FAILED, failure=Failure(reason=reason, message=text))


def _describe_launcher(exit_code: int) -> str:
    how = f"was killed by {_signal_name(-exit_code)}" if exit_code < 0 else f"ended with code {exit_code}"
    return f"torchrun {how} before its ranks had ended."


def _signal_name(number: int) -> str:
    """The name of a signal. Most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
