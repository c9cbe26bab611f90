"""What conditions, events and reasons mean.

The reference pages show these texts. The tables name every condition and reason that the operator writes.
tests/unit/test_reference.py compares them with the operator's sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import ConditionReason, ConditionType, EndReason, EventReason, WaitingReason
from spottrain_api.contract.reports import FailureReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A reason: what happened, and what a person should do (empty: nothing)."""

    meaning: str
    action: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionMeaning:
    """What a condition of a job's status means.

    `reasons` are those that only this condition has.
    """

    when_true: str
    when_false: str
    reasons: Mapping[str, Reason] = field(default_factory=dict)


PHASES: Mapping[str, Reason] = {
    "Pending": Reason(
        meaning="The job waits for nodes, or for another job at its checkpoint.uri.",
        action="Read status.message: it says how many nodes are ready and what the other pods wait for.",
    ),
    "Starting": Reason(meaning="A generation starts: rendezvous, import, resume."),
    "Running": Reason(meaning="The ranks train."),
    "Draining": Reason(meaning="The ranks commit at a common step, then the next generation starts."),
    "Recovering": Reason(meaning="A generation has ended, and the next one has not started yet."),
    "Suspended": Reason(
        meaning="runPolicy.suspend is true, the budget is spent, or the job waits: for quota in a queue of Kueue, or "
        "for a lower price of spot nodes. It holds no nodes.",
        action="Read status.message: it says which of these, and how the job resumes.",
    ),
    "Succeeded": Reason(meaning="The script ended on all ranks with exit code 0."),
    "Failed": Reason(meaning="The job gave up.", action="Read the reason and message of the condition Failed."),
}

# Why a generation ended (status.generation.reason, status.transitions[].reason). Each is also an event.
CAUSES: Mapping[Cause, Reason] = {
    Cause.GROW: Reason(meaning="Nodes have joined. The generation drains, and the next one includes them."),
    Cause.SCALE_DOWN: Reason(meaning="An edit of nodes or capacity leaves no place for some members."),
    Cause.EDITED: Reason(meaning="An edit of the job needs a restart of the ranks or pods."),
    Cause.SUSPENDED: Reason(meaning="runPolicy.suspend was set.", action="Set it to false to resume."),
    Cause.BUDGET_SPENT: Reason(
        meaning="The job has cost budget.maxCost. With budget.onExceeded: Suspend, it commits and holds no nodes.",
        action="Raise budget.maxCost above status.cost.total to resume.",
    ),
    Cause.SPOT_IS_DEAR: Reason(
        meaning="The price of spot nodes has risen, and the job has time to wait for a lower one "
        "(capacity.finishBy). It commits and holds no nodes.",
        action="Nothing: it resumes once they cost less, or there is less time. To train at once, set an earlier "
        "finishBy.",
    ),
    Cause.QUOTA_TAKEN: Reason(
        meaning="Kueue takes back the job's quota, or that of some nodes. The job commits, and trains on with the "
        "nodes that are left, or waits in its queue.",
        action="Nothing: it resumes once Kueue admits it again. The message quotes Kueue's reason.",
    ),
    Cause.DEADLINE_EXCEEDED: Reason(
        meaning="runPolicy.activeDeadlineSeconds has passed. The job commits, then fails.",
        action="Create the job again with the same checkpoint.uri and a longer deadline; it resumes.",
    ),
    Cause.FAILURE: Reason(
        meaning="A rank failed. The failure counts against runPolicy.failureBudget.",
        action="Read the message, then the log of the pod that it names.",
    ),
    Cause.HANG: Reason(
        meaning="No rank made a step within hangTimeoutSeconds, or no first step within startTimeoutSeconds. "
        "It counts against runPolicy.failureBudget.",
        action="Find what the script waits for, or raise the limit in runPolicy.",
    ),
    Cause.STATUS_RESTORED: Reason(
        meaning="The status went back, as after a restore of etcd from a backup: pods run a later generation than it "
        "knows. That one drains.",
    ),
    Cause.PREEMPTED: Reason(
        meaning="A notice announced the loss of a member. The generation drains. It does not count as a failure."
    ),
    Cause.NODE_LOST: Reason(
        meaning="A member was lost without notice. Training resumes from the newest commit or from peers' memory. "
        "It does not count as a failure."
    ),
    Cause.EARLIER_JOB: Reason(
        meaning="The job's first generation was numbered below those of an earlier job at checkpoint.uri, so it "
        "could not commit. The next one is numbered above them. It does not count as a failure."
    ),
    Cause.SUCCEEDED: Reason(meaning="The script ended on all ranks with exit code 0."),
}

