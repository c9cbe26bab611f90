"""Runs of a single rank in the test's own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import spottrain

STEPS = 6


@pytest.fixture
def world_of_its_own() -> Iterator[None]:
    """End the world of one rank that the test's session has made.

    DeepSpeed and Accelerate note worlds in the environment, also those of earlier tests.
    """
    with patch.dict(os.environ):
        os.environ.pop("LOCAL_RANK", None)
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def no_accelerator_afterwards(world_of_its_own: None) -> Iterator[None]:
    """End the state that Accelerate keeps of that world."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def train(
    uri: str,
    schedule: Callable[[Optimizer], LRScheduler] | None,
    last: int,
    strategy: str = "ddp",
    *,
    make: Callable[[Iterator[nn.Parameter]], Optimizer] = lambda each: torch.optim.AdamW(each, torch.tensor(0.013)),
    stateful: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weights after step `last` of a run whose learning rate is a tensor."""
    with spottrain.session(strategy=strategy, global_batch=4, micro_batch=4, checkpoint_uri=uri) as session:
        training = session.prepare(
            nn.Linear(4, 1, dtype=dtype),
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
