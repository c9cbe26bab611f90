"""The pictures of a job's report, as SVG.

They show the course of the job over its steps and over time.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter, MaxNLocator

from spottrain_api.history import MAX_POINTS, HistoryPoint
from spottrain_api.v1alpha1.status import Phase, TrainingJobStatus
from spottrain_cli.job_view import JobSnapshot
from spottrain_cli.live_view import seconds
from spottrain_cli.throughput import Throughput
from spottrain_runtime.wording import counted
from spottrain_simulator.strategies import Outcome

# A thing has the same colour in every picture.
PHASE_COLOURS = {
    Phase.RUNNING.value: "#2a9d5c",
    Phase.STARTING.value: "#3d85c6",
    Phase.DRAINING.value: "#e6b422",
    Phase.RECOVERING.value: "#d9534f",
    Phase.PENDING.value: "#b0b7bf",
    Phase.SUSPENDED.value: "#8e7cc3",
}
ON_DEMAND_COLOUR, SPOT_COLOUR, LINE_COLOUR, REDONE_COLOUR = "#3d85c6", "#c9479b", "#22303c", "#b8bec5"
COMMIT_COLOUR = "#2a9d5c"
NOT_RECORDED = "not recorded"
# In inches. Pictures are as wide as the page, and their time axes are aligned.
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 10.0, 0.8, 0.1, 0.15, 0.5
# The largest loss that matplotlib draws. An axis beyond it overflows.
LARGEST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """The time of the job, in a unit that suits its length.

    Attributes:
        start, end: Unix times in seconds.
    """

    start: float
    end: float

    @property
    def _unit(self) -> tuple[str, float]:
        elapsed = self.end - self.start
        return ("seconds", 1.0) if elapsed < 600 else ("minutes", 60.0) if elapsed < 3 * 3600 else ("hours", 3600.0)

    def at(self, moment: float) -> float:
        return (moment - self.start) / self._unit[1]

    def draw(self, axes: Any) -> None:
        axes.set(xlabel=f"{self._unit[0]} since the job was created", xlim=(0, self.at(self.end)))


def pictures(job: JobSnapshot, speed: Throughput, ended: datetime) -> Iterator[tuple[str, str, str]]:
    start, end = job.created_at.timestamp(), ended.timestamp()
    time = TimeAxis(start=start, end=end)
    yield (
        "Loss",
        "Loss over steps. A dashed line marks the start of a generation, grey marks steps that were done again.",
        _loss(job.history, job.status),
    )
    if speed.mean:
        since = recorded_since(job.history, start)
        whole = rate(speed.amount / (end - since))
        period = "over its whole time" if since == start else "over the time that is recorded"
        yield (
            "Throughput",
            f"{speed.unit.capitalize()} a second of all ranks together: {rate(speed.mean)} on average while the job "
            f"trained (the dashed line), {whole} {period}.",
            _speed(speed, time),
        )
    yield (
        "Commits",
        f"Steps that were made, and those that a commit holds. The gap is what a loss without notice would cost. "
        f"{_commits_note(job)}",
        _commits(job.history, time),
    )
    yield (
        "Members",
        "Nodes that train together.",
        _members(job.history, time),
    )
    times = time_by_phase(job.history, start, end)
    note = ", ".join(f"{phase} {seconds(value)}" for phase, value in times.items())
    if len(job.history) >= MAX_POINTS:
        note += ". The job is long: some of its shortest phases count for the phase before them."
    yield "Phases", note, _timeline(job.history, time)


def _loss(history: Sequence[HistoryPoint], status: TrainingJobStatus) -> str:
    figure, axes = _picture(height=3.2)
    for kept, redone in loss_lines(history):
        for line, colour in ((redone, REDONE_COLOUR), (kept, LINE_COLOUR)):
            axes.plot(
                [step for step, _ in line],
                [min(max(loss, -LARGEST), LARGEST) for _, loss in line],
                color=colour,
                linewidth=1.2,
            )
    for step, generations in generations_by_step(status).items():
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


def generations_by_step(status: TrainingJobStatus) -> dict[int, list[int]]:
    """Group the generations by the step from which they resumed.

    After each transition comes the generation that the next one ends, and after the last the newest. Numbers may
    skip: a generation is beyond all that earlier jobs left in the folder.
    """
    following = [transition.generation for transition in status.transitions[1:]]
    if status.generation is not None:
        following.append(status.generation.number)
    found: dict[int, list[int]] = {}
    for transition, generation in zip(status.transitions, following, strict=False):
        if transition.resume_step is not None:
            found.setdefault(transition.resume_step, []).append(generation)
    return found


Line = list[tuple[int, float]]


def loss_lines(history: Sequence[HistoryPoint]) -> list[tuple[Line, Line]]:
    """Split the history into stretches in which steps only grow.

    Returns:
        For each stretch two lists of (step, loss): steps that were kept, and steps that the next stretch did again.
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


