"""How the training of one rank stops while a step is under way."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from spottrain.recovery.kept_state import KeptState, UpdatedState
from spottrain.recovery.recovery import Recovery
from spottrain.recovery.store_retries import may_succeed_later
from spottrain.recovery.training_state import TrainingState
from spottrain.world.failures import Drained
from spottrain.world.listener import Fitness, Listener
from spottrain.world.rank_context import RankContext
from spottrain.world.stop_point import COMPLETION, UPDATE, Point, StopPoint

logger = logging.getLogger(__name__)

# The state is kept after each step if steps take so long. Shorter ones are completed after a notice.
KEEP_AFTER_SECONDS = 3.0
# At the ends of so many steps whose state was kept before, it is checked that the script has left the weights alone.
NUM_CHECKED = 2


# What the large clouds leave at least, from the notice on.
SHORTEST_NOTICE_SECONDS = 15.0

CHANGED_WEIGHTS = (
    "Step {} can't be committed, because the script has changed weights since, and the newest commit stands. Change "
    "weights between Step.update and the end of the step."
)
BESIDE_THE_SCRIPT = (
    "Step {} was committed while the script was at work after its update, as in an evaluation. What was left to "
    "do there is not done later. An evaluation at the start of a step, before its micro-batches, is done again."
)
IN_STEP_CHANGES = (
    "The script changes weights between the start of a step and its update. So a notice can't abandon the step "
    "under way: a step takes about {:.0f} s, and a cloud may leave {:.0f} s. Change weights between Step.update and "
    "the end of the step, or make the steps shorter."
)
SLOW_SAVE = (
    "A commit takes about {:.0f} s, and clouds leave {:.0f} s or more after a notice. Where they leave less than it "
    "takes, a preemption costs the steps since the newest commit. Use the strategy fsdp, more nodes or a faster "
    "store, or set checkpoint.peerReplicas: 1."
)
BUSY_SCRIPT = (
    "The script was at work for {:.0f} s between two steps, as in an evaluation, and a cloud may leave {:.0f} s "
    "after a notice. Put it into `with training.evaluation():`, so that the step before can be committed meanwhile."
)


@dataclass(slots=True, kw_only=True)
class Commits:
    """What the listener of one rank commits with. Implements Committer.

    Attributes:
        point: Where the rank stops.
        on_commit: Called with the number of each step that is committed.
    """

    point: StopPoint[UpdatedState]
    context: RankContext
    recovery: Recovery
    on_commit: Callable[[int], None]
    _has_failed: bool = False

    def seconds_left(self) -> float:
        return self.context.drain.seconds_left()

    def seconds_to_go(self) -> float:
        step_seconds = self.context.reporter.step_seconds or 0.0
        return max(0.0, step_seconds - self.point.seconds_under_way())

    def seconds_needed(self, seconds_left: float) -> float:
        needed = self.recovery.schedule.safe_seconds()
        if needed is not None:
            return needed
        return seconds_left / 2 if seconds_left < math.inf else 0.0

    def fitness(self, kept: UpdatedState, *, is_resting: bool) -> Fitness:
        self._use_device()
        if self._has_failed:
            return Fitness.NEVER
        if kept.weights.is_same():
            return Fitness.NOW
        if is_resting:
            self.recovery.reports.warn(CHANGED_WEIGHTS.format(kept.step))
        return Fitness.NEVER if is_resting else Fitness.LATER

    def commit(self, kept: UpdatedState, seconds_left: float, *, is_resting: bool) -> bool:
        self._use_device()
        saver = self.recovery.saver
        error = saver.save_in_time(kept, kept.step, seconds_left)
        if error is not None:
            self._has_failed = not may_succeed_later(error)
            return False
        if saver.committed_step == kept.step:
            self.on_commit(kept.step)
            if not (is_resting or kept.is_complete):
                self.recovery.reports.warn(BESIDE_THE_SCRIPT.format(kept.step))
        return True

    def give_up(self, step: int) -> None:
        # The newest commit stands, and the outcome names it: the next generation resumes from it.
        logger.warning("Step %d could not be committed before the end of this generation.", step)

    def _use_device(self) -> None:
        """Use this rank's accelerator in the listener's thread, too."""
        if self.context.device.type == "cuda":
            torch.cuda.set_device(self.context.device)


class Event(Protocol):
    """A mark in what an accelerator has to do, as torch.cuda.Event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Pace:
    """Keeps the host at most one micro-batch ahead of the accelerator.

    A host that has begun a part can't abandon it. Without this, it runs two steps ahead.
    """

    def __init__(self, event: Callable[[], Event] | None) -> None:
        """`event` makes one; None: the host computes itself."""
        self._event = event
        self._before: Event | None = None

    def keep(self, *, catches_up: bool) -> None:
        """Wait until the accelerator has begun the part before; if it `catches_up`, until it has done all."""
        if self._event is None:
            return
        newest, before = self._event(), self._before
        newest.record()
        self._before = newest
        if catches_up:
            newest.synchronize()
        elif before is not None:
            before.synchronize()


