"""Images and laptops without a store's client.

The library works, and a sentence says what to install. Interpreters of their own show it, which can't import the
clients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.utils import canonicalize_name

from distribution import ROOT, closure
from forked_ranks import rank_environments
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.reports import FailureReason, Outcome
from spottrain_api.settings.checkpoint import CheckpointConfig
from spottrain_api.settings.choices import Strategy
from spottrain_api.settings.training import Batch

# Its arguments are run directories. A process of its own trains in each, with torch from the first one.
TRAINING = """
import os, sys
import torch
import spottrain

for os.environ["SPOTTRAIN_RUN_DIR"] in sys.argv[1:]:
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        continue
    with spottrain.session() as session:
        optimizer = lambda model: torch.optim.SGD(model.parameters())
        session.prepare(torch.nn.Linear(1, 1), optimizer=optimizer, dataset=[0])
    sys.exit()
"""
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
# Its arguments are command lines, as JSON. It prints the exit code, the output and the errors of each.
COMMAND_LINES = """
import json, sys
import spottrain_cli.report
from click.testing import CliRunner
from spottrain_cli.main import main

ends = [CliRunner().invoke(main, line) for line in map(json.loads, sys.argv[1:])]
print(json.dumps([(end.exit_code, end.stdout, end.stderr) for end in ends]))
"""
CLIENTS = [("s3://bucket/run", "boto3", "s3"), ("gs://bucket/run", "google-cloud-storage", "gcs")]
CLIENTS += [("az://bucket/run", "azure-storage-blob", "azure")]


@cache
def modules() -> dict[str, set[str]]:
    """The distributions of each importable module. Takes seconds."""
    return {
        module: set(map(canonicalize_name, distributions))
        for module, distributions in packages_distributions().items()
    }


def run(
    code: str, *arguments: str, extras: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the code with only the packages that these extras of ours install.

    Nothing else can be imported.
    """
    installed = closure(extras) | {"spottrain"}
    absent = [module for module, distributions in modules().items() if not distributions & installed]
    return subprocess.run(
        [sys.executable, "-c", ABSENT.format(absent=absent) + code, *arguments],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


def of_command_lines(*lines: list[str], extras: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command line, in one interpreter."""
    done = run(COMMAND_LINES, *map(json.dumps, lines), extras=extras)
    assert done.returncode == 0, done.stderr
    ends: list[tuple[int, str, str]] = json.loads(done.stdout)
    return ends


def test_a_job_whose_image_lacks_the_client_fails_with_a_sentence(tmp_path: Path) -> None:
    folders = {uri: tmp_path / extra for uri, _, extra in CLIENTS}
    for uri, folder in folders.items():
        folder.mkdir()
        TrainerConfig(
            job="test",
            generation=1,
            attempt_id="a",
            seed=5,
            strategy=Strategy.DDP,
            batch=Batch(global_=1),
            checkpoint=CheckpointConfig(uri=uri),
        ).write(folder / "run.json")
    [environment] = rank_environments(1)
    done = run(TRAINING, *map(str, folders.values()), extras="trainer", environment=environment)
    for uri, client, extra in CLIENTS:
        outcome = Outcome.read(folders[uri] / "outcome-0.json")
        assert outcome is not None, done.stderr
        assert outcome.failure is not None
        assert outcome.failure.reason is FailureReason.CHECKPOINT_ACCESS_DENIED
        assert f"checkpoint.uri '{uri}' needs {client}, which can't be imported (" in outcome.failure.message
        assert f"Install spottrain with its extra {extra!r}; for a job, in its image." in outcome.failure.message


def test_the_command_line_says_which_client_is_missing_and_needs_none_for_a_folder(tmp_path: Path) -> None:
    folder = f"file://{tmp_path}"
    lines = [["checkpoints", "ls", uri] for uri in (folder, *(uri for uri, _, _ in CLIENTS))]
    in_folder, *in_buckets = of_command_lines(*lines, extras="cli,trainer")
    _, _, errors = in_folder
    assert errors == f"Error: There is no commit at {folder}. Is it the job's checkpoint.uri?\n"
    for (uri, client, extra), (exit_code, _, errors) in zip(CLIENTS, in_buckets, strict=True):
        assert exit_code == 1
        assert errors.startswith(f"Error: checkpoint.uri '{uri}' needs {client}, which can't be imported (")
        assert f"spottrain with its extra {extra!r}" in errors


def test_the_command_line_works_without_torch() -> None:
    job = str(ROOT / "examples" / "gpt" / "trainingjob.yaml")
    plan = ["plan", job, "--parameters=1B", "--sequence-length=1024", "--accelerator-memory=80GiB"]
    listed, planned = of_command_lines(["checkpoints", "ls", "s3://bucket/run"], plan, extras="cli")
    assert "fsdp" in planned[1]
    assert listed[2] == (
        "Error: Reading checkpoints needs torch, which isn't installed. Install spottrain with its extra 'trainer'.\n"
    )
