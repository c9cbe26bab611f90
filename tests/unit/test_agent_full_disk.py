"""A full disk under the run directory.

What is written there is lost, and nothing else.
"""

from __future__ import annotations

import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import lone_member
from forked_programs import run_forked
from full_disk import fill_disk
from spottrain_agent import generation_run
from spottrain_agent.generation_run import GenerationRun
from spottrain_agent.records import WorkerStarted, worker_started_file
from spottrain_api.contract.configuration import DrainRequest
from spottrain_api.contract.names import progress_file
from spottrain_api.contract.reports import Progress
from spottrain_api.settings.entrypoint import Entrypoint

NOW = datetime.now(UTC)
DRAIN = DrainRequest(reason="ec2: preempt", requested_at=NOW, deadline=NOW + timedelta(hours=1), is_preemption=True)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GenerationRun:
    """A rank that has opened its session, on a disk that is full since then."""
    generation = lone_member.generation(Entrypoint(script="train.py"))
    run = GenerationRun(generation, lone_member.settings(tmp_path), 30.0)
    run.directory.create({})
    WorkerStarted(pid=7, started_at=NOW, expects_session=True).write(run.directory.path / worker_started_file(0))
    Progress(generation=1, updated_at=NOW).write(run.directory.path / progress_file(0))
    fill_disk(monkeypatch)
    return run


def test_ranks_get_sigterm_once_if_a_drain_cannot_be_written(
    run: GenerationRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(generation_run, "is_alive", lambda pid: True)
    monkeypatch.setattr(generation_run, "send_signal", lambda pid, number: sent.append((pid, number)))
    run.terminate_for_drain()
    assert sent == []
    run.request_drain(DRAIN)
    for _ in range(2):
        run.terminate_for_drain()
    assert sent == [(7, signal.SIGTERM)]
    assert run.drain_seen(), "it can't be taken back"


def test_a_risk_that_cannot_be_shown_is_logged_once(run: GenerationRun, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        run.show_risk(True)
    [record] = caplog.records
    assert record.message.startswith("the ranks don't learn that the node is at risk: ")


# A folder in a file's place refuses the file as a full disk does.
WORKER = """
import multiprocessing
from spottrain_agent.worker import Console, run_worker
arguments = (Entrypoint(script=str(folder / "train.py")), folder, Console.redirect(folder / "torchrun.log"))
worker = multiprocessing.get_context("fork").Process(target=run_worker, args=arguments)
worker.start()
worker.join()
sys.exit(worker.exitcode)
"""
LAUNCHER = """
from spottrain_agent import launcher
launcher._run_torchrun = lambda *_: None
request = launcher.LaunchRequest(
    torchrun_arguments=(), environment={}, entrypoint=Entrypoint(script="train.py"), run_dir=str(folder)
)
sys.exit(launcher.run_launcher(request))
"""


@pytest.mark.parametrize(
    ("program", "name"), [(WORKER, "ended-0.json"), (LAUNCHER, "launcher.json")], ids=["worker", "torchrun"]
)
def test_an_end_that_cannot_be_written_is_that_of_the_exit_code(
    program: str, name: str, fork: Any, tmp_path: Path
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "train.py").write_text("print('done')")
    head = "import pathlib, sys\nfrom spottrain_api.settings.entrypoint import Entrypoint\n"
    head += "folder = pathlib.Path(sys.argv[1])\n"
    (tmp_path / "program.py").write_text(head + program)
    done = run_forked(fork, tmp_path / "program.py", str(tmp_path), environment={"LOCAL_RANK": "0"})
    assert done.returncode == 0, done.stderr