# Why a member failed. A fatal one ends the job at once, without a retry: see FATAL_REASONS.
FAILURES: Mapping[FailureReason, Reason] = {
    FailureReason.SCRIPT_ERROR: Reason(
        meaning="The script raised an exception or ended with an exit code other than 0.",
        action="Read the message and the pod's log, and correct the script.",
    ),
    FailureReason.KILLED: Reason(
        meaning="A signal killed the rank; SIGKILL usually means memory: the limit's or, without one, the node's.",
        action="Raise resources.limits.memory, or lower batch.micro.",
    ),
    FailureReason.HANG: Reason(
        meaning="The rank made no step within the limit.",
        action="Find what the script waits for, or raise the limit.",
    ),
    FailureReason.LOST_PEER: Reason(
        meaning="A connection to another rank broke. Usually that rank's own failure is the cause, or its end.",
        action="Read the events for the member that was lost, ended or failed first.",
    ),
    FailureReason.RENDEZVOUS_FAILED: Reason(
        meaning="The members did not come together at the start of a generation.",
        action="If it repeats, check that pods of the job can reach each other (NetworkPolicy).",
    ),
    FailureReason.START_FAILED: Reason(
        meaning="The ranks could not be started, or the checkpoint store did not answer at a resume.",
        action="Read the message; a store is retried for five minutes before this counts as a failure.",
    ),
    FailureReason.ENTRYPOINT_NOT_FOUND: Reason(
        meaning="The image does not contain entrypoint.script or entrypoint.module, or the pod's user can't reach "
        "it. A job that has trained waits for an edit instead.",
        action="Correct the path, or build the file into the image, where that user can read it.",
    ),
    FailureReason.INVALID_CONFIGURATION: Reason(
        meaning="The settings of the job and the script contradict each other.",
        action="The message says which setting to change.",
    ),
    FailureReason.DEVICE_FAILED: Reason(
        meaning="A GPU of the node fails, or the container lacks GPUs that the pod asked for. A job that has trained "
        "replaces the pod, avoids the node for an hour, and counts no failure. A new job fails.",
        action="Look at the node (`nvidia-smi`, Xid errors in its kernel log). For a new job, read the message.",
    ),
    FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE: Reason(
        meaning="The checkpoint store does not answer, throttles, or hangs.",
        action="Check the store and the network; saves are retried at the next interval.",
    ),
    FailureReason.CHECKPOINT_STORAGE_FULL: Reason(
        meaning="The checkpoint store has no space left.",
        action="Add space, or lower checkpoint.keep; a clean-up follows the next save.",
    ),
    FailureReason.CHECKPOINT_STORAGE_MISSING: Reason(
        meaning="The bucket or folder of checkpoint.uri does not exist.", action="Create it, or mount the volume."
    ),
    FailureReason.CHECKPOINT_ACCESS_DENIED: Reason(
        meaning="The store denies access, there are no credentials, or the image lacks the store's client.",
        action="Check podTemplate.serviceAccountName and the rights on the bucket, or add the client to the image.",
    ),
    FailureReason.CHECKPOINT_STORE_UNFIT: Reason(
        meaning="The store does not do what commits need: conditional writes, or flock in a folder.",
        action="Use a store that does; `spottrain checkpoints doctor URI` tries it.",
    ),
    FailureReason.CHECKPOINT_INCOMPATIBLE: Reason(
        meaning="The commits at checkpoint.uri belong to another model, data set or format.",
        action="Restore the script that wrote them, or create a new job with a different checkpoint.uri. Nothing was "
        "changed there.",
    ),
    FailureReason.CHECKPOINT_DAMAGED: Reason(
        meaning="A commit cannot be read back whole. Training resumes from the one before, if there is one.",
        action="If no commit is whole, restore the folder from a backup, or create a new job with a different "
        "checkpoint.uri.",
    ),
    FailureReason.CHECKPOINT_SAVE_FAILED: Reason(
        meaning="A save failed for a cause without a reason of its own.",
        action="Read the message; the next save follows at the next interval.",
    ),
    FailureReason.TRAINING_UNSTABLE: Reason(
        meaning="stability ended the job: action fail, ten skipped steps in a row, or more than maxRollbacks.",
        action="Look at the loss and the data around the step; lower the learning rate, or change stability.",
    ),
}

