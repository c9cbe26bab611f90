"""The examples as a person runs them without a cluster.

They run under torchrun or alone, and are interrupted and resumed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from forked_programs import run_forked
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.stores.uri import open_storage
from spottrain_api.v1alpha1.spec import TrainingJobSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_GPT = ["--steps", "12", "--layers", "2", "--width", "32", "--heads", "2", "--context", "16"]


@contextmanager
def torchrun(num_ranks: int, script: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (
        tempfile.TemporaryDirectory() as logs,
        subprocess.Popen(
            [*command, f"--log-dir={logs}", str(EXAMPLES / script), *args],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def run(num_ranks: int, script: str, *args: str) -> str:
    with torchrun(num_ranks, script, *args) as process:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output


def run_alone(fork: Any, script: str, *args: str) -> str:
    """What the script prints as the only rank, without torchrun."""
    done = run_forked(fork, EXAMPLES / script, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def newest_step(folder: Path) -> int:
    head = read_head(open_storage(f"file://{folder}"))
    return head.newest.step if head is not None and head.newest is not None else 0


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_manifest_is_a_good_job_with_a_script_that_exists(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    spec = TrainingJobSpec.model_validate(manifest["spec"])
    folder = path.parent.name
    assert manifest["metadata"]["name"] == (folder if path.stem == "trainingjob" else f"{folder}-{path.stem}")
    assert spec.entrypoint.script is not None
    assert (EXAMPLES.parent / spec.entrypoint.script).is_file()
    assert len(path.read_text().splitlines()) <= 17


@pytest.mark.nightly
def test_the_gpt_learns_and_resumes_with_another_number_of_ranks(fork: Any, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    args = [*SMALL_GPT, "--checkpoints", f"file://{checkpoints}"]
    run(2, "gpt/train.py", *args)
    assert newest_step(checkpoints) == 12
    output = run_alone(fork, "gpt/train.py", *args, "--steps", "30")
    assert newest_step(checkpoints) == 30
    (loss,) = re.findall(r"step 30: loss ([0-9.]+)", output)
    assert float(loss) < 5.2  # from ln 256 = 5.5


@pytest.mark.parametrize("example", ["digits", "lightning", "accelerate"])
def test_the_digits_are_recognised(fork: Any, example: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    output = run_alone(fork, f"{example}/train.py", "--epochs", "5", "--checkpoints", f"file://{checkpoints}")
    found = re.findall(r"epoch (\d): ([0-9.]+)% of 297 new digits are right", output)
    assert [number for number, _ in found] == ["1", "2", "3", "4", "5"]
    assert float(found[-1][1]) > 85
    assert newest_step(checkpoints) == 150


@pytest.mark.nightly
def test_streams_are_learnt_and_read_on_with_another_number_of_ranks(fork: Any, tmp_path: Path) -> None:
    args = ["--checkpoints", f"file://{tmp_path}/checkpoints"]
    run(2, "stream/train.py", *args, "--steps", "33")
    steady = run(2, "stream/train.py", "--steps", "40")
    output = run_alone(fork, "stream/train.py", *args, "--steps", "40")
    losses = [float(re.findall(r"step 40: loss ([0-9.]+)", each)[0]) for each in (steady, output)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] < 3.5  # from ln 256 = 5.5


@pytest.mark.nightly
def test_the_plain_script_saves_on_sigterm_and_resumes(tmp_path: Path) -> None:
    args = ["--folder", str(tmp_path), "--steps", "40"]
    with torchrun(2, "plain/train.py", *args, "--step-seconds", "0.2") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 1:")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    (step,) = re.findall(r"stopped at step (\d+)", output)
    assert 0 < int(step) < 40
    assert "finished at step 40" in run(1, "plain/train.py", *args, "--step-seconds", "0")
