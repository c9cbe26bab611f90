"""The HTML report of a job: one file with its pictures inside, made from a snapshot. Pure but for the drawing."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import jinja2
import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from spottrain_api.history import HistoryPoint
from spottrain_api.v1alpha1 import Phase, Transition

from .job_view import JobSnapshot
from .live_view import duration, seconds

# The same colour for the same thing in every picture.
PHASE_COLOURS = {
    Phase.RUNNING.value: "#2a9d5c",
    Phase.STARTING.value: "#3d85c6",
    Phase.DRAINING.value: "#e6b422",
    Phase.RECOVERING.value: "#d9534f",
    Phase.PENDING.value: "#b0b7bf",
    Phase.SUSPENDED.value: "#8e7cc3",
}
ON_DEMAND_COLOUR, SPOT_COLOUR, LINE_COLOUR, REDONE_COLOUR = "#3d85c6", "#c9479b", "#22303c", "#b8bec5"
WIDE, LOW = (10.0, 3.2), (10.0, 2.4)

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ job.name }} · spottrain report</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; color: #22303c; max-width: 1040px; margin: 2rem auto; padding: 0 1rem }
 h1 { margin-bottom: 0 } h2 { margin: 2.2rem 0 .4rem } .sub { color: #667 }
 .tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin-top: 1.4rem }
 .tile { background: #f4f6f8; border-radius: 8px; padding: .7rem 1rem; min-width: 8.5rem }
 .tile b { display: block; font-size: 1.35rem } .tile span { color: #667; font-size: .85rem }
 table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .35rem .6rem }
 th { border-bottom: 2px solid #22303c } td { border-bottom: 1px solid #dde2e7 } td.n, th.n { text-align: right }
 svg { width: 100%; height: auto }
</style></head><body>
<h1>{{ job.name }}</h1>
<p class="sub">{{ job.status.phase.value }} · namespace {{ job.namespace }} · started {{ started }} · took {{ took }}
{%- if job.status.message %} · {{ job.status.message }}{% endif %}</p>
<div class="tiles">{% for name, value in tiles %}<div class="tile"><b>{{ value }}</b><span>{{ name }}</span></div>
{% endfor %}</div>
{% for title, note, picture in pictures %}<h2>{{ title }}</h2><p class="sub">{{ note }}</p>{{ picture|safe }}
{% endfor %}
<h2>Every change of membership</h2>
<table><tr><th>What happened</th><th class="n">At step</th><th class="n">Steps redone</th>
<th class="n">Seconds without a step</th><th class="n">World size</th></tr>
{% for row in rows %}<tr><td>{{ row[0] }}</td>{% for cell in row[1:] %}<td class="n">{{ cell }}</td>{% endfor %}</tr>
{% else %}<tr><td colspan="5">None: one generation from the beginning to the end.</td></tr>{% endfor %}</table>
</body></html>
"""


def html_report(job: JobSnapshot, at: datetime) -> str:
    """The whole page. `at` stands for the end of a job that hasn't ended."""
    ended = job.status.completion_time or at
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE).render(
        job=job,
        started=job.created_at.strftime("%Y-%m-%d %H:%M:%S UTC"),
        took=duration(ended - job.created_at),
        tiles=list(_tiles(job)),
        pictures=list(_pictures(job, ended)) if len(job.history) > 1 else [],
        rows=[transition_row(transition) for transition in job.status.transitions],
    )


def transition_row(transition: Transition) -> tuple[str, ...]:
    """What happened, at which step, steps redone, seconds without a step, world size before and after."""
    redone, gap, after = transition.steps_redone, transition.seconds_without_step, transition.world_size_after
    return (
        f"{transition.reason}: {transition.message}" if transition.message else transition.reason,
        str(transition.last_step),
        "–" if redone is None else str(redone),
        "–" if gap is None else f"{gap:.1f}",
        f"{transition.world_size_before} → {'–' if after is None else after}",
    )


def _tiles(job: JobSnapshot) -> Iterator[tuple[str, str]]:
    status = job.status
    yield "steps", status.progress.display or "0"
    if status.progress.loss is not None:
        yield "loss", f"{status.progress.loss:.4f}"
    yield "preemptions", f"{status.preemptions}"
    yield "of them without notice", f"{status.preemptions_without_notice}"
    yield "steps redone", f"{status.steps_redone}"
    if status.goodput_display:
        yield "goodput", status.goodput_display
    if status.cost is not None:
        yield "cost", f"{status.cost.total:.4f}"
        yield "with on-demand nodes alone", f"{status.cost.on_demand_only:.4f}"
        if status.cost.on_demand_only > 0:
            yield "saved", f"{1 - status.cost.total / status.cost.on_demand_only:.0%}"


