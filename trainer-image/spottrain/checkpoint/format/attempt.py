"""An attempt: the prefix that one save, and no other, writes to.

Ranks meet only in the store: each leaves a receipt, and rank 0 collects them. So a save in the background needs no
collective, and rank 0 notices a rank that dies by its missing receipt. A rank that can't reach the store at all
reports its failure to rank 0's training thread (`SaveHandle.give_up`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from spottrain.checkpoint.errors import CorruptCheckpoint, RankFailed, SaveFailed
from spottrain.checkpoint.format.manifest import DataFile, Receipt, data_key, frozen_key, receipt_key
from spottrain.checkpoint.stores.storage import CheckpointStorage

ATTEMPTS = "attempts/"
_NAME = re.compile(r"attempts/g(\d+)-s(\d+)-[^/]+/")
_START = re.compile(r"attempts/g\d+-s\d+-(.+)-[0-9a-f]{16}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One save: its generation, its step, and the prefix that it writes to."""

    generation: int
    step: int
    prefix: str

    @classmethod
    def new(cls, generation: int, step: int, unique: str) -> Attempt:
        """A new attempt. `unique` must never repeat for the same generation and step."""
        prefix = f"{ATTEMPTS}g{generation:06d}-s{step:09d}-{unique}/"
        return cls(generation=generation, step=step, prefix=prefix)

    @classmethod
    def of_key(cls, key: str) -> Attempt | None:
        """The attempt that an object belongs to, by its key. None if the key doesn't have that form."""
        match = _NAME.match(key)
        if match is None:
            return None
        return cls(generation=int(match[1]), step=int(match[2]), prefix=match[0])


def start_of(prefix: str) -> str | None:
    """The id of the start (`attempt_id`) that wrote the attempt at `prefix`.

    None if the prefix doesn't have that form.
    """
    match = _START.fullmatch(prefix)
    return match[1] if match is not None else None


def collect_receipts(
    storage: CheckpointStorage,
    attempt: Attempt,
    world_size: int,
    *,
    deadline: float,
    pause: Callable[[float], None] = time.sleep,
) -> list[Receipt]:
    """Wait until every rank has left its receipt.

    Args:
        storage: The store that the ranks write to.
        attempt: The save.
        world_size: Number of ranks.
        deadline: When to give up, in seconds of `time.monotonic`.
        pause: Waits a number of seconds. It may raise to end the wait.

    Returns:
        The receipts, in order of rank.

    Raises:
        SaveFailed: A rank reports a failure, or a receipt is missing at `deadline`.
        CorruptCheckpoint: A receipt is damaged, or a file doesn't have the size that its receipt names.
    """
    wanted = {receipt_key(attempt.prefix, rank): rank for rank in range(world_size)}
    receipts: dict[int, Receipt] = {}
    wait = 0.005
    while True:
        sizes = dict(storage.list(attempt.prefix))
        for key in wanted.keys() & sizes.keys():
            rank = wanted.pop(key)
            receipts[rank] = _read_receipt(storage, attempt, rank, world_size)
        if not wanted:
            break
        if time.monotonic() >= deadline:
            missing = ", ".join(str(rank) for rank in sorted(wanted.values()))
            raise SaveFailed(
                f"The checkpoint at step {attempt.step} was given up: no receipt came in time from rank "
                f"{missing} (of {world_size}). The newest commit stands."
            )
        pause(wait)
        wait = min(1.5 * wait, 0.5)
    for rank, receipt in receipts.items():
        _check_size(receipt, receipt.file, sizes.get(data_key(attempt.prefix, rank), 0), attempt)
        if receipt.frozen is not None:
            _check_size(receipt, receipt.frozen, sizes.get(frozen_key(attempt.prefix, rank), 0), attempt)
    return [receipts[rank] for rank in range(world_size)]


def _read_receipt(storage: CheckpointStorage, attempt: Attempt, rank: int, world_size: int) -> Receipt:
    data, _ = storage.get(receipt_key(attempt.prefix, rank))
    try:
        receipt = Receipt.parse(data)
    except ValueError as error:
        raise CorruptCheckpoint(f"The receipt of rank {rank} at step {attempt.step} is damaged.") from error
    if receipt.error is not None:
        raise RankFailed(attempt.step, rank, list(receipt.error))
    if (receipt.rank, receipt.world_size) != (rank, world_size):
        raise CorruptCheckpoint(
            f"The receipt of rank {rank} of {world_size} at step {attempt.step} was written by rank "
            f"{receipt.rank} of {receipt.world_size}."
        )
    return receipt


def _check_size(receipt: Receipt, file: DataFile, stored: int, attempt: Attempt) -> None:
    if stored != file.size:
        raise CorruptCheckpoint(
            f"Rank {receipt.rank} wrote {file.size} bytes at step {attempt.step}, but the store holds "
            f"{stored}. The checkpoint was given up, and the newest commit stands."
        )