def rate(value: float) -> str:
    """Write a number per second: 12,345, 42 or 0.31."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _speed(speed: Throughput, time: TimeAxis) -> str:
    figure, axes = _picture(height=2.4)
    for _, group in itertools.groupby(speed.stretches, key=lambda stretch: stretch.generation):
        stretches = list(group)
        edges = [stretches[0].begin, *(stretch.end for stretch in stretches)]
        axes.stairs(
            [stretch.rate for stretch in stretches],
            [time.at(edge) for edge in edges],
            fill=True,
            color=PHASE_COLOURS[Phase.RUNNING.value],
        )
    axes.axhline(speed.mean, color=LINE_COLOUR, linewidth=0.8, linestyle="--")
    axes.set(ylabel=f"{speed.unit}/s")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    time.draw(axes)
    return _svg(figure)


def _commits_note(job: JobSnapshot) -> str:
    commits = len({point.committed_step for point in job.history if point.committed_step > 0})
    spent = job.status.time
    stalled = f" They held training up for {spent.commit_stall_seconds:.1f} s in all." if spent is not None else ""
    return f"At least {counted(commits, 'commit')}.{stalled}"


def _commits(history: Sequence[HistoryPoint], time: TimeAxis) -> str:
    figure, axes = _picture(height=2.4)
    times = [time.at(point.at) for point in history]
    made, committed = [point.step for point in history], [point.committed_step for point in history]
    axes.plot(times, made, color=LINE_COLOUR, linewidth=1.2, label="made")
    axes.step(times, committed, where="post", color=COMMIT_COLOUR, linewidth=1.2, label="committed")
    axes.fill_between(times, committed, made, step="post", color=COMMIT_COLOUR, alpha=0.2)
    axes.set(ylabel="step")
    axes.legend(loc="lower right", fontsize=8)
    time.draw(axes)
    return _svg(figure)


def _members(history: Sequence[HistoryPoint], time: TimeAxis) -> str:
    figure, axes = _picture(height=2.4)
    times = [time.at(point.at) for point in history] + [time.at(time.end)]
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
    axes.set(ylabel="nodes")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right", fontsize=8)
    time.draw(axes)
    return _svg(figure)


def _timeline(history: Sequence[HistoryPoint], time: TimeAxis) -> str:
    figure, axes = _picture(height=1.3, top=0.4)
    shown = set()
    for phase, begin, until in phase_spans(history, time.start, time.end):
        axes.barh(
            0,
            time.at(until) - time.at(begin),
            left=time.at(begin),
            color=PHASE_COLOURS.get(phase, "#888"),
            label=None if phase in shown else phase,
        )
        shown.add(phase)
    axes.set(yticks=[])
    axes.margins(y=0)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(shown) or 1, fontsize=8, frameon=False)
    time.draw(axes)
    return _svg(figure)


def nodes_picture(outcomes: Sequence[Outcome]) -> str:
    """Draw the nodes that train over time, one simulated life below the other."""
    figure, rows = plt.subplots(
        len(outcomes), sharex=True, sharey=True, squeeze=False, figsize=(WIDTH, 1.6 * len(outcomes))
    )
    for axes, outcome in zip(rows[:, 0], outcomes, strict=True):
        times = [moment.time / 3600 for moment in outcome.course]
        nodes = [[moment.on_demand for moment in outcome.course], [moment.spot for moment in outcome.course]]
        axes.stackplot(
            times,
            *nodes,
            labels=("on-demand", "spot"),
            colors=(ON_DEMAND_COLOUR, SPOT_COLOUR),
            step="post",
            alpha=0.8,
        )
        axes.set(ylabel="nodes", title=f"{outcome.name}: {outcome.cost:,.2f}")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    rows[0, 0].legend(loc="upper right", fontsize=8)
    rows[-1, 0].set(xlabel="hours")
    figure.tight_layout()
    return _svg(figure)


def phase_spans(history: Sequence[HistoryPoint], start: float, end: float) -> list[tuple[str, float, float]]:
    """List (phase, start, end) without gaps, in Unix seconds.

    The time before the first point is Pending, or not recorded if the history begins late.
    """
    since = recorded_since(history, start)
    spans = [(NOT_RECORDED, start, since), (Phase.PENDING.value, since, history[0].at if history else end)]
    for index, point in enumerate(history):
        until = history[index + 1].at if index + 1 < len(history) else max(end, point.at)
        if spans[-1][0] == point.phase:
            spans[-1] = (point.phase, spans[-1][1], until)
        else:
            spans.append((point.phase, point.at, until))
    finished = (Phase.SUCCEEDED.value, Phase.FAILED.value)
    return [span for span in spans if span[2] > span[1] and span[0] not in finished]


def recorded_since(history: Sequence[HistoryPoint], start: float) -> float:
    """Return since when the history knows the job, in Unix seconds.

    It is `start`, or the time of its first point if it begins late: a history that was deleted begins again with a
    later generation.
    """
    begins_late = history and (history[0].generation > 1 or history[0].step > 0)
    return history[0].at if begins_late else start


def time_by_phase(history: Sequence[HistoryPoint], start: float, end: float) -> dict[str, float]:
    """Sum the seconds in each phase, longest first."""
    totals: dict[str, float] = {}
    for phase, begin, until in phase_spans(history, start, end):
        totals[phase] = totals.get(phase, 0.0) + until - begin
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _picture(*, height: float, top: float = TOP) -> tuple[Any, Any]:
    """Create a figure of this height, in inches, and its axes."""
    figure, axes = plt.subplots(figsize=(WIDTH, height))
    figure.subplots_adjust(left=LEFT / WIDTH, right=1 - RIGHT / WIDTH, top=1 - top / height, bottom=BOTTOM / height)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