def _pictures(job: JobSnapshot, ended: datetime) -> Iterator[tuple[str, str, str]]:
    start, end = job.created_at.timestamp(), ended.timestamp()
    yield (
        "Loss",
        "Over steps; a line where a new generation begins; in grey, steps that were done again.",
        _loss(job.history, job.status.transitions),
    )
    yield (
        "Members",
        "Nodes that train together, over the time since the job was made.",
        _members(job.history, start, end),
    )
    times = time_by_phase(job.history, start, end)
    note = ", ".join(f"{phase} {seconds(value)}" for phase, value in times.items())
    yield "Where the time went", note, _timeline(job.history, start, end)


def _loss(history: Sequence[HistoryPoint], transitions: Sequence[Transition]) -> str:
    figure, axes = plt.subplots(figsize=WIDE)
    for kept, redone in loss_lines(history):
        for line, colour in ((redone, REDONE_COLOUR), (kept, LINE_COLOUR)):
            axes.plot([step for step, _ in line], [loss for _, loss in line], color=colour, linewidth=1.2)
    for step, generations in generations_by_step(transitions).items():
        axes.axvline(step, color=SPOT_COLOUR, linewidth=0.8, linestyle="--")
        axes.annotate(
            ", ".join(f"g{generation}" for generation in generations),
            (step, 1),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            color=SPOT_COLOUR,
            xytext=(2, -9),
            textcoords="offset points",
        )
    axes.set(xlabel="step", ylabel="loss")
    return _svg(figure)


def generations_by_step(transitions: Sequence[Transition]) -> dict[int, list[int]]:
    """The generations that began, by the step that they resumed from: at times several from the same."""
    found: dict[int, list[int]] = {}
    for transition in transitions:
        if transition.resume_step is not None:
            found.setdefault(transition.resume_step, []).append(transition.generation + 1)
    return found


Line = list[tuple[int, float]]


def loss_lines(history: Sequence[HistoryPoint]) -> list[tuple[Line, Line]]:
    """(kept, done again) for each stretch of steps that only grow: lists of (step, loss).

    Where training went back to a commit, the steps after that commit were done again; they are the second list.
    """
    stretches: list[Line] = [[]]
    for point in history:
        if point.loss != point.loss or (stretches[-1] and stretches[-1][-1][0] == point.step):
            continue
        if stretches[-1] and point.step < stretches[-1][-1][0]:
            stretches.append([])
        stretches[-1].append((point.step, point.loss))
    lines = []
    for stretch, following in zip(stretches, [*stretches[1:], []], strict=True):
        first_again = following[0][0] if following else math.inf
        kept = [point for point in stretch if point[0] < first_again]
        again = [point for point in stretch if point[0] >= first_again]
        lines.append((kept, kept[-1:] + again if again else []))
    return lines


def _members(history: Sequence[HistoryPoint], start: float, end: float) -> str:
    figure, axes = plt.subplots(figsize=LOW)
    times = [point.at - start for point in history] + [end - start]
    on_demand = [point.on_demand for point in history] + [history[-1].on_demand]
    spot = [point.spot for point in history] + [history[-1].spot]
    axes.stackplot(
        times,
        on_demand,
        spot,
        labels=("on-demand", "spot"),
        colors=(ON_DEMAND_COLOUR, SPOT_COLOUR),
        step="post",
        alpha=0.8,
    )
    axes.set(xlabel="seconds", ylabel="nodes", xlim=(0, end - start))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right", fontsize=8)
    return _svg(figure)


def _timeline(history: Sequence[HistoryPoint], start: float, end: float) -> str:
    figure, axes = plt.subplots(figsize=(10.0, 1.3))
    shown = set()
    for phase, begin, until in phase_spans(history, start, end):
        axes.barh(
            0,
            until - begin,
            left=begin - start,
            color=PHASE_COLOURS.get(phase, "#888"),
            label=None if phase in shown else phase,
        )
        shown.add(phase)
    axes.set(xlabel="seconds", xlim=(0, end - start), yticks=[])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.6), ncols=len(shown) or 1, fontsize=8, frameon=False)
    return _svg(figure)


def phase_spans(history: Sequence[HistoryPoint], start: float, end: float) -> list[tuple[str, float, float]]:
    """(phase, begin, end) without gaps, in Unix seconds; what came before the first point was Pending."""
    spans = [(Phase.PENDING.value, start, history[0].at if history else end)]
    for index, point in enumerate(history):
        until = history[index + 1].at if index + 1 < len(history) else max(end, point.at)
        if spans[-1][0] == point.phase:
            spans[-1] = (point.phase, spans[-1][1], until)
        else:
            spans.append((point.phase, point.at, until))
    finished = (Phase.SUCCEEDED.value, Phase.FAILED.value)
    return [span for span in spans if span[2] > span[1] and span[0] not in finished]


def time_by_phase(history: Sequence[HistoryPoint], start: float, end: float) -> dict[str, float]:
    """Seconds in each phase, longest first."""
    totals: dict[str, float] = {}
    for phase, begin, until in phase_spans(history, start, end):
        totals[phase] = totals.get(phase, 0.0) + until - begin
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
