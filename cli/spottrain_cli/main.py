"""The command line `spottrain`."""

from __future__ import annotations

import contextlib
import io
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spottrain_api.v1alpha1.status import FINISHED_PHASES, Phase
from spottrain_cli.api_access import UserError, answers
from spottrain_cli.checkpoints import checkpoints
from spottrain_cli.cost import CAUSE, KEYS, cost_json, cost_table, first_day, spent, today
from spottrain_cli.data import data
from spottrain_cli.job_view import JobReader, JobSnapshot, now, unseen_sentence
from spottrain_cli.live_view import duration, job_view, loss_text, speed_text
from spottrain_cli.logs import Follower, JobLogs
from spottrain_cli.plan import plan
from spottrain_cli.simulate import simulate_command
from spottrain_local.cli import local

REFRESH_SECONDS = 0.5
# Exit code for a failed job. An error of the command, which says nothing about the job, is 1.
JOB_FAILED = 3

T = TypeVar("T")


class Group(click.Group):
    """Prints a UserError as a sentence, without a traceback, and exits with 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Group)
@click.version_option(package_name="spottrain")
def main() -> None:
    """Spot-aware training on Kubernetes.

    kubectl shows the same objects: `kubectl get tj`.
    """
    # A terminal that is not UTF-8 shows a question mark for what it can't show.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


main.add_command(local)
main.add_command(checkpoints)
main.add_command(data)
main.add_command(plan)
main.add_command(simulate_command)


def _not_empty(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    """Refuse the name that an unset variable gives."""
    if name == "":
        raise click.BadParameter("It is empty. Is a variable not set?")
    return name


namespace_option = click.option(
    "-n",
    "--namespace",
    callback=_not_empty,
    help="The job's namespace. Default: that of the kubeconfig's context, otherwise `default`.",
)
kubeconfig_option = click.option(
    "--kubeconfig", help="Path of the kubeconfig. Default: kubectl's own rules (KUBECONFIG, ~/.kube/config)."
)


@main.command()
@click.argument("job", callback=_not_empty, required=False)
@click.option("-w", "--watch", is_flag=True, help="Show the job until it has ended, or all jobs until Ctrl-C.")
@click.option("-A", "--all-namespaces", is_flag=True, help="List the jobs of all namespaces.")
@namespace_option
@kubeconfig_option
def status(job: str | None, watch: bool, all_namespaces: bool, namespace: str | None, kubeconfig: str | None) -> None:
    """Show the state of JOB. Without JOB, list all jobs of the namespace.

    On a narrow terminal, the list leaves out columns.
    """
    if job is not None and all_namespaces:
        raise UserError("--all-namespaces lists jobs: leave JOB out, or name its namespace with -n.")
    reader = JobReader(kubeconfig, namespace)
    console = Console()
    listed = None if all_namespaces else reader.namespace
    if job is None and watch:
        watch_jobs(reader, listed, console)
    elif job is None:
        console.print(jobs_table(reader.jobs(listed), now(), console.width))
    elif watch:
        sys.exit(0 if watch_job(reader, reader.namespace, job, console) is Phase.SUCCEEDED else JOB_FAILED)
    else:
        snapshot = reader.read(reader.namespace, job, with_history=True)
        console.print(job_view(snapshot, now(), [point.loss for point in snapshot.history]))


@main.command()
@click.option(
    "--since", default="30d", show_default=True, help="The last days, today (UTC) included, as in 7d, or a date."
)
@click.option(
    "--by",
    multiple=True,
    type=click.Choice((*KEYS, CAUSE)),
    help="What each row is of; may be given several times, but cause not with type or pool. "
    "Default: job, type and pool.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="As a table for people, or as JSON, in which each row is of one namespace, job, day, type and pool.",
)
@click.option("-A", "--all-namespaces", is_flag=True, help="The jobs of all namespaces.")
@namespace_option
@kubeconfig_option
def cost(
    since: str,
    by: tuple[str, ...],
    output: str,
    all_namespaces: bool,
    namespace: str | None,
    kubeconfig: str | None,
) -> None:
    """Show what jobs cost, and what on-demand nodes alone would have cost.

    Jobs that are over or deleted count, too.
    """
    first = first_day(since, today())
    reader = JobReader(kubeconfig, namespace)
    listed = None if all_namespaces else reader.namespace
    costs = spent(reader.cost_records(listed), reader.jobs(listed), first, by)
    if output == "json":
        click.echo(cost_json(costs, by or KEYS, first))
    else:
        default = ("namespace", "job", "type", "pool") if all_namespaces else ("job", "type", "pool")
        Console().print(cost_table(costs, by or default, first))


def watch_job(reader: JobReader, namespace: str, job: str, console: Console) -> Phase:
    """Show the live view until the job has ended, and return its last phase."""
    losses: deque[float] = deque(maxlen=200)
    last_step = -1
    with Live(console=console, auto_refresh=False) as live:
        snapshots = _answers(lambda: reader.read(namespace, job), console)
        while True:
            snapshot = next(snapshots)
            progress = snapshot.status.progress
            if progress.loss is not None and progress.step != last_step:
                losses.append(progress.loss)
                last_step = progress.step
            live.update(job_view(snapshot, now(), tuple(losses)), refresh=True)
            if snapshot.status.phase in FINISHED_PHASES:
                return snapshot.status.phase


def watch_jobs(reader: JobReader, namespace: str | None, console: Console) -> None:
    """Show the table of jobs until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as live:
        for jobs in _answers(lambda: reader.jobs(namespace), console):
            live.update(jobs_table(jobs, now(), console.width), refresh=True)


