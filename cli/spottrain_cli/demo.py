"""`make demo`: a job trains on a local cluster, loses nodes with and without notice, and ends as if nothing happened.

It uses the product as its user does: `spottrain local`, `kubectl`, the status of the TrainingJob. What it does to
the job is a list of incidents; each waits until the job has settled after the one before.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import click
import psutil
import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from spottrain.data.audit import Audit, read_audit
from spottrain_api.contract import ENV_AUDIT_DIR
from spottrain_api.v1alpha1 import FINISHED_PHASES, GenerationState, Phase, Transition
from spottrain_cli.job_view import JobReader, JobSnapshot, UserError, now
from spottrain_cli.live_view import duration, job_view, money
from spottrain_cli.report import html_report, transition_row
from spottrain_local.cluster import open_cluster
from spottrain_local.layout import ClusterLayout, checkout_root, clusters_root

CLUSTER = "demo"
NAMESPACE, JOB = "default", "gpt"
SETTLED_STEPS = 8
REFRESH_SECONDS = 0.5
TOTAL_PATIENCE_SECONDS = 900.0
BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What happens to the job: `act` does it, `title` says it; it is over when `is_over` of the job before and now.

    It waits until the job has settled, and until `can_begin`.
    """

    title: str
    act: Callable[[JobSnapshot], None]
    can_begin: Callable[[], bool] = lambda: True
    is_over: Callable[[JobSnapshot, JobSnapshot], bool]


@dataclass(slots=True, kw_only=True)
class Happened:
    """An incident that was started: the job before it, and after it once it is over."""

    incident: Incident
    before: JobSnapshot
    started_at: float
    ended_at: float | None = None
    after: JobSnapshot | None = None


@dataclass(slots=True, kw_only=True)
class Course:
    """The incidents so far and those to come."""

    to_come: deque[Incident]
    happened: list[Happened] = field(default_factory=list)

    def advance(self, job: JobSnapshot) -> None:
        """Close the incident that is over; start the next one when the job has settled."""
        current = self.happened[-1] if self.happened else None
        if current is not None and current.after is None:
            if current.incident.is_over(current.before, job):
                current.after, current.ended_at = job, time.time()
        elif self.to_come and _has_settled(job, current) and self.to_come[0].can_begin():
            incident = self.to_come.popleft()
            self.happened.append(Happened(incident=incident, before=job, started_at=time.time()))
            incident.act(job)


def _has_settled(job: JobSnapshot, last: Happened | None) -> bool:
    since = last.after.status.progress.step if last and last.after else 0
    return job.status.phase is Phase.RUNNING and job.status.progress.step >= since + SETTLED_STEPS


# --- what happens ----------------------------------------------------------------------------------------


def _spot_members(job: JobSnapshot) -> list[str]:
    generation = job.status.generation
    members = generation.members if generation and generation.state is not GenerationState.ENDED else ()
    return [member.node for member in members if member.capacity_type == "spot"]


def _new_transitions(before: JobSnapshot, job: JobSnapshot) -> Sequence[Transition]:
    known = {(transition.generation, transition.at) for transition in before.status.transitions}
    return [item for item in job.status.transitions if (item.generation, item.at) not in known]


def _has_moved_on(before: JobSnapshot, job: JobSnapshot) -> bool:
    new = _new_transitions(before, job)
    return bool(new) and new[-1].seconds_without_step is not None


