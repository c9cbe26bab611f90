"""Images and laptops without a store's client.

The library works, and a sentence says what to install. Each test has an interpreter of its own, which can't import
the clients.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from distribution import ROOT, closure
from forked_ranks import rank_environments
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.reports import FailureReason, Outcome
from spottrain_api.settings.checkpoint import CheckpointConfig
from spottrain_api.settings.choices import Strategy
from spottrain_api.settings.training import Batch

TRAINING = """
import torch
import spottrain

with spottrain.session() as session:
    session.prepare(torch.nn.Linear(1, 1), optimizer=lambda model: torch.optim.SGD(model.parameters()), dataset=[0])
"""
COMMAND_LINE = """
import spottrain_cli.report
from spottrain_cli.main import main

main()
"""

each_client = pytest.mark.parametrize(
    ("uri", "client", "extra"),
    [
        ("s3://bucket/run", "boto3", "s3"),
        pytest.param("gs://bucket/run", "google-cloud-storage", "gcs", marks=pytest.mark.nightly),
    ],
)


def run(
    code: str, *arguments: str, extras: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the code with only the packages that these extras of ours install.

    Nothing else can be imported.
    """
    installed = closure(extras) | {"spottrain"}
    absent = [
        module
        for module, distributions in packages_distributions().items()
        if not {canonicalize_name(each) for each in distributions} & installed
    ]
    return subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n{code}", *arguments],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


@each_client
def test_a_job_whose_image_lacks_the_client_fails_with_a_sentence(
    uri: str, client: str, extra: str, tmp_path: Path
) -> None:
    TrainerConfig(
        job="test",
        generation=1,
        attempt_id="a",
        seed=5,
        strategy=Strategy.DDP,
        batch=Batch(global_=1),
        checkpoint=CheckpointConfig(uri=uri),
    ).write(tmp_path / "run.json")
    [environment] = rank_environments(1)
    done = run(TRAINING, extras="trainer", environment=environment | {"SPOTTRAIN_RUN_DIR": str(tmp_path)})
    outcome = Outcome.read(tmp_path / "outcome-0.json")
    assert outcome is not None, done.stderr
    assert outcome.failure is not None
    assert outcome.failure.reason is FailureReason.CHECKPOINT_ACCESS_DENIED
    assert f"checkpoint.uri '{uri}' needs {client}, which can't be imported (" in outcome.failure.message
    assert f"Install spottrain with its extra {extra!r}; for a job, in its image." in outcome.failure.message


@pytest.mark.nightly
@each_client
def test_the_command_line_says_which_client_is_missing(uri: str, client: str, extra: str) -> None:
    done = run(COMMAND_LINE, "checkpoints", "ls", uri, extras="cli,trainer")
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: checkpoint.uri '{uri}' needs {client}, which can't be imported (")
    assert f"spottrain with its extra {extra!r}" in done.stderr


@pytest.mark.nightly
def test_a_folder_of_checkpoints_needs_no_client(tmp_path: Path) -> None:
    done = run(COMMAND_LINE, "checkpoints", "ls", f"file://{tmp_path}", extras="cli,trainer")
    assert done.stderr == f"Error: There is no commit at file://{tmp_path}. Is it the job's checkpoint.uri?\n"


def test_the_command_line_works_without_torch() -> None:
    job = str(ROOT / "examples" / "gpt" / "trainingjob.yaml")
    sizes = ["--parameters=1B", "--sequence-length=1024", "--accelerator-memory=80GiB"]
    assert "fsdp" in run(COMMAND_LINE, "plan", job, *sizes, extras="cli").stdout
    done = run(COMMAND_LINE, "checkpoints", "ls", "s3://bucket/run", extras="cli")
    assert done.stderr == (
        "Error: Reading checkpoints needs torch, which isn't installed. Install spottrain with its extra 'trainer'.\n"
    )
