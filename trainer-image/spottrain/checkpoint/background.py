"""A background thread that starts before there is work for it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

logger = logging.getLogger(__name__)

_Work = tuple[Callable[[], None], Future[None]]


class BackgroundThread:
    """Runs what it is given beside the training, one call after the other.

    `Thread.start` returns only after the new thread has run on a processor. While the ranks of a node keep the
    processors busy, that takes time; to wake a thread that already waits is quicker. The thread ends with this
    object, and doesn't keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        threading.Thread(target=_work_off, args=(self._queue,), name=name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` in the thread, and return at once. An error of `work` is logged, and set on the future."""
        future: Future[None] = Future()
        self._queue.put((work, future))
        return future


def _work_off(queue: SimpleQueue[_Work | None]) -> None:
    while (found := queue.get()) is not None:
        _do(*found)
        del found  # it may refer to an object that waits for the end of this work


def _do(work: Callable[[], None], future: Future[None]) -> None:
    try:
        work()
    except Exception as error:
        logger.exception("Work in the background failed")
        future.set_exception(error)
    else:
        future.set_result(None)
