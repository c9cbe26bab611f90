"""What a commit holds of the streams: marks of each, from which a resume reads on."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from spottrain.data.streams.cursor import Mark
from spottrain.data.streams.stream_order import StreamPlaces


class StreamMarks:
    """A rank's marks of its streams. Implements Stateful.

    Workers read ahead of the steps. So marks are kept until the steps have come to them. A commit holds the newest
    mark of each stream that lies before all items of the steps that follow. Any mark before would do, too: a resume
    knows its step, and skips what is between.

    Attributes:
        streams: Where items are.
        own: The streams of this rank's part of a batch. Together, the ranks have all of them.
    """

    def __init__(self, streams: StreamPlaces, own: Collection[int]) -> None:
        self.streams = streams
        self.own = own
        self._read: set[int] = set()
        self._step = 0
        self._marks: dict[int, deque[Mark]] = {}

    def add(self, marks: Mapping[int, Iterable[Mark]]) -> None:
        """Note where streams can be read on from, in the order of reading."""
        for stream, new in marks.items():
            self._read.add(stream)
            self._marks.setdefault(stream, deque()).extend(new)

    def completed(self, step: int) -> None:
        """Note how many steps are completed. Marks that no resume needs any more are dropped."""
        self._step = step
        kept = self._read.union(self.own)
        self._marks = {stream: marks for stream, marks in self._marks.items() if stream in kept}
        for stream, marks in self._marks.items():
            while len(marks) > 1 and marks[1].place <= self.streams.oldest(stream, step):
                marks.popleft()

    def newest(self) -> dict[int, Mark]:
        """The mark of each stream from which a resume reads on."""
        return {stream: marks[0] for stream, marks in self._marks.items()}

    def state_dict(self) -> dict[str, Any]:
        marks = {str(stream): (mark.place, mark.number, mark.state) for stream, mark in self.newest().items()}
        return {"step": self._step, "marks": marks}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._step = state_dict["step"]
        self._marks = {int(stream): deque([Mark(*mark)]) for stream, mark in state_dict["marks"].items()}

    @staticmethod
    def merged(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """What every rank restores, of what the ranks have saved: the newest mark of each stream."""
        marks: dict[str, tuple[int, int, str | None]] = {}
        for state in states:
            for stream, mark in state["marks"].items():
                if stream not in marks or marks[stream][0] < mark[0]:
                    marks[stream] = mark
        return {"step": states[0]["step"], "marks": marks}
