"""Real ranks resume after damage to any object of the newest commit.

They notice damage of every kind, and train on from the commit before. Each store runs a few cases. `make kill-points`
runs all cases on all stores.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from object_stores import JobStore
from spottrain.checkpoint.format.attempt import ATTEMPTS
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.head import HEAD_KEY
from spottrain.checkpoint.format.manifest import FROZEN_SUFFIX
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.data.audit import read_audit
from spottrain_api.contract.reports import FailureReason, OutcomeKind
from trainer_runs import STEPS, Run, assert_drained, assert_succeeded

EVERYTHING = "SPOTTRAIN_KILL_POINTS" in os.environ
WORLD_SIZE = 2
Way = Callable[[bytes, bytes], bytes | None]


def cut(whole: bytes, other: bytes) -> bytes | None:
    return whole[:-1]


def flip(whole: bytes, other: bytes) -> bytes | None:
    middle = len(whole) // 2
    return whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]


def swap(whole: bytes, other: bytes) -> bytes | None:
    """Replace it by the same object of the commit before.

    That object is sound in itself and of the same size.
    """
    return other


def delete(whole: bytes, other: bytes) -> bytes | None:
    return None


WAYS: tuple[Way, ...] = (cut, flip, swap, delete)


@pytest.fixture
def run(job_store: JobStore, tmp_path: Path, fork: Any) -> Run:
    """Two ranks of FSDP, with nothing committed.

    Each rank reads a different part of a checkpoint.
    """
    return Run(
        tmp_path,
        fork,
        strategy="fsdp",
        interval="3steps",
        uri=job_store.uri,
        endpoint_url=job_store.endpoint_url,
        environment=job_store.environment,
    )


def committed(run: Run) -> tuple[Commit, Commit]:
    """The newest commit and the one before."""
    head = run.head()
    assert head is not None
    newest, before, *_ = head.commits
    return newest, before


def shards(storage: CheckpointStorage, commit: Commit) -> list[str]:
    """What a resume needs of a commit: each rank's data, and the manifest."""
    found = [key for key, _ in storage.list(commit.attempt) if key.endswith((".data", "manifest.json"))]
    assert len(found) == WORLD_SIZE + 1
    return found


def resumed_from(run: Run) -> int:
    """Start a generation that drains at once.

    Returns:
        The step that it would have gone on from.
    """
    run.generate(WORLD_SIZE, {0: {0: "drain"}})
    step = run.progress().start_step
    ended = [outcome and (outcome.kind, outcome.step) for outcome in run.outcomes]
    assert ended == [(OutcomeKind.DRAINED, step)] * WORLD_SIZE
    return step


def damages(run: Run, newest: Commit, store: JobStore) -> Iterator[tuple[str, Way]]:
    """All of them, or a few on each store, in other ways each."""
    keys = shards(run.storage(), newest)
    if EVERYTHING:
        yield from itertools.product(keys, WAYS)
    elif store.is_folder:
        yield from zip(keys, WAYS, strict=False)
    else:
        yield keys[1], flip if store.kind == "s3" else swap


def assert_head_is_made_anew(run: Run, newest: Commit, ways: tuple[Way, ...]) -> None:
    """No commit is lost when HEAD itself is damaged, and it is there again."""
    storage = run.storage()
    for how in ways:
        damaged = how(storage.get(HEAD_KEY)[0], b"")
        storage.delete([HEAD_KEY])
        if damaged is not None:
            storage.put(HEAD_KEY, damaged)
        assert resumed_from(run) == newest.step, how.__name__
        said = run.progress()
        assert said.checkpoint_failure is not None
        assert said.checkpoint_failure.reason is FailureReason.CHECKPOINT_DAMAGED
        assert said.checkpoint_failure.message == said.message
        assert f"rebuilt from the checkpoints in the store, the newest of step {newest.step}" in said.message
        assert committed(run)[0] == newest


@pytest.mark.nightly
def test_damaged_frozen_weights_fail_the_job_with_a_sentence_and_are_good_again_once_restored(
    run: Run, job_store: JobStore
) -> None:
    """All commits refer to them, so that there is none to go back to."""
    run.settings = {"frozen": True}
    run.generate(WORLD_SIZE, {0: {5: "await", 7: "drain"}})
    assert_drained(run)
    newest, _ = committed(run)
    storage = run.storage()
    (base,) = newest.needs
    files = [key for key, _ in storage.list(base) if key.endswith(FROZEN_SUFFIX)]
    assert len(files) == WORLD_SIZE
    assert [key for key, _ in storage.list(ATTEMPTS) if key.endswith(FROZEN_SUFFIX)] == files
    ways = (cut, flip, delete) if EVERYTHING or job_store.is_folder else (flip,)
    for key, how in itertools.product(files if EVERYTHING else files[1:], ways):
        whole = storage.get(key)[0]
        damaged = how(whole, b"")
        storage.delete([key])
        if damaged is not None:
            storage.upload(key, damaged)
        failures = [outcome.failure if outcome is not None else None for outcome in run.generate(WORLD_SIZE)]
        assert {failure and failure.reason for failure in failures} == {FailureReason.CHECKPOINT_DAMAGED}
        assert all("kept checkpoints is whole" in failure.message for failure in failures if failure is not None)
        storage.upload(key, whole)

    run.generate(WORLD_SIZE + 1)
    assert_succeeded(run)
    assert run.progress().start_step == newest.step
    assert [key for key, _ in storage.list(ATTEMPTS) if key.endswith(FROZEN_SUFFIX)] == files


def test_every_damage_is_noticed_and_the_commit_before_is_resumed(run: Run, job_store: JobStore) -> None:
    run.generate(WORLD_SIZE, {0: {5: "await", 7: "drain"}})
    assert_drained(run)
    newest, before = committed(run)
    storage = run.storage()
    cases = list(damages(run, newest, job_store))
    for key, how in cases:
        whole = storage.get(key)[0]
        damaged = how(whole, storage.get(key.replace(newest.attempt, before.attempt))[0])
        storage.delete([key])
        if damaged is not None:
            storage.upload(key, damaged)
        assert resumed_from(run) == before.step, (key, how.__name__)
        said = run.progress()
        assert f"The checkpoint at step {newest.step} is damaged, and training continues from" in (said.message or "")
        assert said.checkpoint_failure is not None
        assert said.checkpoint_failure.reason is FailureReason.CHECKPOINT_DAMAGED
        assert key in said.checkpoint_failure.message
        storage.upload(key, whole)
    assert_head_is_made_anew(run, newest, (cut, flip, delete) if EVERYTHING or job_store.is_folder else (cut,))
    if EVERYTHING:
        print(f"\n{job_store.kind}: {len(cases)} damages, all noticed")
    storage.delete([shards(storage, newest)[0]])

    run.generate(WORLD_SIZE)

    assert_succeeded(run)
    assert run.progress().start_step == before.step
    assert run.progress().checkpoint_failure is None  # a commit was made since
    assert newest not in committed(run)
    assert read_audit(run.folder / "audit").problems(STEPS) == []