class Stopping:
    """The stop of one rank, as its training thread sees it.

    The methods that begin a part of a step raise Drained if the ranks stop before it.
    """

    def __init__(
        self,
        state: TrainingState,
        step: int,
        *,
        context: RankContext,
        recovery: Recovery,
        on_commit: Callable[[int], None],
    ) -> None:
        """Start to listen.

        Args:
            state: The state after `step`, which is complete.
            step: Number of that step.
            context: The rank's ways to reach the other ranks.
            recovery: What commits.
            on_commit: As for `Commits`.
        """
        self._state = state
        self._context = context
        self._schedule = recovery.schedule
        self._reports = recovery.reports
        self._kept: UpdatedState | None = KeptState.of(state, step)
        self._num_unchecked = NUM_CHECKED
        self._is_exact = True
        self._said: set[str] = set()
        self._done_at = time.monotonic()
        self._pace = Pace(torch.cuda.Event if context.device.type == "cuda" else None)
        self._point: StopPoint[UpdatedState] = StopPoint(self._kept)
        self._listener = Listener(
            self._point,
            context.rounds,
            is_due=lambda: context.drain.is_set(
                last_safe_seconds=recovery.schedule.last_safe_seconds(self._step_seconds)
            ),
            committer=Commits(point=self._point, context=context, recovery=recovery, on_commit=on_commit),
        )

    def begin_micro_batch(self, step: int, index: int) -> None:
        """Begin a micro-batch, by its number in the step."""
        if self._is_long:
            self._pace.keep(catches_up=False)
        if index == 0:
            self._check_pause()
        self._begin(Point(step, index))

    def begin_update(self, step: int) -> None:
        """Begin the update of a step. A second call does nothing."""
        if self.is_updating(step):
            return
        if self._is_long:
            self._pace.keep(catches_up=True)
        self._check_weights()
        self._begin(Point(step, UPDATE))

    def is_updating(self, step: int) -> bool:
        """Whether the update of a step has begun, and the step is not being completed yet."""
        return self._point.begun == (step, UPDATE)

    def updated(self, step: int) -> None:
        """The update of the step is done."""
        self._done(lambda: UpdatedState.of(self._state, step))

    def begin_completion(self, step: int) -> None:
        """Begin to complete a step."""
        self._check_pause()
        self._begin(Point(step, COMPLETION))

    def completed(self, step: int, *, pauses: bool = False) -> None:
        """The step is complete. `pauses`: something else comes before the next step, and may take long."""
        self._done(lambda: KeptState.of(self._state, step), pauses=pauses)
        if self._schedule.agreed_seconds is not None and self._schedule.agreed_seconds > SHORTEST_NOTICE_SECONDS:
            self._say_once(SLOW_SAVE, self._schedule.agreed_seconds)

    def pause(self) -> None:
        """Something else comes before the next part, and may take long. It changes nothing that commits hold."""
        step, part = self._point.begun
        if part >= UPDATE:
            self._done(lambda: KeptState.of(self._state, step, is_complete=part == COMPLETION), pauses=True)

    def resume(self) -> None:
        """What came between is done."""
        self._done_at = time.monotonic()

    def stand_down(self) -> None:
        """The ranks end by themselves, all after the same part."""
        self._point.stand_down()

    def end(self) -> None:
        """End the listener."""
        self._listener.end()

    @property
    def _is_long(self) -> bool:
        return (self._step_seconds or 0.0) >= KEEP_AFTER_SECONDS

    @property
    def _step_seconds(self) -> float | None:
        return self._context.reporter.step_seconds

    def _begin(self, point: Point) -> None:
        if self._point.may_begin(point):
            return
        begun = self._point.begun
        # The script is through with what it does after an update.
        self._point.rest(UpdatedState.of(self._state, begun.step) if begun.part == UPDATE else None)
        raise Drained

    def _done(self, state: Callable[[], UpdatedState], *, pauses: bool = False) -> None:
        self._kept = state() if pauses or (self._is_exact and self._is_long) else None
        if not self._point.done(self._kept):
            self._point.done(state())
        self._done_at = time.monotonic()

    def _check_weights(self) -> None:
        """See to it, in the first steps, that the script leaves the weights alone before an update."""
        if self._kept is None or not self._num_unchecked:
            return
        self._num_unchecked -= 1
        if not self._kept.weights.is_same():
            self._is_exact = False
            self._say_once(IN_STEP_CHANGES, self._step_seconds or 0.0)

    def _check_pause(self) -> None:
        """Say how the script lets the ranks follow a notice in a long pause between two steps."""
        seconds = time.monotonic() - self._done_at
        if self._kept is None and seconds + (self._schedule.safe_seconds() or 0.0) > SHORTEST_NOTICE_SECONDS:
            self._say_once(BUSY_SCRIPT, seconds)

    def _say_once(self, sentence: str, seconds: float) -> None:
        if self._context.rank == 0 and sentence not in self._said:
            self._said.add(sentence)
            self._reports.warn(sentence.format(seconds, SHORTEST_NOTICE_SECONDS))