class DemoCluster:
    """The local cluster of the demo, through the commands that a user would type."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._console = console
        self._environment = os.environ | {
            "SPOTTRAIN_LOCAL_HOME": str(folder),
            "KUBECACHEDIR": str(folder / "kube-cache"),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        os.environ["SPOTTRAIN_LOCAL_HOME"] = str(folder)
        self.layout = ClusterLayout(root=clusters_root() / CLUSTER)
        self._environment["KUBECONFIG"] = str(self.layout.kubeconfig)

    def run(self, *command: str) -> str:
        """Run a command as the user would, and show it. UserError: it failed."""
        self._console.print(f"[dim]$ {' '.join(command)}[/dim]")
        done = subprocess.run(command, env=self._environment, text=True, capture_output=True, check=False)
        if done.returncode:
            raise UserError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def up(self) -> None:
        self._console.print(f"[dim]$ spottrain local up --name {CLUSTER}[/dim]")
        command = [str(BIN / "spottrain"), "local", "up", "--name", CLUSTER]
        # Pods find examples/ in the folder where the cluster is started.
        subprocess.run(command, env=self._environment, cwd=checkout_root(), check=True)

    def down(self) -> None:
        self.run("spottrain", "local", "down", "--name", CLUSTER, "--delete")

    def local(self, *arguments: str) -> None:
        self.run("spottrain", "local", *arguments, "--name", CLUSTER)

    def are_gone(self, nodes: Sequence[str]) -> bool:
        """Whether the cloud has taken all these nodes."""
        status = open_cluster(CLUSTER).running_status()
        return all(node["state"] == "gone" for node in status["nodes"] if node["node"] in nodes)

    def operator_pid(self) -> int:
        """Process id of the operator, among the processes of this cluster. UserError: it doesn't run."""
        supervisor = psutil.Process(int(self.layout.lock.read_text()))
        for process in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "spottrain_operator" in process.cmdline():
                    return process.pid
        raise UserError("The operator's process was not found on the local cluster.")


def incidents(cluster: DemoCluster) -> deque[Incident]:
    """Everything that the demo does to the job, in order."""
    gone: list[str] = []

    def preempt_two(job: JobSnapshot) -> None:
        nodes = _spot_members(job)[-2:]
        gone.extend(nodes)
        cluster.local("preempt", *nodes, "--notice", "30s")

    def kill_one(job: JobSnapshot) -> None:
        node = _spot_members(job)[-1]
        gone.append(node)
        cluster.local("kill", node)

    def bring_back(_: JobSnapshot) -> None:
        cluster.local("restore", *gone)

    def is_whole(before: JobSnapshot, job: JobSnapshot) -> bool:
        wanted = before.status.generation.world_size + len(gone) if before.status.generation else 0
        generation = job.status.generation
        return _has_moved_on(before, job) and generation is not None and generation.world_size >= wanted

    killed: list[int] = []

    def kill_operator(_: JobSnapshot) -> None:
        killed.append(cluster.operator_pid())
        os.kill(killed[-1], signal.SIGKILL)

    def operator_is_back(before: JobSnapshot, job: JobSnapshot) -> bool:
        return job.status.progress.step >= before.status.progress.step + SETTLED_STEPS

    return deque(
        (
            Incident(title="two spot nodes preempted, 30 s of notice", act=preempt_two, is_over=_has_moved_on),
            Incident(title="one spot node killed without notice", act=kill_one, is_over=_has_moved_on),
            Incident(
                title="three spot nodes come back",
                act=bring_back,
                is_over=is_whole,
                can_begin=lambda: cluster.are_gone(gone),
            ),
            Incident(title="operator killed with SIGKILL", act=kill_operator, is_over=operator_is_back),
        )
    )


# --- the run ---------------------------------------------------------------------------------------------


def watch(reader: JobReader, course: Course, console: Console) -> JobSnapshot:
    """Show the job and let the incidents happen until it has ended. UserError: it didn't end in time."""
    losses: deque[float] = deque(maxlen=200)
    deadline = time.monotonic() + TOTAL_PATIENCE_SECONDS
    last_step = -1
    with Live(console=console, auto_refresh=False) as live:
        while time.monotonic() < deadline:
            job = reader.read(NAMESPACE, JOB)
            if job.status.progress.loss is not None and job.status.progress.step != last_step:
                losses.append(job.status.progress.loss)
                last_step = job.status.progress.step
            course.advance(job)
            live.update(Group(job_view(job, now(), tuple(losses)), _incident_list(course)), refresh=True)
            if job.status.phase in FINISHED_PHASES:
                return reader.read(NAMESPACE, JOB, with_history=True)
            time.sleep(REFRESH_SECONDS)
    raise UserError(f"The job has not ended within {TOTAL_PATIENCE_SECONDS:.0f} s.")


