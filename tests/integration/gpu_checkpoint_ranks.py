"""What test_checkpoint_gpu.py runs in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.saving.writer import WriterProcess
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.world.launch import gloo_group
from spottrain_agent.processes import is_alive

DEVICE = "cuda"  # another one for trying out


def in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns in a process that has not touched CUDA before."""
    (found,) = _run([(work, arguments)])
    return found


def in_a_world_of_two(work: Callable[..., Any], *arguments: Any) -> None:
    """Run `work` on two ranks, in a group on gloo.

    Its first argument is the rank.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    _run([(_join, (rank, port, work, arguments)) for rank in range(2)])


def save_with_a_writer(folder: str) -> dict[str, Any]:
    """Save twice with a writer process beside the rank, and report how that went.

    The report says which keys of data the rank has uploaded itself, and whether the store holds what the device held.
    """
    writer = WriterProcess.fork()
    uri = f"file://{folder}/store"
    writer.connect(uri)
    storage = open_storage(uri)
    upload, own = storage.upload, []

    def note(key: str, data: Any) -> None:
        if key.endswith(".data"):
            own.append(key)
        upload(key, data)

    storage.upload = note  # type: ignore[method-assign]
    weights = torch.randn(3 << 20, device=DEVICE)
    wanted = weights.cpu()
    saver = Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1, writer=writer)
    saver.latest()
    for step in (1, 2):
        handle = saver.save_in_background({"model": {"w": weights}}, step=step)
        assert handle is not None
        if step == 2:
            weights.zero_()  # the next step, while the writer is at work
        handle.wait()
    pinned = saver._staging._memory.content.is_pinned()
    newest = saver.latest(verify=True)
    assert newest is not None
    saver.load(lambda _: {"model": {"w": weights}}, newest)
    same = torch.equal(weights.cpu(), wanted)
    return {"written by the rank": own, "writer lives": is_alive(writer.pid), "same": same, "pinned": pinned}


def save_half(rank: int, folder: str) -> None:
    """Rows 0 to 3 or 4 to 6 of a tensor, and one that both have."""
    mesh = init_device_mesh(DEVICE, (2,))
    rows = torch.arange(35.0, device=DEVICE).view(7, 5)[4 * rank : 4 * rank + 4]
    sharded = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size((7, 5)), stride=(5, 1))
    saver = Checkpointer(
        open_storage(f"file://{Path(folder)}/store"),
        generation=1,
        attempt_id="a",
        rank=rank,
        world_size=2,
        process_group=gloo_group(),
    )
    saver.latest()
    state = {"model": {"rows": sharded, "whole": torch.arange(9.0, device=DEVICE)}}
    saver.save(state, step=1)


def _join(rank: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    work(rank, *arguments)
    dist.destroy_process_group()


def _run(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in calls]
    processes = [
        context.Process(target=_answer, args=(theirs, *call)) for (_, theirs), call in zip(pipes, calls, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        found = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * len(processes)
        return found
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _answer(answer: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    answer.send(work(*arguments))
