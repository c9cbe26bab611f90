"""Text files are in UTF-8, whatever the locale says."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import demo.__main__
import pytest
from demo.__main__ import save_report

from spottrain_api.contract.reports import Failure, FailureReason
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_cli.job_view import JobSnapshot
from spottrain_cli.model_facts import read_config
from spottrain_local.layout import write_atomically

TEXT = "模型 → gelöst"


@pytest.fixture
def ascii_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python opens without an encoding is ASCII, as in the locale C."""
    monkeypatch.setattr(io, "text_encoding", lambda encoding, _level=2: encoding or "ascii")


@pytest.mark.usefixtures("ascii_locale")
def test_the_demos_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.__main__, "html_report", lambda *_: TEXT)
    job = JobSnapshot(
        namespace="default", name="gpt", spec={}, created_at=datetime.now(UTC), status=TrainingJobStatus()
    )
    save_report(job, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == TEXT.encode()


@pytest.mark.usefixtures("ascii_locale")
def test_the_config_of_a_model(tmp_path: Path) -> None:
    config = {"_name_or_path": TEXT, "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    (tmp_path / "config.json").write_bytes(json.dumps(config, ensure_ascii=False).encode())
    assert read_config(tmp_path / "config.json").layers == 12


@pytest.mark.usefixtures("ascii_locale")
def test_the_state_of_a_local_cluster(tmp_path: Path) -> None:
    write_atomically(tmp_path / "spec.json", TEXT)
    assert (tmp_path / "spec.json").read_bytes() == TEXT.encode()


@pytest.mark.usefixtures("ascii_locale")
def test_a_message_between_agent_and_ranks(tmp_path: Path) -> None:
    message = Failure(reason=FailureReason.INVALID_CONFIGURATION, message=TEXT)
    message.write(tmp_path / "failure.json")
    assert Failure.read(tmp_path / "failure.json") == message


def test_the_job_that_is_planned(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(
        f"""# {TEXT}
kind: TrainingJob
spec:
  image: trainer
  entrypoint: {{script: train.py}}
  nodes: {{max: 1}}
  batch: {{global: 8}}
  checkpoint: {{uri: s3://bucket/run}}
""".encode()
    )
    arguments = ["plan", str(tmp_path / "job.yaml"), "--parameters", "1B", "--accelerator-memory", "80GiB"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("PYTHONIOENCODING", None)
    command = [sys.executable, "-c", "from spottrain_cli.main import main; main()", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done
