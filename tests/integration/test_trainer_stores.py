"""Stores that fail while ranks train.

Training goes on, a sentence says why saves fail, and what was committed stays.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster_fixtures import wait_for
from faulty_proxy import FaultyProxy, faulty_proxy
from object_stores import CREDENTIALS, ObjectStore
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.head import HEAD_KEY
from spottrain.data.audit import read_audit
from spottrain_api.contract.reports import Failure, FailureReason, OutcomeKind
from trainer_runs import STEPS, Run, assert_drained, assert_succeeded

WORLD_SIZE = 2
MANY_STEPS = 100_000


@pytest.fixture
def run(tmp_path: Path, fork: Any) -> Run:
    """Ranks that commit whenever they can."""
    return Run(tmp_path, fork, interval="1steps", step_seconds=0.02)


@pytest.fixture(params=["s3", "gs", pytest.param("az", marks=pytest.mark.nightly)])
def proxy(request: pytest.FixtureRequest, run: Run) -> Iterator[FaultyProxy]:
    """A proxy between the ranks and their store."""
    store: ObjectStore = request.getfixturevalue(f"{request.param}_store")
    request.getfixturevalue(f"{request.param}_credentials")
    run.environment = CREDENTIALS[request.param] | {"AWS_MAX_ATTEMPTS": "2"}
    with faulty_proxy(store.endpoint_url) as proxy:
        run.uri, run.endpoint_url = f"{request.param}://{store.new_bucket()}/job", proxy.url
        yield proxy


def refuse_writes(to: Path, number: int) -> None:
    """Give the ranks that look at this file an error of the disk.

    They may look at any moment.
    """
    written = to.with_suffix(".new")
    written.write_text(str(number))
    written.replace(to)


def newest_commit(run: Run) -> Commit | None:
    head = run.head()
    return head.newest if head is not None else None


def await_failure(run: Run) -> Failure:
    """Wait for rank 0 to report a failed save, and return the report.

    Training must go on meanwhile.
    """
    wait_for(lambda: run.progress().checkpoint_failure, "a save fails", 90)
    failure, step = run.progress().checkpoint_failure, run.progress().step
    assert failure is not None
    wait_for(lambda: run.progress().step > step, "training goes on")
    return failure


def await_failure_at_start(run: Run) -> None:
    wait_for((run.run_dir(0) / "progress-0.json").exists, "rank 0 begins", 60)
    wait_for(lambda: run.progress().checkpoint_failure, "it says why it can't", 60)


def await_commit(run: Run) -> Commit:
    """A commit that is newer than the newest, and rank 0 content with it."""
    before = newest_commit(run)
    wait_for(lambda: newest_commit(run) not in (None, before), "a commit is made", 90)
    wait_for(lambda: run.progress().checkpoint_failure is None, "the failure is over", 90)
    found = newest_commit(run)
    assert found is not None
    return found


@contextmanager
def training(run: Run, *, redone: int = 0) -> Iterator[None]:
    """Train while the block runs, and then drain.

    At most `redone` steps may be done again.
    """
    with run.running(WORLD_SIZE, steps=MANY_STEPS):
        wait_for((run.run_dir(0) / "progress-0.json").exists, "rank 0 begins", 60)
        await_commit(run)
        yield
        run.drain()
    step = assert_drained(run)
    audit = read_audit(run.folder / "audit")
    assert audit.problems(step) == []
    assert audit.num_redone <= redone


SENTENCES = {
    "denies": (FailureReason.CHECKPOINT_ACCESS_DENIED, "is denied"),
    "vanishes": (FailureReason.CHECKPOINT_STORAGE_MISSING, "does not exist: create it, or correct checkpoint.uri"),
    "full": (FailureReason.CHECKPOINT_STORAGE_FULL, "the store is full. Free space, or lower checkpoint.keep"),
    "throttles": (FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE, "failed, after retries"),
}
PLAYED = {"s3": ("vanishes", "full", "throttles"), "gs": ("denies",), "az": ("denies",)}


def test_training_survives_what_befalls_a_bucket(run: Run, proxy: FaultyProxy) -> None:
    with training(run):
        for fault in PLAYED[str(run.uri).partition(":")[0]]:
            before = newest_commit(run)
            proxy.play(fault)
            failure = await_failure(run)
            proxy.play("")
            reason, sentence = SENTENCES[fault]
            assert (failure.reason, sentence in failure.message) == (reason, True), failure
            after = await_commit(run)
            assert before is not None
            assert after.step > before.step


def test_training_survives_what_befalls_a_folder(run: Run) -> None:
    folder = run.folder / "checkpoints"
    gone = folder.with_name("gone")

    def vanish() -> None:
        folder.rename(gone)

    def refuse(number: int) -> Callable[[], None]:
        return lambda: refuse_writes(run.folder / "errno", number)

    def heal() -> None:
        (run.folder / "errno").unlink(missing_ok=True)
        if gone.exists():
            gone.rename(folder)

    faults = {
        vanish: (FailureReason.CHECKPOINT_STORAGE_MISSING, "it is gone. Mount or create it again"),
        refuse(errno.ENOSPC): (FailureReason.CHECKPOINT_STORAGE_FULL, "the disk is full. Free space"),
        refuse(errno.EACCES): (FailureReason.CHECKPOINT_ACCESS_DENIED, "Permission denied. Let the job's user"),
    }
    with training(run):
        for break_it, (reason, sentence) in faults.items():
            break_it()
            failure = await_failure(run)
            heal()
            assert (failure.reason, sentence in failure.message) == (reason, True), failure
            await_commit(run)


def test_a_rank_that_cannot_reach_the_store_is_not_waited_for(run: Run) -> None:
    """The ranks give a save up if one of them can't reach the store.

    That rank can't leave word in the store. Otherwise rank 0 would wait ten minutes for its receipt, without any
    other save.
    """
    unreachable = run.folder / "errno-1"
    with training(run):
        refuse_writes(unreachable, errno.EHOSTUNREACH)
        failure = await_failure(run)
        assert failure.reason is FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE
        assert "was given up, because rank 1 failed: " in failure.message
        wait_for(lambda: run.progress(1).checkpoint_failure, "rank 1 says why itself")
        own = run.progress(1).checkpoint_failure
        assert own is not None
        assert own.reason is FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE
        assert "No route to host" in own.message
        assert "No route to host" in failure.message
        unreachable.unlink()
        await_commit(run)


def test_the_last_step_waits_for_its_store(run: Run) -> None:
    refusal = run.folder / "errno"
    with run.running(WORLD_SIZE):
        wait_for((run.run_dir(0) / "progress-0.json").exists, "rank 0 begins", 60)
        await_commit(run)
        refuse_writes(refusal, errno.ENOSPC)
        wait_for(lambda: run.progress().phase == "saving", "the last commit is tried", 60)
        wait_for(lambda: run.progress().checkpoint_failure, "it fails", 60)
        refusal.unlink()
    assert_succeeded(run)
    newest = newest_commit(run)
    assert newest is not None
    assert newest.step == STEPS


def test_a_drain_without_a_store_leaves_the_newest_commit(run: Run) -> None:
    with run.running(WORLD_SIZE, steps=MANY_STEPS):
        wait_for((run.run_dir(0) / "progress-0.json").exists, "rank 0 begins", 60)
        await_commit(run)
        refuse_writes(run.folder / "errno", errno.ENOSPC)
        await_failure(run)
        stands = newest_commit(run)
        run.drain(seconds=3)
    assert [outcome and outcome.kind for outcome in run.outcomes] == [OutcomeKind.DRAINED] * WORLD_SIZE
    assert run.progress().checkpoint_failure is not None
    assert newest_commit(run) == stands
    (run.folder / "errno").unlink()

    assert stands is not None
    with training(run, redone=run.progress().step - stands.step):
        assert run.progress().start_step == stands.step


@pytest.mark.parametrize("refusal", ["errno", "errno-1"], ids=["all ranks", "one rank"])
def test_a_drain_waits_for_its_store_as_long_as_there_is_time(run: Run, refusal: str) -> None:
    with run.running(WORLD_SIZE, steps=MANY_STEPS):
        wait_for((run.run_dir(0) / "progress-0.json").exists, "rank 0 begins", 60)
        await_commit(run)
        refuse_writes(run.folder / refusal, errno.ENOSPC)
        await_failure(run)
        run.drain()
        wait_for(lambda: run.progress().phase == "saving", "the last commit is tried", 60)
        (run.folder / refusal).unlink()
    assert_drained(run)


def test_a_generation_that_resumes_waits_for_its_store_unless_it_is_to_stop(run: Run) -> None:
    run.generate(1, {0: {4: "drain"}})
    step = assert_drained(run)
    run.resume = run.progress().commit
    refuse_writes(run.folder / "errno", errno.ENOSPC)
    with run.running(WORLD_SIZE):
        await_failure_at_start(run)
        run.drain(rank=1)
    assert assert_drained(run) == 0
    assert run.progress(1).drain_seen_at is not None
    with run.running(WORLD_SIZE):
        await_failure_at_start(run)
        (run.folder / "errno").unlink()
    assert_succeeded(run)
    assert run.progress().start_step == step


@pytest.mark.parametrize("proxy", ["s3"], indirect=True)
@pytest.mark.parametrize(("strategy", "within"), [("ddp", ".data"), ("auto", "manifest")])
def test_a_store_that_goes_away_while_a_commit_is_read_is_waited_for(
    run: Run, proxy: FaultyProxy, strategy: str, within: str
) -> None:
    run.strategy = strategy
    run.generate(1, {0: {4: "drain"}})
    step = assert_drained(run)
    run.resume = run.progress().commit
    proxy.play("throttles", within=within)
    with run.running(WORLD_SIZE):
        await_failure_at_start(run)
        proxy.play("")
    assert_succeeded(run)
    assert run.progress().start_step == step


@pytest.mark.parametrize("proxy", ["s3"], indirect=True)
def test_a_store_that_says_nothing_is_reported_long_before_it_fails(run: Run, proxy: FaultyProxy) -> None:
    proxy.play("hangs")
    with run.running(WORLD_SIZE):
        await_failure_at_start(run)
        failure = run.progress().checkpoint_failure
        proxy.play("")
    assert_succeeded(run)
    assert failure is not None
    assert failure.reason is FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE
    assert failure.message.startswith(f"Opening {run.uri} takes more than 20 s: the store, or a rank's connection")
    assert run.progress().checkpoint_failure is None


@pytest.mark.parametrize("damaged", [0, 1], ids=["the-first", "another"])
def test_ranks_that_read_a_commit_and_meet_different_errors_do_the_same(run: Run, damaged: int) -> None:
    """Both ranks resume from an earlier commit.

    One meets damage, which the ranks pass over. The other meets a store that doesn't answer, and the ranks wait for
    it.
    """
    run.strategy = "fsdp"  # of which each rank reads another part
    with run.running(WORLD_SIZE, {0: {4: "await", 8: "drain"}}):
        pass
    assert_drained(run)
    run.resume = run.progress().commit
    newest = newest_commit(run)
    assert newest is not None
    files = sorted(run.folder.glob(f"checkpoints/{newest.attempt}*.data"))
    files[damaged].write_bytes(files[damaged].read_bytes()[:-1])
    refusal = run.folder / f"errno-{1 - damaged}-read"
    refuse_writes(refusal, errno.EHOSTUNREACH)
    with run.running(WORLD_SIZE):
        wait_for((run.run_dir(1 - damaged) / "progress-0.json").exists, "the rank begins", 60)
        wait_for(lambda: run.progress(1 - damaged).checkpoint_failure, "it says why it can't go on", 60)
        refusal.unlink()
    assert_succeeded(run)
    assert 0 < run.progress().start_step < newest.step


def test_a_folder_with_commits_that_is_gone_is_not_made_anew(run: Run) -> None:
    run.generate(1, {0: {4: "drain"}})
    assert_drained(run)
    run.resume = run.progress().commit
    folder = run.folder / "checkpoints"
    folder.rename(run.folder / "gone")
    (outcome,) = run.generate(1)
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason is FailureReason.CHECKPOINT_STORAGE_MISSING
    assert "it is gone. Mount or create it again" in outcome.failure.message
    assert run.progress().checkpoint_failure is not None
    assert not folder.exists()


def test_a_checkpoint_that_does_not_fit_is_left_as_it_is(run: Run) -> None:
    """A checkpoint that doesn't fit is refused with a sentence, and stays.

    It is of a different data set, model, format version or engine.
    """
    run.generate(1, {0: {4: "drain"}})
    assert_drained(run)
    storage = run.storage()
    head = storage.get(HEAD_KEY)[0]

    def refusal() -> str:
        before = {key: storage.get(key)[0] for key, _ in storage.list("attempts/")}
        (outcome,) = run.generate(1)
        assert outcome is not None
        assert outcome.failure is not None
        assert outcome.failure.reason is FailureReason.CHECKPOINT_INCOMPATIBLE
        assert {key: storage.get(key)[0] for key, _ in storage.list("attempts/")} == before
        return outcome.failure.message

    run.num_samples = 40
    assert "was made with num_samples 46, and this run has num_samples 40" in refusal()
    run.num_samples, run.width = 46, 9
    assert "does not fit this model and strategy" in refusal()
    run.width = 8
    storage.put(HEAD_KEY, b'{"format_version": 7, "fence": 1}')
    assert "The checkpoints are of format version 7; this spottrain reads 1." in refusal()
    storage.put(HEAD_KEY, head)
    run.generate(1)
    assert_succeeded(run)
