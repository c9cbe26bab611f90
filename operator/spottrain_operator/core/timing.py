"""Every duration that a decision depends on, in seconds, each with its reason."""

from __future__ import annotations

from datetime import datetime, timedelta

# Agents report every second. After three missed reports an agent is taken for lost if its generation is
# breaking up anyway; it isn't deleted for that, and if it comes back it joins the next generation.
SILENT_WHILE_OTHERS_ENDED = 3.0
# Peers of a lost node often hang rather than fail (NCCL: for minutes). If they have made no step for this long
# and for several times as long as a step takes, an agent that is silent for as long is taken for lost.
SILENT_WHILE_STUCK = 6.0
STUCK_STEPS = 5.0
# Nothing else points to a loss: only a long silence counts, and only if the others don't make steps either.
SILENT_ALONE = 30.0
# The node object says that the node is gone: a report younger than this says that it isn't.
SILENT_ON_LOST_NODE = 2.5
# Longest age of the report of a pod that is to join a generation.
CANDIDATE_REPORT_AGE = 3.5
# A new operator hears its first reports only when the agents' long polls and retries come round.
OPERATOR_RESTART_GRACE = 6.0
# The newest step of someone else is at most this old: that one's generation is alive.
STEPPING = 10.0

# The first generation waits this long for more than nodes.min: the pods of a new job come one by one.
FIRST_GENERATION_PATIENCE = 20.0
# Later ones only for pods that are up already and get warm again after the generation that ended.
NEXT_GENERATION_PATIENCE = 4.0
# A pod this young that has no node yet may still get one: the scheduler takes a moment.
SCHEDULING = 5.0

# An assignment that wasn't taken up this long after it was given won't be: the agent is stuck.
TAKE_UP = 30.0
# Once a drain or stop is written, a RUN that was already on its way has reached its agent this much later.
IN_FLIGHT = 2.0
# A report this much younger than the generation's first step, by an agent that makes none: it restarted.
RESTARTED = 10.0

# Ranks that run for so long and say nothing are those of a script without the library.
SAYS_NOTHING = 30.0

# Without a step for this long, and for STUCK_STEPS times as long as one takes, the job's message says so. A limit of
# runPolicy ends the generation later.
NO_STEP = 120.0

# A report this young, by agents that report every second, is what is the case now.
JUST_NOW = 1.2
# Time for a drain that nobody's deadline bounds: enough for a large checkpoint, not for a hang.
PLANNED_DRAIN = 120.0
# A preemption whose deadline isn't known (a taint, an eviction): the shortest lead of the large clouds, less
# what has passed already.
UNKNOWN_LEAD = 15.0
# After the deadline of a drain the ranks get this much longer, since clocks differ; then they are stopped.
DRAIN_OVERTIME = 5.0
# An agent that was told to stop kills its ranks at once. One that doesn't in this time is deleted.
STOP_TIMEOUT = 20.0
# A notice whose deadline is this long past, on a node whose pod still reports, was a false alarm.
NOTICE_EXPIRY = 90.0

# When ranks fail, wait this long for a sign that a node was taken: its loss shows after its peers' errors.
CULPRIT_GRACE = 5.0
# A lost node's last report came before its peers failed, or so shortly after that it was on its way.
CULPRIT_LAST_WORD = 1.0
# Generations in a row that failed without a step. A third try tells a broken script from bad luck.
MAX_GENERATIONS_WITHOUT_PROGRESS = 3
# A container that can't start is given this long: image pulls are retried by the kubelet.
START_FAILURE_PATIENCE = 20.0
# ... and where others of its template run, it's this pod's node: try another one after this long.
STUCK_START = 300.0
# Kubernetes refuses the pods, for example for a service account that isn't there. It may be on its way, applied
# together with the job.
REFUSAL_PATIENCE = 10.0
# Meanwhile, and for a job that has trained for good, one pod is tried again after this, doubling up to that.
REFUSAL_PAUSE = 1.0
REFUSAL_MAX_PAUSE = 30.0
# Pods whose container ended before they joined a generation: this many, and the job can't start. They are
# kept until then as evidence, with a pause after each that doubles.
MAX_START_FAILURES = 3
START_FAILURE_PAUSE = 5.0
START_FAILURE_WINDOW = 600.0

# Growing costs a drain and a restart: not more often than this after a generation's first step,
GROWTH_INTERVAL = 20.0
# admitting all who come within this time of the first who waits (twice that if one is just starting),
GROWTH_PATIENCE = 15.0
GROWTH_PATIENCE_WHILE_COMING = 45.0
# and not for a job that is nearly done.
GROWTH_MIN_REMAINING = 30.0

# A pod that trains in an older generation although a newer one exists gets its stop this long.
STRAY = 30.0

# Progress and cost change all the time; they are written this often at most.
RECORD_INTERVAL = 2.0
# How many membership changes the status remembers.
MAX_TRANSITIONS = 50


def seconds_between(earlier: datetime, later: datetime) -> float:
    """Seconds from `earlier` to `later`; negative if it's the other way round."""
    return (later - earlier).total_seconds()


def after(moment: datetime, seconds: float) -> datetime:
    return moment + timedelta(seconds=seconds)