def _answers(read: Callable[[], T], console: Console) -> Iterator[T]:
    return answers(read, every=REFRESH_SECONDS, remark=partial(console.print, style="yellow", markup=False))


def jobs_table(jobs: Sequence[JobSnapshot], at: datetime, width: int) -> RenderableType:
    """One row for each job. A sentence below names jobs that no operator looks at.

    Args:
        jobs: In the order of their rows.
        at: Current time.
        width: Characters in a line of the terminal. Columns that don't fit are left out, the least important first.
    """
    several = len({job.namespace for job in jobs}) > 1
    columns = {
        **({"Namespace": [job.namespace for job in jobs]} if several else {}),
        **{name: [cell(job, at) for job in jobs] for name, cell in _CELLS.items()},
    }
    for name in _LEAST_IMPORTANT_FIRST:
        if sum(max(map(len, (heading, *cells))) + 2 for heading, cells in columns.items()) <= width:
            break
        del columns[name]
    table = Table(box=None)
    for name in columns:
        table.add_column(name, no_wrap=True, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    unseen = unseen_sentence(jobs, at)
    return Lines(table, Text(unseen, "yellow")) if unseen else table


def _loss(job: JobSnapshot, _at: datetime) -> str:
    loss = job.status.progress.loss
    return loss_text(loss) if loss is not None else ""


_CELLS: dict[str, Callable[[JobSnapshot, datetime], str]] = {
    "Job": lambda job, _: job.name,
    "Phase": lambda job, _: job.phase,
    "Step": lambda job, _: job.status.progress.display,
    "Loss": _loss,
    "Tokens/s": lambda job, at: speed_text(job.status, at),
    "World": lambda job, _: str(job.status.members.world_size),
    "Preempted": lambda job, _: str(job.status.preemptions),
    "Redone": lambda job, _: str(job.status.steps_redone),
    "Goodput": lambda job, _: job.status.goodput_display or "",
    "Cost": lambda job, _: job.status.cost.display if job.status.cost else "",
    "Age": lambda job, at: duration(at - job.created_at),
}
_LEAST_IMPORTANT_FIRST = ("Redone", "Preempted", "Goodput", "Tokens/s", "World", "Cost", "Loss", "Age", "Step")


@main.command()
@click.argument("job", callback=_not_empty)
@click.option("--node-rank", default=0, show_default=True, help="Follow the pod with this node rank.")
@click.option("--all", "everyone", is_flag=True, help="Follow all pods. Each line starts with its pod's name.")
@namespace_option
@kubeconfig_option
def logs(job: str, node_rank: int, everyone: bool, namespace: str | None, kubeconfig: str | None) -> None:
    """Follow the log of JOB to its end, from one generation to the next.

    Shows node rank 0, whichever pod that is. Exits with 0 if the job succeeds. The logs of the last generation can be
    read until the job is deleted.
    """
    reader = JobReader(kubeconfig, namespace)
    follower = Follower(
        JobLogs(reader=reader, namespace=reader.namespace, job=job),
        wanted=lambda member: everyone or member.node_rank == node_rank,
        prefix=everyone,
        write=click.echo,
        remark=lambda sentence: click.secho(f"spottrain: {sentence}", fg="cyan", err=True),
    )
    sys.exit(0 if follower.run() is Phase.SUCCEEDED else JOB_FAILED)


@main.command()
@click.argument("job", callback=_not_empty)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: JOB.html.")
@namespace_option
@kubeconfig_option
def report(job: str, output: Path | None, namespace: str | None, kubeconfig: str | None) -> None:
    """Write a self-contained HTML report of JOB.

    It shows loss, throughput, members, time in each phase, and cost.
    """
    # The import of matplotlib takes a second, and no other command needs it.
    from spottrain_cli.report import html_report

    path = output or Path(f"{job}.html")
    reader = JobReader(kubeconfig, namespace)
    snapshot = reader.read(reader.namespace, job, with_history=True)
    page = html_report(snapshot, now())
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Name another file with --output.") from error
    click.echo(f"Wrote {path}.")
