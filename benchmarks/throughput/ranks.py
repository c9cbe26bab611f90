"""What one rank of bench_throughput does.

bench_throughput starts it, with torchrun's environment. Its arguments are: way, folder for checkpoints, steps to
measure, steps from one commit to the next, file for the results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import spottrain
from benchmarks.memory.cases import Gpt, Shape
from benchmarks.throughput.model import flops_per_token, measured_tflops, num_parameters, shape_for, wait_for
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.saving.writer import start_writer
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.world.launch import Launch

PLAIN, PLAIN_SAVES = "plain torch loop", "plain torch loop, torch.save"
OURS, OURS_COMMITS = "spottrain", "spottrain, commits"
WAYS = (PLAIN, OURS, PLAIN_SAVES, OURS_COMMITS)
LEARNING_RATE = 1e-4
WARM_UP = 5  # after the first save, if there are any


class Tokens(Dataset[torch.Tensor]):
    """Random tokens, created when they are read."""

    def __init__(self, shape: Shape, length: int) -> None:
        self._shape = shape
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, self._shape.vocabulary, (self._shape.context,), generator=generator)


class Clock:
    """Seconds of the steps that count, including the device's work.

    They run from after the step `first` to after the step `last`.
    """

    def __init__(self, device: torch.device, first: int, last: int) -> None:
        self._device = device
        self._first, self._last = first, last
        self._started = 0.0
        self.seconds = 0.0
        self.losses: list[float] = []

    def step(self, number: int, loss: torch.Tensor) -> None:
        if number == self._first:
            wait_for(self._device)
            self.losses.append(float(loss))
            self._started = time.perf_counter()
        if number == self._last:
            wait_for(self._device)
            self.seconds = time.perf_counter() - self._started
            self.losses.append(float(loss))


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def model_of(shape: Shape, device: torch.device) -> Gpt:
    torch.manual_seed(0)
    with device:
        return Gpt(shape)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def train_plainly(launch: Launch, shape: Shape, clock: Clock, last: int, save: Callable[[int, Any], None]) -> None:
    """Train as a script without this library would.

    It has autocast, a fused AdamW, and DDP with several ranks.
    """
    device = launch.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    model: Any = model_of(shape, device)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True) if launch.world_size > 1 else model
    optimizer = optimizer_of(model)
    loader = DataLoader(
        Tokens(shape, last * shape.micro_batch), batch_size=shape.micro_batch, pin_memory=device.type == "cuda"
    )
    for number, batch in enumerate(loader, start=1):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(parallel, batch.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        save(number, {"model": model, "optimizer": optimizer})
        clock.step(number, loss.detach())
    if launch.world_size > 1:
        dist.destroy_process_group()


def train_with_spottrain(
    launch: Launch, shape: Shape, clock: Clock, last: int, before_save: Callable[[int], None], **settings: Any
) -> None:
    start_writer()  # as the agent does
    with spottrain.session(
        strategy="ddp",
        precision="bf16",
        global_batch=shape.micro_batch * launch.world_size,
        micro_batch=shape.micro_batch,
        **settings,
    ) as session:
        training = session.prepare(
            model_of(shape, session.device),
            optimizer=optimizer_of,
            dataset=Tokens(shape, last * shape.micro_batch * launch.world_size),
            shuffle=False,
        )
        loss = torch.zeros(())
        for step in training.steps(total=last):
            for ids in step.micro_batches():
                loss = loss_of(training.model, ids)
                step.backward(loss)
            step.update()
            before_save(step.number)
            clock.step(step.number, loss.detach())


def main(new_clock: Callable[[torch.device, int, int], Clock] = Clock) -> None:
    way, folder, steps, every, result = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5]), sys.argv[5]
    launch = Launch.from_environment()
    shape = shape_for(launch.device)
    first = every + WARM_UP  # so that the first save, which allocates its memory, doesn't count
    clock = new_clock(launch.device, first, first + steps)
    last = first + steps
    uri = f"file://{folder}/commits"
    saved: set[int] = set()  # the steps with a checkpoint

    def save(number: int, state: dict[str, Any]) -> None:
        if way == PLAIN_SAVES and number % every == 0 and launch.rank == 0:
            saved.add(number)
            with (folder / "plain.pt").open("wb") as file:
                torch.save({name: part.state_dict() for name, part in state.items()}, file)
                file.flush()
                os.fsync(file.fileno())

    def note_commits() -> None:
        head = read_head(open_storage(uri))
        saved.update(commit.step for commit in (head.commits if head is not None else ()))

    def before_save(number: int) -> None:
        # HEAD lists only the newest two commits. From one due step to the next, at most one is added: while it is
        # under way, the next one is left out.
        if way == OURS_COMMITS and number % every == 0 and launch.rank == 0:
            note_commits()

    commits = {"checkpoint_uri": uri, "checkpoint_interval": f"{every}steps"}
    if way in (PLAIN, PLAIN_SAVES):
        train_plainly(launch, shape, clock, last, save)
    else:
        train_with_spottrain(launch, shape, clock, last, before_save, **(commits if way == OURS_COMMITS else {}))
    if launch.rank == 0:
        if way == OURS_COMMITS:
            note_commits()
        report = {
            "seconds": clock.seconds,
            "losses": clock.losses,
            "tokens": steps * shape.micro_batch * shape.context * launch.world_size,
            "flops_per_token": flops_per_token(shape),
            "parameters": num_parameters(shape),
            "shape": shape.name,
            "measured_tflops": measured_tflops(launch.device),
            "saved": sum(first < step < last for step in saved),
        }
        Path(result).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
