"""Names of conditions, and the reasons of conditions and events.

docs/reference_pages/meanings.py says what each means.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Types of the conditions in a job's status."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    PREEMPTED = "Preempted"
    PODS_HEALTHY = "PodsHealthy"
    SPOT_AVAILABLE = "SpotAvailable"
    CHECKPOINTS_HEALTHY = "CheckpointsHealthy"
    CLEAN_UP_HEALTHY = "CleanUpHealthy"
    NOTICES_HEARD = "NoticesHeard"
    WITHIN_BUDGET = "WithinBudget"
    ON_TIME = "OnTime"
    ADMITTED = "Admitted"
    NODE_POOLS_READY = "NodePoolsReady"
    PROFILE_ACCEPTED = "ProfileAccepted"
    BLOCKED = "Blocked"
    SPEC_NOT_UNDERSTOOD = "SpecNotUnderstood"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class ConditionReason(StrEnum):
    """Reasons that only conditions have.

    The others are phases, causes, failures, ends, and reasons to wait.
    """

    STEADY = "Steady"
    HEALTHY = "Healthy"
    PODS_REFUSED = "PodsRefused"
    UNSCHEDULABLE = "Unschedulable"
    NODE_GOES = "NodeGoes"
    NONE_WAITS = "NoneWaits"
    SPOT_PENDING = "SpotPending"
    HEARD = "Heard"
    KUBERNETES_ONLY = "KubernetesOnly"
    FINISHED = "Finished"
    FREE = "Free"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    NEWER_VERSION = "NewerVersion"
    TOO_LARGE = "TooLarge"
    UNDERSTOOD = "Understood"
    MONEY_LEFT = "MoneyLeft"
    NO_BUDGET = "NoBudget"
    PROFILE_TAKEN = "ProfileTaken"
    SLACK_LEFT = "SlackLeft"
    SPOT_IS_DEAR = "SpotIsDear"
    NO_FINISH_BY = "NoFinishBy"
    ADMITTED = "Admitted"
    WAITS_FOR_QUOTA = "WaitsForQuota"
    WORKLOAD_REFUSED = "WorkloadRefused"
    KUEUE_OFF = "KueueOff"
    KUEUE_MISSING = "KueueMissing"
    KUEUE_TOO_OLD = "KueueTooOld"
    NODE_POOLS_MADE = "NodePoolsMade"
    NODE_POOL_REFUSED = "NodePoolRefused"
    NODE_POOL_NOT_READY = "NodePoolNotReady"
    KARPENTER_OFF = "KarpenterOff"
    KARPENTER_MISSING = "KarpenterMissing"
    KARPENTER_TOO_OLD = "KarpenterTooOld"
    ASKS_FOR_NO_NODES = "AsksForNoNodes"
    NO_QUEUE = "NoQueue"


class EndReason(StrEnum):
    """Reasons of the condition Failed that belong to the job as a whole.

    They are neither a failure of the ranks nor a cause.
    """

    FAILURE_BUDGET_EXCEEDED = "FailureBudgetExceeded"
    NO_PROGRESS = "NoProgress"
    CANNOT_START = "CannotStart"


class WaitingReason(StrEnum):
    """A kubelet's reasons why a container can't start, and won't by waiting."""

    ERR_IMAGE_PULL = "ErrImagePull"
    IMAGE_PULL_BACK_OFF = "ImagePullBackOff"
    ERR_IMAGE_NEVER_PULL = "ErrImageNeverPull"
    INVALID_IMAGE_NAME = "InvalidImageName"
    CREATE_CONTAINER_CONFIG_ERROR = "CreateContainerConfigError"
    CREATE_CONTAINER_ERROR = "CreateContainerError"
    RUN_CONTAINER_ERROR = "RunContainerError"
    CRASH_LOOP_BACK_OFF = "CrashLoopBackOff"
    START_ERROR = "StartError"
    FAILED_MOUNT = "FailedMount"


class EventReason(StrEnum):
    """Reasons of events. Causes, failures, ends and reasons to wait are also events."""

    PODS_CREATED = "PodsCreated"
    POD_NOT_CREATED = "PodNotCreated"
    PODS_NOT_GROUPED = "PodsNotGrouped"
    PODS_END_EARLY = "PodsEndEarly"
    GENERATION_STARTED = "GenerationStarted"
    STRATEGY_CHOSEN = "StrategyChosen"
    PROFILE_MISSING = "ProfileMissing"
    PROFILE_LIMITS = "ProfileLimits"
    NODES_GIVEN_BACK = "NodesGivenBack"
    BUDGET_NEARLY_SPENT = "BudgetNearlySpent"
    NO_SLACK_LEFT = "NoSlackLeft"
    DEADLINE_OUT_OF_REACH = "DeadlineOutOfReach"
    DEADLINE_PASSED = "DeadlinePassed"
    FELL_BACK = "FellBack"
    SPOT_RETRIED = "SpotRetried"
    CHECKPOINT_URI_IN_USE = "CheckpointURIInUse"
    WATCHER_MISSING = "WatcherMissing"
    WATCHER_BLIND = "WatcherBlind"
    SPEC_NOT_UNDERSTOOD = "SpecNotUnderstood"
    EARLIER_JOB = "EarlierJob"
    EDIT_IGNORED = "EditIgnored"
    CLEAN_UP_FAILED = "CleanUpFailed"
    ROLLED_BACK = "RolledBack"
    STEP_SKIPPED = "StepSkipped"
    WAITS_FOR_DATA = "WaitsForData"
    NOT_AS_PLANNED = "NotAsPlanned"
