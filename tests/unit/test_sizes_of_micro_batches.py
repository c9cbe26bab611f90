"""A run says at its start how the size of a micro-batch depends on the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spottrain
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.names import ENV_RUN_DIR, FILE_RUN

pytestmark = pytest.mark.usefixtures("world_of_its_own")


def sizes_of(batch: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, generation: int = 1) -> list[int]:
    """Open a session in a job of one to three ranks, train a step, and return the sizes of its micro-batches."""
    run_dir = folder / str(generation)
    run_dir.mkdir()
    monkeypatch.setenv(ENV_RUN_DIR, str(run_dir))
    worlds = {"minWorldSize": 1, "maxWorldSize": 3}
    checkpoint = {"uri": f"file://{folder / 'commits'}"}
    name = {"job": "job", "generation": generation, "attemptId": f"g{generation}"}
    config = {**name, "checkpoint": checkpoint, "batch": batch, **worlds}
    TrainerConfig.model_validate(config | {"strategy": "ddp"}).write(run_dir / FILE_RUN)
    with spottrain.session() as session:
        training = session.prepare(
            nn.Linear(1, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            dataset=[torch.ones(1)],
            num_workers=0,
        )
        sizes = []
        for step in training.steps(total=training.step + 1):
            for samples in step.micro_batches():
                sizes.append(len(samples))
                step.backward(training.model(samples).sum())
            step.update()
    return sizes


def test_a_run_says_once_that_sizes_depend_on_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    batch = {"global": 14, "micro": 7}
    assert sizes_of(batch, tmp_path, monkeypatch) == [7, 7]
    said = "spottrain: Samples of a micro-batch: 7 at 1 and 2 ranks, 4 or 5 at 3 ranks."
    assert capfd.readouterr().err.count(said) == 1
    sizes_of(batch, tmp_path, monkeypatch, generation=2)  # resumes
    assert "Samples of a micro-batch" not in capfd.readouterr().err


def test_a_script_that_asks_for_even_micro_batches_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sizes_of({"global": 14, "micro": 7, "multipleOf": 2}, tmp_path, monkeypatch) == [4, 4, 6]
    assert "Samples of a micro-batch" not in capfd.readouterr().err
