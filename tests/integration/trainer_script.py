"""The training script that trainer_runs.py runs as ranks.

RANK_SETTINGS comes from the test.
"""

import json
import math
import multiprocessing
import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
from torch import nn  # noqa: E402

import script_orders  # noqa: E402
import spottrain  # noqa: E402
from kill_point import KillPoint  # noqa: E402
from shard_corpus import corpus  # noqa: E402
from spottrain.checkpoint.format.attempt import Attempt  # noqa: E402
from spottrain.checkpoint.format.head import read_head  # noqa: E402
from spottrain.checkpoint.saving.writer import start_writer  # noqa: E402
from spottrain.checkpoint.stores.file_storage import FileStorage  # noqa: E402
from spottrain.checkpoint.stores.uri import open_storage  # noqa: E402
from spottrain.data import Mixture, Streams  # noqa: E402
from spottrain.loop import stopping  # noqa: E402
from spottrain.world import listener, stop_point  # noqa: E402
from spottrain_api.contract.configuration import DrainRequest  # noqa: E402
from spottrain_api.contract.reports import Progress  # noqa: E402

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Model(nn.Module):
    def __init__(self, width: int, dropout: float, *, has_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x).squeeze(1)


def ask_to_drain(seconds: float = 30.0, *, is_preemption: bool = False) -> None:
    now = datetime.now(UTC)
    path = Path(os.environ["SPOTTRAIN_RUN_DIR"]) / "drain.json"
    deadline = now + timedelta(seconds=seconds)
    DrainRequest(reason="test", deadline=deadline, requested_at=now, is_preemption=is_preemption).write(path)


def slow_down_uploads(seconds_by_step: dict[int, float]) -> None:
    """A store that takes that long for a rank's data of these steps."""
    upload = FileStorage.upload

    def slow_upload(self: FileStorage, key: str, data: Any) -> None:
        attempt = Attempt.of_key(key)
        if attempt is not None and key.endswith(".data"):
            time.sleep(seconds_by_step.get(attempt.step, 0.0))
        upload(self, key, data)

    FileStorage.upload = slow_upload  # type: ignore[method-assign]


def obey_the_disk(errnos: list[Path]) -> None:
    """Make checkpoints fail with a disk's error while one of these files is there.

    The file holds the error number. A file whose name ends in -read makes reading fail, and the others make writing
    fail.
    """
    write, read_into = FileStorage._write, FileStorage.read_into

    def fail(suffix: str = "") -> None:
        for errno in errnos:
            if (file := errno.with_name(errno.name + suffix)).exists():
                number = int(file.read_text())
                raise OSError(number, os.strerror(number))

    def write_or_fail(self: FileStorage, key: str, data: Any) -> None:
        fail()
        write(self, key, data)

    def read_or_fail(self: FileStorage, key: str, offset: int, memory: memoryview) -> int:
        with self._sentences(f"read {key}"):
            fail("-read")
        return read_into(self, key, offset, memory)

    FileStorage._write = write_or_fail  # type: ignore[method-assign]
    FileStorage.read_into = read_or_fail  # type: ignore[method-assign]


def await_commit() -> None:
    """Commits are made in the background, and these steps are much faster than that."""
    storage = open_storage(RANK_SETTINGS["uri"], endpoint_url=RANK_SETTINGS["endpoint_url"])
    while (head := read_head(storage)) is None or head.newest is None:
        time.sleep(0.01)


def await_next_commit() -> None:
    """A part of a step that takes until there is a newer commit than now."""
    storage = open_storage(RANK_SETTINGS["uri"], endpoint_url=RANK_SETTINGS["endpoint_url"])
    before = read_head(storage)
    while read_head(storage) == before:
        time.sleep(0.01)


def await_hearing() -> None:
    """A part of a step that takes until this rank has heard of a notice."""
    path = Path(os.environ["SPOTTRAIN_RUN_DIR"]) / "progress-0.json"
    while (progress := Progress.read(path)) is None or progress.drain_seen_at is None:
        time.sleep(0.01)


def await_all(names: list[str]) -> None:
    for name in names:
        {"heard": await_hearing, "committed": await_next_commit}[name]()


def kill(*names: str) -> None:
    """Kill this rank, or a process of it: "worker", which reads data ahead, or "fetch-ahead", of shards."""
    pids = [
        each.pid
        for each in set(multiprocessing.active_children()) - others
        if ("fetch-ahead" if each.name == "fetch-ahead" else "worker") in names
    ]
    [pid] = pids if names else [os.getpid()]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def strike(step: int, place: str = "") -> None:
    """What the test wants to happen on this rank in the middle of this step, at a place in it."""
    if not place:
        time.sleep(RANK_SETTINGS["step_seconds"])
    match RANK_SETTINGS["faults"].get(f"{step}{place}" if place else step, "").split():
        case ["drain"]:
            ask_to_drain()
        case ["notice", seconds, *until]:
            ask_to_drain(float(seconds), is_preemption=True)
            await_all(until)
        case ["await"]:
            await_commit()
        case ["sigterm"]:
            os.kill(os.getpid(), signal.SIGTERM)
        case ["kill" | "vanish" as how, *names]:
            if how == "kill":
                await_commit()
            kill(*names)
        case ["raise"]:
            await_commit()
            raise ValueError("the loss is purple")
        case ["exit"]:
            raise SystemExit(7)


