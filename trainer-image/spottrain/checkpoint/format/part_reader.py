"""Parallel reads of parts of a checkpoint's data files, with each block verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from zlib_ng import zlib_ng

from spottrain.checkpoint.errors import CorruptCheckpoint, ObjectNotFound
from spottrain.checkpoint.format.manifest import DataFile, Manifest
from spottrain.checkpoint.stores.storage import ObjectReader

Span = tuple[int, int, int]
"""The number of a file in the manifest, and the first byte and the end of a range in it."""

Deliver = Callable[[int, int, memoryview], None]
"""Called with the index of a span, an offset in it, and the bytes from there. They are valid only during the call."""

READ_BYTES = 8 << 20


@dataclass(slots=True)
class _Run:
    """Adjacent blocks that are read at once, and the parts of spans that lie in them.

    Attributes:
        members: Index of the span, offset in it, and begin and end in the file.
    """

    file: int
    members: list[tuple[int, int, int, int]] = field(default_factory=list)

    def bounds(self, file: DataFile) -> tuple[int, int]:
        begin = min(member[2] for member in self.members) // file.block_bytes * file.block_bytes
        end = -(-max(member[3] for member in self.members) // file.block_bytes) * file.block_bytes
        return begin, min(end, file.size)


class PartReader:
    """Reads spans of bytes of one checkpoint. Only verified bytes leave it."""

    def __init__(
        self, storage: ObjectReader, prefix: str, manifest: Manifest, *, read_bytes: int = READ_BYTES
    ) -> None:
        """Read the data files of one attempt.

        Args:
            storage: Where to read from.
            prefix: Prefix of the attempt.
            manifest: The attempt's manifest.
            read_bytes: How much to read at once, rounded down to whole blocks, and at least one block.
        """
        self._storage = storage
        self._prefix = prefix
        self._manifest = manifest
        self._read_bytes = read_bytes

    def read(self, spans: Sequence[Span], deliver: Deliver) -> None:
        """Pass all bytes of the spans to `deliver`, each once.

        They come in pieces and from several threads. Every block is fetched at most once. Each thread reuses its
        memory, so that memory is needed for as many reads as run at once.

        Raises:
            CorruptCheckpoint: Bytes are missing or damaged.
        """
        runs = self._runs(spans)
        scratch = threading.local()
        with ThreadPoolExecutor(self._storage.parallel_reads) as pool:
            for _ in pool.map(lambda run: self._read_run(run, deliver, scratch), runs):
                pass  # the first error ends it

    def verify(self, number: int) -> None:
        """Read a whole file, by its number in the manifest, and drop the bytes. Raises CorruptCheckpoint."""
        self.read([(number, 0, self._manifest.file(number).size)], lambda *_: None)

    def _runs(self, spans: Sequence[Span]) -> list[_Run]:
        """Cut the spans at fixed places of the files. All that lies between two of these places is one read."""
        runs: dict[tuple[int, int], _Run] = {}
        for index, (file, begin, end) in enumerate(spans):
            block = self._manifest.file(file).block_bytes
            width = max(self._read_bytes // block, 1) * block
            for number in range(begin // width, -(-end // width) if begin < end else 0):
                low, high = max(begin, number * width), min(end, (number + 1) * width)
                run = runs.setdefault((file, number), _Run(file))
                run.members.append((index, low - begin, low, high))
        return [runs[place] for place in sorted(runs)]

    def _read_run(self, run: _Run, deliver: Deliver, scratch: threading.local) -> None:
        first, last = run.bounds(self._manifest.file(run.file))
        if len(getattr(scratch, "memory", ())) < last - first:
            scratch.memory = memoryview(bytearray(last - first))
        data = scratch.memory[: last - first]
        self._fetch(run.file, first, data)
        for index, offset, begin, end in run.members:
            deliver(index, offset, data[begin - first : end - first])

    def _fetch(self, number: int, begin: int, data: memoryview) -> None:
        key = self._manifest.key(self._prefix, number)
        try:
            length = self._storage.read_into(key, begin, data)
        except ObjectNotFound as error:
            raise CorruptCheckpoint(f"{key} of the checkpoint is missing.") from error
        if length != len(data):
            raise CorruptCheckpoint(f"{key} of the checkpoint is cut short at byte {begin + length}.")
        file = self._manifest.file(number)
        for offset in range(0, len(data), file.block_bytes):
            block = data[offset : offset + file.block_bytes]
            if zlib_ng.crc32(block) != file.crc32[(begin + offset) // file.block_bytes]:
                raise CorruptCheckpoint(
                    f"{key} of the checkpoint is damaged between bytes {begin + offset} and "
                    f"{begin + offset + len(block)}."
                )