def _incident_list(course: Course) -> Table:
    table = Table.grid(padding=(0, 2))
    for happened in course.happened:
        state = "[yellow]…[/yellow]" if happened.after is None else "[green]✓[/green]"
        table.add_row(state, happened.incident.title)
    for incident in course.to_come:
        table.add_row("[dim]·[/dim]", f"[dim]{incident.title}[/dim]")
    return table


def result_table(course: Course, job: JobSnapshot, audit: Audit) -> Table:
    """One row an incident: what it cost, from the job's status; the operator's from the ranks' own records."""
    table = Table("What happened", "Steps redone", "Seconds without a step", "World size", title="The demo")
    for happened in course.happened:
        transitions = _transitions_of(happened, job)
        for transition in transitions:
            _, _, redone, gap, world = transition_row(transition)
            table.add_row(happened.incident.title, redone, gap, world)
        if not transitions:
            world = str(happened.before.status.generation.world_size) if happened.before.status.generation else "–"
            longest = audit.longest_gap(happened.started_at, happened.ended_at or time.time())
            table.add_row(happened.incident.title, "0", f"{longest:.1f}", f"{world} → {world}")
    return table


def _transitions_of(happened: Happened, job: JobSnapshot) -> list[Transition]:
    until = happened.after or job
    known = {(item.generation, item.at) for item in _new_transitions(happened.before, until)}
    return [item for item in job.status.transitions if (item.generation, item.at) in known]


def verdict(course: Course, job: JobSnapshot, audit: Audit) -> list[str]:
    """Sentences on what is not as it must be; none where the demo has shown what it promises."""
    problems = []
    if job.status.phase is not Phase.SUCCEEDED:
        problems.append(f"The job ended {job.status.phase.value}: {job.status.message}")
    problems += [f"This did not happen: {incident.title}." for incident in course.to_come]
    problems += [f"This did not end: {item.incident.title}." for item in course.happened if item.after is None]
    for transition in job.status.transitions:
        if transition.with_notice and transition.steps_redone != 0:
            problems.append(f"A preemption with notice cost {transition.steps_redone} steps: {transition.message}")
    problems += [f"Order of samples: {problem}." for problem in audit.problems(job.status.progress.total_steps)]
    return problems


def save_view(course: Course, path: Path) -> None:
    """The live view as it was when the first incident was over, as a picture."""
    first = course.happened[0] if course.happened else None
    if first is not None and first.after is not None and first.ended_at is not None:
        console = Console(record=True, width=110, file=io.StringIO())
        console.print(job_view(first.after, datetime.fromtimestamp(first.ended_at, UTC)))
        console.save_svg(str(path), title="spottrain status gpt --watch")


def write_manifest(folder: Path) -> Path:
    """The example's manifest with one more environment variable, so that the ranks record their samples."""
    manifest = yaml.safe_load((checkout_root() / "examples" / "gpt" / "trainingjob.yaml").read_text())
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


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo-out"), show_default=True)
def main(out: Path) -> None:
    """Train, preempt, recover, and tell what it cost."""
    console = Console()
    out = out.absolute()
    for leftover in ("audit", "cluster"):
        shutil.rmtree(out / leftover, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    cluster = DemoCluster(out / "cluster", console)
    try:
        sys.exit(_demo(cluster, out, console))
    except UserError as error:
        raise click.ClickException(str(error)) from error
    finally:
        cluster.down()


def _demo(cluster: DemoCluster, out: Path, console: Console) -> int:
    cluster.up()
    cluster.run("kubectl", "apply", "-f", str(write_manifest(out)))
    course = Course(to_come=incidents(cluster))
    job = watch(JobReader(str(cluster.layout.kubeconfig)), course, console)
    audit = read_audit(out / "audit")
    print_result(course, job, audit, console)
    save_view(course, out / "live-view.svg")
    report = out / "report.html"
    report.write_text(html_report(job, now()))
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
