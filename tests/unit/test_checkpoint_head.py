"""HEAD: who may commit what, and unclear outcomes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from memory_storage import MemoryStorage
from spottrain.checkpoint.errors import (
    CheckpointMismatch,
    CorruptCheckpoint,
    Fenced,
    PreconditionFailed,
    StepBehind,
    StorageUnavailable,
)
from spottrain.checkpoint.format.attempt import Attempt
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.head import HEAD_KEY, commit, fence, prune, read_head
from spottrain.checkpoint.stores.storage import Buffer

ROUNDS = 200


def of_start(start: str, step: int, generation: int = 2) -> Commit:
    """A commit as the checkpointer names it.

    The name is of the start of its generation, and of the save.
    """
    attempt = Attempt.new(generation, step, f"{start}-{step:016x}").prefix
    return Commit(generation=generation, step=step, attempt=attempt, manifest_sha256="0", committed_at="2026-11-21")


def new(step: int, generation: int = 1, name: str = "") -> Commit:
    attempt = f"attempts/g{generation}-s{step}-{name}/"
    return Commit(generation=generation, step=step, attempt=attempt, manifest_sha256="0", committed_at="2026-11-21")


def steps(storage: MemoryStorage) -> list[int]:
    head = read_head(storage)
    return [kept.step for kept in head.commits] if head else []


def test_without_anything_there_is_no_head() -> None:
    assert read_head(MemoryStorage()) is None


def test_commits_are_kept_newest_first() -> None:
    storage = MemoryStorage()
    commit(storage, new(10))
    head = commit(storage, new(20))
    assert head == read_head(storage)
    assert head.newest == new(20)
    assert steps(storage) == [20, 10]


def test_a_new_generation_fences_the_older_ones() -> None:
    storage = MemoryStorage()
    commit(storage, new(10, generation=1))
    assert fence(storage, 3).newest == new(10, generation=1)
    with pytest.raises(Fenced, match="Generation 2 may not commit any more: generation 3 has taken over"):
        commit(storage, new(20, generation=2))
    with pytest.raises(Fenced, match="generation 3, of an earlier job or of this one, has used") as refused:
        fence(storage, 2)
    assert refused.value.fence == 3
    with pytest.raises(Fenced):
        prune(storage, 2, lambda commits: set())
    assert fence(storage, 3).fence == 3
    assert steps(storage) == [10]


def test_a_fence_holds_before_the_first_commit() -> None:
    storage = MemoryStorage()
    assert fence(storage, 2).newest is None
    with pytest.raises(Fenced):
        commit(storage, new(1, generation=1))


def test_of_a_generation_that_was_started_twice_the_first_to_commit_goes_on() -> None:
    """Ranks run on that the restored cluster doesn't know."""
    storage = MemoryStorage()
    commit(storage, of_start("job-g1", 10, generation=1))
    for _ in ("job-g2-1", "job-g2-2"):
        assert fence(storage, 2).newest == of_start("job-g1", 10, generation=1)
    commit(storage, of_start("job-g2-2", 15), resumed_from_step=10)
    with pytest.raises(Fenced, match=r"it was started twice.* and the other start has committed step 15") as refused:
        commit(storage, of_start("job-g2-1", 20), resumed_from_step=10)
    assert refused.value.fence == 2
    commit(storage, of_start("job-g2-2", 25), resumed_from_step=10)
    assert steps(storage) == [25, 15, 10]


def test_a_start_that_has_resumed_from_another_goes_on_from_there() -> None:
    """As a new job does whose folder has commits of an earlier job."""
    storage = MemoryStorage()
    commit(storage, of_start("job-g2-1", 10))
    commit(storage, of_start("other-g2-9", 20), resumed_from_step=10)
    commit(storage, of_start("other-g2-9", 30), resumed_from_step=10)
    with pytest.raises(Fenced, match="it was started twice"):
        commit(storage, of_start("job-g2-1", 40))
    assert steps(storage) == [30, 20, 10]


@pytest.mark.parametrize(("step", "generation"), [(10, 1), (9, 1), (10, 2), (9, 2)])
def test_a_step_behind_is_refused(step: int, generation: int) -> None:
    storage = MemoryStorage()
    commit(storage, new(10))
    with pytest.raises(StepBehind, match=f"Step {step} of generation {generation} was not committed"):
        commit(storage, new(step, generation, "other"))


