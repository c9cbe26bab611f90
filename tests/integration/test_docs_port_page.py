"""The scripts of docs/how-to/port-plain-torch.md do what the page says.

Real ranks on gloo.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional  # noqa: F401

import spottrain
from spottrain_api.contract.reports import Progress
from trainer_runs import Run, assert_drained, assert_succeeded

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "port-plain-torch.md"
SCRIPT = Path(__file__).with_name("page_script.py")


def script_with(part: str) -> str:
    blocks = [dedent(each) for each in re.findall(r"^ *```python\n(.*?)^ *```", PAGE.read_text(), re.S | re.M)]
    [found] = [each for each in blocks if part in each]
    return found


def trained_on_labels(backward: str, micro_batch: int) -> torch.Tensor:
    """Weights of a model of 5 classes after two steps.

    The samples have 1, 2, 3 and 4 labels.
    """
    labels = torch.arange(16).reshape(4, 4) % 5
    labels[torch.ones(4, 4).triu(1).bool()] = -100
    linear = nn.Linear(4, 20, bias=False)
    nn.init.ones_(linear.weight)
    with spottrain.session(strategy="ddp", global_batch=4, micro_batch=micro_batch) as session:
        training = session.prepare(
            nn.Sequential(linear, nn.Unflatten(1, (4, 5))),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            dataset=[(torch.eye(4)[index], labels[index]) for index in range(4)],
        )
        for step in training.steps(total=2):
            for inputs, targets in step.micro_batches():
                logits = training.model(inputs)
                exec(backward, {**globals(), "step": step, "logits": logits, "targets": targets, "LABELS": 2.5})
            step.update()
    return training.full_state_dict()["0.weight"]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
def test_the_best_model_and_the_early_stop_survive_a_resume_at_another_world_size(
    strategy: str, tmp_path: Path, fork: Any
) -> None:
    script = script_with("full_state_dict").replace("/results", str(tmp_path))
    run = Run(tmp_path, fork, SCRIPT, strategy=strategy, settings={"script": script})
    with run.running(2):
        progress = run.run_dir(0) / "progress-0.json"
        while (seen := Progress.read(progress)) is None or (seen.step or 0) < 250:
            time.sleep(0.01)
        run.drain()
    assert 250 <= assert_drained(run) < 700
    best = {"loss": pytest.approx(0.0, abs=1e-6), "step": 200}
    for world_size in (3, 1):
        run.generate(world_size)
        assert_succeeded(run)
        ranks = [json.loads((tmp_path / f"result.pt-{rank}").read_text()) for rank in range(world_size)]
        assert ranks == [{"best": best, "step": 700}] * world_size
    assert run.progress().start_step == 700  # the last generation had nothing to do
    weights = torch.load(tmp_path / "best.pt", weights_only=True)
    assert weights["weight"].sum().item() == pytest.approx(0.5, abs=1e-3)


def test_a_sum_over_labels_is_the_same_in_micro_batches_of_any_size() -> None:
    by_constant = script_with("LABELS")
    whole = trained_on_labels(by_constant, 4)
    assert torch.allclose(trained_on_labels(by_constant, 1), whole, atol=1e-6)
    assert torch.allclose(trained_on_labels(by_constant, 3), whole, atol=1e-6)

    by_mean = "step.backward(functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100))"
    assert torch.allclose(trained_on_labels(by_mean, 4), whole, atol=1e-6)
    assert not torch.allclose(trained_on_labels(by_mean, 1), whole, atol=1e-4)
