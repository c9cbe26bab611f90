"""Saves that are staged in pieces, because there is no room for all of a rank's bytes."""

from __future__ import annotations

import itertools
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spottrain
from memory_storage import MemoryStorage
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import SaveFailed, StorageUnavailable
from spottrain.checkpoint.format.dcp import plan_save
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.format.manifest import BLOCK_BYTES, read_manifest
from spottrain.checkpoint.saving.pieces import StagedPieces
from spottrain.checkpoint.saving.staging import StagingBuffer
from spottrain.checkpoint.stores.storage import Buffer, Pieces, pieces_of
from spottrain.recovery import open_store
from spottrain_runtime import host_memory
from staging_memory import staging_memory

COUNT = 3 * BLOCK_BYTES // 4 + 5  # elements: more than three pieces of float32


def tensors(factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Of all kinds, and in an order in which most lie across bounds of pieces."""
    large = torch.arange(COUNT, dtype=torch.float32) * factor
    return {
        "number": torch.tensor(factor),
        "empty": torch.empty(0, 3),
        "large": large,
        "flags": torch.arange(5) < 3,
        "columns": large[:2_000_000].view(2_000, 1_000).t(),
        "every third": large[::3],
        "image": large[:1_200_000].view(10, 100, 1_200).permute(2, 0, 1),
        "complex": torch.complex(large[:300_001], large[1:300_002]).conj(),
        "half": large[: COUNT // 2].bfloat16(),
        "one row": torch.full((1, COUNT // 3), factor, dtype=torch.float64),
        "imaginary": torch.complex(large[:100_003], large[1:100_004]).conj().imag,
        "last": torch.arange(7).to(torch.uint16),
    }


def state(factor: float = 1.0) -> dict[str, Any]:
    return {"model": tensors(factor)}


def checkpointer(storage: MemoryStorage, *, free_bytes: float, generation: int = 1) -> Checkpointer:
    made = Checkpointer(
        storage,
        generation=generation,
        attempt_id="a",
        rank=0,
        world_size=1,
        free_bytes=lambda: free_bytes,
        piece_bytes=BLOCK_BYTES,
    )
    made.latest()
    return made


def new_memory(before: dict[int, int]) -> list[int]:
    return sorted(size for inode, size in staging_memory().items() if inode not in before)


def stored(storage: MemoryStorage) -> list[bytes]:
    """The data files of the newest commit."""
    head = read_head(storage)
    assert head is not None
    assert head.newest is not None
    manifest = read_manifest(storage, head.newest)
    return [storage.get(manifest.key(head.newest.attempt, number))[0] for number in range(manifest.num_files)]


@pytest.mark.parametrize("frozen", [(), ("model.large", "model.columns")], ids=["trained", "partly frozen"])
def test_the_commit_has_the_same_bytes_and_no_more_than_a_piece_is_staged(frozen: tuple[str, ...]) -> None:
    whole, pieces = MemoryStorage(), MemoryStorage()
    checkpointer(whole, free_bytes=1 << 30).save(state(), step=1, frozen=frozen)
    before = staging_memory()
    saver = checkpointer(pieces, free_bytes=1000)
    saver.prepare(state(2.0), frozen=frozen)
    for step in (1, 2):
        saver.save(state(), step=step, frozen=frozen)
        assert max(new_memory(before)) == BLOCK_BYTES
        assert stored(pieces) == stored(whole)
    assert saver.pieces_of is not None

    into, reader = state(0.0), checkpointer(pieces, free_bytes=1 << 30, generation=2)
    newest = reader.latest(verify=True)
    assert newest is not None
    reader.load(lambda _: into, newest)
    for name, tensor in tensors().items():
        assert torch.equal(into["model"][name], tensor), name


def test_without_need_nothing_is_staged_in_pieces() -> None:
    saver = checkpointer(MemoryStorage(), free_bytes=1 << 30)
    saver.prepare(state())
    assert saver.pieces_of is None


class WatchingStorage(MemoryStorage):
    """Changes the weights during an upload as soon as training might do so."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        if self.fails:
            list(itertools.islice(pieces_of(data), 2))
            raise StorageUnavailable("the store is away")
        super().upload(key, data)


def test_training_waits_until_all_pieces_are_stored() -> None:
    storage, given = WatchingStorage(), state()
    saver = checkpointer(storage, free_bytes=0)
    handle = saver.save_in_background(given, step=1)
    given["model"]["large"].zero_()  # as the next step would
    assert handle is not None
    handle.wait()
    assert handle.staging_seconds > 0.0
    assert handle.upload_seconds == 0.0
    into, reader = state(0.0), checkpointer(storage, free_bytes=1 << 30, generation=2)
    newest = reader.latest(verify=True)
    assert newest is not None
    reader.load(lambda _: into, newest)
    assert torch.equal(into["model"]["large"], tensors()["large"])


def test_a_store_that_fails_lets_training_go_on_and_the_next_save_succeeds() -> None:
    storage = WatchingStorage()
    saver = checkpointer(storage, free_bytes=0)
    storage.fails = True
    handle = saver.save_in_background(state(), step=1)
    assert handle is not None
    handle.join()
    assert isinstance(handle.error, StorageUnavailable)
    storage.fails = False
    assert saver.save(state(), step=2).commit is not None


def test_what_is_given_up_is_not_copied_any_more() -> None:
    given = tensors()
    staged = StagingBuffer(BLOCK_BYTES).stage_within(0, plan_save(given, rank=0, group=None), given)
    assert isinstance(staged, StagedPieces)
    pieces = iter(staged)
    next(pieces)
    staged.close()
    with pytest.raises(SaveFailed, match="given up before all of its pieces were copied"):
        next(pieces)


WIDTH = 1100  # weights and moments are more than two pieces


def train(uri: str, total: int) -> tuple[torch.Tensor, str | None]:
    with spottrain.session(strategy="ddp", global_batch=2, micro_batch=2, checkpoint_uri=uri) as session:
        training = session.prepare(
            nn.Linear(WIDTH, WIDTH, bias=False),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
            dataset=[torch.full((WIDTH,), float(index)) for index in range(8)],
        )
        for step in training.steps(total=total):
            for batch in step.micro_batches():
                step.backward(training.model(batch).square().mean())
            step.update()
        return next(training.model.parameters()).detach().clone(), session._context.reporter.progress.message


@pytest.mark.usefixtures("world_of_its_own")
def test_a_run_on_a_node_without_memory_resumes_as_it_would_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, message = train(f"file://{tmp_path}/whole", 4)
    assert message is None
    monkeypatch.setattr(open_store, "Checkpointer", partial(Checkpointer, piece_bytes=BLOCK_BYTES))
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 10 << 20)
    with caplog.at_level(logging.WARNING):
        train(f"file://{tmp_path}/pieces", 2)
        found, message = train(f"file://{tmp_path}/pieces", 4)
    assert torch.equal(found, expected)
    sentence = "This node has no room for a copy of a rank's share of a checkpoint, 14 MiB."
    assert sentence in caplog.text
    assert message is not None
    assert message.startswith(sentence)
