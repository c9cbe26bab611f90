"""Why a generation ends, in the operator's words."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """The reasons of `GenerationStatus` and `Transition`."""

    # Wanted by the operator or the user.
    GROW = "Grow"
    SCALE_DOWN = "ScaleDown"
    EDITED = "Edited"
    SUSPENDED = "Suspended"
    BUDGET_SPENT = "BudgetSpent"
    SPOT_IS_DEAR = "SpotIsDear"
    QUOTA_TAKEN = "QuotaTaken"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    # Caused by the job: they count against its failure budget.
    FAILURE = "Failure"
    HANG = "Hang"
    # Caused by the cloud, with and without notice: they don't count.
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    # The job's status went back, and pods run a later generation.
    STATUS_RESTORED = "StatusRestored"
    # The generation was numbered below those of an earlier job at checkpoint.uri. It doesn't count.
    EARLIER_JOB = "EarlierJob"
    # The end.
    SUCCEEDED = "Succeeded"
