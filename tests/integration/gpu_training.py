"""What test_gpu_training.py runs: a job's generations on this machine's devices.

Each rank is a process of its own. Processes are spawned, not forked, because a process that has touched CUDA can't be
forked.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spottrain
from commits import newest_commit
from spottrain.checkpoint.saving.writer import start_writer, started_writer
from spottrain.world.failures import Drained
from spottrain_agent.processes import is_alive
from spottrain_api.contract.configuration import DrainRequest, TrainerConfig
from spottrain_api.settings.checkpoint import CheckpointConfig
from spottrain_api.settings.choices import Precision, Strategy
from spottrain_api.settings.interval import Interval
from spottrain_api.settings.training import Batch, DeepSpeedConfig, FsdpConfig

STEPS = 6
WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How a job trains."""

    name: str
    strategy: str
    precision: str = "fp32"
    fsdp: FsdpConfig = FsdpConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    fused: bool = False
    world_size: int = 1
    with_torchrun: bool = True  # else as `python script.py` is started


@dataclass(slots=True, kw_only=True)
class Generation:
    """What rank 0 saw in one generation."""

    device: str
    backends: str
    losses: dict[int, float] = field(default_factory=dict)  # by step, the mean of rank 0's samples
    shown: dict[int, float] = field(default_factory=dict)  # what training.loss was then, of a step or two back
    random_state: bytes = b""  # of the device, at the end
    writer_lives: bool = False


class Model(nn.Module):
    """A model with dropout that draws on the device.

    It has a scalar, a frozen parameter, and a buffer that follows the samples.
    """

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.25), requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(0.9))
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().float().mean(dim=0), 0.1)
        x = (x + self.frozen) * self.temperature
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x)))
        return self.out(x - self.mean.to(x.dtype)).sum(dim=1)


def run_job(case: Case, folder: Path) -> dict[str, Any]:
    """Train without a break, and once more with a break after the third step.

    Returns:
        The generations, and what was committed last.
    """
    steady = _generation(case, folder / "steady", 1, drain_at=None)
    drained = _generation(case, folder / "resumed", 1, drain_at=3)
    resumed = _generation(case, folder / "resumed", 2, drain_at=None)
    return {
        "steady": steady,
        "drained": drained,
        "resumed": resumed,
        "wanted": committed(folder / "steady"),
        "found": committed(folder / "resumed"),
    }


def run_jobs(cases: list[Case], folder: Path, *, at_once: int) -> dict[str, dict[str, Any] | Exception]:
    """By the case's name; what went wrong where something did."""

    def run(number: int) -> dict[str, Any] | Exception:
        try:
            return run_job(cases[number], folder / str(number))
        except Exception as error:
            return error

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(run, range(len(cases))))
    return {case.name: each for case, each in zip(cases, found, strict=True)}


def committed(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Step and tensors of the newest commit."""
    return newest_commit(folder / "checkpoints")[:2]


def _generation(case: Case, folder: Path, number: int, *, drain_at: int | None) -> Generation:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = []
    for rank in range(case.world_size):
        run_dir = folder / f"run-{number}-{rank}"
        run_dir.mkdir(parents=True)
        _config(case, folder, number).write(run_dir / "run.json")
        world: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": case.world_size,
            "LOCAL_WORLD_SIZE": case.world_size,
        }
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {name: str(value) for name, value in world.items()} if case.with_torchrun else {}
        environment["SPOTTRAIN_RUN_DIR"] = str(run_dir)
        answer = theirs if rank == 0 else None
        ranks.append(context.Process(target=_rank, args=(environment, case, run_dir, drain_at, answer)))
    try:
        for process in ranks:
            process.start()
        theirs.close()
        try:
            found: Generation = ours.recv()
        except EOFError:
            raise RuntimeError(f"a rank of generation {number} has failed; see above") from None
        for process in ranks:
            process.join(120)
        if any(process.exitcode != 0 for process in ranks):
            raise RuntimeError(f"ranks of generation {number} ended with {[each.exitcode for each in ranks]}")
        return found
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def _config(case: Case, folder: Path, number: int) -> TrainerConfig:
    return TrainerConfig(
        job="test",
        generation=number,
        attempt_id=f"attempt{number}",
        seed=5,
        strategy=Strategy(case.strategy),
        precision=Precision(case.precision),
        fsdp=case.fsdp,
        deepspeed=case.deepspeed,
        batch=Batch(global_=8, micro=2),
        checkpoint=CheckpointConfig(uri=f"file://{folder}/checkpoints", interval=Interval.parse("2steps")),
    )


def _rank(environment: dict[str, str], case: Case, run_dir: Path, drain_at: int | None, answer: Any) -> None:
    start_writer()  # as the agent does, before there is CUDA
    os.environ.update(environment)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = Generation(device="", backends="")
    try:
        _train(case, run_dir, drain_at, found)
    except Drained:
        assert drain_at is not None, "nobody has asked for a drain"
    if found.device == "cuda":
        found.random_state = torch.cuda.get_rng_state().numpy().tobytes()
    if answer is not None:
        answer.send(found)


def _train(case: Case, run_dir: Path, drain_at: int | None, found: Generation) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(46, WIDTH, generator=generator)
    with spottrain.session() as session:
        found.device = session.device.type
        found.backends = torch.distributed.get_backend_config()
        training = session.prepare(
            Model(),
            optimizer=lambda model: torch.optim.AdamW(
                [each for each in model.parameters() if each.requires_grad], lr=1e-2, fused=case.fused or None
            ),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
            dataset=[(row, row.sum()) for row in inputs],
            clip_grad_norm=1.0,
            num_workers=1,
        )
        for step in training.steps(total=STEPS):
            total = torch.zeros((), device=session.device)
            for x, y in step.micro_batches():
                assert x.device == session.device
                loss = (training.model(x) - y).square().mean()
                step.backward(loss)
                total += loss.detach()
            if step.number == drain_at and session.rank == 0:
                now = datetime.now(UTC)
                request = DrainRequest(reason="test", deadline=now + timedelta(seconds=60), requested_at=now)
                request.write(run_dir / "drain.json")
            step.update()
            found.losses[step.number] = float(total) / session.batch_plan.num_micro_batches
            found.shown[step.number] = training.loss
            writer = started_writer()
            # After a write that failed the rank would have ended it, and gone on by itself.
            found.writer_lives = writer is not None and is_alive(writer.pid)