def spoilt(loss: torch.Tensor, step: int) -> torch.Tensor:
    """The loss as the test wants it on this rank in this step."""
    match RANK_SETTINGS["faults"].get(step, "").split():
        case ["nan"]:
            return loss * math.nan
        case ["spike"]:
            return loss * 1000
    return loss


class Seen:
    """A variable of the script: the steps that were updated."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        vars(self).update(state_dict)


generator = torch.Generator().manual_seed(1)
inputs = torch.randn(RANK_SETTINGS["num_samples"], RANK_SETTINGS["width"], generator=generator)
targets = inputs.sum(dim=1)
dataset: Any = [(inputs[index], targets[index]) for index in range(len(inputs))]
slow_down_uploads(RANK_SETTINGS["upload_seconds"])
obey_the_disk([Path(errno) for errno in RANK_SETTINGS["errnos"]])
if 0 in RANK_SETTINGS["faults"]:
    strike(0)

if RANK_SETTINGS["takes_steps_for_long"]:
    stopping.KEEP_AFTER_SECONDS = listener.LISTEN_AFTER_SECONDS = 0.0
    stop_point.MARGIN_SECONDS = RANK_SETTINGS["takes_steps_for_long"]
if RANK_SETTINGS["commits_at_once"]:
    stopping.Commits.seconds_needed = lambda self, seconds_left: seconds_left  # type: ignore[method-assign]

kill_point = KillPoint(RANK_SETTINGS["uri"])
kill_point.kill_at = RANK_SETTINGS["kill_at"]
kill_point.arm()
start_writer()  # as the agent does
model = Model(RANK_SETTINGS["width"], RANK_SETTINGS["dropout"], has_norm=RANK_SETTINGS["has_norm"])
model.blocks.requires_grad_(not RANK_SETTINGS["frozen"])
seen = Seen()
others = set(multiprocessing.active_children())  # the writer of checkpoints
with spottrain.session() as session:
    if (num_streams := RANK_SETTINGS["streams"]) is not None:
        of_index = dataset
        dataset = Streams(lambda stream, number: iter(of_index[stream::num_streams]), streams=num_streams)
    if RANK_SETTINGS["shards"]:
        cache = Path(f"{RANK_SETTINGS['result']}-cache-{session.rank}")
        in_shards = corpus(RANK_SETTINGS["shards"], cache, RANK_SETTINGS["cache_bytes"])
        dataset = in_shards if num_streams is None else Mixture({"shards": (in_shards, 2), "streams": (dataset, 1)})
    training = session.prepare(
        model,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5),
        dataset=dataset,
        clip_grad_norm=5.0,
        stateful={"seen": seen},
        num_workers=RANK_SETTINGS["num_workers"],
        order=getattr(script_orders, RANK_SETTINGS["order"]) if RANK_SETTINGS["order"] else None,
    )
    if RANK_SETTINGS["export_first"]:
        training.full_state_dict()
    losses: dict[int, float] = {}
    exact: dict[int, float] = {}
    epochs = training.epochs(RANK_SETTINGS["epochs"]) if RANK_SETTINGS["epochs"] else None
    steps = training.steps(total=RANK_SETTINGS["steps"])
    for step in (step for epoch in epochs for step in epoch) if epochs is not None else steps:
        with training.evaluation():
            strike(step.number, "-")
        for index, (x, y) in enumerate(step.micro_batches()):
            loss = (training.model(x) - y).square().mean()
            strike(step.number)
            strike(step.number, f".{index}")
            step.backward(spoilt(loss, step.number))
        step.update()
        if RANK_SETTINGS["step_loss"]:
            exact[step.number] = training.step_loss()
        seen.steps.append(training.step)
        strike(step.number, "+")
        if RANK_SETTINGS["leave_after"] == step.number:
            break
        if not math.isnan(training.loss):
            losses[step.number - 2] = training.loss
    parameters = training.full_state_dict()
    Path(f"{RANK_SETTINGS['result']}-seen-{session.rank}").write_text(json.dumps(seen.steps))
    if session.rank == 0:
        torch.save(parameters, RANK_SETTINGS["result"])
        Path(RANK_SETTINGS["result"]).with_suffix(".json").write_text(json.dumps(losses))
        Path(RANK_SETTINGS["result"]).with_suffix(".exact.json").write_text(json.dumps(exact))
