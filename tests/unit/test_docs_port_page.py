"""The scripts of docs/how-to/port-plain-torch.md run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "port-plain-torch.md"


@pytest.fixture(autouse=True)
def _world_of_its_own() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run(part: str, uri: str, **names: Any) -> dict[str, Any]:
    """Run the page's script that has this part, with small data; its variables at the end."""
    [script] = [each for each in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M) if part in each]
    scope: dict[str, Any] = {
        "model": nn.Linear(4, 1),
        "make_optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.01),
        "dataset": [(torch.ones(4), torch.ones(1))] * 8,
        "loss_fn": functional.mse_loss,
        **names,
    }
    exec(script.replace("session()", f"session(strategy='ddp', global_batch=4, checkpoint_uri={uri!r})"), scope)
    return scope


def test_an_early_stop_counts_from_the_best_evaluation_and_holds_after_a_resume(tmp_path: Path) -> None:
    losses = iter([3.0, 2.0, *[2.5] * 10])
    for _ in range(2):
        found = run("stateful=", f"file://{tmp_path}", evaluate=lambda model: next(losses))
        assert (found["best"].loss, found["best"].step, found["training"].step) == (2.0, 200, 700)
