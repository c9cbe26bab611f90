"""A rank reports clean-ups of the store that fail again and again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import spottrain
from spottrain.checkpoint.errors import StorageDenied
from spottrain.checkpoint.stores.file_storage import FileStorage
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.names import ENV_RUN_DIR, FILE_RUN, progress_file
from spottrain_api.contract.reports import Progress

pytestmark = pytest.mark.usefixtures("world_of_its_own")


@pytest.mark.timeout(120)
def test_what_stays_in_a_store_that_refuses_to_delete_is_reported_until_it_deletes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path))
    checkpoint = {"uri": f"file://{tmp_path}/store", "interval": "1steps", "keep": 1}
    settings = {"strategy": "ddp", "batch": {"global": 1, "micro": 1}, "checkpoint": checkpoint}
    config = TrainerConfig.model_validate({"job": "job", "generation": 1, "attemptId": "g1", **settings})
    config.write(tmp_path / FILE_RUN)
    delete, refuses = FileStorage.delete, False
    failure: str | None = None

    def delete_or_refuse(self: FileStorage, keys: Iterable[str]) -> None:
        if refuses:
            raise StorageDenied("explicit deny")
        delete(self, keys)

    monkeypatch.setattr(FileStorage, "delete", delete_or_refuse)
    with spottrain.session() as session:
        training = session.prepare(
            nn.Linear(1, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            dataset=[torch.ones(1)],
            num_workers=0,
        )
        refuses = True  # only now: a store that refuses it from the start is refused
        for step in training.steps(total=1_000_000):
            for batch in step.micro_batches():
                step.backward(training.model(batch).sum())
            step.update()
            progress = Progress.read(tmp_path / progress_file(0))
            assert progress is not None
            if refuses and progress.clean_up_failure is not None:
                failure, refuses = progress.clean_up_failure, False
            elif not refuses and progress.clean_up_failure is None:
                break
    assert failure is not None
    assert failure.endswith(
        " of old or unfinished checkpoints stay in the store, as they can't be deleted: explicit deny"
    )
    assert not failure.startswith("0.0 MB")
