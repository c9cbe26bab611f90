"""`make gpu` where it can't do its work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.on_gpu import TEST_FILES, unfit_torch

ROOT = Path(__file__).parents[2]


def test_a_machine_without_a_gpu_is_told_so() -> None:
    command = [sys.executable, "-m", "benchmarks.on_gpu"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    assert found.stderr.strip() == "torch finds no NVIDIA GPU here. Run this on a machine with one."
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("version", "num_devices", "fits"),
    [("2.13.0+cu130", 8, True), ("2.11.0+cu130", 1, True), ("2.11.0", 2, False), ("2.9.1", 1, False)],
)
def test_a_torch_that_is_too_old_is_told_so(version: str, num_devices: int, fits: bool) -> None:
    reason = unfit_torch(version, num_devices)
    assert (reason is None) == fits
    if reason is not None:
        assert version in reason
        assert "2.13" in reason


def test_all_marked_tests_are_run() -> None:
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()}
    assert marked - {Path(__file__)} == set(TEST_FILES)
