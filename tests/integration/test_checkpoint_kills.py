"""SIGKILL while saving, committing, cleaning up and loading.

No commit is lost, none is torn, and nothing is left over. The tests kill at some points. With `make kill-points`,
which sets SPOTTRAIN_KILL_POINTS, they kill at each.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from forked_programs import run_forked
from object_stores import JobStore
from spottrain.data.audit import read_audit
from spottrain_api.contract.reports import Progress
from trainer_runs import Run, assert_succeeded

SCRIPT = Path(__file__).with_name("checkpoint_kills.py")
EACH = 0
EVERYTHING = "SPOTTRAIN_KILL_POINTS" in os.environ
POINTS = EACH if EVERYTHING else 12
RANK_POINTS, RANK_STEPS = (40, 60) if EVERYTHING else (1, 8)

FEW = (
    "KillPoint has seen too few operations on this store: tests/kill_point.py counts those that Python reports to an "
    "audit hook (files, http.client). If the store's client makes them in C, let the store report each operation by "
    "sys.audit(NAME, URI) before it makes it, and add NAME to OPERATIONS there."
)


@pytest.mark.timeout(900)
def test_no_commit_is_lost_or_torn_wherever_a_writer_is_killed(
    job_store: JobStore, draw: random.Random, fork: Any
) -> None:
    environment = {**os.environ, **job_store.environment, "TEST_ENDPOINT": job_store.endpoint_url or ""}
    arguments = job_store.uri, str(POINTS), str(draw.randrange(2**31))
    ended = run_forked(fork, SCRIPT, *arguments, environment=environment, seconds=880)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    count = json.loads(ended.stdout.splitlines()[-1])
    print(f"\n{job_store.kind}: {count}")
    wrong = {what: count[what] for what in ("torn", "lost", "left_over", "wrongly_kept")}
    assert not any(wrong.values()), ended.stdout
    assert count["most_saves_redone"] <= 1
    assert count["points"] >= (200 if POINTS == EACH else POINTS), FEW
    assert count["in_writer"] > 0 or POINTS != EACH, FEW


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory, fork: Any) -> Run:
    """Two ranks that nobody kills."""
    run = Run(tmp_path_factory.mktemp("steady"), fork, dropout=0.2)
    run.generate(2, steps=RANK_STEPS)
    assert_succeeded(run)
    return run


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ranks_killed_again_and_again_end_with_the_weights_of_a_run_that_was_not(
    steady: Run, job_store: JobStore, draw: random.Random, tmp_path: Path, fork: Any
) -> None:
    """Real ranks that are killed again and again end with the same weights.

    In each generation, one of them is killed at a different operation on the store.
    """
    run = Run(tmp_path, fork, dropout=0.2, interval="1steps", step_seconds=0.02, uri=job_store.uri)
    run.endpoint_url, run.environment = job_store.endpoint_url, job_store.environment
    known, kills, most_redone = 0, 0, 0
    for point in range(RANK_POINTS):
        run.kill_at = {point % 2: draw.randrange(1, 90 if EVERYTHING else 40)}
        run.generate(2, steps=RANK_STEPS)
        killed = run.exit_codes[point % 2] == -9
        kills += killed
        progress = Progress.read(run.run_dir(0) / "progress-0.json")
        if progress is not None and "loaded" in progress.milestones:  # the other wasn't killed before that
            assert progress.start_step >= known, (run.kill_at, "a commit that rank 0 knew of was lost")
            if progress.commit is not None:
                known = progress.commit.step
        head = run.head()
        newest = head.newest.step if head is not None and head.newest is not None else 0
        assert newest >= known
        most_redone = max(most_redone, (progress.step if progress is not None else 0) - newest)
        if not killed:
            break
    run.kill_at = {}
    run.generate(2, steps=RANK_STEPS)

    assert_succeeded(run)
    wanted = steady.parameters()
    assert all(torch.equal(value, wanted[name]) for name, value in run.parameters().items())
    audit = read_audit(run.folder / "audit")
    assert audit.problems(RANK_STEPS) == []
    print(f"\n{job_store.kind}: {kills} ranks killed, {audit.num_redone} steps redone, at most {most_redone} at once")
    assert kills > 0, FEW
