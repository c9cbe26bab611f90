"""SIGKILL while saving, committing and cleaning up: no commit is lost, none is torn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("checkpoint_kills.py")


def run(uri: str, rounds: int, longest_seconds: float, **environment: str) -> None:
    command = [sys.executable, str(SCRIPT), uri, str(rounds), str(longest_seconds)]
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_kills_on_files(tmp_path: Path) -> None:
    run(f"file://{tmp_path}/store", 40, 0.05)


def test_kills_on_s3(s3_store, s3_credentials: None) -> None:  # type: ignore[no-untyped-def]
    run(f"s3://{s3_store.new_bucket()}/job", 15, 0.3, TEST_ENDPOINT=s3_store.endpoint_url)
