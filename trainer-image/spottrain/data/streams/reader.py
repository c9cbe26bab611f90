"""Reading the items of a rank's micro-batches from its streams."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from spottrain.data import random_state
from spottrain.data.batch import MicroBatch
from spottrain.data.streams.cursor import MakeStream, Mark, StreamCursor
from spottrain.data.streams.marks import StreamMarks

logger = logging.getLogger(__name__)

# A skip that takes longer is said.
_SAID_SECONDS = 1.0


class StreamReader:
    """Reads the streams of which a rank needs items, in the order of the steps. Implements Items."""

    def __init__(
        self,
        make: MakeStream,
        marks: StreamMarks,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin at the marks. Nothing is opened before the first item is needed."""
        self._make = make
        self._streams = marks.streams
        self._own = marks.own
        self._starts = marks.newest()
        self._now = now
        self._cursors: dict[int, StreamCursor] = {}

    def items(self, micro_batch: MicroBatch, samples: Sequence[int]) -> list[Any]:
        """The items of a micro-batch, by their indices in the order. Raises StreamError."""
        step = micro_batch.batch.start // self._streams.global_batch
        return [self.item(sample, step) for sample in samples]

    def item(self, sample: int, step: int) -> Any:
        """The item of an index, which is `place * streams + stream`, in a step. Raises StreamError."""
        place, stream = divmod(sample, self._streams.num_streams)
        if stream not in self._cursors:
            self._open({stream} if self._cursors else {stream, *self._own}, step)
        return self._cursors[stream].item(place, oldest=self._streams.oldest(stream, step))

    def pop_marks(self) -> dict[int, list[Mark]]:
        """The marks of the streams since the last call."""
        found = {stream: cursor.pop_marks() for stream, cursor in self._cursors.items()}
        return {stream: marks for stream, marks in found.items() if marks}

    def _open(self, streams: Collection[int], step: int) -> None:
        """Open streams, and skip what the steps before have used. Say so if it takes long."""
        started = self._now()
        opened = [self._cursor(stream, step) for stream in sorted(streams)]
        seconds = self._now() - started
        skipped = sum(
            self._cursors[stream].place - self._starts.get(stream, Mark()).place for stream in sorted(streams)
        )
        if skipped and seconds >= _SAID_SECONDS:
            advice = (
                ""
                if all(cursor.has_state for cursor in opened)
                else (". Streams with state_dict and load_state_dict are read on from where they were")
            )
            logger.warning(
                "To go on after step %d, %d items of %d streams were read and skipped in %.1f s%s.",
                step,
                skipped,
                len(opened),
                seconds,
                advice,
            )

    def _cursor(self, stream: int, step: int) -> StreamCursor:
        """Open a stream where a step needs it."""
        cursor = StreamCursor(
            self._make,
            stream,
            self._starts.get(stream, Mark()),
            name=self._streams.name_of(stream),
            seed=lambda place: random_state.seed_host(self._streams.seed, step=self._number(stream, place)),
            now=self._now,
        )
        cursor.skip_to(self._streams.oldest(stream, step))
        self._cursors[stream] = cursor
        return cursor

    def _number(self, stream: int, place: int) -> int:
        """A number of its own for each item of each stream; below 0 for a pass."""
        return place * self._streams.num_streams + stream
