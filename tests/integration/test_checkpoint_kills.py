"""SIGKILL while saving, committing, cleaning up and loading: no commit is lost, none is torn, nothing is left over.

At some points here; at each with `make kill-points`, which sets SPOTTRAIN_KILL_POINTS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from object_stores import JobStore

SCRIPT = Path(__file__).with_name("checkpoint_kills.py")
EACH = 0
POINTS = EACH if "SPOTTRAIN_KILL_POINTS" in os.environ else 12


@pytest.mark.timeout(900)
def test_no_commit_is_lost_or_torn_wherever_a_writer_is_killed(job_store: JobStore) -> None:
    environment = {**os.environ, **job_store.environment, "TEST_ENDPOINT": job_store.endpoint_url or ""}
    command = [sys.executable, str(SCRIPT), job_store.uri, str(POINTS)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    count = json.loads(ended.stdout.splitlines()[-1])
    print(f"\n{job_store.kind}: {count}")
    wrong = {what: count[what] for what in ("torn", "lost", "left_over", "wrongly_kept")}
    assert not any(wrong.values()), ended.stdout
    assert count["most_saves_redone"] <= 1
    assert count["points"] >= (200 if POINTS == EACH else POINTS)
