"""Why a generation ends, and which of several causes wins."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """The reasons of `GenerationStatus` and `Transition`."""

    # Wanted by the operator or the user.
    GROW = "Grow"
    SCALE_DOWN = "ScaleDown"
    EDITED = "Edited"
    SUSPENDED = "Suspended"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    # Caused by the job: they count against its failure budget.
    FAILURE = "Failure"
    HANG = "Hang"
    # Caused by the cloud, with and without notice: they don't count.
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    # The end.
    SUCCEEDED = "Succeeded"


FAILURES = frozenset({Cause.FAILURE, Cause.HANG})
PREEMPTIONS = frozenset({Cause.PREEMPTED, Cause.NODE_LOST})


def outranks(new: Cause, old: str | None) -> bool:
    """Whether `new` explains the end of a generation better than `old`.

    A node that is taken explains the failures of its peers. Either of these explains why a drain that was merely
    wanted failed.
    """
    return old is None or _rank(new) > _rank(old)


def _rank(cause: str) -> int:
    if cause in PREEMPTIONS:
        return 2
    return 1 if cause in FAILURES else 0
