"""The ways to save and load a state, to compare them.

`save` returns once training can continue; its time is the stall. `finish` returns when the checkpoint is durable. All
ways sync what they write to a file. The plain writer and reader show the best that the store can do.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from benchmarks.checkpoint.deepspeed_way import DeepSpeedSave, sync
from benchmarks.checkpoint.state import State, local_tensors
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.saving.retention import Retention
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.checkpoint.saving.writer import WriterProcess
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.world.launch import gloo_group


class Way(Protocol):
    """One way to save this rank's state. All ranks call it in step."""

    name: str

    def save(self, state: State, number: int) -> None: ...

    def finish(self) -> None: ...

    def load(self, state: State, number: int) -> None:
        """Fill `state` from the save of that number.

        The world size may be a different one if the way supports it.
        """
        ...


@dataclass
class BareCopy:
    """The copy of this rank's bytes into existing host memory.

    No save can stall less.
    """

    name: str = "bare copy"
    _memory: list[torch.Tensor] = field(default_factory=list)

    def save(self, state: State, number: int) -> None:
        sources = local_tensors(state)
        pinned = sources[0].is_cuda
        self._memory = self._memory or [torch.zeros(s.shape, dtype=s.dtype, pin_memory=pinned) for s in sources]
        for target, source in zip(self._memory, sources, strict=True):
            target.copy_(source, non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize()

    def finish(self) -> None: ...

    def load(self, state: State, number: int) -> None: ...


@dataclass
class PlainFile:
    """Every rank writes and reads only its own bytes, in parallel with the others."""

    root: Path
    name: str = "plain parallel writer"

    def save(self, state: State, number: int) -> None:
        with self._path(number).open("wb") as file:
            for tensor in local_tensors(state):
                file.write(tensor.cpu().numpy().data.cast("B"))
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None: ...

    def load(self, state: State, number: int) -> None:
        with self._path(number).open("rb") as file:
            for tensor in local_tensors(state):
                data = bytearray(tensor.nbytes)
                file.readinto(data)
                tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape))

    def _path(self, number: int) -> Path:
        return self.root / f"plain-{number}-{dist.get_rank()}"


@dataclass
class TorchSave:
    """Rank 0 gathers everything, and saves it."""

    root: Path
    name: str = "torch.save from rank 0"

    def save(self, state: State, number: int) -> None:
        whole = {}
        for name, tensor in state["model"].items():
            full = tensor.full_tensor()
            if dist.get_rank() == 0:
                whole[name] = full.cpu()
        if dist.get_rank() == 0:
            torch.save(whole, self._path(number))
            sync(self._path(number))

    def finish(self) -> None:
        dist.barrier()

    def load(self, state: State, number: int) -> None:
        whole = torch.load(self._path(number), weights_only=True, mmap=True)
        for name, tensor in state["model"].items():
            local = tensor.to_local()
            chunk = -(-tensor.shape[0] // dist.get_world_size())
            local.copy_(whole[name][chunk * dist.get_rank() :][: local.shape[0]])

    def _path(self, number: int) -> Path:
        return self.root / f"torch-{number}.pt"


@dataclass
class Dcp:
    """torch.distributed.checkpoint's own save, or async_save, to its own format."""

    root: Path
    name: str
    asynchronous: bool
    _pending: Any = None

    def save(self, state: State, number: int) -> None:
        path = self._path(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.asynchronous:
                self._pending = state_dict_saver.async_save(state, checkpoint_id=path)
            else:
                state_dict_saver.save(state, checkpoint_id=path)

    def finish(self) -> None:
        if isinstance(self._pending, Future):
            self._pending.result()
        dist.barrier()

    def load(self, state: State, number: int) -> None:
        state_dict_loader.load(state, checkpoint_id=self._path(number))

    def _path(self, number: int) -> Path:
        return self.root / f"{self.name.replace(' ', '-')}-{number}"


class Spottrain:
    """This project's checkpointer, as the step loop uses it.

    With `freezes`, all tensors but the first are frozen.
    """

    def __init__(self, uri: str, generation: int, writer: WriterProcess, *, freezes: bool = False) -> None:
        self.name = "spottrain, one tensor trained" if freezes else "spottrain"
        self._freezes = freezes
        writer.connect(uri)
        self._checkpointer = Checkpointer(
            open_storage(uri),
            generation=generation,
            attempt_id="bench",
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            process_group=gloo_group(),
            retention=Retention(last=100),
            writer=writer,
        )
        self._checkpointer.latest()
        self.newest: Commit | None = None
        self._under_way: SaveHandle | None = None

    def prepare(self, state: State) -> None:
        """Prepare as the loop does after its first step or a resume.

        Some steps pass until the first save.
        """
        self._checkpointer.prepare(dict(state), frozen=self._frozen(state))

    def save(self, state: State, number: int) -> None:
        self._under_way = self._checkpointer.save_in_background(dict(state), step=number, frozen=self._frozen(state))

    def finish(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
        dist.barrier()

    def load(self, state: State, number: int) -> None:
        newest = self._checkpointer.latest()
        assert newest is not None
        self._checkpointer.load(lambda _: dict(state), newest, frozen=self._frozen(state))

    def _frozen(self, state: State) -> set[str]:
        return {f"model.{name}" for name in list(state["model"])[1:]} if self._freezes else set()


def ways_for(
    uri: str, generation: int, writers: Sequence[WriterProcess], *, mib: int, device: torch.device, saves: bool
) -> list[Way]:
    """Return the ways that can write to this store.

    torch's and DeepSpeed's own ways know only files. DeepSpeed's is left out if it isn't installed. A world other
    than the one that `saves` can't read all of them.
    """
    parts = urlsplit(uri)
    ours = [
        Spottrain(f"{uri}/spottrain", generation, writers[0]),
        Spottrain(f"{uri}/frozen", generation, writers[1], freezes=True),
    ]
    if parts.scheme != "file":
        from benchmarks.checkpoint.s3 import PlainS3  # it needs S3's client

        plain: list[Way] = [PlainS3(uri)] if saves else []
        return [*plain, *ours]
    root = Path(parts.path)
    root.mkdir(parents=True, exist_ok=True)
    of_one_world: list[Way] = [BareCopy(), PlainFile(root)] if saves else []
    if saves and find_spec("deepspeed") is not None:
        of_one_world.append(DeepSpeedSave(root, mib, device))
    return [
        *of_one_world,
        TorchSave(root),
        Dcp(root, "DCP save", asynchronous=False),
        Dcp(root, "DCP async_save", asynchronous=True),
        *ours,
    ]
