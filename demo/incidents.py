"""Incidents: what the demo does to its job.

They come one after the other. Each uses the commands that a user would type.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console

from spottrain_api.v1alpha1.status import Phase, Transition
from spottrain_cli.api_access import UserError
from spottrain_cli.job_view import JobSnapshot
from spottrain_local.cluster import open_cluster
from spottrain_local.layout import ClusterLayout, checkout_root, clusters_root

CLUSTER = "demo"
SETTLED_STEPS = 8
BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that happens to the job.

    It starts when the job has settled and `can_begin` returns True for it. `act` causes it. It is over when `is_over`
    returns True for the job before it and the job now.
    """

    title: str
    act: Callable[[JobSnapshot], None]
    can_begin: Callable[[JobSnapshot], bool] = lambda _: True
    is_over: Callable[[JobSnapshot, JobSnapshot], bool]


@dataclass(slots=True, kw_only=True)
class Happened:
    """An incident that has started, with the job before and after it.

    `after` is set once the incident is over.
    """

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
        elif self.to_come and _has_settled(job, current) and self.to_come[0].can_begin(job):
            incident = self.to_come.popleft()
            self.happened.append(Happened(incident=incident, before=job, started_at=time.time()))
            incident.act(job)


def _has_settled(job: JobSnapshot, last: Happened | None) -> bool:
    since = last.after.status.progress.step if last and last.after else 0
    return job.status.phase is Phase.RUNNING and job.status.progress.step >= since + SETTLED_STEPS


def _spot_members(job: JobSnapshot) -> list[str]:
    running = job.status.running
    members = running.members if running is not None else ()
    return [member.node for member in members if member.capacity_type == "spot"]


def new_transitions(before: JobSnapshot, job: JobSnapshot) -> Sequence[Transition]:
    """List the changes of membership since `before`."""
    known = {(transition.generation, transition.at) for transition in before.status.transitions}
    return [item for item in job.status.transitions if (item.generation, item.at) not in known]


def _has_moved_on(before: JobSnapshot, job: JobSnapshot) -> bool:
    new = new_transitions(before, job)
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
        """Show a command, run it and return its output.

        Raises:
            UserError: It failed.
        """
        self._show(*command)
        return self._run(*command)

    def _show(self, *command: str) -> None:
        self._console.print(f"[dim]$ {' '.join(command)}[/dim]")

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._environment, text=True, capture_output=True, check=False)
        if done.returncode:
            raise UserError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def up(self) -> None:
        """Start the cluster, and show what that prints.

        Raises:
            UserError: It did not start. What it printed says why.
        """
        # Nothing here needs `kubectl exec`, whose programs would take minutes to build.
        command = ("spottrain", "local", "up", "--name", CLUSTER, "--no-exec")
        self._show(*command)
        # Pods find examples/ in the folder where the cluster is started.
        if subprocess.run(command, env=self._environment, cwd=checkout_root(), check=False).returncode:
            raise UserError("The demo's cluster did not start.")

    def down(self) -> None:
        """Stop the cluster, and delete its state.

        Raises:
            UserError: It failed.
        """
        command = ("spottrain", "local", "down", "--name", CLUSTER, "--delete")
        # The terminal may be closed, and Ctrl-C also ends a `tee` that reads. rich exits then.
        with contextlib.suppress(OSError, SystemExit):
            self._show(*command)
        self._run(*command)

    def local(self, *arguments: str) -> None:
        self.run("spottrain", "local", *arguments, "--name", CLUSTER)

    def are_gone(self, nodes: Sequence[str]) -> bool:
        """Return whether the cloud has taken all these nodes."""
        status = open_cluster(CLUSTER).running_status()
        return all(node["state"] == "gone" for node in status["nodes"] if node["node"] in nodes)

    def operator_pid(self) -> int:
        """Return the process id of this cluster's operator.

        Raises:
            UserError: It does not run.
        """
        supervisor = psutil.Process(int(self.layout.lock.read_text()))
        for process in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "spottrain_operator" in process.cmdline():
                    return process.pid
        raise UserError("The operator's process was not found on the local cluster.")


def incidents(cluster: DemoCluster) -> deque[Incident]:
    """Return everything that happens to the job, in order."""
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
            Incident(
                title="two spot nodes preempted, 30 s of notice",
                act=preempt_two,
                is_over=_has_moved_on,
                # A slow machine begins without its spot pods, and grows.
                can_begin=lambda job: len(_spot_members(job)) >= 3,
            ),
            Incident(
                title="one spot node killed without notice",
                act=kill_one,
                is_over=_has_moved_on,
                can_begin=lambda job: bool(_spot_members(job)),
            ),
            Incident(
                title="three spot nodes come back",
                act=bring_back,
                is_over=is_whole,
                can_begin=lambda _: cluster.are_gone(gone),
            ),
            Incident(title="operator killed with SIGKILL", act=kill_operator, is_over=operator_is_back),
        )
    )
