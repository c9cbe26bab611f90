"""The HTML report of a job: one file, with its pictures inside.

It is made from a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

import jinja2

from spottrain_api.cost_record import NOT_RECORDED, all_causes
from spottrain_api.v1alpha1.spending import CostCause
from spottrain_api.v1alpha1.status import TrainingJobStatus, Transition
from spottrain_cli.job_view import JobSnapshot
from spottrain_cli.live_view import duration, loss_text, money, seconds
from spottrain_cli.pictures import pictures, rate
from spottrain_cli.throughput import Throughput, throughput
from spottrain_runtime.wording import counted

# Parts of the status' `time`, as the report names them.
TIME_PARTS = {
    "productive_seconds": "Lasting steps",
    "redone_seconds": "Steps that were made again after a loss",
    "data_wait_seconds": "Waiting for data",
    "commit_stall_seconds": "Training held up by saves",
    "start_up_seconds": "Start of the job, up to its first step",
    "restart_seconds": "Restarts: from a generation's last step to the next one's first",
    "capacity_seconds": "Waiting for nodes",
    "suspended_seconds": "Suspended",
    "unreported_seconds": "A script that does not report its steps",
}

# What nodes cost money for, as the report names it.
COST_CAUSES: Mapping[str, str] = {
    CostCause.TRAINING: "Steps",
    CostCause.REDONE: "Steps that were made again after a loss",
    CostCause.START: "Starts and ends of generations",
    CostCause.CAPACITY: "Waiting for nodes.min nodes",
    CostCause.IDLE: "Nodes in no generation",
    CostCause.FALLBACK: "What on-demand nodes cost more than the spot nodes for which they stood in",
    NOT_RECORDED: "Before causes were recorded",
}

# A stretch in the picture of throughput takes at least this share of the job's time.
SHORTEST_SHARE = 1 / 200
TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ job.name }} · spottrain report</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; color: #22303c; max-width: 1040px; margin: 2rem auto; padding: 0 1rem }
 h1 { margin-bottom: 0 } h2 { margin: 2.2rem 0 .2rem } .sub { color: #667; margin: .2rem 0 .6rem }
 .tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .8rem; margin-top: 1rem }
 .tile { background: #f4f6f8; border-radius: 8px; padding: .7rem 1rem }
 .tile b { display: block; font-size: 1.35rem } .tile span { color: #667; font-size: .85rem }
 table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .35rem .6rem }
 th { border-bottom: 2px solid #22303c } td { border-bottom: 1px solid #dde2e7 } td.n, th.n { text-align: right }
 svg { width: 100%; height: auto }
</style></head><body>
<h1>{{ job.name }}</h1>
<p class="sub">{{ job.phase }} · namespace {{ job.namespace }} · created {{ created }} · took {{ took }}
{%- if job.status.message %} · {{ job.status.message }}{% endif %}</p>
{% if job.advice %}<p class="sub">{{ job.advice }}</p>
{% endif -%}
<div class="tiles">{% for name, value in tiles %}<div class="tile"><b>{{ value }}</b><span>{{ name }}</span></div>
{% endfor %}</div>
{% for title, note, picture in pictures %}<h2>{{ title }}</h2><p class="sub">{{ note }}</p>{{ picture|safe }}
{% endfor %}
{% for title, note, unit, rows in parts if rows %}<h2>{{ title }}</h2>
<p class="sub">{{ note }}</p>
<table><tr><th>Went into</th><th class="n">{{ unit }}</th><th class="n">Share</th></tr>
{% for row in rows %}<tr><td>{{ row[0] }}</td>{% for cell in row[1:] %}<td class="n">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endfor -%}
<h2>Notices, losses and other changes of members</h2>
<p class="sub">The newest fifty. A notice that was taken back before the job acted on it, and a recommendation to
move, change no members and are not listed.</p>
<table><tr><th class="n">After</th><th>What happened</th><th>What came of it</th><th class="n">At step</th>
<th class="n">Steps redone</th><th class="n">Seconds without a step</th><th class="n">World size</th></tr>
{% for when, what, outcome, numbers in rows %}<tr><td class="n">{{ when }}</td><td>{{ what }}</td>
<td>{{ outcome }}</td>
{% for cell in numbers %}<td class="n">{{ cell }}</td>{% endfor %}</tr>
{% else %}<tr><td colspan="7">{{ "None: one generation from the start to the end." if job.status.start_time
else "No generation has started." }}</td></tr>{% endfor %}</table>
</body></html>
"""


def html_report(job: JobSnapshot, at: datetime) -> str:
    """Render the whole page. `at` stands for the end of a job that has not ended."""
    ended = _end(job, at)
    elapsed = (ended - job.created_at).total_seconds()
    speed = throughput(job.history, job.spec["batch"]["global"], shortest=elapsed * SHORTEST_SHARE)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE).render(
        job=job,
        created=job.created_at.strftime("%Y-%m-%d %H:%M:%S UTC"),
        took=duration(ended - job.created_at),
        tiles=list(_tiles(job, speed)),
        pictures=list(pictures(job, speed, ended)) if len(job.history) > 1 else [],
        parts=[
            ("What the time went into", "Since the first generation's start.", "Time", list(_time(job.status))),
            (
                "What the money went into",
                "What nodes did while they were paid for.",
                "Money",
                list(_money(job.status)),
            ),
        ],
        rows=[_change(job, transition) for transition in job.status.transitions],
    )


