"""The command line `spottrain`."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from spottrain_api.v1alpha1 import FINISHED_PHASES, Phase
from spottrain_cli.checkpoints import checkpoints
from spottrain_cli.job_view import JobReader, JobSnapshot, UserError, now
from spottrain_cli.live_view import duration, job_view
from spottrain_cli.plan import plan
from spottrain_local.cli import local

REFRESH_SECONDS = 0.5


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
    """Spot-aware training on Kubernetes. kubectl shows the same objects: `kubectl get tj`."""


main.add_command(local)
main.add_command(checkpoints)
main.add_command(plan)

namespace_option = click.option(
    "-n", "--namespace", default="default", show_default=True, help="The job's namespace."
)
kubeconfig_option = click.option(
    "--kubeconfig", help="Path of the kubeconfig. Default: kubectl's own rules (KUBECONFIG, ~/.kube/config)."
)


@main.command()
@click.argument("job", required=False)
@click.option("-w", "--watch", is_flag=True, help="Show the job until it has ended.")
@namespace_option
@kubeconfig_option
def status(job: str | None, watch: bool, namespace: str, kubeconfig: str | None) -> None:
    """Show the state of JOB. Without JOB, list all jobs of the namespace."""
    reader = JobReader(kubeconfig)
    console = Console()
    if job is None:
        console.print(_jobs_table(reader, namespace))
    elif watch:
        sys.exit(0 if watch_job(reader, namespace, job, console) is Phase.SUCCEEDED else 1)
    else:
        snapshot = reader.read(namespace, job, with_history=True)
        console.print(job_view(snapshot, now(), [point.loss for point in snapshot.history]))


def watch_job(reader: JobReader, namespace: str, job: str, console: Console) -> Phase:
    """Show the live view until the job has ended, and return its last phase."""
    losses: deque[float] = deque(maxlen=200)
    last_step = -1
    with Live(console=console, auto_refresh=False) as live:
        while True:
            snapshot = reader.read(namespace, job)
            progress = snapshot.status.progress
            if progress.loss is not None and progress.step != last_step:
                losses.append(progress.loss)
                last_step = progress.step
            live.update(job_view(snapshot, now(), tuple(losses)), refresh=True)
            if snapshot.status.phase in FINISHED_PHASES:
                return snapshot.status.phase
            time.sleep(REFRESH_SECONDS)


def _jobs_table(reader: JobReader, namespace: str) -> Table:
    return jobs_table([reader.read(namespace, name) for name in reader.names(namespace)], now())


def jobs_table(jobs: Sequence[JobSnapshot], at: datetime) -> Table:
    """One row for each job. On a narrow terminal, only the figures wrap."""
    table = Table(box=None)
    for column in ("Job", "Phase"):
        table.add_column(column, no_wrap=True, overflow="fold")
    for column in ("Step", "Loss", "World", "Preempted", "Redone", "Goodput", "Cost", "Age"):
        table.add_column(column, overflow="fold")
    for job in jobs:
        table.add_row(*_job_row(job), duration(at - job.created_at))
    return table


def _job_row(job: JobSnapshot) -> tuple[str, ...]:
    status = job.status
    loss = status.progress.loss
    return (
        job.name,
        job.phase,
        status.progress.display,
        f"{loss:.4f}" if loss is not None else "",
        str(status.generation.world_size) if status.generation else "",
        str(status.preemptions),
        str(status.steps_redone),
        status.goodput_display or "",
        status.cost.display if status.cost else "",
    )


@main.command()
@click.argument("job")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: JOB.html.")
@namespace_option
@kubeconfig_option
def report(job: str, output: Path | None, namespace: str, kubeconfig: str | None) -> None:
    """Write a self-contained HTML report of JOB: loss, throughput, members, time in each phase, and cost."""
    # The import of matplotlib takes a second, and no other command needs it.
    from spottrain_cli.report import html_report

    path = output or Path(f"{job}.html")
    snapshot = JobReader(kubeconfig).read(namespace, job, with_history=True)
    path.write_text(html_report(snapshot, now()))
    click.echo(f"Wrote {path}.")
