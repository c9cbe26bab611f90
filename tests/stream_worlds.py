"""Ranks that read data without epochs, in the test's own process: generations of any size, and commits between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from spottrain.checkpoint.format import codec
from spottrain.checkpoint.loading.loader import Loaded
from spottrain.data import Mixture, Streams
from spottrain.data.audit import AuditWriter
from spottrain.data.batch import BatchPlan
from spottrain.data.loader import Data
from spottrain.data.order import DataOrder
from spottrain.data.rank_data import RankData
from spottrain.data.streams import cursor
from spottrain.recovery.by_rank import RankPart, load_rank_parts, rank_states_of

GLOBAL_BATCH = 12
LAST = 24
RESIZED = ((6, 5), (4, 11), (3, 12), (6, LAST))
"""Generations, each with a number of ranks, up to a step."""

Commit = tuple[int, tuple[codec.Json, ...]]
"""The step of a commit, and the states of its ranks."""


def length(stream: int) -> int:
    """Items of a pass of a stream: each is of another length, and some end within a step."""
    return 3 + 5 * stream


def without_state(stream: int, number: int) -> Iterator[tuple[int, int, int]]:
    """A stream of a generator function."""
    return ((stream, number, item) for item in range(length(stream)))


class WithState:
    """A stream with a state of its own, as a data set of torch or Hugging Face has. It counts what is read."""

    num_read = 0

    def __init__(self, stream: int, number: int) -> None:
        self._stream = stream
        self._number = number
        self._next = 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        while self._next < length(self._stream):
            self._next += 1
            WithState.num_read += 1
            yield self._stream, self._number, self._next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "of": (self._stream, self._number)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"] == (self._stream, self._number)
        self._next = state["next"]


def mark_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams get a mark before each item, however fast they are read."""
    monkeypatch.setattr(cursor, "_MARK_SECONDS", 0.0)
    monkeypatch.setattr(cursor, "_MARK_FACTOR", 0)


def ranks_of(data: Data, order: DataOrder, world_size: int, audit: Path, generation: int) -> list[RankData]:
    """The data of all ranks of a generation."""
    return [
        RankData(
            data=data,
            order=order,
            plan=BatchPlan(global_batch=GLOBAL_BATCH, micro_batch=2, world_size=world_size),
            rank=rank,
            generation=generation,
            attempt=str(generation),
            open_audit=partial(AuditWriter, audit, generation=generation, rank=rank),
        )
        for rank in range(world_size)
    ]


def parts_of(rank: RankData) -> dict[str, RankPart]:
    """As a session makes them."""
    if rank.marks is None:
        return {}
    part = RankPart(
        part=rank.marks,
        rank=rank.rank,
        world_size=rank.plan.world_size,
        at_another_size=rank.marks.merged,
        is_dealt=True,
    )
    return {"streams": part}


def generate(data: Data, order: DataOrder, worlds: Sequence[tuple[int, int]], audit: Path) -> list[list[Any]]:
    """Run generations, each with a number of ranks up to a step, and commit between them. The items of each step."""
    commit: Commit | None = None
    steps: list[list[Any]] = []
    for generation, (world_size, last) in enumerate(worlds, start=1):
        found, commit = _generation(ranks_of(data, order, world_size, audit, generation), commit, last)
        steps += found
    return steps


def _generation(ranks: list[RankData], commit: Commit | None, last: int) -> tuple[list[list[Any]], Commit]:
    by_rank = [_run(rank, commit, last) for rank in ranks]
    states = tuple(codec.encode({"parts": rank_states_of(parts_of(rank))}) for rank in ranks)
    return [list(chain(*parts)) for parts in zip(*by_rank, strict=True)], (last, states)


def _run(rank: RankData, commit: Commit | None, last: int) -> list[list[Any]]:
    """This rank's items of each step. More is fetched ahead if there is a worker."""
    first, states = commit or (0, ())
    if states:
        own = codec.decode(states[rank.rank]) if len(states) == rank.plan.world_size else None
        load_rank_parts(parts_of(rank), Loaded(step=first, state={}, extra={}, rank_state=own, rank_states=states))
    rank.begin(LAST, by_epoch=False)
    found = []
    with closing(rank.load(first_step=first, device=torch.device("cpu"))) as batches:
        for step in range(first + 1, last + 1):
            items: list[Any] = []
            for _ in range(rank.plan.num_micro_batches):
                micro_batch, data = next(batches)
                items += data[: micro_batch.num_samples]
            rank.record(step)
            found.append(items)
    return found


def data_of(streams: Streams | Mixture, *, num_workers: int | None = 0) -> Data:
    """Micro-batches are lists of items."""
    return Data(streams, collate=list, num_workers=num_workers)