# Other reasons of the condition Failed.
_ENDS: Mapping[str, Reason] = {
    EndReason.FAILURE_BUDGET_EXCEEDED: Reason(
        meaning="More failures than runPolicy.failureBudget allows.",
        action="Correct the cause in the message, then create the job again; it resumes from its commits.",
    ),
    EndReason.NO_PROGRESS: Reason(
        meaning="Three generations in a row failed without a step.", action="Correct the cause in the message."
    ),
    EndReason.CANNOT_START: Reason(
        meaning="No container of the pod template ever started, or three pods ended before they joined a generation.",
        action="Check image, pull secrets, volumes, service account and quota; the message quotes Kubernetes.",
    ),
    Cause.DEADLINE_EXCEEDED: CAUSES[Cause.DEADLINE_EXCEEDED],
    **{reason: each for reason, each in FAILURES.items()},
}
_PODS_END_EARLY = Reason(
    meaning="Pods ended before they could train: a container of theirs did, or their node's kubelet rejected or "
    "evicted them. They are replaced ever more slowly. Of those whose containers ended by themselves, a new job "
    "tries three.",
    action="The message quotes the container or the kubelet. If it always names the same node, cordon or mend that "
    "node.",
)
_CLEAN_UP_FAILED = Reason(
    meaning="Several clean-ups of the checkpoint store in a row failed.",
    action="Let the job's service account delete below checkpoint.uri; the next clean-up deletes what is left.",
)
_FELL_BACK = Reason(
    meaning="Spot pods found no node within capacity.fallback.afterSeconds. On-demand pods take their place.",
    action="Nothing; the job returns to spot after capacity.fallback.returnAfterSeconds.",
)
_NO_SLACK_LEFT = Reason(
    meaning="There is no time left to wait for spot nodes. On-demand nodes stand in at once for missing ones."
)
_DEADLINE_OUT_OF_REACH = Reason(
    meaning="The steps that are left take longer than the time until capacity.finishBy, or the job may use no "
    "on-demand nodes.",
    action="Set a later finishBy, or raise nodes.max or capacity.onDemand.max.",
)
_DEADLINE_PASSED = Reason(
    meaning="capacity.finishBy is over. The job goes on as one without a deadline.",
    action="Set a later finishBy, or remove it.",
)
_BUDGET_NEARLY_SPENT = Reason(
    meaning="The job has cost 80 % of budget.maxCost.",
    action="Raise budget.maxCost, or let onExceeded decide what happens once all of it is spent.",
)
_PROFILE_MISSING = Reason(
    meaning="The cluster has no TrainingProfile of the name that the job has in `profile`.",
    action="Create it, or create the job again with the name of another.",
)
_PROFILE_LIMITS = Reason(
    meaning="The job asks for more than its profile allows, or lacks an image or prices that neither of them has.",
    action="The message says what to change. A job that runs keeps to the limits until then.",
)
_URI_IN_USE = Reason(
    meaning="Another unfinished job of the namespace comes first at the same checkpoint.uri. This one gets no pods "
    "until it ends.",
    action="For a run of its own, create this job with a different checkpoint.uri. Otherwise wait, or delete the "
    "other job: this one then continues from its newest commit.",
)
_NEWER_VERSION = Reason(
    meaning="The spec has fields or values that this operator doesn't know; a newer version may have written them. "
    "A job that has trained continues without them; one that has not waits.",
    action="Upgrade the operator, or remove the fields that the message names.",
)
_WATCHER_MISSING = Reason(
    meaning="No watcher answers on a spot node of a member. A preemption of that node comes without notice, unless "
    "Kubernetes announces it. Training continues.",
    action="Check that a watcher runs there: its affinity, the chart's value spotLabels, its port.",
)
_WATCHER_BLIND = Reason(
    meaning="The watcher of a member's spot node can't reach the cloud's metadata service or the API server. "
    "Training continues.",
    action="The message quotes the error: the watcher needs the host network and the way to that address.",
)

