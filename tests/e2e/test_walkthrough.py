"""The product by hand, as the README shows it.

The tests run the commands that a user types, and check what the user then sees.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from cluster_fixtures import Kubectl, processes_of, wait_for
from spottrain_api.v1alpha1.status import GenerationState, Phase, TrainingJobStatus
from spottrain_local.cluster import DEFAULT_NAME, Cluster
from spottrain_local.layout import ClusterLayout, LocalClusterError, checkout_root

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

NODES = """\
nodes:
  - {name: system, gpus: 0}
  - {name: on-demand, gpus: 8}
  - {name: spot, gpus: 8, capacityType: spot}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """A user's shell in the checkout, pointed at a cluster of its own."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, stdin: str | None = None) -> str:
        """What the command prints; fails the test with what it complains about."""
        done = self.start(*command, stdin=subprocess.PIPE)
        out, err = done.communicate(stdin, timeout=120)
        assert done.returncode == 0, f"{' '.join(command)}: {err}{out}"
        return out

    def start(
        self, *command: str, stdin: int = subprocess.DEVNULL, output: int | IO[str] = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start the command, whose output and complaints go to `output`."""
        return subprocess.Popen(
            command, cwd=checkout_root(), env=self.environment, stdin=stdin, stdout=output, stderr=output, text=True
        )

    def status(self, job: str) -> TrainingJobStatus:
        kubectl = Kubectl(kubeconfig=Path(self.environment["KUBECONFIG"]))
        return TrainingJobStatus.model_validate(kubectl.get("tj", job).get("status") or {})

    def wait(self, job: str, what: str, condition: Any, seconds: float = 90.0) -> TrainingJobStatus:
        """The status of the job once the condition holds for it."""
        seen: list[TrainingJobStatus] = []

        def holds() -> bool:
            seen[:] = [self.status(job)]
            return bool(condition(seen[0]))

        try:
            wait_for(holds, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.run('kubectl', 'describe', 'tj', job)}") from error
        return seen[0]

    def patch(self, job: str, **spec: Any) -> None:
        self.run("kubectl", "patch", "tj", job, "--type", "merge", "-p", json.dumps({"spec": spec}))

    def apply(self, manifest: Path, **spec: Any) -> None:
        """Apply an example, with some fields of its spec replaced."""
        job = yaml.safe_load(manifest.read_text())
        job["spec"] |= spec
        self.run("kubectl", "apply", "-f", "-", stdin=yaml.safe_dump(job))

    def unhurried(self) -> dict[str, Any]:
        """Fields that make an example leave the processors to others between its steps."""
        return {
            "entrypoint": {"script": "tests/e2e/jobs/mlp.py", "args": ["--until", str(self.folder / "never")]},
            "checkpoint": {"uri": "s3://checkpoints/unhurried"},
        }

    def job_processes(self, job: str) -> list[int]:
        """Ids of the living processes of the job's pods."""
        text = f"SPOTTRAIN_JOB={job}"
        return [p.pid for p in processes_of(self.folder) if _mentions(p.pid, text)]

    def delete(self, job: str, seconds: float) -> None:
        """Delete the job; all that belongs to it must be gone in time."""
        self.run("kubectl", "delete", "tj", job)
        wait_for(lambda: not self.job_processes(job), f"processes of {job} end", seconds)
        left = ("kubectl", "get", "pods,configmaps", "-l", f"spottrain.dev/job={job}", "-o", "name")
        # Its garbage collector learns of a new CRD only every half minute.
        wait_for(lambda: not self.run(*left), f"objects of {job} go", 90)


def _mentions(pid: int, text: str) -> bool:
    try:
        return f"{text}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def is_running(status: TrainingJobStatus) -> bool:
    return status.phase is Phase.RUNNING


def trains_past(step: int) -> Any:
    return lambda status: is_running(status) and status.progress.step > step


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("walkthrough")
    environment = os.environ | {
        "SPOTTRAIN_LOCAL_HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "160",
    }
    found = Shell(folder=folder, environment=environment)
    (folder / "nodes.yaml").write_text(NODES)
    try:
        out = found.run("spottrain", "local", "up", "--nodes", str(folder / "nodes.yaml"))
        assert out.startswith("export KUBECONFIG=")
        environment["KUBECONFIG"] = found.run("spottrain", "local", "kubeconfig").strip()
        yield found
    finally:
        out = found.run("spottrain", "local", "down", "--delete")
        assert "is stopped. Its state is deleted." in out
        wait_for(lambda: not processes_of(folder), "all processes of the cluster end")


