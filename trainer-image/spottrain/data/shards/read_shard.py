"""Reading a shard of a store into a file: the one way for caches, indices and packing.

A store may answer late, not at all, in part, or with other bytes. Outages are waited for here. What is damaged
raises ShardDamaged, and `again_if_damaged` reads it again.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import BinaryIO

from zlib_ng import zlib_ng

from spottrain.checkpoint.errors import ObjectNotFound
from spottrain.checkpoint.stores.storage import ObjectReader
from spottrain.data.shards.index import UNKNOWN
from spottrain.data.shards.store import ShardDamaged, through_outages

_PART_BYTES = 8 << 20
_REMEDY = (
    "If something between here and the store sends other bytes, mend that. Otherwise put the shard back, or make the "
    "index again (`spottrain data index`), which begins another run"
)


def read_shard(
    store: Callable[[], ObjectReader],
    name: str,
    size: int,
    file: BinaryIO,
    *,
    place: str,
    checksum: int = UNKNOWN,
    is_patient: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Read a shard, in parallel parts.

    Args:
        store: Opens the store, or has it open.
        name: The shard.
        size: Its bytes.
        file: Takes them; it has that size already. Afterwards it is at its beginning.
        place: URI of the shards, for messages.
        checksum: CRC-32 of the bytes. UNKNOWN: the size alone is checked.
        is_patient: Whether to wait for a store that does not answer.
        sleep: Waits so many seconds.

    Returns:
        The CRC-32.

    Raises:
        ShardDamaged: It is missing, or has another size or checksum.
        StorageError: The store refuses it, or does not answer.
    """
    what = f"the shard {name} of {place}"
    try:
        asked = partial(through_outages, is_patient=is_patient, sleep=sleep)
        asked(lambda: _read_once(store(), name, size, file, what))
        if checksum == UNKNOWN:
            asked(lambda: _check_end(store(), name, size, what))
    except ObjectNotFound as error:
        raise ShardDamaged(
            f"{what} is missing; put it back, or make the index again (`spottrain data index`), which begins another "
            "run"
        ) from error
    found = _checksum(file)
    if checksum not in (found, UNKNOWN):
        raise ShardDamaged(
            f"{what} has changed since the index was made: its checksum is {found:08x}, and the index says "
            f"{checksum:08x}. {_REMEDY}"
        )
    return found


def _read_once(store: ObjectReader, name: str, size: int, file: BinaryIO, what: str) -> None:
    if size == 0:
        return
    # Unmapped by whoever drops the last view. The traceback of an error may be that.
    view = memoryview(mmap.mmap(file.fileno(), size))

    def read(begin: int) -> int:
        return store.read_into(name, begin, view[begin : begin + _PART_BYTES])

    with ThreadPoolExecutor(max_workers=store.parallel_reads) as pool:
        found = sum(pool.map(read, range(0, size, _PART_BYTES)))
    if found != size:
        raise ShardDamaged(f"{what} has {found} bytes, and the index says {size}: it was cut or changed. {_REMEDY}")


def _check_end(store: ObjectReader, name: str, size: int, what: str) -> None:
    if store.read_into(name, size, memoryview(bytearray(1))):
        raise ShardDamaged(f"{what} has more than the {size} bytes of the index: it has changed. {_REMEDY}")


def _checksum(file: BinaryIO) -> int:
    found = 0
    file.seek(0)
    while block := file.read(_PART_BYTES):
        found = zlib_ng.crc32(block, found)
    file.seek(0)
    return found