# What a kubelet says of a container that doesn't start.
WAITING: Mapping[str, Reason] = {
    WaitingReason.ERR_IMAGE_PULL: Reason(
        meaning="The image can't be pulled.", action="Check spec.image, imagePullSecrets, and the registry."
    ),
    WaitingReason.IMAGE_PULL_BACK_OFF: Reason(
        meaning="The image can't be pulled; the node retries.",
        action="Check spec.image, imagePullSecrets, and the registry.",
    ),
    WaitingReason.ERR_IMAGE_NEVER_PULL: Reason(
        meaning="The image is not on the node, and imagePullPolicy forbids pulling it.",
        action="Change imagePullPolicy, or load the image onto the nodes.",
    ),
    WaitingReason.INVALID_IMAGE_NAME: Reason(
        meaning="The name of the image is malformed.", action="Correct spec.image."
    ),
    WaitingReason.CREATE_CONTAINER_CONFIG_ERROR: Reason(
        meaning="Something that the container refers to is missing, such as a Secret or a ConfigMap.",
        action="Create what the message names, or correct the reference.",
    ),
    WaitingReason.CREATE_CONTAINER_ERROR: Reason(
        meaning="The node can't create the container.", action="The message quotes the container runtime."
    ),
    WaitingReason.RUN_CONTAINER_ERROR: Reason(
        meaning="The node can't run the container.", action="The message quotes the container runtime."
    ),
    WaitingReason.CRASH_LOOP_BACK_OFF: Reason(
        meaning="A container ends again and again, or can't be started, before the agent is up.",
        action="Read its log with the command in the message, or correct the command that the message quotes.",
    ),
    WaitingReason.START_ERROR: Reason(
        meaning="A container's command can't be started.",
        action="The trainer's: use an image with Python and the package spottrain[trainer]. Another one's, which the "
        "message names: correct its command or image.",
    ),
    WaitingReason.FAILED_MOUNT: Reason(
        meaning="A volume can't be mounted.", action="Create the claim, Secret or ConfigMap that the message names."
    ),
}

