"""What runs beside the training, and the bodies that it uploads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial

import pytest

from memory_storage import MemoryStorage
from spottrain.checkpoint.background import BackgroundThread
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.head import commit, read_head
from spottrain.checkpoint.saving.retention import BackgroundCleanUp, Retention
from spottrain.checkpoint.stores.upload_body import UploadBody


def test_work_is_done_in_order_by_one_thread() -> None:
    background = BackgroundThread("worker")
    seen: list[tuple[int, str]] = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    done = [background.submit(partial(note, number)) for number in range(3)]
    wait(done)
    assert seen == [(0, "worker"), (1, "worker"), (2, "worker")]


def test_an_error_is_on_the_future_and_the_next_work_is_done(caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundThread("worker")
    failed, done = background.submit(lambda: 1 / 0), background.submit(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert done.result() is None
    assert "failed" in caplog.text


def test_submitting_waits_for_nothing() -> None:
    background, go_on = BackgroundThread("worker"), threading.Event()
    first = background.submit(lambda: (go_on.wait(), None)[1])
    second = background.submit(lambda: None)
    assert not first.done()
    go_on.set()
    wait([first, second])


def test_the_thread_ends_with_its_owner() -> None:
    background = BackgroundThread("worker-that-ends")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "worker-that-ends"]
    background.submit(lambda: None).result()
    del background
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


class SlowStorage(MemoryStorage):
    """Clean-ups wait at their end, and are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.go_on, self.clean_ups = threading.Semaphore(0), threading.Event(), 0

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        self.clean_ups += 1
        self.waiting.release()
        self.go_on.wait()
        return 0


def test_clean_ups_do_not_pile_up_and_the_newest_commit_is_followed_by_one() -> None:
    storage = SlowStorage()

    def commit_step(step: int) -> None:
        attempt = f"attempts/g000001-s{step:09d}-a/"
        commit(
            storage, Commit(generation=1, step=step, attempt=attempt, manifest_sha256="", committed_at="2026-11-21")
        )

    commit_step(10)
    others = set(threading.enumerate())
    clean_up = BackgroundCleanUp(storage, 1, Retention(last=1))
    (thread,) = set(threading.enumerate()) - others
    clean_up.start()
    storage.waiting.acquire()
    for step in range(20, 60, 10):
        commit_step(step)
        clean_up.start()
    storage.go_on.set()
    del clean_up
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert storage.clean_ups == 2
    head = read_head(storage)
    assert head is not None
    assert [kept.step for kept in head.commits] == [50]


def test_a_body_is_read_in_pieces_without_a_copy() -> None:
    memory = bytearray(b"abcdefgh")
    body = UploadBody(memoryview(memory))
    first = body.read(3)
    memory[0] = ord("x")
    assert first == b"xbc"  # type: ignore[comparison-overlap]
    assert (body.tell(), body.read(3), body.read(3), body.read(3)) == (3, b"def", b"gh", b"")  # type: ignore[comparison-overlap]
    assert len(body) == 8


@pytest.mark.parametrize(
    ("offset", "whence", "rest"), [(0, 0, b"abcd"), (2, 0, b"cd"), (1, 1, b"d"), (-1, 2, b"d"), (0, 2, b"")]
)
def test_a_body_is_sought_as_a_file(offset: int, whence: int, rest: bytes) -> None:
    body = UploadBody(memoryview(b"abcd"))
    body.read(2)
    body.seek(offset, whence)
    assert body.read() == rest
    assert body.read(None) == b""  # type: ignore[comparison-overlap]
