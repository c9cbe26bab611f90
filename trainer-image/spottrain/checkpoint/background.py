"""A thread that is there before there is work for it."""

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
    """Does what it is given, one thing after the other, beside the training.

    `Thread.start` returns when the new thread has had a processor, for which it waits as long as the ranks of a node
    keep them busy. A thread that waits already is only woken. It doesn't outlive this object or keep a process from
    its end.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        threading.Thread(target=_work_off, args=(self._queue,), name=name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Returns at once. An error of the work is logged, and on the future."""
        future: Future[None] = Future()
        self._queue.put((work, future))
        return future


def _work_off(queue: SimpleQueue[_Work | None]) -> None:
    while (found := queue.get()) is not None:
        _do(*found)
        del found  # what it refers to may be waiting for its end


def _do(work: Callable[[], None], future: Future[None]) -> None:
    try:
        work()
    except Exception as error:
        logger.exception("What ran beside the training failed")
        future.set_exception(error)
    else:
        future.set_result(None)
