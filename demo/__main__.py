"""The command behind `make demo`.

It starts a cluster, watches the job, prints what each incident cost, and writes the report.
"""

from __future__ import annotations

import io
import shutil
import signal
import sys
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

import click
import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from demo.incidents import Course, DemoCluster, incidents
from demo.results import result_table, verdict
from spottrain.data.audit import Audit, read_audit
from spottrain_api.contract.names import ENV_AUDIT_DIR
from spottrain_api.v1alpha1.status import FINISHED_PHASES
from spottrain_cli.api_access import UserError
from spottrain_cli.job_view import JobReader, JobSnapshot, now
from spottrain_cli.live_view import duration, job_view, money
from spottrain_cli.report import html_report
from spottrain_local.layout import checkout_root

NAMESPACE, JOB = "default", "gpt"
REFRESH_SECONDS = 0.5
LINE_SECONDS = 10.0
TOTAL_PATIENCE_SECONDS = 900.0
# Requests to end, also that of a terminal that closes.
ENDS = (signal.SIGTERM, signal.SIGHUP)


def watch(reader: JobReader, course: Course, console: Console) -> JobSnapshot:
    """Show the job and start the incidents until it has ended.

    Raises:
        UserError: It has not ended in time.
    """
    losses: deque[float] = deque(maxlen=200)
    deadline = time.monotonic() + TOTAL_PATIENCE_SECONDS
    last_step, next_line = -1, 0.0
    with Live(console=console, auto_refresh=False) as live:
        while time.monotonic() < deadline:
            job = reader.read(NAMESPACE, JOB)
            if job.status.progress.loss is not None and job.status.progress.step != last_step:
                losses.append(job.status.progress.loss)
                last_step = job.status.progress.step
            course.advance(job)
            live.update(Group(job_view(job, now(), tuple(losses)), _incident_list(course)), refresh=True)
            # A Live view shows nothing before its end if the output is not a terminal.
            if not console.is_terminal and time.monotonic() >= next_line:
                console.print(progress_line(job, course), soft_wrap=True)
                next_line = time.monotonic() + LINE_SECONDS
            if job.status.phase in FINISHED_PHASES:
                return reader.read(NAMESPACE, JOB, with_history=True)
            time.sleep(REFRESH_SECONDS)
    raise UserError(f"The job has not ended within {TOTAL_PATIENCE_SECONDS:.0f} s.")


def progress_line(job: JobSnapshot, course: Course) -> str:
    """The job in one line, for a log file."""
    step = job.status.progress.display or "no step yet"
    happens = course.happened[-1].incident.title if course.happened else "nothing has happened yet"
    return f"{duration(now() - job.created_at)}: {job.phase}, {step}; {happens}"


def _incident_list(course: Course) -> Table:
    table = Table.grid(padding=(0, 2))
    for happened in course.happened:
        state = "[yellow]…[/yellow]" if happened.after is None else "[green]✓[/green]"
        table.add_row(state, happened.incident.title)
    for incident in course.to_come:
        table.add_row("[dim]·[/dim]", f"[dim]{incident.title}[/dim]")
    return table


def save_view(course: Course, path: Path) -> None:
    """Save a picture of the live view at the end of the first incident."""
    first = course.happened[0] if course.happened else None
    if first is not None and first.after is not None and first.ended_at is not None:
        console = Console(record=True, width=110, file=io.StringIO())
        console.print(job_view(first.after, datetime.fromtimestamp(first.ended_at, UTC)))
        console.save_svg(str(path), title="spottrain status gpt --watch")


def save_report(job: JobSnapshot, path: Path) -> None:
    path.write_text(html_report(job, now()), encoding="utf-8")


def write_manifest(folder: Path) -> Path:
    """Write the example's manifest with one more environment variable.

    With the variable, the ranks record their samples.
    """
    manifest = yaml.safe_load((checkout_root() / "examples" / "gpt" / "trainingjob.yaml").read_text(encoding="utf-8"))
    manifest["spec"].setdefault("env", []).append({"name": ENV_AUDIT_DIR, "value": str(folder / "audit")})
    path = folder / "trainingjob.yaml"
    path.write_text(yaml.safe_dump(manifest, sort_keys=False))
    return path


def print_result(course: Course, job: JobSnapshot, audit: Audit, console: Console) -> None:
    console.print(result_table(course, job, audit))
    cost = job.status.cost
    if cost is not None:
        console.print(
            f"Cost {money(cost.total, cost.currency)}; on-demand nodes alone would have cost "
            f"{money(cost.on_demand_only, cost.currency)}."
        )
    console.print(f"Goodput {job.status.goodput_display or '–'}; the job took {duration(now() - job.created_at)}.")


def end_as_ctrl_c(number: int, _: object) -> None:
    """Handle SIGTERM and SIGHUP: the demo ends, after it has stopped its cluster.

    Another one doesn't disturb that.
    """
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def handle_requests_to_end() -> None:
    """Let `end_as_ctrl_c` handle what `nohup` and the like have not switched off."""
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_as_ctrl_c)


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo-out"), show_default=True)
def main(out: Path) -> None:
    """Train, preempt, recover, and print what it cost."""
    handle_requests_to_end()
    console = Console()
    out = out.absolute()
    cluster = DemoCluster(out / "cluster", console)
    try:
        if cluster.layout.root.exists():  # a demo that was killed, and whose nodes may still run
            cluster.down()
        for leftover in ("audit", "cluster"):
            shutil.rmtree(out / leftover, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        try:
            sys.exit(_demo(cluster, out, console))
        finally:
            cluster.down()
    except UserError as error:
        raise click.ClickException(str(error)) from error


def _demo(cluster: DemoCluster, out: Path, console: Console) -> int:
    cluster.up()
    cluster.run("kubectl", "apply", "-f", str(write_manifest(out)))
    course = Course(to_come=incidents(cluster))
    job = watch(JobReader(str(cluster.layout.kubeconfig)), course, console)
    audit = read_audit(out / "audit")
    print_result(course, job, audit, console)
    save_view(course, out / "live-view.svg")
    report = out / "report.html"
    save_report(job, report)
    console.print(f"Report: {report}")
    problems = verdict(course, job, audit)
    for problem in problems:
        console.print(f"[bold red]✗[/bold red] {problem}")
    if not problems:
        console.print(
            "[bold green]✓[/bold green] Succeeded; no step was redone for a preemption with notice; the samples "
            f"of all {len(audit.steps)} steps are those of an uninterrupted run."
        )
    return 1 if problems else 0


if __name__ == "__main__":
    main()