def _end(job: JobSnapshot, at: datetime) -> datetime:
    """Return the end of the job, or of what is known of it.

    It is after the job's start, also if the clock of this machine is behind the cluster's.
    """
    newest = [datetime.fromtimestamp(point.at, UTC) for point in job.history[-1:]]
    ended = job.status.completion_time or max([at, *newest])
    return max(ended, job.created_at + timedelta(seconds=1))


def transition_row(transition: Transition) -> tuple[str, ...]:
    """Return the cells of a row for a transition.

    They are the event, the step, the steps redone, the seconds without a step, and the world sizes before and after.
    """
    redone, gap, after = transition.steps_redone, transition.seconds_without_step, transition.world_size_after
    return (
        f"{transition.reason}: {transition.message}" if transition.message else transition.reason,
        str(transition.last_step),
        "–" if redone is None else str(redone),
        "–" if gap is None else f"{gap:.1f}",
        f"{transition.world_size_before} → {'–' if after is None else after}",
    )


def _change(job: JobSnapshot, transition: Transition) -> tuple[str, str, str, tuple[str, ...]]:
    what, *numbers = transition_row(transition)
    return duration(transition.at - job.created_at), what, outcome(transition), tuple(numbers)


def outcome(transition: Transition) -> str:
    """Say what came of the end of a generation, for the steps that it had made."""
    if transition.resume_step is None:
        return "no later generation has made a step"
    source = "the members' memory" if transition.from_replicas else "the commit"
    resumed = f"resumed from {source} of step {transition.resume_step}"
    if transition.with_notice:
        return f"notice in time, {resumed}" if not transition.steps_redone else f"notice too late, {resumed}"
    return resumed


def _time(status: TrainingJobStatus) -> Iterator[tuple[str, str, str]]:
    """What the job's time went into, the largest part first, with its share."""
    if status.time is None:
        return
    parts = {name: getattr(status.time, name) for name in TIME_PARTS}
    whole = sum(parts.values())
    for name, spent in sorted(parts.items(), key=lambda item: -item[1]):
        if spent >= whole / 10_000 and spent:
            yield TIME_PARTS[name], seconds(spent), f"{spent / whole:.1%}"


def _money(status: TrainingJobStatus) -> Iterator[tuple[str, str, str]]:
    """What the job's money went into, the largest part first, with its share."""
    cost = status.cost
    causes = all_causes(cost.causes, cost.pools) if cost is not None else ()
    whole = sum(each.total for each in causes)
    for each in sorted(causes, key=lambda cause: -cause.total):
        if cost is not None and each.total > 0:
            yield (
                COST_CAUSES.get(each.cause, each.cause),
                money(each.total, cost.currency),
                f"{each.total / whole:.1%}",
            )


def _tiles(job: JobSnapshot, speed: Throughput) -> Iterator[tuple[str, str]]:
    status = job.status
    yield "steps", status.progress.display or "0"
    if status.progress.loss is not None:
        yield "loss", loss_text(status.progress.loss)
    if speed.mean:
        yield f"{speed.unit}/s while training", rate(speed.mean)
    yield _count(status.preemptions, "preemption")
    yield "of them without notice", f"{status.preemptions_without_notice}"
    yield _count(status.steps_redone, "step", " redone")
    if status.goodput_display:
        yield "goodput", status.goodput_display
    if status.cost is not None:
        yield "cost", money(status.cost.total, status.cost.currency)
        if tokens := _lasting_tokens(status, speed):
            yield "a million tokens, about", money(status.cost.total / tokens * 1e6, status.cost.currency)
        if status.cost.list_prices_of is not None:
            yield "list prices of", status.cost.list_prices_of.isoformat()
        if status.cost.on_demand_only > 0:
            yield "with on-demand nodes alone", money(status.cost.on_demand_only, status.cost.currency)
            if status.progress.step > 0:
                yield "saved", f"{1 - status.cost.total / status.cost.on_demand_only:.0%}"


def _lasting_tokens(status: TrainingJobStatus, speed: Throughput) -> float:
    """Tokens of lasting steps: those that were made again after a loss count once. 0 if the script reports none."""
    if speed.unit != "tokens":
        return 0.0
    if status.time is None or not status.time.productive_seconds:
        return speed.amount
    return (
        speed.amount * status.time.productive_seconds / (status.time.productive_seconds + status.time.redone_seconds)
    )


def _count(number: int, noun: str, more: str = "") -> tuple[str, str]:
    """Return the name and the value of a tile."""
    value, _, name = counted(number, noun).partition(" ")
    return f"{name}{more}", value