CONDITIONS: Mapping[ConditionType, ConditionMeaning] = {
    ConditionType.READY: ConditionMeaning(
        when_true="The ranks train.", when_false="They don't; the reason is the job's phase."
    ),
    ConditionType.PROGRESSING: ConditionMeaning(
        when_true="A generation is active.", when_false="There is none, or it ends; the reason is the job's phase."
    ),
    ConditionType.PREEMPTED: ConditionMeaning(
        when_true="The cloud takes or took nodes of the newest generation, and no new generation has replaced it.",
        when_false="The cloud takes no node of the newest generation.",
        reasons={ConditionReason.STEADY: Reason(meaning="The cloud takes no node of the newest generation.")},
    ),
    ConditionType.PODS_HEALTHY: ConditionMeaning(
        when_true="No pod is kept from starting, or the job has finished.",
        when_false="The job lacks a pod that can't be created, placed or started, ends early, or whose node goes. "
        "Existing pods continue.",
        reasons={
            ConditionReason.HEALTHY: Reason(meaning="No pod is kept from starting."),
            ConditionReason.FINISHED: Reason(meaning="The job has finished, and needs no pod."),
            ConditionReason.PODS_REFUSED: Reason(
                meaning="A pod can't be created: a quota or an admission rule, for example, refuses it, or "
                "capacity.pools has no pool of its capacity type, or the administrator doesn't allow its network. "
                "The operator retries.",
                action="The message says what is refused: provide what it asks for, or change the job.",
            ),
            ConditionReason.UNSCHEDULABLE: Reason(
                meaning="No node has room for a pod, or none has the labels that it asks for, or a claim is missing.",
                action="The message quotes the scheduler, and says what to change.",
            ),
            ConditionReason.NODE_GOES: Reason(
                meaning="A pod was placed on a node that is not ready, or whose loss is announced, as by a taint "
                "that the job tolerates.",
                action="Tolerate only the taints that the job needs, or end what holds up the loss of the node.",
            ),
            EventReason.PODS_END_EARLY: _PODS_END_EARLY,
            **WAITING,
        },
    ),
    ConditionType.SPOT_AVAILABLE: ConditionMeaning(
        when_true="No spot pod waits for a node.",
        when_false="Spot pods wait, or on-demand pods stand in for them.",
        reasons={
            ConditionReason.NONE_WAITS: Reason(meaning="No spot pod waits for a node."),
            ConditionReason.SPOT_PENDING: Reason(
                meaning="Spot pods wait for a node.",
                action="See PodsHealthy. Or wait: the message says from when on-demand nodes stand in.",
            ),
            EventReason.FELL_BACK: _FELL_BACK,
        },
    ),
    ConditionType.CHECKPOINTS_HEALTHY: ConditionMeaning(
        when_true="No save has failed since the newest commit.",
        when_false="The newest save failed. Training continues, but the job doesn't grow. "
        "The condition stays False until a save succeeds.",
        reasons={ConditionReason.HEALTHY: Reason(meaning="No save has failed since the newest commit.")},
    ),
    ConditionType.CLEAN_UP_HEALTHY: ConditionMeaning(
        when_true="Old commits are deleted again. Absent for a job whose clean-ups never failed.",
        when_false="Clean-ups of the store fail again and again. Training and commits continue, and the store fills. "
        "The message says how much stays, and quotes the store.",
        reasons={
            EventReason.CLEAN_UP_FAILED: _CLEAN_UP_FAILED,
            ConditionReason.HEALTHY: Reason(meaning="The clean-up after the newest commit has succeeded."),
        },
    ),
    ConditionType.NOTICES_HEARD: ConditionMeaning(
        when_true="A watcher on each spot node of a member hears all that can be heard there. Absent for a job that "
        "had no member on a spot node, and before the agents report it.",
        when_false="Nobody hears the notices for a member's spot node, for half a minute and longer. No generation "
        "ends for it.",
        reasons={
            ConditionReason.HEARD: Reason(meaning="The notices of all members on spot nodes are heard."),
            ConditionReason.KUBERNETES_ONLY: Reason(
                meaning="On a spot node of a member, the watcher knows no cloud, and hears only Kubernetes' signals. "
                "That is normal outside EC2, Compute Engine and Azure.",
                action="On one of these clouds, name it as SPOTTRAIN_PROVIDER in the chart's value watcher.env.",
            ),
            ConditionReason.FINISHED: Reason(meaning="The job has finished, and holds no nodes."),
            EventReason.WATCHER_MISSING: _WATCHER_MISSING,
            EventReason.WATCHER_BLIND: _WATCHER_BLIND,
        },
    ),
    ConditionType.WITHIN_BUDGET: ConditionMeaning(
        when_true="The job has cost less than budget.maxCost. Absent before 80 % of it are spent.",
        when_false="The job has cost budget.maxCost, or more.",
        reasons={
            EventReason.BUDGET_NEARLY_SPENT: _BUDGET_NEARLY_SPENT,
            ConditionReason.MONEY_LEFT: Reason(meaning="maxCost was raised: less than 80 % of it are spent."),
            ConditionReason.NO_BUDGET: Reason(meaning="The budget was removed from the job."),
            Cause.BUDGET_SPENT: CAUSES[Cause.BUDGET_SPENT],
        },
    ),
    ConditionType.ON_TIME: ConditionMeaning(
        when_true="The job can finish by capacity.finishBy. Absent without a deadline, and before the first steps.",
        when_false="The job may finish later than capacity.finishBy.",
        reasons={
            ConditionReason.SLACK_LEFT: Reason(
                meaning="There is time to wait for spot nodes. No on-demand nodes stand in for them."
            ),
            ConditionReason.SPOT_IS_DEAR: CAUSES[Cause.SPOT_IS_DEAR],
            EventReason.NO_SLACK_LEFT: _NO_SLACK_LEFT,
            EventReason.DEADLINE_OUT_OF_REACH: _DEADLINE_OUT_OF_REACH,
            EventReason.DEADLINE_PASSED: _DEADLINE_PASSED,
            ConditionReason.NO_FINISH_BY: Reason(meaning="The deadline was removed from the job."),
        },
    ),
    ConditionType.ADMITTED: ConditionMeaning(
        when_true="Kueue grants the job the nodes of nodes.min, or more. Absent for a job that was never in a queue.",
        when_false="The job holds no quota, and no nodes.",
        reasons={
            ConditionReason.ADMITTED: Reason(meaning="The message says how many nodes Kueue grants."),
            ConditionReason.WAITS_FOR_QUOTA: Reason(
                meaning="Kueue has not admitted the job.",
                action="The message quotes Kueue: what is missing, and where.",
            ),
            Cause.QUOTA_TAKEN: CAUSES[Cause.QUOTA_TAKEN],
            ConditionReason.WORKLOAD_REFUSED: Reason(
                meaning="The job's Workload can't be made.", action="Do what the message says. The operator retries."
            ),
            ConditionReason.KUEUE_OFF: Reason(
                meaning="The job names a queue, and the operator doesn't use Kueue.",
                action="Set the chart's value kueue.enabled, or remove the label kueue.x-k8s.io/queue-name.",
            ),
            ConditionReason.KUEUE_MISSING: Reason(
                meaning="The job names a queue, and Kueue isn't installed.",
                action="Install Kueue 0.15 or newer, or remove the label kueue.x-k8s.io/queue-name.",
            ),
            ConditionReason.KUEUE_TOO_OLD: Reason(
                meaning="Kueue doesn't serve v1beta2 of its API.", action="Install Kueue 0.15 or newer."
            ),
            ConditionReason.ASKS_FOR_NO_NODES: Reason(
                meaning="The job is suspended, its budget is spent, or another job comes first at its folder."
            ),
            ConditionReason.NO_QUEUE: Reason(meaning="The job was taken out of its queue."),
            ConditionReason.FINISHED: Reason(meaning="The job has finished."),
        },
    ),
    ConditionType.NODE_POOLS_READY: ConditionMeaning(
        when_true="Karpenter can make nodes for the pools with a nodeClass. Absent for a job that never had trouble.",
        when_false="It can't. The job uses the nodes that there are.",
        reasons={
            ConditionReason.NODE_POOLS_MADE: Reason(meaning="The trouble is over."),
            ConditionReason.NODE_POOL_REFUSED: Reason(
                meaning="The NodePool of a pool can't be made.",
                action="Do what the message says. The operator retries.",
            ),
            ConditionReason.NODE_POOL_NOT_READY: Reason(
                meaning="Karpenter makes no nodes of a NodePool.",
                action="The message quotes Karpenter. Often the node class doesn't exist: see the pool's nodeClass.",
            ),
            ConditionReason.KARPENTER_OFF: Reason(
                meaning="A pool has a nodeClass, and the operator makes no NodePools.",
                action="Set the chart's value karpenter.enabled, or remove nodeClass.",
            ),
            ConditionReason.KARPENTER_MISSING: Reason(
                meaning="A pool has a nodeClass, and Karpenter isn't installed.",
                action="Install Karpenter 1.0 or newer, or remove nodeClass.",
            ),
            ConditionReason.KARPENTER_TOO_OLD: Reason(
                meaning="Karpenter doesn't serve v1 of its API.", action="Install Karpenter 1.0 or newer."
            ),
            ConditionReason.FINISHED: Reason(meaning="The job has finished."),
        },
    ),
    ConditionType.PROFILE_ACCEPTED: ConditionMeaning(
        when_true="The job has what it takes from its profile. Absent for a job without one.",
        when_false="The profile is missing, or the job is beyond its limits. A job that has not started waits.",
        reasons={
            ConditionReason.PROFILE_TAKEN: Reason(meaning="The job has taken its profile: status.profile."),
            EventReason.PROFILE_MISSING: _PROFILE_MISSING,
            EventReason.PROFILE_LIMITS: _PROFILE_LIMITS,
        },
    ),
    ConditionType.BLOCKED: ConditionMeaning(
        when_true="Another unfinished job of the namespace uses the same checkpoint.uri. "
        "Absent for a job that was never blocked.",
        when_false="The job was blocked, and no longer is.",
        reasons={
            EventReason.CHECKPOINT_URI_IN_USE: _URI_IN_USE,
            ConditionReason.FINISHED: Reason(meaning="The job has finished."),
            ConditionReason.FREE: Reason(meaning="No other job comes first at checkpoint.uri."),
            ConditionReason.RUNNING: Reason(meaning="The job already trains; a running generation is left alone."),
            ConditionReason.SUSPENDED: Reason(meaning="A suspended job waits for no other."),
        },
    ),
    ConditionType.SPEC_NOT_UNDERSTOOD: ConditionMeaning(
        when_true="The operator can't apply fields of the spec. Absent for a job that it always understood.",
        when_false="The operator understands the whole job again.",
        reasons={
            ConditionReason.NEWER_VERSION: _NEWER_VERSION,
            ConditionReason.TOO_LARGE: Reason(
                meaning="podTemplate.volumes or deepspeed.config holds more than 64 KiB, or 50 levels. The running "
                "generation continues; no pod and no other generation starts.",
                action="Shorten it, or put it into a ConfigMap or the image.",
            ),
            ConditionReason.UNDERSTOOD: Reason(meaning="The operator understands the whole job."),
        },
    ),
    ConditionType.SUSPENDED: ConditionMeaning(
        when_true="The job is suspended and holds no nodes.",
        when_false="It is not suspended; the reason is the job's phase.",
    ),
    ConditionType.SUCCEEDED: ConditionMeaning(
        when_true="The job has succeeded. Absent before.",
        when_false="Never written.",
        reasons={Cause.SUCCEEDED: CAUSES[Cause.SUCCEEDED]},
    ),
    ConditionType.FAILED: ConditionMeaning(
        when_true="The job has failed; reason and message say why. Absent before.",
        when_false="Never written.",
        reasons=_ENDS,
    ),
}

