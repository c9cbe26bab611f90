"""States on a GPU, staged into pinned memory and restored bit for bit.

They come back to the device from a store and from memory.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.gpu_checkpoint_ranks import in_a_process, in_a_world_of_two, save_half, save_with_a_writer
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.dcp import plan_save
from spottrain.checkpoint.peers.replicas import Replicas
from spottrain.checkpoint.saving.staging import SharedMemory, StagingBuffer, _pin
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.data import random_state
from spottrain_agent.replica_store import ReplicaServer, ReplicaStore
from spottrain_api.contract.replicas import ReplicaHolder, ReplicaSettings, ReplicatedStep

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
TOKEN = "secret"


def state(fill: bool) -> dict[str, Any]:
    """A state on the GPU that is larger than one read.

    It has several types, and views that aren't contiguous. Some of it is on the CPU, pinned and not, like the state
    that engines offload.
    """
    make = torch.randn if fill else torch.zeros
    return {
        "model": {
            "big": make(3 << 20, 2, device=DEVICE),
            "transposed": make(64, 300, device=DEVICE).t(),
            "every other": make(64, 300, device=DEVICE)[::2, 1::3],
            "half": make(1001, device=DEVICE).to(torch.bfloat16),
            "eighth": make(77, device=DEVICE).to(torch.float8_e4m3fn),
            "flags": make(33, device=DEVICE) > 0,
            "scalar": make((), device=DEVICE),
            "none": make(0, 3, device=DEVICE),
        },
        "optimizer": {
            "step": torch.tensor(3.0 if fill else 0.0),
            "moment": make(5000, 3),
            "pinned": make(5000, 3).pin_memory(),
        },
    }


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for part, tensors in wanted.items():
        for name, tensor in tensors.items():
            assert found[part][name].device == tensor.device
            assert found[part][name].dtype == tensor.dtype
            assert bytes_of(found[part][name]) == bytes_of(tensor), name


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def checkpointer(folder: Path, generation: int) -> Checkpointer:
    return Checkpointer(
        open_storage(f"file://{folder}/store"), generation=generation, attempt_id="a", rank=0, world_size=1
    )


def test_training_goes_on_while_what_was_staged_is_written(tmp_path: Path) -> None:
    saver, saved = checkpointer(tmp_path, 1), state(fill=True)
    wanted = {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in saved.items()}
    saver.latest()
    saver.prepare(saved)
    handle = saver.save_in_background(saved, step=1)
    for tensors in saved.values():
        for tensor in tensors.values():
            tensor.zero_()  # the next step
    assert handle is not None
    handle.wait()
    into, loader = state(fill=False), checkpointer(tmp_path, 2)
    newest = loader.latest()
    assert newest is not None
    loader.load(lambda _: into, newest)
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


def test_what_the_device_has_still_to_compute_is_staged_as_it_will_be() -> None:
    """State is staged as the step's kernels that are under way will leave it.

    That holds even if they were started on another stream.
    """
    work, weights = torch.randn(4096, 4096, device=DEVICE), torch.zeros(1 << 20, device=DEVICE)
    tensors, _ = codec.split({"w": weights})
    plan, buffer = plan_save(tensors, rank=0, group=None), StagingBuffer()
    buffer.prepare(plan)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(50):
        work = work @ work / 64
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        weights += 1 + 0 * work[0, 0].nan_to_num()
    torch.cuda.default_stream().wait_stream(side)
    staged = buffer.stage(plan, tensors)
    weights.zero_()
    torch.cuda.synchronize()
    found = torch.frombuffer(staged.data, dtype=torch.float32, count=weights.numel())
    assert (found == 1).all()


def test_memory_that_cannot_be_pinned_is_reported_and_leaves_the_device_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    _pin(memory)
    with caplog.at_level(logging.WARNING):
        _pin(memory)  # CUDA registers no byte twice
    assert "can't be pinned" in caplog.text
    assert torch.ones(1000, device=DEVICE).sum().item() == 1000
    torch.cuda.synchronize()


def test_buffers_that_are_replaced_are_registered_no_longer() -> None:
    """Otherwise, a later one at the same address could not be."""
    for _ in range(20):
        for size in (1 << 20, 3 << 20):
            memory = SharedMemory.of(size)
            assert memory.content.is_pinned()


def test_random_numbers_of_the_device_go_on_where_they_were_captured() -> None:
    random_state.seed_everything(3, rank=1)
    torch.randn(1000, device=DEVICE)
    state = codec.decode(codec.encode(random_state.capture()))
    wanted = [torch.randn(1000, device=DEVICE), torch.rand(7, device=DEVICE), torch.randn(5)]
    random_state.restore(state)
    found = [torch.randn(1000, device=DEVICE), torch.rand(7, device=DEVICE), torch.randn(5)]
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))


def test_a_writer_process_uploads_what_a_rank_on_the_device_has_staged(tmp_path: Path) -> None:
    found = in_a_process(save_with_a_writer, str(tmp_path))
    assert found == {"written by the rank": [], "writer lives": True, "same": True, "pinned": True}


def test_two_ranks_on_one_device_save_what_one_loads(tmp_path: Path) -> None:
    """Each has half of the rows there.

    They meet on gloo, as NCCL wants a device for each.
    """
    in_a_world_of_two(save_half, str(tmp_path))
    into = {"model": {"rows": torch.zeros(7, 5, device=DEVICE), "whole": torch.zeros(9, device=DEVICE)}}
    loader = checkpointer(tmp_path, 2)
    newest = loader.latest(verify=True)
    assert newest is not None
    loader.load(lambda _: into, newest)
    assert torch.equal(into["model"]["rows"].cpu(), torch.arange(35.0).view(7, 5))
    assert torch.equal(into["model"]["whole"].cpu(), torch.arange(9.0))


@pytest.fixture
def holder() -> Iterator[str]:
    listen = socket.create_server(("127.0.0.1", 0))
    server = ReplicaServer(listen, ReplicaStore(lambda held: None))
    server.token = TOKEN
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{listen.getsockname()[1]}"
    server.shutdown()
    server.server_close()


def test_a_replica_comes_back_to_the_device(holder: str, tmp_path: Path) -> None:
    replicas = Replicas(
        ReplicaSettings(token=TOKEN, own=holder), generation=1, rank=0, world_size=1, ranks_per_node=1, group=None
    )
    wanted = state(fill=True)
    assert replicas.replicate(wanted, step=5, extra={}, rank_state=None)
    replicas.close()
    place = ReplicaHolder(address=holder, ranks=(0,))
    found = ReplicatedStep(generation=1, sequence=1, step=5, world_size=1, holders=(place,))
    into = state(fill=False)
    assert checkpointer(tmp_path, 2).load_replica(lambda _: into, replicas, found).step == 5
    assert_same(into, wanted)
