"""A thread of each rank that hears a notice while a step is under way.

The ranks exchange ballots at the boundaries of steps, which is soon enough if steps are short. While a step takes
longer, the listener looks for a request to drain on this rank, and in the store of the process group for one on
another rank. Then the ranks agree on a point where they stop, and the listeners commit the newest step that all ranks
have updated: what a commit holds of it is there until the next update.

They commit once the training thread rests. If it doesn't rest in time, as in an evaluation or a long micro-batch,
they commit beside it, provided that the weights are what they were.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from spottrain.world.stop_point import Kept, Point, StopPoint, hurries, last_part

logger = logging.getLogger(__name__)

# A step that has been under way for so long is listened in, every so many seconds. Before, the next boundary is near.
LISTEN_AFTER_SECONDS = 1.0
LISTEN_EVERY_SECONDS = 0.25
# Time between tries to commit beside a training thread, or with a store that fails.
TRY_EVERY_SECONDS = 1.0


class Rounds(Protocol):
    """How the listeners of all ranks exchange values."""

    def ask(self) -> None:
        """Ask all ranks to stop."""
        ...

    def is_asked(self) -> bool:
        """Whether a rank has asked."""
        ...

    def gather(self, name: str, value: Any) -> list[Any]:
        """All ranks' values, which JSON can hold. Waits for the listeners of all ranks."""
        ...


class StoreRounds:
    """Rounds through the store of the process group. A connection of its own waits, while others use the store."""

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = PrefixStore("spottrain/stop", store.clone())
        self._rank, self._world_size = rank, world_size

    def ask(self) -> None:
        self._store.set("asked", "1")

    def is_asked(self) -> bool:
        return self._store.check(["asked"])

    def gather(self, name: str, value: Any) -> list[Any]:
        self._store.set(f"{name}/{self._rank}", json.dumps(value))
        return [json.loads(each) for each in self._store.multi_get([f"{name}/{r}" for r in range(self._world_size)])]


class RoundsOfOne:
    """Rounds in a world of one."""

    def ask(self) -> None:
        """Nobody else is there."""

    def is_asked(self) -> bool:
        return False

    def gather(self, name: str, value: Any) -> list[Any]:
        return [value]


def rounds_of(rank: int, world_size: int) -> Rounds:
    """The rounds of this process group."""
    if world_size == 1:
        return RoundsOfOne()
    return StoreRounds(_get_default_store(), rank=rank, world_size=world_size)


class Fitness(IntEnum):
    """Whether the kept state can be committed now."""

    NEVER = 0
    LATER = 1
    NOW = 2


K = TypeVar("K", bound=Kept)
K_contra = TypeVar("K_contra", bound=Kept, contravariant=True)


class Committer(Protocol[K_contra]):
    """What the listener of a rank commits with. `commit` is a collective of the listeners."""

    def seconds_left(self) -> float:
        """Seconds until this rank's deadline; infinite if it knows none."""
        ...

    def seconds_to_go(self) -> float:
        """How long the step under way takes from now on."""
        ...

    def seconds_needed(self, seconds_left: float) -> float:
        """How long before the deadline a commit starts at the latest."""
        ...

    def fitness(self, kept: K_contra, *, is_resting: bool) -> Fitness:
        """Whether the kept state is what it was."""
        ...

    def commit(self, kept: K_contra, seconds_left: float, *, is_resting: bool) -> bool:
        """Commit if there is time. False, on all ranks, if that has failed: `fitness` then says whether to retry."""
        ...

    def give_up(self, step: int) -> None:
        """Report that this step is not committed."""
        ...


class Listener(Generic[K]):
    """The listener of one rank."""

    def __init__(
        self, point: StopPoint[K], rounds: Rounds, *, is_due: Callable[[], bool], committer: Committer[K]
    ) -> None:
        """`is_due` says whether this rank has seen a request to drain."""
        self._point = point
        self._rounds = rounds
        self._is_due = is_due
        self._committer = committer
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="listener", daemon=True).start()

    def end(self) -> None:
        """End the thread, unless the ranks are stopping."""
        self._ended.set()

    def _run(self) -> None:
        try:
            while not self._is_heard():
                if self._ended.wait(LISTEN_EVERY_SECONDS):
                    return
            self._stop()
        except BaseException as error:  # the training thread raises it
            logger.debug("The listener ended", exc_info=True)
            self._point.over(error)

    def _is_heard(self) -> bool:
        if self._point.stands_down:
            return self._is_asked()
        if self._point.seconds_under_way() < LISTEN_AFTER_SECONDS:
            return False
        if self._is_due():
            self._rounds.ask()
            return True
        return self._is_asked()

    def _is_asked(self) -> bool:
        try:
            return self._rounds.is_asked()
        except RuntimeError:  # the store has gone with its rank, and the training thread notices
            self._ended.set()
            return False

    def _stop(self) -> None:
        self._point.close()
        try:
            deadline, last = self._agree()
        except RuntimeError:  # a rank has gone
            self._point.reopen()
            return
        self._point.agree(last)
        self._commit(last.updated, deadline)
        self._point.over()

    def _agree(self) -> tuple[float, Point]:
        """The deadline by this rank's clock, and the last part that any rank begins."""
        own = self._committer
        times = self._rounds.gather("time", [own.seconds_left(), own.seconds_to_go()])
        left = min(left for left, _ in times)
        deadline = time.monotonic() + left
        to_go = max(to_go for _, to_go in times)
        hurried = hurries(left, commit_seconds=own.seconds_needed(left), to_go_seconds=to_go)
        promises = self._rounds.gather("promise", self._point.promise(hurried=hurried))
        return deadline, last_part(Point(*each) for each in promises)

    def _commit(self, step: int, deadline: float) -> None:
        """Try to commit this step until all ranks have, or one of them can't."""
        left = deadline - time.monotonic()
        self._point.wait_for_rest(max(0.0, left - self._committer.seconds_needed(left)))
        for number in count():
            if self._point.stands_down:
                return
            kept, is_resting = self._point.kept(), self._point.is_resting
            fits = self._committer.fitness(kept, is_resting=is_resting) if kept is not None else Fitness.LATER
            answers = self._rounds.gather(f"try {number}", [fits, deadline - time.monotonic()])
            fitness, left = (min(column) for column in zip(*answers, strict=True))
            if fitness == Fitness.NEVER or left <= 0.0:
                self._committer.give_up(step)
                return
            if kept and fitness == Fitness.NOW and self._committer.commit(kept, left, is_resting=is_resting):
                return
            self._pause()

    def _pause(self) -> None:
        if self._point.is_resting:
            time.sleep(TRY_EVERY_SECONDS)
        else:
            self._point.wait_for_rest(TRY_EVERY_SECONDS)
