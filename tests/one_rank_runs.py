"""Runs of a single rank in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import spottrain

STEPS = 6


def train(
    uri: str,
    schedule: Callable[[Optimizer], LRScheduler] | None,
    last: int,
    strategy: str = "ddp",
    *,
    make: Callable[[Iterator[nn.Parameter]], Optimizer] = lambda each: torch.optim.AdamW(each, torch.tensor(0.013)),
    stateful: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    model: nn.Module | None = None,
) -> torch.Tensor:
    """The weights after step `last` of a run whose learning rate is a tensor."""
    with spottrain.session(strategy=strategy, global_batch=4, micro_batch=4, checkpoint_uri=uri) as session:
        training = session.prepare(
            model or nn.Linear(4, 1, dtype=dtype),
            optimizer=lambda model: make(model.parameters()),
            scheduler=schedule,
            dataset=[torch.arange(4, dtype=dtype) + index for index in range(8)],
            stateful=stateful,
        )
        for step in training.steps(total=last):
            for batch in step.micro_batches():
                step.backward(training.model(batch).square().mean())
            step.update()
        weights = [parameter.detach() for parameter in training.model.parameters()]
        return torch.cat([(w.full_tensor() if isinstance(w, DTensor) else w).flatten() for w in weights])
