"""A session tries a store before its first commit, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spottrain
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import StoreUnfit
from spottrain.checkpoint.stores.file_storage import FileStorage
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.world.failures import start_error
from spottrain_api.contract.reports import FailureReason

pytestmark = pytest.mark.usefixtures("world_of_its_own")


@pytest.fixture(autouse=True)
def store_without_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    put = FileStorage.put

    def ignoring(self: FileStorage, key: str, data: bytes, **conditions: Any) -> str:
        return put(self, key, data)

    monkeypatch.setattr(FileStorage, "put", ignoring)


def test_a_store_without_conditional_writes_is_refused_before_anything_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(SystemExit),
        spottrain.session(strategy="ddp", global_batch=1, micro_batch=1, checkpoint_uri=f"file://{tmp_path}"),
    ):
        pass
    assert "Two generations could commit at once" in capfd.readouterr().err
    assert start_error(StoreUnfit("unfit"), resumes=False).reason is FailureReason.CHECKPOINT_STORE_UNFIT
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]


def test_a_store_that_holds_commits_is_not_tried_again(tmp_path: Path) -> None:
    saver = Checkpointer(open_storage(f"file://{tmp_path}"), generation=1, attempt_id="a", rank=0, world_size=1)
    saver.save({}, step=1, extra={})
    with spottrain.session(strategy="ddp", global_batch=1, micro_batch=1, checkpoint_uri=f"file://{tmp_path}"):
        pass
