"""A rank reports how long its steps waited for data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import spottrain
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.names import ENV_RUN_DIR, FILE_RUN, progress_file
from spottrain_api.contract.reports import Progress

pytestmark = pytest.mark.usefixtures("world_of_its_own")


def test_the_wait_for_data_is_in_the_progress_and_a_part_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path))
    settings = {"strategy": "ddp", "batch": {"global": 1, "micro": 1}}
    config = TrainerConfig.model_validate({"job": "job", "generation": 1, "attemptId": "g1", **settings})
    config.write(tmp_path / FILE_RUN)
    with spottrain.session() as session:
        training = session.prepare(
            nn.Linear(1, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            dataset=[torch.ones(1)],
            num_workers=0,
        )
        for step in training.steps(total=2):
            for batch in step.micro_batches():
                step.backward(training.model(batch).sum())
            step.update()
    progress = Progress.read(tmp_path / progress_file(0))
    assert progress is not None
    assert progress.data_wait_seconds is not None
    assert progress.step_seconds is not None
    assert 0.0 < progress.data_wait_seconds < progress.step_seconds
    assert progress.waited_seconds > 0.0
    assert progress.memory_bytes is not None
    assert progress.memory_bytes > 2**20
