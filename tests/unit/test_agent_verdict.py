"""The verdict on how a generation ended, from the traces of its processes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from spottrain_agent.records import LauncherEnded, WorkerEnded, WorkerStarted
from spottrain_agent.verdict import GenerationObservation, RankObservation, judge, unexplained_end
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.reports import CommitRef, Failure, FailureReason, Outcome, OutcomeKind

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STARTED = WorkerStarted(pid=1, started_at=NOW)
COMMIT = CommitRef(generation=1, step=7, manifest="m", committed_at=NOW)
GLOO = (
    "RuntimeError: [/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:10120: "
    "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application"
)
LOST_PEER = WorkerEnded(exit_code=1, exception="builtins.RuntimeError", message=GLOO)


def rank(
    number: int = 0,
    *,
    ended: WorkerEnded | None = None,
    outcome: OutcomeKind | None = None,
    alive: bool = False,
    failure: Failure | None = None,
) -> RankObservation:
    left = Outcome(generation=1, kind=outcome, step=7, commit=COMMIT, failure=failure) if outcome else None
    return RankObservation(rank=number, local_rank=number, started=STARTED, ended=ended, outcome=left, is_alive=alive)


def exited(code: int, exception: str | None = None, message: str | None = None) -> WorkerEnded:
    return WorkerEnded(exit_code=code, exception=exception, message=message)


def seen(*ranks: RankObservation, **more: object) -> GenerationObservation:
    return GenerationObservation(ranks=ranks, **more)  # type: ignore[arg-type]


UNSTARTED = RankObservation(rank=0, local_rank=0)
P = AgentPhase
R = FailureReason

CASES: dict[str, tuple[GenerationObservation, AgentPhase | None, FailureReason | None]] = {
    "not started": (seen(UNSTARTED), None, None),
    "running": (seen(rank(alive=True)), None, None),
    "one of two done": (seen(rank(0, ended=exited(0)), rank(1, alive=True)), None, None),
    "plain script done": (seen(rank(ended=exited(0))), P.SUCCEEDED, None),
    "plain script done under a drain": (seen(rank(ended=exited(0)), drain_requested=True), P.DRAINED, None),
    "plain script ends by sigterm's exit code": (
        seen(rank(ended=exited(143)), drain_requested=True),
        P.DRAINED,
        None,
    ),
    "plain script dies of sigterm": (
        seen(rank(), drain_requested=True, is_settled=True, launcher=LauncherEnded(exit_codes={0: -15})),
        P.DRAINED,
        None,
    ),
    "plain script fails under a drain": (
        seen(rank(ended=exited(1, "builtins.OSError", "OSError: disk full")), drain_requested=True),
        P.FAILED,
        R.SCRIPT_ERROR,
    ),
    "outcome counts before the process has gone": (
        seen(rank(outcome=OutcomeKind.DRAINED, alive=True)),
        P.DRAINED,
        None,
    ),
    "after its session, the script goes on": (seen(rank(outcome=OutcomeKind.SUCCEEDED, alive=True)), None, None),
    "it goes on under a drain": (
        seen(rank(outcome=OutcomeKind.SUCCEEDED, alive=True), drain_requested=True),
        None,
        None,
    ),
    "done after its session, under a drain": (
        seen(rank(outcome=OutcomeKind.SUCCEEDED, ended=exited(0)), drain_requested=True),
        P.SUCCEEDED,
        None,
    ),
    "raised after its session": (
        seen(rank(outcome=OutcomeKind.SUCCEEDED, ended=exited(1, "builtins.ValueError", "ValueError: x"))),
        P.FAILED,
        R.SCRIPT_ERROR,
    ),
    "gone after its session, torchrun may still report": (seen(rank(outcome=OutcomeKind.SUCCEEDED)), None, None),
    "gone after its session by os._exit(0)": (
        seen(rank(outcome=OutcomeKind.SUCCEEDED), is_settled=True),
        P.SUCCEEDED,
        None,
    ),
    "killed after its session": (
        seen(rank(outcome=OutcomeKind.SUCCEEDED), is_settled=True, launcher=LauncherEnded(exit_codes={0: -9})),
        P.FAILED,
        R.KILLED,
    ),
    "raised": (seen(rank(ended=exited(1, "builtins.ValueError", "ValueError: x"))), P.FAILED, R.SCRIPT_ERROR),
    "a cause before its consequence": (
        seen(rank(0, ended=LOST_PEER), rank(1, ended=exited(1, "builtins.ValueError", "ValueError: x"))),
        P.FAILED,
        R.SCRIPT_ERROR,
    ),
    "lost peer": (seen(rank(ended=LOST_PEER)), P.FAILED, R.LOST_PEER),
    "one failed while the other runs": (
        seen(rank(0, ended=exited(3)), rank(1, alive=True)),
        P.FAILED,
        R.SCRIPT_ERROR,
    ),
    "a killed rank is the cause, not the one that lost it": (
        seen(rank(0, ended=LOST_PEER), rank(1), is_settled=True, launcher=LauncherEnded(exit_codes={0: 1, 1: -9})),
        P.FAILED,
        R.KILLED,
    ),
    "lost a rank that may have been killed": (seen(rank(0, ended=LOST_PEER), rank(1)), None, None),
    "torchrun ended the other, and is about to end": (
        seen(rank(0, ended=LOST_PEER), rank(1), launcher=LauncherEnded(exit_codes={0: 1, 1: -15})),
        P.FAILED,
        R.LOST_PEER,
    ),
    "lost a rank that ended without a word": (
        seen(rank(0, ended=LOST_PEER), rank(1), is_settled=True),
        P.FAILED,
        R.LOST_PEER,
    ),
    "torchrun ended the other": (
        seen(rank(0, ended=LOST_PEER), rank(1), is_settled=True, launcher=LauncherEnded(exit_codes={0: 1, 1: -15})),
        P.FAILED,
        R.LOST_PEER,
    ),
    "gone without a word, torchrun may still report": (seen(rank()), None, None),
    "gone by os._exit(0)": (seen(rank(), is_settled=True), P.SUCCEEDED, None),
    "killed, and torchrun says so at once": (
        seen(rank(), launcher=LauncherEnded(exit_codes={0: -9})),
        P.FAILED,
        R.KILLED,
    ),
    "killed": (
        seen(rank(), is_settled=True, launcher=LauncherEnded(exit_codes={0: -9})),
        P.FAILED,
        R.KILLED,
    ),
    "rendezvous failed": (
        seen(
            UNSTARTED,
            launcher=LauncherEnded(exception="DistNetworkError", message="The client socket has timed out"),
            launcher_exit_code=1,
            is_settled=True,
        ),
        P.FAILED,
        R.RENDEZVOUS_FAILED,
    ),
    "torchrun could not start": (
        seen(
            UNSTARTED,
            launcher=LauncherEnded(exception="ValueError", message="bad"),
            launcher_exit_code=1,
            is_settled=True,
        ),
        P.FAILED,
        R.START_FAILED,
    ),
    "torchrun was killed": (seen(UNSTARTED, launcher_exit_code=-9, is_settled=True), P.FAILED, R.KILLED),
}


@pytest.mark.parametrize(("observation", "phase", "reason"), CASES.values(), ids=CASES)
def test_judge(observation: GenerationObservation, phase: AgentPhase | None, reason: FailureReason | None) -> None:
    verdict = judge(observation)
    assert (verdict and verdict.phase) == phase
    assert (verdict.failure.reason if verdict and verdict.failure else None) == reason


def test_the_ranks_own_failure_is_passed_on() -> None:
    own = Failure(reason=R.CHECKPOINT_ACCESS_DENIED, message="The bucket denies access.")
    verdict = judge(seen(rank(2, outcome=OutcomeKind.FAILED, failure=own, ended=exited(1))))
    assert verdict is not None
    assert verdict.failure == own.model_copy(update={"rank": 2, "exit_code": 1})


def test_a_message_with_half_a_character_is_passed_on() -> None:
    """Such as the name of a file that is not UTF-8, in a FileNotFoundError."""
    ended = WorkerEnded.from_json(exited(1, "builtins.OSError", "no \udcff file").to_json())
    verdict = judge(seen(rank(0, ended=ended)))
    assert verdict is not None
    assert verdict.failure is not None
    assert verdict.failure.message == "no ? file"


def test_the_log_shows_a_failure_as_a_sentence() -> None:
    own = Failure(reason=R.SCRIPT_ERROR, message="ValueError: x (train.py, line 3)", traceback="  in main")
    verdict = judge(seen(rank(2, outcome=OutcomeKind.FAILED, failure=own, ended=exited(1))))
    assert str(verdict) == "failed: ScriptError: ValueError: x (train.py, line 3)"
    assert str(judge(seen(rank(0, outcome=OutcomeKind.SUCCEEDED, ended=exited(0))))) == "succeeded"


def test_a_rank_that_failed_without_a_reason_is_reported_with_its_step() -> None:
    verdict = judge(seen(rank(2, outcome=OutcomeKind.FAILED)))
    assert verdict is not None
    assert verdict.failure == Failure(reason=R.SCRIPT_ERROR, message="The rank failed at step 7.", rank=2)


def test_the_newest_commit_is_passed_on() -> None:
    for kind, code in ((OutcomeKind.DRAINED, 0), (OutcomeKind.SUCCEEDED, 0), (OutcomeKind.SUCCEEDED, 1)):
        verdict = judge(seen(*(rank(number, outcome=kind, ended=exited(code)) for number in range(2))))
        assert verdict is not None
        assert verdict.commit == COMMIT


def test_a_kill_says_what_it_usually_means() -> None:
    verdict = judge(seen(rank(3), is_settled=True, launcher=LauncherEnded(exit_codes={3: -9})))
    assert verdict is not None
    assert verdict.failure is not None
    assert verdict.failure.message == (
        "The rank was killed by SIGKILL. The usual cause is memory: that of resources.limits.memory or, without a "
        "limit, of the node (kubectl top pod). If little was used, see in the script what happens at this step."
    )


@pytest.mark.parametrize(("number", "name"), [(34, "SIGRTMIN"), (40, "signal 40")])
def test_a_real_time_signal_is_named_by_its_number_if_it_has_no_name(number: int, name: str) -> None:
    launcher = LauncherEnded(exit_codes={3: -number})
    verdict = judge(seen(rank(3), is_settled=True, launcher=launcher))
    assert verdict is not None
    assert verdict.failure is not None
    assert verdict.failure.message == f"The rank was killed by {name}."
    verdict = judge(seen(UNSTARTED, is_settled=True, launcher_exit_code=-number))
    assert verdict is not None
    assert verdict.failure is not None
    assert verdict.failure.message == f"torchrun was killed by {name} before its ranks had ended."


def test_a_rank_that_has_gone_without_a_word_is_named() -> None:
    """As by os._exit(0), of which torchrun says nothing while other members run."""
    failure = unexplained_end(seen(rank(0, alive=True), rank(1)))
    assert failure is not None
    assert (failure.reason, failure.rank) == (R.SCRIPT_ERROR, 1)
    assert unexplained_end(seen(rank(0, alive=True), rank(1, ended=exited(1)))) is None


def test_an_abort_by_the_watchdog_hides_neither_a_kill_nor_an_error() -> None:
    for cause in (-9, -11):
        verdict = judge(seen(rank(2), rank(3), is_settled=True, launcher=LauncherEnded(exit_codes={2: -6, 3: cause})))
        assert verdict is not None
        assert verdict.failure is not None
        assert verdict.failure.exit_code == cause
    alone = judge(seen(rank(3), is_settled=True, launcher=LauncherEnded(exit_codes={3: -6})))
    assert alone is not None
    assert alone.failure is not None
    assert "NCCL's watchdog aborts a rank whose peer is lost" in alone.failure.message
    assert "memory" not in alone.failure.message
