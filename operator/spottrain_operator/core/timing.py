"""Every duration that a decision depends on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Every duration that a decision depends on, in seconds, each with its reason.

    The operator has one value of it, which each observation carries. Users have no setting for these.
    """

    # An agent that holds its poll is there, and tells at once what changes. After three seconds without one, it
    # counts as lost if its generation is breaking up anyway. It isn't deleted for that: if it comes back, it joins
    # the next generation. While no other agent was heard within this time either, silence alone is no loss.
    silent_while_others_ended: float = 3.0
    # Peers of a lost node often hang rather than fail (NCCL: for minutes). If they have made no step for this long,
    # and for several times the duration of a step, an agent that is silent for as long counts as lost. Keep it under
    # stepping: otherwise silent_alone applies to peers whose newest step is older than stepping but not than this.
    silent_while_stuck: float = 6.0
    stuck_steps: int = 5
    # If nothing else points to a loss, only a long silence counts, and only if the others make no steps either. A pod
    # that isn't a member is deleted after the same silence.
    silent_alone: float = 30.0
    # An agent that has lost its relay comes to the operator itself, and those of many relays all at once: it isn't
    # silent for this long.
    without_relay: float = 6.0
    # If the Node object says that the node is gone, a report younger than this contradicts it.
    silent_on_lost_node: float = 2.5
    # Longest age of the report of a pod that is to join a generation.
    candidate_report_age: float = 3.5
    # A new operator receives first reports only with the agents' next polls and retries.
    operator_restart_grace: float = 6.0
    # A generation is alive if the newest step of another member is younger than this, or than stuck_steps steps:
    # agents report no sooner that steps no longer come.
    stepping: float = 10.0

    # The first generation waits this long for more than nodes.min: the pods of a new job come one by one.
    first_generation_patience: float = 20.0
    # Later ones wait only for pods that are up and get warm again after the generation that ended.
    next_generation_patience: float = 4.0
    # A pod this young that has no node yet may still get one: the scheduler takes a moment.
    scheduling: float = 5.0

    # If an agent has not taken up an assignment after this time, it is stuck. With a thousand jobs, and notices for a
    # tenth of the nodes, an assignment has taken 44 s to its agent.
    take_up: float = 120.0
    # This long after a drain or stop was written, a RUN that was on its way has reached its agent.
    in_flight: float = 2.0
    # If an agent reports that it starts this long after the generation's first step, it has restarted. Clocks are
    # compared by the fastest report of each agent, and a busy operator may have taken half a minute for all of one's.
    restarted: float = 60.0

    # Ranks that run for this long without a report are those of a script without the library.
    says_nothing: float = 30.0

    # Without a step for this long, or for half of runPolicy's limit if that is less, and for stuck_steps times as
    # long as one takes, the job's message says so. The limit ends the generation later.
    no_step: float = 60.0

    # A report this young describes the present, and an agent that was heard so lately is there.
    just_now: float = 1.2
    # Time for a drain without a deadline: enough for a large checkpoint, but not for a hang. If the generation has
    # saved, it is at least this many times a save: one may be under way, another follows, and the store may be
    # slower. The same of a step: one is under way, and the ranks may agree only in the next.
    planned_drain: float = 120.0
    planned_drain_saves: int = 3
    # For a preemption without a known deadline (the watcher's taint without its notice, or a deadline that has
    # passed): the shortest notice of the large clouds, minus the time that has passed already.
    unknown_lead: float = 15.0
    # A watcher that restarts, or is replaced by a new version, is back within this time. After it, a job's condition
    # says that nobody hears the notices for a member's node.
    unwatched: float = 30.0
    # After the deadline of a drain the ranks get this much longer, since clocks differ; then they are stopped.
    drain_overtime: float = 5.0
    # A stopped agent kills its ranks at once. If it doesn't within this time, its pod is deleted.
    stop_timeout: float = 20.0
    # A notice was a false alarm if its deadline passed this long ago and the node's pod still reports.
    notice_expiry: float = 90.0

    # When ranks fail, wait this long for a sign that a node was taken: its loss shows after its peers' errors. It
    # matters only once no member is in the generation, and a silent member is in until it counts as lost. So it may
    # be shorter than a silence.
    culprit_grace: float = 5.0
    # A lost node's last report came before its peers failed, or so shortly after that it was on its way.
    culprit_last_word: float = 1.0
    # Generations in a row that failed without a step. The third attempt distinguishes a broken script from bad luck.
    max_generations_without_progress: int = 3
    # Patience with a container that can't start: the kubelet retries image pulls.
    start_failure_patience: float = 20.0
    # A pod placed this recently is only starting its containers. After that, an event may say what keeps it from
    # that.
    starts_containers: float = 3.0
    # A scheduler places a pod, or says why it can't, in a second or two. A busy one may take longer.
    unseen_by_scheduler: float = 30.0
    # If other pods of its template run, this pod's node is the cause: try another node after this time. The same if
    # the pod was placed on a node that didn't answer, or whose loss was announced already.
    stuck_start: float = 300.0
    # Patience if Kubernetes refuses the pods, for example for a missing service account. It may be on its way, if it
    # was applied together with the job.
    refusal_patience: float = 10.0
    # Meanwhile one pod is retried after a pause that doubles up to a limit. A job that has trained retries for ever.
    refusal_pause: float = 1.0
    refusal_max_pause: float = 30.0
    # After this many pods whose container ended before they joined a generation, the job can't start. Until then the
    # pods are kept as evidence, with a pause after each try that doubles. Pods that were created no longer than
    # start_failure_pause after each other are one try.
    max_start_failures: int = 3
    start_failure_pause: float = 5.0
    start_failure_window: float = 600.0

    # Growing costs a drain and a restart. It happens this long after a generation's first step at the earliest,
    growth_interval: float = 20.0
    # with all pods that come within this time after the first one (twice that if one is just starting),
    growth_patience: float = 15.0
    growth_patience_while_coming: float = 45.0
    # and then waits as long as the wait for one more pod costs less than a restart for it alone, but no longer than
    # this: a node that waits is paid for.
    growth_longest: float = 600.0

    # A pod that was created ahead of time, for a hint, stays at least this long: hints may come and go each minute,
    # and a node takes minutes to come up.
    prewarmed_stay: float = 600.0

    # A pod waits at least this long for a node of its pool before another pool is tried, even if
    # fallback.afterSeconds is short: nodes take minutes to come up. It waits twice as long while a node of its pool
    # is not up yet.
    device_avoidance: float = 3600.0
    # A job that holds fewer nodes than it needs gives them back once no other has come for this long. That is three
    # times as long as a pod waits in a pool. A job waits once more for each younger one that waits.
    gang_patience: float = 900.0
    # Then it asks for none, for a pause that doubles up to a limit. Others need a moment to take what it gives back.
    gang_pause: float = 300.0
    gang_max_pause: float = 3600.0

    # On-demand nodes stand in for spot nodes if, within this window, at least so many interruptions have taken a
    # larger share of the time than spot nodes save of the price. A single one says nothing about the next.
    unrest_window: float = 3600.0
    unrest_interruptions: int = 3
    # A pool of which the cloud took a node, or that had none for a pod, comes last for this long.
    pool_avoidance: float = 1800.0
    pool_patience: float = 300.0

    # Time for the agents of a finished job to leave by themselves. Then their pods are deleted.
    leave: float = 15.0

    # How long a pod of an older generation gets its stop, once a newer generation exists.
    stray: float = 30.0

    # Progress, time and cost change all the time. While nothing else changes, they are written this often: with the
    # history and the reviews of tokens, a job at rest then costs less than a hundred requests an hour.
    record_interval: float = 45.0


DEFAULT_TIMING = Timing()


def seconds_between(earlier: datetime, later: datetime) -> float:
    """Seconds from `earlier` to `later`; negative in the other order."""
    return (later - earlier).total_seconds()


def after(moment: datetime, seconds: float) -> datetime:
    """The time so many seconds after `moment`.

    It is the calendar's last moment if that comes first: a job may name any number of seconds.
    """
    try:
        return moment + timedelta(seconds=seconds)
    except OverflowError:
        return datetime.max.replace(tzinfo=moment.tzinfo)


def growing_pause(num_tries: int, *, first: float, most: float) -> float:
    """Seconds to wait after so many failed tries in a row.

    The pause is `first` after one, and doubles with each further one, up to `most`.
    """
    num_doublings = min(num_tries - 1, 64)  # a job may be tried for weeks, and a float ends at 2**1024
    return min(most, first * 2.0**num_doublings)
