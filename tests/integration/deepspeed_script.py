"""The training script that test_deepspeed_ranks.py runs as ranks.

RANK_SETTINGS comes from the test.
"""

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
from torch import nn  # noqa: E402

import spottrain  # noqa: E402
from no_pickles import refuse_pickles  # noqa: E402
from spottrain_api.contract.configuration import DrainRequest  # noqa: E402

torch.set_num_threads(1)
refuse_pickles()
if RANK_SETTINGS["cpu_has_fp16"] is not None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    # It asks for instructions that make fp16 fast, which some CPUs have; torch computes in it on any.
    CPU_Accelerator.is_fp16_supported = lambda self: RANK_SETTINGS["cpu_has_fp16"]


class Model(nn.Module):
    """Odd sizes, so that the parts of ranks end within rows.

    It has dropout, a scalar, a frozen parameter, and a buffer that follows the samples.
    """

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.frozen = nn.Parameter(torch.full((5,), 0.25), requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(0.9))
        self.dropout = nn.Dropout(RANK_SETTINGS["dropout"])
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and RANK_SETTINGS["dropout"]:  # depends on the world size, as dropout does
            self.scale += x.detach().mean() / 16
        x = x * self.frozen * self.temperature
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x)))
        return (self.out(x) * self.scale).sum(dim=1)


class Mixture(nn.Module):
    """Experts, of which all ranks use the same one in a micro-batch.

    The next micro-batch uses a different one. After `mixed_after` micro-batches, each rank has an expert of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.never = nn.Linear(5, 5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        mine = int(os.environ["RANK"]) if self.calls > RANK_SETTINGS["mixed_after"] else 2 + self.calls % 2
        return self.experts[mine](x).sum(dim=1)


class InBlocks(torch.optim.Optimizer):
    """An optimizer that keeps a number for each two elements of a parameter.

    8-bit optimizers do so for more elements. With `in_dict`, the numbers lie in a dict.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], *, in_dict: bool) -> None:
        super().__init__(groups, defaults)
        self._in_dict = in_dict

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                largest = torch.zeros(parameter.numel() // 2 + 1)
                self.state[parameter].setdefault("largest", {"first": largest} if self._in_dict else largest)
                parameter.sub_(parameter.grad, alpha=group["lr"])


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trained if parameter.dim() > 1]
    biases = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 2e-2}]
    if RANK_SETTINGS["optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    if RANK_SETTINGS["optimizer"] == "adafactor":
        return torch.optim.Adafactor(groups, lr=1e-2)
    if RANK_SETTINGS["optimizer"] == "frozen group":
        groups.insert(0, {"params": [model.frozen]})
    if RANK_SETTINGS["optimizer"] in ("blocks", "blocks in dict"):
        return InBlocks(groups, {"lr": 1e-2}, in_dict=RANK_SETTINGS["optimizer"] == "blocks in dict")
    return torch.optim.AdamW(groups, lr=1e-2)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def ask_to_drain() -> None:
    now = datetime.now(UTC)
    path = Path(os.environ["SPOTTRAIN_RUN_DIR"]) / "drain.json"
    DrainRequest(reason="test", deadline=now + timedelta(seconds=60), requested_at=now).write(path)


generator = torch.Generator().manual_seed(1)
inputs = torch.randn(46, 5, generator=generator)
dataset = [(inputs[index], inputs[index].sum()) for index in range(len(inputs))]

with spottrain.session() as session:
    training = session.prepare(
        Model() if RANK_SETTINGS["mixed_after"] is None else Mixture(),
        optimizer=make_optimizer,
        scheduler=make_schedule if RANK_SETTINGS["has_schedule"] else None,
        dataset=dataset,
        clip_grad_norm=RANK_SETTINGS["clip_grad_norm"],
        deepspeed_config=RANK_SETTINGS["deepspeed_config"],
    )
    if RANK_SETTINGS["export_first"]:
        training.full_state_dict()
    for step in training.steps(total=RANK_SETTINGS["steps"]):
        for x, y in step.micro_batches():
            loss = (training.model(x) - y).square().mean()
            assert loss.dtype is torch.float32
            step.backward(loss)
        if step.number == RANK_SETTINGS["drain_at"]:
            ask_to_drain()
        step.update()
    if RANK_SETTINGS["echo_as"] is not None:
        # What was loaded is saved again, as if it were another step.
        training._saver.save(training._state, RANK_SETTINGS["echo_as"])
    if RANK_SETTINGS["model"] is not None:
        import deepspeed

        full = training.full_state_dict()
        model = cast(nn.Module, training.model.module)
        with deepspeed.zero.GatheredParameters([*model.parameters()]):
            if os.environ["RANK"] == "0":
                torch.save(model.state_dict(), RANK_SETTINGS["model"])
                torch.save(full, f"{RANK_SETTINGS['model']}.full")
            else:
                assert full == {}
    # To load torch's compiler would be most of a rank's start.
    assert "torch._inductor.compile_fx" not in sys.modules
