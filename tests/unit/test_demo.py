"""The demo: what `make demo` runs, which is no part of what pip installs."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import demo.__main__
import pytest
from click.testing import CliRunner
from demo.__main__ import ENDS, handle_requests_to_end, main, progress_line
from demo.incidents import SETTLED_STEPS, Course, DemoCluster, Incident, incidents
from demo.results import verdict
from rich.console import Console

from distribution import ROOT, build_wheel
from job_snapshots import START, snapshot
from spottrain.data.audit import Audit, AuditHeader
from spottrain_api.v1alpha1.status import Phase, ProgressStatus, TrainingJobStatus, Transition
from spottrain_cli.job_view import JobSnapshot


def job(step: int, phase: Phase = Phase.RUNNING, **status_fields: Any) -> JobSnapshot:
    status = TrainingJobStatus(phase=phase, progress=ProgressStatus(step=step), **status_fields)
    return JobSnapshot(namespace="default", name="gpt", spec={}, created_at=START, status=status)


def with_spot_members(step: int, number: int) -> JobSnapshot:
    generation = snapshot().status.generation
    assert generation is not None
    members = tuple(generation.members[0].model_copy(update={"node": f"spot-{i}"}) for i in range(number))
    return job(step, generation=generation.model_copy(update={"members": members}))


def test_the_wheel_ships_the_command_line_without_the_demo(tmp_path: Path) -> None:
    with ZipFile(build_wheel(ROOT, tmp_path)) as wheel:
        names = wheel.namelist()
    assert "spottrain_cli/main.py" in names
    assert [name for name in names if "demo" in name] == []


def test_an_incident_waits_until_the_job_has_settled_and_the_next_until_it_is_over() -> None:
    done: list[str] = []

    def incident(title: str) -> Incident:
        return Incident(title=title, act=lambda _: done.append(title), is_over=two_steps_later)

    def two_steps_later(before: JobSnapshot, after: JobSnapshot) -> bool:
        return after.status.progress.step >= before.status.progress.step + 2

    course = Course(to_come=deque([incident("first"), incident("second")]))
    course.advance(job(SETTLED_STEPS - 1))
    course.advance(job(SETTLED_STEPS, Phase.DRAINING))
    assert done == []
    course.advance(job(SETTLED_STEPS))
    course.advance(job(SETTLED_STEPS + 1))
    assert (done, course.happened[0].after) == (["first"], None)
    over = job(SETTLED_STEPS + 2)
    course.advance(over)
    assert course.happened[0].after == over
    course.advance(job(2 * SETTLED_STEPS + 1))
    assert done == ["first"]
    course.advance(job(2 * SETTLED_STEPS + 2))
    assert done == ["first", "second"]


def test_nodes_are_preempted_once_the_job_has_grown_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine begins with the on-demand pods alone."""
    preempted: list[str] = []

    def local(self: DemoCluster, *arguments: str) -> None:
        preempted.extend(arguments)

    monkeypatch.setattr(DemoCluster, "local", local)
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", "")
    course = Course(to_come=incidents(DemoCluster(Path("demo-out"), Console())))
    course.advance(with_spot_members(SETTLED_STEPS, 0))
    course.advance(with_spot_members(SETTLED_STEPS, 2))
    assert preempted == []
    course.advance(with_spot_members(SETTLED_STEPS, 3))
    assert preempted == ["preempt", "spot-1", "spot-2", "--notice", "30s"]


def test_without_a_terminal_the_job_is_a_line() -> None:
    course = Course(to_come=deque([Incident(title="a node goes", act=lambda _: None, is_over=lambda *_: True)]))
    assert progress_line(job(SETTLED_STEPS), course).endswith(": Running, no step yet; nothing has happened yet")
    course.advance(job(SETTLED_STEPS))
    assert progress_line(job(SETTLED_STEPS), course).endswith(": Running, no step yet; a node goes")


@pytest.fixture
def handlers() -> Iterator[None]:
    """The test may set handlers of signals."""
    # A shell without job control, or nohup, may have left the tests with ignored ones.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("handlers")
def test_a_request_to_end_ends_the_demo_once_so_that_it_stops_its_cluster(number: signal.Signals) -> None:
    handle_requests_to_end()
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
    for again in ENDS:
        os.kill(os.getpid(), again)


@pytest.mark.usefixtures("handlers")
def test_the_demo_outlives_its_terminal_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handle_requests_to_end()
    os.kill(os.getpid(), signal.SIGHUP)


class ClosedTerminal(io.StringIO):
    """What nobody reads any more."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise OSError(self._error, os.strerror(self._error))


@pytest.mark.parametrize("error", [errno.EPIPE, errno.EIO], ids=errno.errorcode.get)
def test_the_cluster_is_stopped_though_nobody_reads(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(" ".join(command))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", "")
    monkeypatch.setattr(subprocess, "run", run)
    with (tmp_path / "stdout").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        DemoCluster(tmp_path, Console(file=ClosedTerminal(error))).down()
    assert commands == ["spottrain local down --name demo --delete"]


def test_a_cluster_that_does_not_start_is_reported_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: Sequence[str], *, check: bool, **_: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.CompletedProcess(command, int("up" in command), "", "")
        if check:
            done.check_returncode()
        return done

    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", "")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(demo.__main__, "handle_requests_to_end", lambda: None)
    result = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert isinstance(result.exception, SystemExit)
    assert "Error: The demo's cluster did not start." in result.output


def test_the_verdict_names_what_was_promised_and_did_not_happen() -> None:
    header = AuditHeader(seed=0, shuffle=False, num_samples=8, global_batch=4)
    audit = Audit(header=header, steps=(), step_times=(), num_redone=0)
    lost = Transition(generation=1, reason="Preempted", message="node spot-1 goes.", at=START, with_notice=True)
    kept = lost.model_copy(update={"steps_redone": 0})
    to_come = Incident(title="operator killed", act=lambda _: None, is_over=lambda before, now: True)
    assert verdict(Course(to_come=deque()), job(0, Phase.SUCCEEDED, transitions=(kept,)), audit) == []
    again = lost.model_copy(update={"steps_redone": 3})
    assert verdict(Course(to_come=deque([to_come])), job(0, Phase.FAILED, transitions=(again,)), audit) == [
        "The job ended Failed: ",
        "This did not happen: operator killed.",
        "A preemption with notice cost 3 steps: node spot-1 goes.",
    ]
