"""Writers of several generations whose operations come in any order.

They share one store, and die at any operation. Whatever the order: HEAD never names what isn't whole, never goes
back, and no acknowledged commit is lost to anything but a newer one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from memory_storage import MemoryStorage
from spottrain.checkpoint.errors import Fenced, FrozenWeightsGone, StepBehind
from spottrain.checkpoint.format.attempt import ATTEMPTS, Attempt
from spottrain.checkpoint.format.commits import Commit, Head
from spottrain.checkpoint.format.head import commit, fence, read_head
from spottrain.checkpoint.format.manifest import FROZEN_SUFFIX
from spottrain.checkpoint.saving.retention import Retention, clean_up
from spottrain.checkpoint.stores.storage import Buffer, CheckpointStorage, Pieces

RETENTION = Retention(last=1, every=20)
SAVES = 3


class Killed(BaseException):
    """The process died before this operation."""


class Writer(threading.Thread):
    """A process, which makes its next operation on the store only on request."""

    def __init__(self, storage: MemoryStorage, name: str, generation: int) -> None:
        super().__init__(name=name, daemon=True)
        self.storage = storage
        self.generation = generation
        self.acknowledged: list[Commit] = []
        self.over = False
        self._killed = False
        self._waits, self._goes = threading.Semaphore(0), threading.Semaphore(0)

    def begin(self) -> None:
        self.start()
        self._waits.acquire()

    def advance(self, *, kill: bool = False) -> None:
        """One operation, and on to before the next."""
        self._killed = kill
        self._goes.release()
        self._waits.acquire()

    def gate(self) -> None:
        self._waits.release()
        self._goes.acquire()
        if self._killed:
            raise Killed

    def run(self) -> None:
        try:
            self._work(GatedStorage(self))
        except (Killed, Fenced, StepBehind, FrozenWeightsGone):
            pass
        finally:
            self.over = True
            self._waits.release()

    def _work(self, storage: CheckpointStorage) -> None:
        newest = fence(storage, self.generation).newest
        base = newest.step if newest is not None else 0
        frozen = next(iter(newest.needs), newest.attempt) if newest is not None else None
        # Of different strides, so that one may come between two steps of another.
        for step in (base + (10 + 3 * int(self.name[-1])) * number for number in range(1, SAVES + 1)):
            attempt = Attempt.new(self.generation, step, self.name)
            new = Commit(
                generation=self.generation,
                step=step,
                attempt=attempt.prefix,
                manifest_sha256=self.name,
                committed_at="2026-11-21",
                needs=(frozen,) if frozen is not None else (),
            )
            if frozen is None:
                storage.upload(f"{attempt.prefix}rank-00000{FROZEN_SUFFIX}", b"frozen")
            storage.upload(f"{attempt.prefix}rank-00000.data", self.name.encode())
            storage.upload(new.manifest, self.name.encode())
            commit(storage, new, resumed_from_step=base)
            self.acknowledged.append(new)
            # One writer of two refers to what it has written; another writes it each time, as after failed saves.
            frozen = (frozen or attempt.prefix) if self.name[-1] in "02" else None
            clean_up(storage, self.generation, RETENTION)


@dataclass(frozen=True, slots=True)
class GatedStorage:
    """The store as one writer sees it."""

    writer: Writer

    parallel_reads = 2

    @property
    def inner(self) -> MemoryStorage:
        self.writer.gate()
        return self.writer.storage

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        return self.inner.put(key, data, if_match=if_match, if_absent=if_absent)

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        self.inner.upload(key, data)

    def get(self, key: str) -> tuple[bytes, str]:
        return self.inner.get(key)

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        return self.inner.read_into(key, offset, memory)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.inner.delete([key])

    def keeps_deleted(self, key: str) -> str | None:
        return None

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        return self.inner.abandon_uploads(prefix, is_over)


def order(commit: Commit | None) -> tuple[int, int]:
    return (commit.generation, commit.step) if commit is not None else (0, 0)


def check(storage: MemoryStorage, before: Head | None, acknowledged: list[Commit]) -> Head | None:
    """What holds after each operation."""
    head = read_head(storage)
    if head is None:
        assert before is None
        return None
    if before is not None:
        assert head.fence >= before.fence
        assert order(head.newest) >= order(before.newest)
    for kept in head.commits:
        for name in ("rank-00000.data", "manifest.json"):
            assert storage.get(f"{kept.attempt}{name}")[0] == kept.manifest_sha256.encode()
        for needed in kept.needs or (kept.attempt,):
            assert storage.get(f"{needed}rank-00000{FROZEN_SUFFIX}")[0] == b"frozen"
    steps = [kept.step for kept in head.commits]
    assert steps == sorted(set(steps), reverse=True)
    assert all(order(said) <= order(head.newest) for said in acknowledged)
    return head


@settings(max_examples=60)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.data())
def test_in_any_order_no_commit_is_lost_or_torn(generations: list[int], data: st.DataObject) -> None:
    storage = MemoryStorage()
    writers = [Writer(storage, f"w{number}", generation) for number, generation in enumerate(generations)]
    for writer in writers:
        writer.begin()
    head: Head | None = None
    while alive := [writer for writer in writers if not writer.over]:
        # A few operations in a row, so that some writer gets anywhere; rarely its last ones.
        writer = data.draw(st.sampled_from(alive))
        operations, killed = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 15)) == 0
        for number in range(1, operations + 1):
            if not writer.over:
                writer.advance(kill=killed and number == operations)
                head = check(storage, head, [said for each in writers for said in each.acknowledged])

    survivor = max(generations) + 1
    newest = fence(storage, survivor).newest
    clean_up(storage, survivor, RETENTION)
    head = check(storage, head, [said for each in writers for said in each.acknowledged])
    assert head is not None
    assert head.newest == newest
    if newest is not None:
        kept = {attempt for kept in head.commits for attempt in (kept.attempt, *kept.needs)}
        assert {key.rpartition("/")[0] + "/" for key, _ in storage.list(ATTEMPTS)} == kept
        stretches = [c.step // 20 for c in head.commits[1:]]
        assert 0 not in stretches
        assert len({*stretches}) == len(stretches)
