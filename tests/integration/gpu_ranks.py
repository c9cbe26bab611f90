"""What test_gpu_engines.py and test_memory_measured.py run.

Each piece runs in a process and a world of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.memory.cases import Case
from benchmarks.memory.rank import Peaks, estimated, measured

from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.data.batch import BatchPlan
from spottrain.engines.choice import choose_engine
from spottrain.engines.engine import Engine, EngineConfig
from spottrain_api.settings.training import DeepSpeedConfig


def in_a_world_of_one(device: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    found: Queue[Any] = context.Queue()
    process = context.Process(target=_join, args=(device, port, found, work, arguments))
    process.start()
    try:
        process.join(300)
        assert process.exitcode == 0
        return found.get(timeout=10)
    finally:
        process.kill()


def _join(device: str, port: int, found: Queue[Any], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["DS_ACCELERATOR"] = device
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    found.put(work(*arguments))
    dist.destroy_process_group()


def peaks_and_estimates(device: str, cases: list[Case]) -> list[tuple[Peaks, Peaks]]:
    """Measured and estimated, of each case."""
    own = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    return [(measured(case, own), estimated(case, 1, device)) for case in cases]


def start_of_zero_3() -> tuple[int, int]:
    """Peak GPU memory while ZeRO 3 spreads a model, and the model's bytes in bf16.

    The parts of the model are kept on the CPU.
    """
    device = torch.device("cuda", 0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(32)))
    model_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    config = EngineConfig(
        device=device,
        plan=BatchPlan(global_batch=1, micro_batch=1, world_size=1),
        precision=torch.bfloat16,
        deepspeed=DeepSpeedConfig(
            zero_stage=3,
            offload_optimizer=True,
            offload_parameters=True,
            # Its bucket is made at the start, too.
            config={"zero_optimization": {"reduce_bucket_size": 1_000_000}},
        ),
    )
    torch.cuda.reset_peak_memory_stats(device)
    choose_engine("deepspeed", config).wrap(model, lambda m: torch.optim.AdamW(m.parameters()))
    return torch.cuda.max_memory_allocated(device), model_bytes


class Moved(torch.nn.Linear):
    """A layer that notes how many parameters it has as a whole whenever it is moved.

    It does so on the CPU as on a GPU.
    """

    most = 0

    def _apply(self, *args: Any, **settings: Any) -> Any:
        self.most = max(self.most, sum(parameter.numel() for parameter in self.parameters()))
        return super()._apply(*args, **settings)


def moved_as_a_whole(stage: int) -> int:
    """How many of 272 parameters are moved at once while DeepSpeed spreads a model.

    The model is in bf16.
    """
    model = Moved(16, 16)
    config = EngineConfig(
        device=torch.device("cpu"),
        plan=BatchPlan(global_batch=1, micro_batch=1, world_size=1),
        precision=torch.bfloat16,
        deepspeed=DeepSpeedConfig(zero_stage=stage),
    )
    shapes: list[int] = []

    def optimizer(m: torch.nn.Module) -> torch.optim.Optimizer:
        shapes.extend(parameter.dim() for parameter in m.parameters())
        return torch.optim.AdamW(m.parameters())

    choose_engine("deepspeed", config).wrap(model, optimizer)
    assert shapes == [2, 1], "the optimizer sees parameters as the script has made them"
    assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    return model.most


def train_in_fp16(uri: str) -> tuple[list[float], list[float], float]:
    """Train six steps in fp16, with and without a commit after the third.

    Returns:
        The losses of six steps, those of three and three with a commit between, and the scale at the end.
    """

    device = torch.device("cuda", 0)

    def engine() -> tuple[Engine, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
        config = EngineConfig(
            device=device,
            plan=BatchPlan(global_batch=8, micro_batch=8, world_size=1),
            precision=torch.float16,
            deepspeed=DeepSpeedConfig(zero_stage=2, config={"fp16": {"initial_scale_power": 24, "hysteresis": 1}}),
        )
        made = choose_engine("deepspeed", config)
        return made, made.wrap(model, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))[0]

    def train(made: Engine, model: Any, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(device)
            made.begin_micro_batch(is_last=True)
            loss = (model(inputs).squeeze(1) - inputs.sum(dim=1)).square().mean()
            made.backward(loss)
            made.update()
            losses.append(float(loss))
        return losses

    steady, model = engine()
    whole = train(steady, model, 0, 6)
    begun, model = engine()
    parts = train(begun, model, 0, 3)
    checkpointer = Checkpointer(open_storage(uri), generation=1, attempt_id="a", rank=0, world_size=1)
    checkpointer.latest()
    checkpointer.save(begun.state(), step=3)
    resumed, model = engine()
    newest = checkpointer.latest()
    assert newest is not None
    resumed.load_state(checkpointer.load(resumed.room, newest).state)
    parts += train(resumed, model, 3, 6)
    return whole, parts, resumed.state()["loss_scaler"]["cur_scale"]