@pytest.fixture(autouse=True)
def _clean(shell: Shell) -> Iterator[None]:
    """Each test begins without jobs, and with all nodes."""
    yield
    shell.run("kubectl", "delete", "tj", "--all")
    cluster = Cluster(layout=ClusterLayout(root=shell.folder / "home" / DEFAULT_NAME))
    state = {node["node"]: node["state"] for node in cluster.running_status()["nodes"]}["spot-0"]
    # A notice may still be running: what is announced goes now, where it hasn't gone yet.
    if state not in ("running", "gone"):
        with contextlib.suppress(LocalClusterError):
            cluster.kill(["spot-0"])
    if state != "running":
        cluster.restore(["spot-0"])


EXAMPLES = checkout_root() / "examples"


@pytest.mark.nightly
def test_on_demand_stands_in_for_spot_and_spot_returns(shell: Shell) -> None:
    shell.run("spottrain", "local", "kill", "spot-0")
    shell.apply(
        EXAMPLES / "digits" / "trainingjob.yaml",
        **shell.unhurried(),
        nodes={"min": 1, "max": 1},
        capacity={
            "onDemand": {"min": 0, "max": 1},
            "spot": {"max": 1},
            "fallback": {"afterSeconds": 2, "returnAfterSeconds": 12},
        },
    )

    def members(status: TrainingJobStatus) -> list[str]:
        generation = status.generation
        if generation is None or generation.state is GenerationState.ENDED:
            return []
        return [member.capacity_type.value for member in generation.members]

    # In two steps: on a slow machine spot is tried again before on-demand trains.
    shell.wait(
        "digits",
        "it falls back",
        lambda s: ("SpotAvailable", "FellBack") in {(c.type, c.reason) for c in s.conditions},
    )
    shell.wait("digits", "on-demand stands in", lambda s: is_running(s) and members(s) == ["on-demand"])
    shell.run("spottrain", "local", "restore", "spot-0")
    back = shell.wait("digits", "spot is back", lambda s: is_running(s) and members(s) == ["spot"], 90)
    assert back.steps_redone == 0
    assert back.failures == 0


@pytest.mark.nightly
def test_deadline_and_time_to_live(shell: Shell) -> None:
    shell.apply(
        EXAMPLES / "digits" / "trainingjob.yaml",
        **shell.unhurried(),
        nodes={"min": 1, "max": 1},
        runPolicy={"activeDeadlineSeconds": 3600, "ttlSecondsAfterFinished": 3},
    )
    shell.wait("digits", "it trains", trains_past(0))
    shell.patch("digits", runPolicy={"activeDeadlineSeconds": 1})
    status = shell.wait("digits", "its deadline ends it", lambda s: s.phase is Phase.FAILED, 60)
    assert status.message.startswith(
        "The job has not finished within runPolicy.activeDeadlineSeconds (1): raise it, or remove it. To run it "
        "again, "
    )
    assert status.commit is not None
    assert status.commit.step == status.progress.step
    gone = ("kubectl", "get", "tj", "digits", "--ignore-not-found", "-o", "name")
    wait_for(lambda: not shell.run(*gone), "its time to live is over", 20)
    wait_for(lambda: not shell.job_processes("digits"), "its processes end")


