"""Reading one stream forwards, with marks from which a later generation goes on."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from spottrain.checkpoint.errors import CheckpointError
from spottrain.checkpoint.format import codec
from spottrain.data.streams.opened import HasState, OpenStream

MakeStream = Callable[[int, int], Iterable[Any]]
"""Takes the number of a stream and of a pass, each from 0, and returns the items of that pass."""

# What is read after a mark is read again at a resume. Taking marks costs a few percent of the reading at most.
_MARK_SECONDS = 1.0
_MARK_FACTOR = 20


class StreamError(CheckpointError):
    """A stream can't be read."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a stream can be read on from.

    Attributes:
        place: Items before it, over all passes.
        number: The pass, from 0.
        state: The stream's own state there, as JSON. None: it is the beginning of the pass.
    """

    place: int = 0
    number: int = 0
    state: str | None = None


class StreamCursor:
    """Reads one stream, pass after pass.

    Attributes:
        place: Items read so far, over all passes.
        has_state: Whether the stream has a state of its own.
    """

    def __init__(
        self,
        make: MakeStream,
        stream: int,
        start: Mark,
        *,
        name: str,
        seed: Callable[[int], None],
        now: Callable[[], float],
    ) -> None:
        """Open the stream at a mark.

        Args:
            make: The script's.
            stream: Number of the stream.
            start: Where to begin.
            name: What messages call it.
            seed: Seeds the random numbers for the item at a place; for a pass, with -1 minus its number.
            now: Clock, in seconds.

        Raises:
            StreamError: The script makes no stream, or its state can't be restored.
        """
        self.place = start.place
        self._make = make
        self._stream = stream
        self._name = name
        self._seed = seed
        self._now = now
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._marks: list[Mark] = []
        self._next_mark = now() + _MARK_SECONDS
        self._begin(start)

    @property
    def has_state(self) -> bool:
        return self._items.stateful is not None

    def item(self, place: int, *, oldest: int) -> Any:
        """The item at a place, which is not read yet or is kept. Items before `oldest` are not kept."""
        self._drop_before(oldest)
        while self.place <= place:
            at = self.place
            self._kept[at] = self._read()
        return self._kept[place]

    def skip_to(self, place: int) -> None:
        """Read and drop the items before a place."""
        while self.place < place:
            self._read()

    def pop_marks(self) -> list[Mark]:
        """The marks since the last call."""
        marks, self._marks = self._marks, []
        return marks

    def _drop_before(self, oldest: int) -> None:
        while self._kept and next(iter(self._kept)) < oldest:
            self._kept.popitem(last=False)

    def _read(self) -> Any:
        if self._items.stateful is not None and self._now() >= self._next_mark:
            self._mark(self._items.stateful)
        self._seed(self.place)
        try:
            item = next(self._items)
        except StopIteration:
            self._begin(Mark(self.place, self._number + 1))
            self._seed(self.place)
            item = next(self._items, self)
            if item is self:
                raise StreamError(
                    f"{self._name} has no items in its pass {self._number}; a stream that ends is read "
                    "again from its beginning, so make_stream has to return one item at least"
                ) from None
        self.place += 1
        return item

    def _begin(self, start: Mark) -> None:
        """Open the pass of a mark."""
        self._marks.append(start)
        self._number = start.number
        self._seed(-1 - start.number)
        made = self._make(self._stream, start.number)
        if not isinstance(made, Iterable):
            raise StreamError(
                f"make_stream returns a {type(made).__name__} for {self._name}, which has no items; "
                "let it return an iterable, such as an IterableDataset or what a generator function returns"
            )
        self._items = OpenStream(made)
        self._restore(self._items.stateful, start)

    def _restore(self, stateful: HasState | None, start: Mark) -> None:
        if start.state is None:
            return
        place = f"{self._name} had a state at item {start.place} (pass {start.number})"
        if stateful is None:
            raise StreamError(
                f"{place}, and what make_stream returns now has no load_state_dict; let it return the same kind of "
                "stream, or create a new job with a different checkpoint.uri"
            )
        try:
            stateful.load_state_dict(codec.decode(json.loads(start.state)))
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise StreamError(
                f"{place}, which its load_state_dict does not take: {error!r}. Let it take that state, or create a "
                "new job with a different checkpoint.uri"
            ) from error

    def _mark(self, stateful: HasState) -> None:
        started = self._now()
        if (state := stateful.state_dict()) is None:
            return  # asked again at the next item
        self._marks.append(Mark(self.place, self._number, json.dumps(codec.encode(state))))
        ended = self._now()
        self._next_mark = ended + max(_MARK_SECONDS, _MARK_FACTOR * (ended - started))
