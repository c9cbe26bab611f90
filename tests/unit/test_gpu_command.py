"""`make gpu` where it can't do its work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.on_gpu import TEST_FILES, unfit_torch

from cluster_fixtures import wait_for
from forked_programs import run_forked
from marked_processes import MARK, marked

ROOT = Path(__file__).parents[2]
# `make gpu` with one part, which has a folder as long as it runs.
COMMAND = """
import signal
from benchmarks import on_gpu
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell without job control ignores it
on_gpu.what_is_missing, on_gpu.hardware = lambda: None, lambda: "a GPU"
on_gpu.PARTS = {"tests": ["part"]}
on_gpu.main()
"""
PART = """
import signal, tempfile
from pathlib import Path
from benchmarks import clean_up_on_sigterm
clean_up_on_sigterm()
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "ready").touch()
    signal.pause()
"""


def test_a_machine_without_a_gpu_is_refused(fork: Any) -> None:
    found = run_forked(fork, ROOT / "benchmarks" / "on_gpu.py", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert found.returncode == 1
    assert found.stderr.strip() == "torch finds no NVIDIA GPU here. Run this on a machine with one."
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("version", "num_devices", "fits"),
    [("2.13.0+cu130", 8, True), ("2.11.0+cu130", 1, True), ("2.11.0", 2, False), ("2.9.1", 1, False)],
)
def test_a_torch_that_is_too_old_is_refused(version: str, num_devices: int, fits: bool) -> None:
    reason = unfit_torch(version, num_devices)
    assert (reason is None) == fits
    if reason is not None:
        assert version in reason
        assert "2.13" in reason


def test_all_marked_tests_are_run() -> None:
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()}
    assert marked - {Path(__file__)} == set(TEST_FILES)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_leaves_neither_processes_nor_folders(number: signal.Signals, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "part.py").write_text(PART)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(scratch), MARK: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", COMMAND], cwd=ROOT, env=environment) as command:
        try:
            wait_for(lambda: [*scratch.glob("*/ready")], "the part runs")
            command.send_signal(number)
            command.wait(30)
            assert marked(str(tmp_path)) == []
            assert [*scratch.iterdir()] == []
        finally:
            for pid in marked(str(tmp_path)):
                os.kill(pid, signal.SIGKILL)
