"""Which causes are failures or preemptions, and which of several wins."""

from __future__ import annotations

from spottrain_api.contract.causes import Cause

FAILURES = frozenset({Cause.FAILURE, Cause.HANG})
PREEMPTIONS = frozenset({Cause.PREEMPTED, Cause.NODE_LOST})


def outranks(new: Cause, old: str | None) -> bool:
    """Whether `new` explains the end of a generation better than `old`.

    A node that is taken, or a status that is not the newest, explains the failures of ranks. Either of these
    explains why a drain that was merely wanted failed.
    """
    return old is None or _rank(new) > _rank(old)


def _rank(cause: str) -> int:
    if cause in PREEMPTIONS or cause == Cause.STATUS_RESTORED:
        return 2
    return 1 if cause in FAILURES else 0
