"""The terminal view of a job.

It is a pure function from a snapshot to a renderable of rich.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.conditions import ConditionType
from spottrain_api.v1alpha1.status import FINISHED_PHASES, LONG_DATA_WAIT, Phase, ProgressStatus, TrainingJobStatus
from spottrain_cli.job_view import EventSummary, JobSnapshot, PodSummary, unseen_sentence
from spottrain_planner.memory_estimate import in_gib
from spottrain_runtime.wording import counted

PHASE_STYLES: Mapping[str, str] = {
    Phase.RUNNING: "bold green",
    Phase.SUCCEEDED: "bold green",
    Phase.FAILED: "bold red",
    Phase.DRAINING: "bold yellow",
    Phase.RECOVERING: "bold yellow",
    Phase.STARTING: "bold cyan",
}
CAPACITY_STYLES: Mapping[str, str] = {CapacityType.ON_DEMAND: "blue", CapacityType.SPOT: "magenta"}
# The first steps of a generation wait for the data workers to start, and say little about the others.
TELLING_STEPS = 20
# Without a step for this long, and for so many times as long as one takes, speed and remaining time are not shown.
# The status of a job that trains may be 165 s old: agents report every 45 s, and the operator records at least every
# 120 s (operator.progressSeconds). The alert SpottrainJobStalled has the same 180 s.
STANDSTILL_SECONDS = 180.0
STANDSTILL_STEPS = 5.0
SPARKS = "▁▂▃▄▅▆▇█"
NUM_SPARKS = 40
NUM_EVENTS = 8
# A loss from here on has more digits than anybody reads.
DIVERGED = 1e6
# Of a loss below, four decimals are too few to see a change.
SMALL = 0.1
# States of pods that have ended.
ENDED_PODS = ("Succeeded", "Failed")


def job_view(job: JobSnapshot, at: datetime, losses: Sequence[float] = ()) -> RenderableType:
    """Draw the whole view.

    Args:
        job: The job to show.
        at: Current time, for ages.
        losses: The newest losses for the small curve, oldest first.
    """
    return Group(_headline(job, at), _progress(job, at, losses), _members(job), _events(job.events, at))


def _headline(job: JobSnapshot, at: datetime) -> RenderableType:
    status = job.status
    line = Text.assemble(
        (f"{job.namespace}/{job.name}  ", "bold"),
        (job.phase, PHASE_STYLES.get(job.phase, "bold")),
        (f"  {duration((status.completion_time or at) - job.created_at)}", "dim"),
    )
    if status.message:
        line.append(f"\n{status.message}", "dim")
    if unseen := unseen_sentence([job], at):
        line.append(f"\n{unseen}", "yellow")
    if job.advice:
        line.append(f"\n{job.advice}", "yellow")
    return line


def _progress(job: JobSnapshot, at: datetime, losses: Sequence[float]) -> RenderableType:
    status = job.status
    progress, over = status.progress, status.phase in FINISHED_PHASES
    stalled = not over and _stands_still(progress, at)
    reached = progress.display or ("no step made" if over else "waiting for the first step")
    if stalled and progress.last_step_at is not None:
        reached += f", last step {duration(at - progress.last_step_at)} ago"
    if progress.eta_seconds is not None and not (stalled or over or status.phase is Phase.SUSPENDED):
        reached += f"   {seconds(progress.eta_seconds)} to go"
    grid = Table.grid(
        "", "", Column(no_wrap=True), padding=(0, 2)
    )  # if it's narrow, the sentences in the middle wrap
    grid.add_row(
        "Step",
        ProgressBar(total=progress.total_steps, completed=progress.step, width=40)
        if progress.total_steps
        else Text("–"),
        Text(reached),
    )
    curve = sparkline(losses)
    if progress.loss is not None:
        speed = speed_text(status, at)
        unit = "tokens/s" if speed else ""
        grid.add_row("Loss", Text(curve, "green"), Text(f"{loss_text(progress.loss)}   {speed} {unit}"))
    if progress.data_wait_ratio is not None and not stalled:
        waits_long = progress.data_wait_ratio >= LONG_DATA_WAIT and _steps_made(status) >= TELLING_STEPS
        advice = "try a higher num_workers" if waits_long else ""
        epoch = f"epoch {progress.epoch:.2f}, " if progress.epoch is not None else ""
        waits = f"{progress.data_wait_ratio:.0%} of each step is spent waiting"
        grid.add_row("Data", Text(epoch + waits), Text(advice))
    commit = status.commit
    grid.add_row(
        "Commit",
        Text(f"step {commit.step} of generation {commit.generation}" if commit else "none yet"),
        Text(
            f"{counted(progress.step - commit.step, 'step')} since" if commit and progress.step >= commit.step else ""
        ),
    )
    healthy = status.condition(ConditionType.CHECKPOINTS_HEALTHY)
    if healthy is not None and healthy.status == "False":
        grid.add_row("", Text(healthy.message, "red"))
    if progress.checkpoint_interval:
        grid.add_row("", Text(progress.checkpoint_interval, "dim"))
    if status.strategy is not None:
        grid.add_row("Strategy", Text(status.strategy.name), Text(f"{in_gib(status.strategy.memory.total)} a rank"))
        grid.add_row("", Text(status.strategy.reason, "dim"))
    if progress.message:
        grid.add_row("Note", Text(progress.message, "yellow"))
    lost = f"{counted(status.preemptions, 'preemption')} ({status.preemptions_without_notice} without notice)"
    grid.add_row(
        "Losses",
        Text(lost),
        Text(f"{counted(status.steps_redone, 'step')} redone, {counted(status.failures, 'failure')}"),
    )
    if not over:
        _add_deadline(grid, job)
    no_cost = "none so far" if _has_prices(job.spec) else "no prices given"
    cost = status.cost.display if status.cost else no_cost
    grid.add_row("Cost", Text(cost), Text(f"goodput {status.goodput_display}" if status.goodput_display else ""))
    return grid


def _add_deadline(grid: Table, job: JobSnapshot) -> None:
    """capacity.finishBy, the time that the job can lose until then, and what may make it late."""
    by, slack = job.spec.get("capacity", {}).get("finishBy"), job.status.slack_seconds
    if by is None:
        return
    known = "not known yet" if slack is None else f"{seconds(abs(slack))} {'to lose' if slack >= 0 else 'late'}"
    grid.add_row("Deadline", Text(str(by)), Text(known))
    on_time = job.status.condition(ConditionType.ON_TIME)
    if on_time is not None and on_time.status == "False":
        grid.add_row("", Text(on_time.message, "yellow"))


def _has_prices(spec: Mapping[str, Any]) -> bool:
    """Whether the spec prices a node. A price may be 0."""
    capacity = spec.get("capacity", {})
    nodes = (capacity.get("onDemand", {}), capacity.get("spot", {}), *capacity.get("pools", ()))
    return any(each.get("pricePerHour") is not None for each in nodes)


def _steps_made(status: TrainingJobStatus) -> int:
    """Steps since the commit from which the newest generation started."""
    generation = status.generation
    resume = generation.resume if generation is not None else None
    return status.progress.step - (resume.step if resume is not None else 0)


def speed_text(status: TrainingJobStatus, at: datetime) -> str:
    """Write the tokens a second of a generation that trains at the time `at`; empty if none does."""
    speed = status.progress.tokens_per_second
    trains = status.running is not None and not _stands_still(status.progress, at)
    return f"{speed:,.0f}" if speed and trains else ""


def _stands_still(progress: ProgressStatus, at: datetime) -> bool:
    """Whether the newest step is old.

    Then the speed before it says nothing about now.
    """
    if progress.last_step_at is None:
        return False
    steps_to_go = (progress.total_steps or 0) - progress.step
    usual = (progress.eta_seconds or 0.0) / steps_to_go if steps_to_go > 0 else 0.0
    age = (at - progress.last_step_at).total_seconds()
    return age > max(STANDSTILL_SECONDS, STANDSTILL_STEPS * usual)


def _members(job: JobSnapshot) -> RenderableType:
    generation = job.status.generation
    title = "no generation yet" if job.understands("generation") else "generation unknown"
    ranks = {}
    if generation is not None:
        ranks = {member.pod: member.node_rank for member in generation.members}
        title = f"generation {generation.number}, {generation.state.value}"
        if job.status.running is not None:
            title += f", world size {generation.world_size}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1))
    for column in ("Rank", "Pod", "Node", "Capacity", "State"):
        table.add_column(column, overflow="fold")  # names are for copying
    warm = _all_warm(job, ranks)
    for pod in sorted(job.pods, key=lambda pod: (ranks.get(pod.name, len(ranks)), pod.name)):
        rank, state = _rank_and_state(job.status, pod, ranks.get(pod.name), warm)
        capacity = Text(pod.capacity_type, CAPACITY_STYLES.get(pod.capacity_type, ""))
        table.add_row(rank, pod.name, pod.node or "–", capacity, state)
    return table


def _all_warm(job: JobSnapshot, ranks: dict[str, int]) -> bool:
    """Whether all pods that run outside a generation are ready for the next one.

    The status only has their number.
    """
    others = [pod for pod in job.pods if pod.state == "Running" and not _is_member(job.status, ranks.get(pod.name))]
    return job.status.members.waiting >= len(others)


def _is_member(status: TrainingJobStatus, rank: int | None) -> bool:
    return rank is not None and status.running is not None


def _rank_and_state(status: TrainingJobStatus, pod: PodSummary, rank: int | None, warm: bool) -> tuple[str, str]:
    """What the view says of a pod.

    `rank` is that in the newest generation, which a pod keeps after its end.
    """
    generation = status.generation
    if pod.state == "Running" and not _is_member(status, rank) and status.phase not in FINISHED_PHASES:
        return "", "waits, warm" if warm else "starts or waits"
    if rank is not None and pod.state == "Succeeded" and status.phase is Phase.FAILED:
        return str(rank), "Stopped"  # its agent left when another rank had failed
    if rank is None and generation is not None and pod.state in ENDED_PODS:
        return "", f"{pod.state}, not in generation {generation.number}"
    return "" if rank is None else str(rank), pod.state


def _events(events: Sequence[EventSummary], at: datetime) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for event in events[-NUM_EVENTS:]:
        style = "yellow" if event.type == "Warning" else ""
        table.add_row(Text(f"{duration(at - event.at)} ago", "dim"), Text(event.reason, style), Text(event.message))
    return Panel(table, title="events", title_align="left", box=box.ROUNDED, border_style="dim")


def sparkline(values: Sequence[float]) -> str:
    """Draw the newest values as blocks.

    The lowest value has the lowest block.
    """
    shown = [value for value in values[-NUM_SPARKS:] if value == value]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    height = high / 2 - low / 2  # half of it: the whole may be larger than any float
    if height == 0.0:
        return SPARKS[0] * len(shown)
    return "".join(SPARKS[round((value / 2 - low / 2) / height * (len(SPARKS) - 1))] for value in shown)


def loss_text(value: float) -> str:
    """Write a loss with four decimals.

    A small one has five digits, and one that has diverged its exponent.
    """
    if 0 < abs(value) < SMALL:
        return f"{value:.5g}"
    return f"{value:.4f}" if abs(value) < DIVERGED else f"{value:.4g}"


def duration(span: timedelta) -> str:
    """Write a time as 42s, 3m05s or 2h10m."""
    return seconds(span.total_seconds())


def seconds(value: float) -> str:
    """Write seconds as `duration` does."""
    whole = max(0, round(value))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def money(value: float, currency: str) -> str:
    """Write an amount with its currency, with four decimals if it is less than one."""
    return f"{value:,.2f} {currency}" if value >= 1 else f"{value:.4f} {currency}"
