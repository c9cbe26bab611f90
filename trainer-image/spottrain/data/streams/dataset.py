"""Streams without an index, to be passed as `dataset` to a session."""

from __future__ import annotations

from spottrain.data.streams.cursor import MakeStream
from spottrain.data.streams.stream_order import StreamOrder


class Streams:
    """Items that are read from the beginning of a fixed number of streams, in one order at any world size.

    Every step takes its items from all streams, in turn. A rank reads only those streams from which its part of the
    batch comes. A stream that ends begins again, with its next pass, so that a short one is repeated more often.

    Attributes:
        make_stream: Called with the number of a stream and of a pass, each from 0.
        num_streams: How many streams there are.
    """

    def __init__(self, make_stream: MakeStream, *, streams: int, window: int = 1) -> None:
        """Nothing is read yet.

        Args:
            make_stream: Called with the number of a stream and of a pass, each from 0. Returns an iterable: a
                generator, a torch IterableDataset, a streaming data set of Hugging Face. The items of a pass depend
                on these two numbers alone. If it, or its iterator, has `state_dict` and `load_state_dict`, commits
                hold its state; otherwise a resume reads the pass from its beginning, and skips.
            streams: How many there are. It belongs to the run, not to the number of ranks: at least as many as there
                are ever ranks, and at most `batch.global`.
            window: Items of a stream that are shuffled together. They are held in memory.

        Raises:
            ValueError: The arguments can't be used.

        Example:
            >>> from spottrain.data import Streams
            >>> data = Streams(lambda stream, number: (f"{stream}.{item}" for item in range(3)), streams=4)
            >>> order = data.order(seed=0, shuffle=True, global_batch=8)
            >>> [stream for stream in order.places(range(8))[0].tolist()]
            [0, 0, 1, 1, 2, 2, 3, 3]
        """
        if not callable(make_stream):
            raise ValueError(
                f"make_stream ({type(make_stream).__name__}) is not a function; pass one that makes a stream, as in "
                "Streams(lambda stream, number: read(files[stream]), streams=16)"
            )
        if min(streams, window) < 1:
            raise ValueError("streams and window of Streams have to be at least 1")
        self.make_stream = make_stream
        self.num_streams = streams
        self._window = window

    def name_of(self, index: int) -> str:
        """What messages call an item, by its index in the order."""
        place, stream = divmod(index, self.num_streams)
        return f"item {place} of stream {stream}"

    def order(self, *, seed: int, shuffle: bool, global_batch: int) -> StreamOrder:
        """The order in which a run reads the items. Raises ValueError for more streams than a batch has items."""
        return StreamOrder(
            streams=self.num_streams, seed=seed, shuffle=shuffle, global_batch=global_batch, window=self._window
        )