def test_a_plain_script_is_warned_and_goes_on_where_it_stopped(shell: Shell) -> None:
    folder = shell.folder / "plain"
    args = ["--steps", "100000", "--folder", str(folder)]
    shell.apply(
        EXAMPLES / "plain" / "trainingjob.yaml",
        entrypoint={"script": "examples/plain/train.py", "args": args},
        nodes={"min": 2, "max": 2},
        capacity={"onDemand": {"min": 1}},
    )
    shell.wait("plain", "two nodes run it", lambda s: s.generation)
    shell.patch("plain", nodes={"min": 1})

    def said(text: str, pod: str = "plain-1") -> bool:
        return text in shell.run("kubectl", "logs", pod)

    wait_for(lambda: said("step 11: "), "it trains", 60)
    shell.run("spottrain", "local", "preempt", "spot-0", "--notice", "20s")
    wait_for(lambda: said("stopped at step"), "it saves on SIGTERM", 30)
    assert (folder / "checkpoint.pt").exists()
    shell.wait("plain", "the next generation", lambda s: s.generation.number == 2)
    stopped = int(shell.run("kubectl", "logs", "plain-1").split("stopped at step ")[1].split()[0])

    def steps() -> list[int]:
        lines = shell.run("kubectl", "logs", "plain-1").split("stopped at step")[1].splitlines()
        return [int(line.split()[1].rstrip(":")) for line in lines if line.startswith("step ")]

    wait_for(steps, "it goes on", 60)
    assert stopped < steps()[0] <= stopped + 10
    status = shell.status("plain")
    assert (status.transitions[-1].reason, status.failures) == ("Preempted", 0)


def test_a_job_is_deleted_while_it_starts(shell: Shell) -> None:
    shell.apply(EXAMPLES / "digits" / "trainingjob.yaml", nodes={"min": 1, "max": 1})
    wait_for(lambda: shell.job_processes("digits"), "a pod starts")
    shell.delete("digits", seconds=10)


def test_a_job_by_hand(shell: Shell) -> None:
    shell.apply(
        EXAMPLES / "digits" / "trainingjob.yaml",
        entrypoint={"script": "examples/digits/train.py", "args": ["--epochs", "3000"]},
        nodes={"min": 2, "max": 2},
    )
    said = shell.folder / "digits.log"
    with said.open("w") as file:
        logs = shell.start("spottrain", "logs", "digits", output=file)
    status = shell.wait("digits", "two nodes train", trains_past(0))
    shell.patch("digits", nodes={"min": 1})
    followed = "spottrain: Generation {}: node rank 0 on digits-{}.\n"
    wait_for(lambda: followed.format(1, 1) in said.read_text(), "its log is followed")

    shell.run("spottrain", "local", "preempt", "spot-0", "--notice", "15s")
    after = shell.wait("digits", "it goes on alone", lambda s: is_running(s) and len(s.generation.members) == 1)
    assert after.transitions[-1].reason == "Preempted"
    assert after.transitions[-1].steps_redone == 0
    assert after.progress.step >= status.progress.step

    described = shell.run("kubectl", "describe", "tj", "digits")
    assert "Creating 1 on-demand pod and 1 spot pod" in described
    assert re.search(r"Generation \d drains: node spot-0 goes at [\d:]{8} UTC \(preempt notice from ec2\)", described)
    assert re.search(r"Message: +Training in generation \d with 1 node\n", described)
    listed = shell.run("kubectl", "get", "tj")
    assert "Running" in listed
    assert "digits" in shell.run("spottrain", "status")
    assert "1 preemption (0 without notice)" in shell.run("spottrain", "status", "digits")

    shell.patch("digits", runPolicy={"suspend": True})
    suspended = shell.wait("digits", "it is suspended", lambda s: s.phase is Phase.SUSPENDED)
    assert suspended.message == "Suspended: set runPolicy.suspend to false to go on"
    assert suspended.commit is not None
    assert suspended.commit.step == suspended.progress.step
    wait_for(lambda: not shell.job_processes("digits"), "a suspended job holds no pods")
    shell.patch("digits", runPolicy={"suspend": False})
    resumed = shell.wait("digits", "it goes on", trains_past(suspended.progress.step))
    assert resumed.steps_redone == 0

    report = shell.folder / "digits.html"
    shell.run("spottrain", "report", "digits", "-o", str(report))
    assert "<svg" in report.read_text()
    shell.delete("digits", seconds=10)

    # The command follows the job from generation to generation and from pod to pod, and ends with it.
    logs.wait(20)
    log = said.read_text()
    places = re.findall(followed.format(r"(\d)", r"(\d)"), log)
    assert places[:2] == [("1", "1"), ("2", "1")]
    assert [number for number, pod in places[2:] if pod != "1"] == ["3"]
    assert re.findall(r"generation (\d): torchrun ", log) == ["1", "2", "3"]
    assert re.findall(r"spottrain: resumed from step (\d+) of ", log)[1:] == [str(suspended.commit.step)]
