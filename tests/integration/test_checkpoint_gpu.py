"""States on a GPU: staged into pinned memory, and back on the device bit for bit, from a store and from memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spottrain.checkpoint import Checkpointer, Replicas, codec, open_storage
from spottrain.checkpoint.dcp import plan_save
from spottrain.checkpoint.staging import StagingBuffer
from spottrain_agent.memory_store import MemoryServer, Shelf
from spottrain_api.contract import MemoryCheckpoint, MemoryHolder, PeerMemory

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
TOKEN = "secret"


def state(fill: bool) -> dict[str, Any]:
    """Larger than one read, with a view that isn't contiguous, in several types."""
    make = torch.randn if fill else torch.zeros
    return {
        "model": {
            "big": make(3 << 20, 2, device=DEVICE),
            "transposed": make(64, 300, device=DEVICE).t(),
            "half": make(1001, device=DEVICE).to(torch.bfloat16),
            "scalar": make((), device=DEVICE),
        },
        "optimizer": {"step": torch.tensor(3.0 if fill else 0.0)},
    }


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for part, tensors in wanted.items():
        for name, tensor in tensors.items():
            assert found[part][name].device == tensor.device
            assert torch.equal(found[part][name], tensor), name


def checkpointer(folder: Path, generation: int) -> Checkpointer:
    return Checkpointer(
        open_storage(f"file://{folder}/store"), generation=generation, attempt_id="a", rank=0, world_size=1
    )


def test_training_goes_on_while_what_was_staged_is_written(tmp_path: Path) -> None:
    saver, saved = checkpointer(tmp_path, 1), state(fill=True)
    wanted = {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in saved.items()}
    saver.latest()
    saver.prepare(saved)
    handle = saver.save(saved, step=1)
    for tensor in saved["model"].values():
        tensor.zero_()  # the next step
    assert handle is not None
    handle.wait()
    into, loader = state(fill=False), checkpointer(tmp_path, 2)
    newest = loader.latest()
    assert newest is not None
    loader.load(into, newest)
    assert_same(into, wanted)


def test_staging_memory_is_pinned_and_used_again() -> None:
    tensors, _ = codec.split(state(fill=True))
    plan, buffer = plan_save(tensors, rank=0, group=None), StagingBuffer()
    first = buffer.stage(plan, tensors).data
    second = buffer.stage(plan, tensors).data
    assert (
        torch.frombuffer(first, dtype=torch.uint8).data_ptr()
        == torch.frombuffer(second, dtype=torch.uint8).data_ptr()
    )
    assert torch.frombuffer(first, dtype=torch.uint8).is_pinned()


@pytest.fixture
def memory() -> Iterator[str]:
    listen = socket.create_server(("127.0.0.1", 0))
    server = MemoryServer(listen, Shelf(lambda held: None))
    server.token = TOKEN
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{listen.getsockname()[1]}"
    server.shutdown()
    server.server_close()


def test_a_replica_in_memory_comes_back_to_the_device(memory: str, tmp_path: Path) -> None:
    replicas = Replicas(
        PeerMemory(token=TOKEN, own=memory), generation=1, rank=0, world_size=1, ranks_per_node=1, group=None
    )
    wanted = state(fill=True)
    assert replicas.replicate(wanted, step=5, extra={}, rank_state=None)
    replicas.close()
    holder = MemoryHolder(address=memory, ranks=(0,))
    found = MemoryCheckpoint(generation=1, sequence=1, step=5, world_size=1, holders=(holder,))
    into = state(fill=False)
    assert checkpointer(tmp_path, 2).load_replica(into, replicas, found).step == 5
    assert_same(into, wanted)
