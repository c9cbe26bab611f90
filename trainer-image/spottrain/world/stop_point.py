"""Where the ranks stop while a step is under way.

The parts of a step follow each other: its micro-batches, its update, and its completion, in which commits are made.
A rank asks before it begins a part. After a notice, each rank promises which part it begins at most before it knows
the promises of all, and the latest of these parts is the last one that any rank begins.

So the ranks that are behind still do what the others have begun, in whose collectives they take part. Nobody waits
for a rank that has stopped.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

# Parts of a step. Before them come its micro-batches, by their number.
UPDATE = 1 << 30
COMPLETION = UPDATE + 1
# Time for what else is to be done before a deadline.
MARGIN_SECONDS = 1.0


class Point(NamedTuple):
    """A part of a step, in the order of the run.

    Attributes:
        step: Number of the step, from 1.
        part: Number of the micro-batch, from 0; UPDATE; or COMPLETION.
    """

    step: int
    part: int

    @property
    def updated(self) -> int:
        """The step whose update is the newest, once the rank is through with this part."""
        return self.step if self.part >= UPDATE else self.step - 1

    @property
    def next_update(self) -> Point:
        """The next update after this part."""
        return Point(self.updated + 1, UPDATE)


class Kept(Protocol):
    """The state after a step, as it was at the end of a part."""

    @property
    def step(self) -> int:
        """Number of the step."""
        ...


K = TypeVar("K", bound=Kept)


def hurries(seconds_left: float, *, commit_seconds: float, to_go_seconds: float) -> bool:
    """Whether there is no time to complete the step under way before a commit, even if it takes longer than usual.

    Args:
        seconds_left: Time until the deadline.
        commit_seconds: How long before the deadline a commit starts at the latest.
        to_go_seconds: How long the step takes from now on.
    """
    return seconds_left < commit_seconds + 2 * to_go_seconds + MARGIN_SECONDS


def promise(begun: Point, *, is_done: bool, kept: int | None, hurried: bool) -> Point:
    """The part that a rank begins at most before it knows the promises of the others.

    It is the part under way. But if the step could be completed in time, or if there is nothing to commit without it,
    it is its update.

    Args:
        begun: The part that the rank has begun last.
        is_done: Whether the part is done. The state is then kept at the end of an update or a completion.
        kept: The step after which the state was kept last. None: it was not.
        hurried: Whether there is no time to complete the step.
    """
    if begun.part < UPDATE:
        return begun if hurried and kept == begun.updated else Point(begun.step, UPDATE)
    if begun.part == COMPLETION and is_done and kept != begun.updated:
        return Point(begun.step + 1, UPDATE)
    return begun


def last_part(promises: Iterable[Point]) -> Point:
    """The last part that any rank begins."""
    return max(promises)


class StopPoint(Generic[K]):
    """What the training thread and the listener of one rank know about a stop.

    The training thread calls `may_begin`, `done`, `rest` and `stand_down`, and the listener the other methods.
    """

    def __init__(self, kept: K) -> None:
        """The step of `kept` is complete, and committed."""
        self._changed = threading.Condition()
        self._begun = Point(kept.step, COMPLETION)
        self._is_done = True
        self._kept: K | None = kept
        self._limit: Point | None = None  # the last part that may begin; None: any may
        self._is_agreed = False
        self._is_resting = self._is_over = self._stands_down = False
        self._error: BaseException | None = None
        self._completed_at = time.monotonic()

    def may_begin(self, point: Point) -> bool:
        """Note that this part begins, or return False if it does not any more. Waits while the ranks agree."""
        with self._changed:
            self._changed.wait_for(lambda: self._limit is None or point <= self._limit or self._is_agreed)
            if self._limit is not None and point > self._limit:
                return False
            self._begun, self._is_done = point, False
            return True

    def done(self, kept: K | None) -> bool:
        """Note that the update or completion under way is done. It may be called again, with the state as it is then.

        Args:
            kept: The state after it. None: it is not kept.

        Returns:
            False if the state is needed: then repeat the call with it.
        """
        with self._changed:
            if kept is None and self._limit is not None:
                return False
            self._is_done = True
            self._kept = kept
            if self._begun.part == COMPLETION:
                self._completed_at = time.monotonic()
            self._changed.notify_all()
            return True

    @property
    def begun(self) -> Point:
        """The part that this rank has begun last."""
        return self._begun

    @property
    def is_stopping(self) -> bool:
        """Whether the ranks stop."""
        return self._limit is not None

    def rest(self, kept: K | None = None) -> None:
        """Wait until the listener is done; nothing else happens on this rank meanwhile. Raises what it has met.

        Args:
            kept: The state as it is now, if it is that of the step to commit.
        """
        with self._changed:
            self._kept = kept or self._kept
            self._is_resting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over)
            if self._error is not None:
                raise self._error

    def stand_down(self) -> None:
        """The training threads of all ranks end by themselves. The listener commits nothing."""
        with self._changed:
            self._stands_down = True
            self._changed.notify_all()

    @property
    def stands_down(self) -> bool:
        """Whether the training threads end by themselves."""
        return self._stands_down

    def seconds_under_way(self) -> float:
        """Time since the newest step was complete."""
        return time.monotonic() - self._completed_at

    def close(self) -> None:
        """Begin no part until the ranks have agreed."""
        with self._changed:
            self._limit = self._begun

    def promise(self, *, hurried: bool) -> Point:
        """The part that this rank begins at most before the ranks have agreed."""
        with self._changed:
            kept = self._kept.step if self._kept is not None else None
            self._limit = promise(self._begun, is_done=self._is_done, kept=kept, hurried=hurried)
            self._changed.notify_all()
            return self._limit

    def agree(self, last: Point) -> None:
        """The ranks have agreed on the last part."""
        with self._changed:
            self._limit, self._is_agreed = last, True
            self._changed.notify_all()

    def wait_for_rest(self, seconds: float) -> bool:
        """Whether the training thread rests, or stands down, within so many seconds."""
        with self._changed:
            timeout = seconds if seconds < math.inf else None
            return self._changed.wait_for(lambda: self._is_resting or self._stands_down, timeout)

    @property
    def is_resting(self) -> bool:
        """Whether the training thread rests."""
        return self._is_resting

    def kept(self) -> K | None:
        """The state to commit; None as long as the training thread may still change it.

        A completion may wait for the other ranks to make a commit of its own, unless they are through with it.
        """
        with self._changed:
            assert self._limit is not None
            is_settled = self._is_done or self._begun.part < UPDATE
            may_commit = self._limit.part == COMPLETION and self._begun < self._limit
            return self._kept if is_settled and not may_commit and self._limit < self._begun.next_update else None

    def over(self, error: BaseException | None = None) -> None:
        """The listener is done."""
        with self._changed:
            self._is_over, self._error = True, error
            self._changed.notify_all()

    def reopen(self) -> None:
        """Let all parts begin again, because the ranks can't agree."""
        with self._changed:
            self._limit = None
            self._changed.notify_all()