# Events beside those of CAUSES and FAILURES, whose reasons are events, too.
EVENTS: Mapping[str, Reason] = {
    EventReason.CLEAN_UP_FAILED: _CLEAN_UP_FAILED,
    EventReason.PODS_CREATED: Reason(meaning="The operator creates pods for members that are missing."),
    EventReason.POD_NOT_CREATED: Reason(
        meaning="A pod was refused, for example by a quota or an admission rule, or has no place in capacity.pools.",
        action="The message quotes the refusal.",
    ),
    EventReason.PODS_NOT_GROUPED: Reason(
        meaning="The chart's value jobs.podGroups is set, and the job can't have a PodGroup. Its pods get nodes one "
        "by one.",
        action="The message says whether the cluster serves no PodGroups, or quotes the refusal.",
    ),
    EventReason.PODS_END_EARLY: _PODS_END_EARLY,
    EventReason.GENERATION_STARTED: Reason(
        meaning="A generation starts; the message lists its members and where it resumes."
    ),
    EventReason.STRATEGY_CHOSEN: Reason(meaning="What strategy auto chose, and why."),
    EventReason.NODES_GIVEN_BACK: Reason(
        meaning="The job held fewer nodes than nodes.min, and no other came for 15 minutes or more. It has given "
        "them back, and asks for nodes again after a pause.",
        action="Nothing, if other jobs use the nodes. To start with fewer, lower nodes.min.",
    ),
    EventReason.PROFILE_MISSING: _PROFILE_MISSING,
    EventReason.PROFILE_LIMITS: _PROFILE_LIMITS,
    EventReason.BUDGET_NEARLY_SPENT: _BUDGET_NEARLY_SPENT,
    EventReason.NO_SLACK_LEFT: _NO_SLACK_LEFT,
    EventReason.DEADLINE_OUT_OF_REACH: _DEADLINE_OUT_OF_REACH,
    EventReason.DEADLINE_PASSED: _DEADLINE_PASSED,
    EventReason.FELL_BACK: _FELL_BACK,
    EventReason.SPOT_RETRIED: Reason(meaning="The job tries spot nodes again after a fallback."),
    EventReason.CHECKPOINT_URI_IN_USE: _URI_IN_USE,
    EventReason.WATCHER_MISSING: _WATCHER_MISSING,
    EventReason.WATCHER_BLIND: _WATCHER_BLIND,
    EventReason.SPEC_NOT_UNDERSTOOD: _NEWER_VERSION,
    EventReason.EARLIER_JOB: Reason(
        meaning="There were commits at checkpoint.uri before this job: an earlier job's, or a fork. The job "
        "continues from the newest one.",
        action="Nothing, if you meant it. For a fresh run, create a new job with a different checkpoint.uri.",
    ),
    EventReason.EDIT_IGNORED: Reason(
        meaning="The spec of a job that has failed or succeeded was edited. It is not started again.",
        action="Delete the job and apply it again, or apply it under another name. It resumes from its commits. "
        "After a success, raise the script's steps first, or apply it with a different checkpoint.uri: otherwise "
        "nothing is left to train.",
    ),
    EventReason.ROLLED_BACK: Reason(
        meaning="stability rolled training back to the newest commit.", action="Look at the loss around the step."
    ),
    EventReason.STEP_SKIPPED: Reason(
        meaning="stability skipped a step.", action="Look at the loss and data of the step."
    ),
    EventReason.WAITS_FOR_DATA: Reason(
        meaning="The slowest rank waits for data for more than 10 % of a step, in the generation so far.",
        action="Raise num_workers, or cache_bytes of shards.",
    ),
    EventReason.NOT_AS_PLANNED: Reason(
        meaning="Something differed from the plan, such as a commit that was passed over. Training continues, unless "
        "the script ended without a step.",
        action="Read the message.",
    ),
    **WAITING,
    **{name: reason for name, reason in _ENDS.items() if name not in FAILURES},
}