def test_a_generation_that_fell_back_drops_the_damaged_commits() -> None:
    storage = MemoryStorage()
    for step in (10, 20, 30):
        commit(storage, new(step))
    fence(storage, 2)
    with pytest.raises(StepBehind):
        commit(storage, new(25, generation=2), resumed_from_step=15)
    commit(storage, new(25, generation=2), resumed_from_step=20)
    assert steps(storage) == [25, 20, 10]


def test_a_damaged_commit_goes_at_once_when_it_was_passed_over() -> None:
    storage = MemoryStorage()
    for step in (10, 20):
        commit(storage, new(step))
    commit(storage, new(25, generation=2), resumed_from_step=10)
    assert steps(storage) == [25, 10]
    with pytest.raises(StepBehind):
        commit(storage, new(24, generation=3), resumed_from_step=25)


def test_committing_again_changes_nothing() -> None:
    storage = MemoryStorage()
    commit(storage, new(10))
    commit(storage, new(20))
    before = storage.get(HEAD_KEY)
    commit(storage, new(10))
    assert storage.get(HEAD_KEY) == before


def test_prune_never_drops_the_newest() -> None:
    storage = MemoryStorage()
    for step in (10, 20, 30):
        commit(storage, new(step))
    prune(storage, 1, lambda commits: {new(10).attempt})
    assert steps(storage) == [30, 10]


class UnclearStorage(MemoryStorage):
    """The first conditional writes time out, and take effect or not."""

    def __init__(self, times: int, takes_effect: bool) -> None:
        super().__init__()
        self.times = times
        self.takes_effect = takes_effect

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        if self.times == 0:
            return super().put(key, data, if_match=if_match, if_absent=if_absent)
        self.times -= 1
        if self.takes_effect:
            super().put(key, data, if_match=if_match, if_absent=if_absent)
        raise StorageUnavailable("timed out")


@pytest.mark.parametrize("takes_effect", [True, False])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_unclear_write_is_settled_by_reading(times: int, takes_effect: bool) -> None:
    storage = UnclearStorage(times, takes_effect)
    commit(storage, new(10))
    assert steps(storage) == [10]


def test_a_store_that_stays_away_is_reported() -> None:
    with pytest.raises(StorageUnavailable, match="timed out"):
        commit(UnclearStorage(100, takes_effect=False), new(10))


class LostResponse(MemoryStorage):
    """The first write takes effect, but the client's retry loses against it."""

    lost = False

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        etag = super().put(key, data, if_match=if_match, if_absent=if_absent)
        if not self.lost:
            self.lost = True
            raise PreconditionFailed(key)
        return etag


def test_losing_against_oneself_is_winning() -> None:
    storage = LostResponse()
    assert commit(storage, new(10)).newest == new(10)
    assert steps(storage) == [10]


def test_of_two_writers_for_a_step_and_a_fenced_one_exactly_one_wins() -> None:
    storage = MemoryStorage()
    fence(storage, 2)
    writers = [(2, "a"), (2, "b"), (1, "late")]
    with ThreadPoolExecutor(3) as pool:
        for step in range(1, ROUNDS + 1):

            def write(writer: tuple[int, str], step: int = step) -> str | None:
                try:
                    commit(storage, new(step, *writer))
                    return new(step, *writer).attempt
                except (Fenced, StepBehind):
                    return None

            won = [attempt for attempt in pool.map(write, writers) if attempt]
            head = read_head(storage)
            assert head is not None
            assert head.newest is not None
            assert won == [head.newest.attempt]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"format_version": 1}', b"\x80\x04K\x01."])
def test_a_damaged_head_gets_a_sentence(data: bytes) -> None:
    storage = MemoryStorage()
    storage.put(HEAD_KEY, data)
    with pytest.raises(CorruptCheckpoint, match="HEAD of the checkpoint store is damaged"):
        fence(storage, 1)
    assert storage.get(HEAD_KEY)[0] == data


def test_a_head_of_another_version_gets_a_sentence() -> None:
    storage = MemoryStorage()
    storage.put(HEAD_KEY, b'{"format_version": 3, "fence": 1}')
    with pytest.raises(CheckpointMismatch, match=r"of format version 3; this spottrain reads 1\."):
        read_head(storage)
