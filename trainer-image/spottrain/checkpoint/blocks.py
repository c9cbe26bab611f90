"""Reading parts of an attempt's data files, verified block by block, in parallel."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from spottrain.checkpoint.errors import CorruptCheckpoint, ObjectNotFound
from spottrain.checkpoint.manifest import Manifest, data_key
from spottrain.checkpoint.storage import CheckpointStorage

Span = tuple[int, int, int]
"""Rank, and begin and end in bytes of that rank's data file."""

READ_BYTES = 32 << 20
_READERS = 4


class PartReader:
    """Reads spans of bytes of one checkpoint; only verified bytes leave it."""

    def __init__(self, storage: CheckpointStorage, attempt: str, manifest: Manifest) -> None:
        self._storage = storage
        self._attempt = attempt
        self._manifest = manifest

    def read(self, spans: Sequence[Span]) -> Iterator[tuple[int, memoryview]]:
        """Yield (index of the span, its bytes), in the order of the files; each block is fetched once or,
        where spans far apart share it, twice. Raises CorruptCheckpoint."""
        order = sorted((i for i in range(len(spans)) if spans[i][1] < spans[i][2]), key=lambda i: spans[i])
        runs = list(self._runs([(index, spans[index]) for index in order]))
        with ThreadPoolExecutor(_READERS) as pool:
            pending = iter(runs)
            # A window of reads: as many bytes are held in memory as readers are at work, not all of them.
            window = [(run, pool.submit(self._fetch, *run[0])) for run in islice(pending, _READERS)]
            while window:
                ((_, first, _), members), fetched = window.pop(0)
                data = memoryview(fetched.result())
                window += [(run, pool.submit(self._fetch, *run[0])) for run in islice(pending, 1)]
                for index, begin, end in members:
                    yield index, data[begin - first : end - first]

    def verify(self, rank: int) -> None:
        """Read all of one rank's file and drop it. Raises CorruptCheckpoint."""
        size = self._manifest.files[rank].size
        spans = [(rank, begin, min(begin + READ_BYTES, size)) for begin in range(0, size, READ_BYTES)]
        for _ in self.read(spans):
            pass

    def _runs(self, spans: Sequence[tuple[int, Span]]) -> Iterator[tuple[Span, list[tuple[int, int, int]]]]:
        """Gather neighbouring spans, widened to whole blocks, into reads of a good size."""
        run: Span | None = None
        members: list[tuple[int, int, int]] = []
        for index, (rank, begin, end) in spans:
            file = self._manifest.files[rank]
            low = begin // file.block_bytes * file.block_bytes
            high = min(-(-end // file.block_bytes) * file.block_bytes, file.size)
            if run is not None and rank == run[0] and low <= run[2] and high - run[1] <= READ_BYTES:
                run = (rank, run[1], max(run[2], high))
            else:
                if run is not None:
                    yield run, members
                run, members = (rank, low, high), []
            members.append((index, begin, end))
        if run is not None:
            yield run, members

    def _fetch(self, rank: int, begin: int, end: int) -> bytearray:
        key = data_key(self._attempt, rank)
        try:
            # A bytearray, as torch refuses to look at read-only memory without a warning.
            data = bytearray(self._storage.get_range(key, begin, end - begin))
        except ObjectNotFound as error:
            raise CorruptCheckpoint(f"{key} of the checkpoint is missing.") from error
        if len(data) != end - begin:
            raise CorruptCheckpoint(f"{key} of the checkpoint is cut short at byte {begin + len(data)}.")
        file = self._manifest.files[rank]
        view = memoryview(data)
        for offset in range(0, len(data), file.block_bytes):
            block = view[offset : offset + file.block_bytes]
            if zlib.crc32(block) != file.crc32[(begin + offset) // file.block_bytes]:
                raise CorruptCheckpoint(
                    f"{key} of the checkpoint is damaged between bytes {begin + offset} and "
                    f"{begin + offset + len(block)}."
                )
        return data
